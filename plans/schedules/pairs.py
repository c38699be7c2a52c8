"""Pairs of actions that may run at once: a forward of one chunk next to a backward of another.

While one of the two communicates, the other computes. DualPipe-V is made for this (arXiv 2412.19437, section 3.2.1);
torch.distributed.pipelining writes such a pair as `(0F3;7B1)OVERLAP_F_B`. The order of actions determines them: a pair
is a forward and the full backward that comes next on its rank, of another stage and another micro-batch, so that
neither needs the other. The first backward of a rank runs alone, because other ranks wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from plans.schedules.action import Action, ActionKind
from plans.schedules.dependencies import remote_dependencies
from plans.schedules.errors import ScheduleError
from plans.schedules.schedule import Schedule

__all__ = ["overlapped_pairs"]


@lru_cache(maxsize=64)
def overlapped_pairs(schedule: Schedule) -> tuple[frozenset[int], ...]:
    """Per rank the places in its order at which the forward of a pair stands; its backward is in the next place.

    Args:
        schedule: one that `plans.schedules.validate` accepts.

    Raises:
        ScheduleError: with the two actions of every pair at once, ranks would wait for each other.

    >>> from plans.schedules import make_schedule
    >>> schedule = make_schedule("dualpipe_v", 2, 4)
    >>> [(str(schedule.order[0][at]), str(schedule.order[0][at + 1])) for at in sorted(overlapped_pairs(schedule)[0])]
    [('0F3', '3B1'), ('3F2', '0B0'), ('3F3', '0B1')]
    """
    pairs = tuple(_pairs_of_rank(actions) for actions in schedule.order)
    if stuck := _stuck(schedule, pairs):
        cells = ", ".join(stuck)
        raise ScheduleError(
            f"schedule {schedule.name!r}: with overlap_pairs its ranks wait for each other at {cells}; "
            "run it without overlap_pairs, or use dualpipe_v"
        )
    return pairs


def _pairs_of_rank(actions: Sequence[Action]) -> frozenset[int]:
    found = set[int]()
    has_backward = False
    for place, (first, second) in enumerate(pairwise(actions)):
        has_backward |= first.kind is not ActionKind.FORWARD
        is_pair = first.kind is ActionKind.FORWARD and second.kind is ActionKind.BACKWARD
        if is_pair and has_backward and first.stage != second.stage and first.micro_batch != second.micro_batch:
            found.add(place)
    return frozenset(found)


def _stuck(schedule: Schedule, pairs: Sequence[frozenset[int]]) -> list[str]:
    """The actions that never run if a pair begins when both of its actions can, and ends as a whole."""
    waits, starts = remote_dependencies(schedule).tolist(), schedule.table.rank_start.tolist()
    at = starts[:-1]
    done = [False] * len(waits)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, own in enumerate(pairs):
            while at[rank] < starts[rank + 1]:
                rows = range(at[rank], at[rank] + 1 + (at[rank] - starts[rank] in own))
                if not all(waits[row] < 0 or done[waits[row]] for row in rows):
                    break
                for row in rows:
                    done[row] = True
                at[rank], has_moved = rows[-1] + 1, True
    return [schedule.cell_text(row) for rank, row in enumerate(at) if row < starts[rank + 1]]
