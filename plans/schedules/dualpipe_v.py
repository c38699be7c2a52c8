"""DualPipe-V: the V-shaped half of DualPipe (DeepSeek-AI, arXiv 2412.19437 and github.com/deepseek-ai/DualPipe)."""

from plans.schedules.errors import ScheduleError
from plans.schedules.phases import backward, build, check_counts, forward, input_gradient, v_placement, weight_gradient
from plans.schedules.schedule import Schedule

__all__ = ["dualpipe_v"]


def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Forwards of one chunk overlap backwards of the other; rank i owns stages i and 2p - 1 - i.

    The pairs that overlap (OVERLAP_F_B in torch.distributed.pipelining) are adjacent actions here, the forward first:
    an order of actions cannot say that two run at once.

    Raises:
        ScheduleError: fewer micro-batches than stages (2p).

    >>> print(dualpipe_v(1, 2))
    0F0,1F0,0F1,1B0,1F1,0B0,1B1,0I1,0W1
    """
    check_counts("dualpipe_v", num_ranks, num_micro_batches)
    if num_micro_batches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v on {num_ranks} ranks has {2 * num_ranks} stages and needs as many micro-batches, not "
            f"{num_micro_batches}; zb_v takes any number of them"
        )
    (f0, f1), (b0, b1), (i0, i1), (w0, w1) = (
        (step(0), step(1)) for step in (forward, backward, input_gradient, weight_gradient)
    )
    phases = []
    for rank in range(num_ranks):
        behind = num_ranks - rank - 1
        half, is_even = (rank + 1) // 2, rank % 2 == 0
        # the backwards of the end are split halfway down this phase; their weight gradients are done in the same order
        ending = (b1 + b0) * half + (b1 + i0 if is_even else b"") + (i1 + i0) * half
        late = (w0 if is_even else b"") + (w1 + w0) * half + w0 * behind
        phases.append(
            f0 * (2 * behind)
            + (f0 + f1) * (rank + 1)
            + (i1 + w1 + f1) * behind
            + (f0 + b1 + f1 + b0) * (num_micro_batches - num_ranks - behind)
            + (b1 + f1 + b0) * behind
            + ending
            + b"".join(late[k : k + 1] + i0 for k in range(behind))
            + late[behind:]
        )
    return build("dualpipe_v", phases, num_micro_batches, v_placement(num_ranks))
