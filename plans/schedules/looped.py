"""Looped schedules: the model runs over the ranks in one loop, or in several where a rank has several chunks.

Backwards are whole: a stage sends the gradient after its weight gradients are done. In the formulas p is the number of
ranks, m that of micro-batches, v that of chunks per rank; rank i counts from 0; T_F and T_B are the times of a forward
and a backward.
"""

from __future__ import annotations

from plans.schedules.errors import ScheduleError
from plans.schedules.phases import backward, build, check_counts, forward, looped_placement, rounds, steady
from plans.schedules.schedule import Schedule

__all__ = ["gpipe", "interleaved_1f1b", "looped_bfs", "micro_batches_per_round", "one_f_one_b"]


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    Every rank keeps all micro-batches alive; the bubble is (p - 1)(T_F + T_B), with full backwards.

    >>> print(gpipe(2, 2))
    0F0,0F1,0B0,0B1
    1F0,1F1,1B0,1B1
    """
    check_counts("gpipe", num_ranks, num_micro_batches)
    phases = [forward(0) * num_micro_batches + backward(0) * num_micro_batches] * num_ranks
    return build("gpipe", phases, num_micro_batches, looped_placement(num_ranks, 1))


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B: one forward and one backward by turns (PipeDream-Flush, Narayanan et al. 2021, arXiv 2104.04473, 2.2.1).

    The bubble is that of GPipe, with at most p - i micro-batches alive on rank i. Fewer micro-batches than ranks are
    fine (torch.distributed.pipelining refuses them).

    >>> print(one_f_one_b(2, 3))
    0F0,0F1,0B0,0F2,0B1,0B2
    1F0,1B0,1F1,1B1,1F2,1B2
    """
    check_counts("1f1b", num_ranks, num_micro_batches)
    forwards, backwards = forward(0) * num_micro_batches, backward(0) * num_micro_batches
    phases = [steady(forwards, backwards, min(num_ranks - 1 - rank, num_micro_batches)) for rank in range(num_ranks)]
    return build("1f1b", phases, num_micro_batches, looped_placement(num_ranks, 1))


def interleaved_1f1b(num_ranks: int, num_micro_batches: int, virtual: int) -> Schedule:
    """Interleaved 1F1B: several chunks per rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2).

    The bubble is v times smaller than that of 1F1B, for v times the transfers; one chunk per rank is 1F1B. The micro-
    batches go through the chunks in rounds of p; if they are no multiple of p, in as many rounds as fit, all of the
    same size, as torch.distributed.pipelining does it.

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


def looped_bfs(num_ranks: int, num_micro_batches: int, virtual: int) -> Schedule:
    """Looped breadth-first: each chunk does all micro-batches before the next chunk (Lamy-Poirier, arXiv 2211.05953).

    This is GPipe over several chunks per rank; gathered weights are used once per chunk and direction. Backwards take
    the last micro-batch first, as in torch.distributed.pipelining.

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
            f"{below} or {above} micro-batches work, or any multiple of {num_ranks}"
        )
    return num_micro_batches // num_rounds
