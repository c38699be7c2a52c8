"""ZB-H1: weight gradients fill a third of the bubble at the memory of 1F1B (Qi et al. 2023, arXiv 2401.10241, 2.2)."""

from plans.schedules.phases import (
    build,
    check_counts,
    forward,
    input_gradient,
    looped_placement,
    steady,
    weight_gradient,
)
from plans.schedules.schedule import Schedule

__all__ = ["zb_h1"]


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank i postpones its weight gradients by i micro-batches, so that the input gradients travel without them.

    With T_W <= T_F and T_W <= T_B (input gradient) and m >= p the bubble is (p - 1)(T_F + T_B - T_W), and rank i
    (from 0) holds (p - i) M_B + i M_W. It is the InterleavedZeroBubble of torch.distributed.pipelining with one chunk
    per rank.

    >>> print(zb_h1(2, 3))
    0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
    """
    check_counts("zb_h1", num_ranks, num_micro_batches)
    forwards, weights = forward(0) * num_micro_batches, weight_gradient(0) * num_micro_batches
    backwards = input_gradient(0) * num_micro_batches
    phases = [
        steady(
            forwards,
            backwards,
            min(num_ranks - 1 - rank, num_micro_batches),
            weights=weights,
            weight_delay=rank,
        )
        for rank in range(num_ranks)
    ]
    return build("zb_h1", phases, num_micro_batches, looped_placement(num_ranks, 1))
