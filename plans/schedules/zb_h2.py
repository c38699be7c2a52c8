"""ZB-H2: no bubble between the first and the last action of a rank, for twice the memory (arXiv 2401.10241, 2.2)."""

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

__all__ = ["zb_h2"]


def zb_h2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Rank i starts with 2(p - i) - 1 forwards and postpones its weight gradients by 2i micro-batches.

    With T_W <= T_F and T_W <= T_B (input gradient) and m >= 2p - 1 a rank idles (p - 1)(T_F + T_B - 2 T_W) between its
    first and its last action if that is positive, and rank i (from 0) holds (2p - 2i - 1) M_B + 2i M_W. The ranks end
    as staggered as they begin, so a step that every rank must end together is longer by (p - 1) T_F.

    >>> print(zb_h2(2, 3))
    0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2
    """
    check_counts("zb_h2", num_ranks, num_micro_batches)
    forwards, weights = forward(0) * num_micro_batches, weight_gradient(0) * num_micro_batches
    backwards = input_gradient(0) * num_micro_batches
    phases = [
        steady(
            forwards,
            backwards,
            min(2 * (num_ranks - 1 - rank), num_micro_batches),
            weights=weights,
            weight_delay=2 * rank,
        )
        for rank in range(num_ranks)
    ]
    return build("zb_h2", phases, num_micro_batches, looped_placement(num_ranks, 1))
