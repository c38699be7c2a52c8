"""Looped breadth-first: each chunk does all micro-batches before the next chunk (Lamy-Poirier, arXiv 2211.05953)."""

from plans.schedules.phases import backward, build, check_counts, forward, looped_placement, rounds
from plans.schedules.schedule import Schedule

__all__ = ["looped_bfs"]


def looped_bfs(num_ranks: int, num_micro_batches: int, virtual: int) -> Schedule:
    """GPipe over several chunks per rank; gathered weights are used once per chunk and direction.

    Backwards take the last micro-batch first, as in torch.distributed.pipelining.

    >>> print(looped_bfs(2, 2, 2))
    0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0
    1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0
    """
    check_counts("looped_bfs", num_ranks, num_micro_batches)
    there = [forward(chunk) for chunk in range(virtual)]
    back = [backward(chunk) for chunk in reversed(range(virtual))]
    phase = b"".join(rounds(steps, num_micro_batches, num_micro_batches) for steps in (there, back))
    placement = looped_placement(num_ranks, virtual)
    return build("looped_bfs", [phase] * num_ranks, num_micro_batches, placement, is_backward_reversed=True)
