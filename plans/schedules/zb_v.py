"""ZB-V: two chunks per rank in the shape of a V, no bubble at the memory of 1F1B (arXiv 2401.10241, section 6)."""

from plans.schedules.phases import build, check_counts, forward, input_gradient, v_placement, weight_gradient
from plans.schedules.schedule import Schedule

__all__ = ["zb_v"]


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """The handcrafted order; ranks idle nowhere if T_F = T_B = T_W and m >= 2p - 1.

    Rank i owns stages i and 2p - 1 - i. For fewer than 2p - 1 micro-batches the order for 2p - 1 is taken and the
    missing ones are left out, as in torch.distributed.pipelining.

    >>> print(zb_v(1, 2))
    0F0,1F0,1I0,1W0,0F1,0I0,0W0,1F1,1I1,1W1,0I1,0W1
    """
    check_counts("zb_v", num_ranks, num_micro_batches)
    (f0, f1), (i0, i1), (w0, w1) = ((step(0), step(1)) for step in (forward, input_gradient, weight_gradient))
    full = max(2 * num_ranks - 1, num_micro_batches)
    phases = []
    for rank in range(num_ranks):
        ahead = num_ranks - rank
        phases.append(
            f0 * (2 * ahead - 1)
            + (f1 + f0) * rank
            + (f1 + i1 + w1) * ahead
            + (f0 + i0 + w0 + f1 + i1 + w1) * (full - num_ranks - ahead + 1)
            + (i0 + w0 + f1 + i1 + w1) * (ahead - 1)
            + (i0 + i1) * rank
            + (i0 + w0) * ahead
            + w1 * rank
            + w0 * rank
        )
    return build("zb_v", phases, num_micro_batches, v_placement(num_ranks))
