"""Zero-bubble schedules: a backward is split, and the weight gradients fill what would be idle time.

The input gradient travels on at once; its weight gradient may be done any time later. Stages are on the ranks as in the
looped schedules. In the formulas T_F, T_B and T_W are the times of a forward, an input gradient and a weight gradient,
M_B and M_W the memory that a micro-batch holds before its input gradient and before its weight gradient.
"""

from __future__ import annotations

from plans.schedules.looped import micro_batches_per_round
from plans.schedules.phases import (
    build,
    check_counts,
    forward,
    input_gradient,
    looped_placement,
    rounds,
    steady,
    weight_gradient,
)
from plans.schedules.schedule import Schedule

__all__ = ["interleaved_zb", "zb_h1", "zb_h2"]


def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-H1: weight gradients fill a third of the bubble at the memory of 1F1B (Qi et al. 2023, arXiv 2401.10241, 2.2).

    Rank i postpones its weight gradients by i micro-batches, so that the input gradients travel without them. With T_W
    <= T_F and T_W <= T_B (input gradient) and m >= p the bubble is (p - 1)(T_F + T_B - T_W), and rank i (from 0) holds
    (p - i) M_B + i M_W. It is the InterleavedZeroBubble of torch.distributed.pipelining with one chunk per rank.

    >>> print(zb_h1(2, 3))
    0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
    """
    return _one_chunk("zb_h1", num_ranks, num_micro_batches, steps=1)


def zb_h2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-H2: no bubble between the first and the last action of a rank, for twice the memory (arXiv 2401.10241, 2.2).

    Rank i starts with 2(p - i) - 1 forwards and postpones its weight gradients by 2i micro-batches. With T_W <= T_F and
    T_W <= T_B (input gradient) and m >= 2p - 1 a rank idles (p - 1)(T_F + T_B - 2 T_W) between its first and its last
    action if that is positive, and rank i (from 0) holds (2p - 2i - 1) M_B + 2i M_W. The ranks end as staggered as they
    begin, so a step that every rank must end together is longer by (p - 1) T_F.

    >>> print(zb_h2(2, 3))
    0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2
    """
    return _one_chunk("zb_h2", num_ranks, num_micro_batches, steps=2)


def _one_chunk(name: str, num_ranks: int, num_micro_batches: int, *, steps: int) -> Schedule:
    """Rank i starts with `steps` forwards more than rank i + 1, and postpones its weight gradients by `steps` * i."""
    check_counts(name, num_ranks, num_micro_batches)
    forwards, weights = forward(0) * num_micro_batches, weight_gradient(0) * num_micro_batches
    backwards = input_gradient(0) * num_micro_batches
    phases = [
        steady(
            forwards,
            backwards,
            min(steps * (num_ranks - 1 - rank), num_micro_batches),
            weights=weights,
            weight_delay=steps * rank,
        )
        for rank in range(num_ranks)
    ]
    return build(name, phases, num_micro_batches, looped_placement(num_ranks, 1))


def interleaved_zb(num_ranks: int, num_micro_batches: int, virtual: int) -> Schedule:
    """Interleaved zero bubble: ZB-H1 over several chunks per rank, as torch.distributed.pipelining has it.

    This is interleaved 1F1B with split backwards; rank i postpones its weight gradients by i steps.

    Raises:
        ScheduleError: the micro-batches do not split evenly into rounds.

    >>> print(interleaved_zb(2, 2, 2))
    0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1
    1F0,1F1,3F0,3I0,3F1,3I1,3W0,1I0,3W1,1I1,1W0,1W1
    """
    check_counts("interleaved_zb", num_ranks, num_micro_batches)
    per_round = micro_batches_per_round("interleaved_zb", num_ranks, num_micro_batches)
    there, back = range(virtual), range(virtual - 1, -1, -1)
    forwards = rounds([forward(chunk) for chunk in there], num_micro_batches, per_round)
    backwards = rounds([input_gradient(chunk) for chunk in back], num_micro_batches, per_round)
    weights = rounds([weight_gradient(chunk) for chunk in back], num_micro_batches, per_round)
    phases = []
    for rank in range(num_ranks):
        num_warmup = min((virtual - 1) * per_round + num_ranks - 1 - rank, len(forwards))
        phases.append(steady(forwards, backwards, num_warmup, weights=weights, weight_delay=rank))
    return build("interleaved_zb", phases, num_micro_batches, looped_placement(num_ranks, virtual))
