"""Interleaved zero bubble: ZB-H1 over several chunks per rank, as torch.distributed.pipelining has it."""

from plans.schedules.interleaved_1f1b import micro_batches_per_round
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

__all__ = ["interleaved_zb"]


def interleaved_zb(num_ranks: int, num_micro_batches: int, virtual: int) -> Schedule:
    """Interleaved 1F1B with split backwards; rank i postpones its weight gradients by i steps.

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
