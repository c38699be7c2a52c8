"""1F1B: one forward and one backward by turns (PipeDream-Flush, Narayanan et al. 2021, arXiv 2104.04473, 2.2.1)."""

from plans.schedules.phases import backward, build, check_counts, forward, looped_placement, steady
from plans.schedules.schedule import Schedule

__all__ = ["one_f_one_b"]


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The bubble of GPipe with at most p - i micro-batches alive on rank i.

    Fewer micro-batches than ranks are fine (torch.distributed.pipelining refuses them).

    >>> print(one_f_one_b(2, 3))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    check_counts("1f1b", num_ranks, num_micro_batches)
    forwards, backwards = forward(0) * num_micro_batches, backward(0) * num_micro_batches
    phases = [steady(forwards, backwards, min(num_ranks - 1 - rank, num_micro_batches)) for rank in range(num_ranks)]
    return build("1f1b", phases, num_micro_batches, looped_placement(num_ranks, 1))
