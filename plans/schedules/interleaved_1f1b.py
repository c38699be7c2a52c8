"""Interleaved 1F1B: several chunks per rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2)."""

from plans.schedules.errors import ScheduleError
from plans.schedules.phases import backward, build, check_counts, forward, looped_placement, rounds, steady
from plans.schedules.schedule import Schedule

__all__ = ["interleaved_1f1b", "micro_batches_per_round"]


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, virtual: int) -> Schedule:
    """A bubble v times smaller than that of 1F1B, for v times the transfers; one chunk per rank is 1F1B.

    The micro-batches go through the chunks in rounds of p; if they are no multiple of p, in as many rounds as fit,
    all of the same size, as torch.distributed.pipelining does it.

    Raises:
        ScheduleError: the micro-batches do not split evenly into rounds.

    >>> print(interleaved_1f1b(2, 2, 2))
    0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1
    1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1
    """
    check_counts("interleaved_1f1b", num_ranks, num_micro_batches)
    per_round = micro_batches_per_round("interleaved_1f1b", num_ranks, num_micro_batches)
    forwards = rounds([forward(chunk) for chunk in range(virtual)], num_micro_batches, per_round)
    backwards = rounds([backward(chunk) for chunk in reversed(range(virtual))], num_micro_batches, per_round)
    # Two forwards ahead per hop, as Megatron-LM and torch have it; with one chunk the second would only cost memory.
    per_hop = 2 if virtual > 1 else 1
    phases = []
    for rank in range(num_ranks):
        num_warmup = (virtual - 1) * per_round + per_hop * (num_ranks - 1 - rank)
        phases.append(steady(forwards, backwards, min(num_warmup, len(forwards))))
    return build("interleaved_1f1b", phases, num_micro_batches, looped_placement(num_ranks, virtual))


def micro_batches_per_round(name: str, num_ranks: int, num_micro_batches: int) -> int:
    """The size of a round: p, or a little more or less where p does not divide the micro-batches.

    Raises:
        ScheduleError: there is no such size; the message names counts of micro-batches that have one.
    """
    num_rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % num_rounds:
        below = next(m for m in range(num_micro_batches, 0, -1) if m % max(1, m // num_ranks) == 0)
        above = num_ranks * (num_rounds + 1)
        raise ScheduleError(
            f"{name} takes the micro-batches in {num_micro_batches} // {num_ranks} = {num_rounds} rounds over "
            f"{num_ranks} ranks, and {num_rounds} does not divide {num_micro_batches}; "
            f"{below} or {above} micro-batches would do, or any multiple of {num_ranks}"
        )
    return num_micro_batches // num_rounds
