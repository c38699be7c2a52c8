"""Which of a schedule's actions begin and end a step for their stage: these gather weights and reduce gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.schedules.schedule import Schedule

__all__ = ["VARIANTS", "counts_of_variants", "variant_of_rows"]

VARIANTS = ("F", "B", "I", "W", "F.first", "B.last", "W.last")
"""Variants of actions: the four kinds, and those of the first forward and the last backward of a stage."""


@lru_cache(maxsize=64)
def variant_of_rows(schedule: Schedule) -> npt.NDArray[np.int64]:
    """The number in `VARIANTS` of each row of the schedule's table.

    >>> from plans.schedules import make_schedule
    >>> [VARIANTS[number] for number in variant_of_rows(make_schedule("1f1b", 1, 2))]
    ['F.first', 'B', 'F', 'B.last']
    """
    table = schedule.table
    variant = table.kind.astype(np.int64)
    forward = np.flatnonzero(table.kind == 0)
    variant[forward[np.unique(table.stage[forward], return_index=True)[1]]] = VARIANTS.index("F.first")
    closing = np.flatnonzero((table.kind == 1) | (table.kind == 3))[::-1]
    last = closing[np.unique(table.stage[closing], return_index=True)[1]]
    variant[last] = np.where(table.kind[last] == 1, VARIANTS.index("B.last"), VARIANTS.index("W.last"))
    variant.setflags(write=False)
    return variant


@lru_cache(maxsize=256)
def counts_of_variants(schedule: Schedule) -> tuple[Mapping[tuple[int, str], int], ...]:
    """Per pipeline rank (number of the chunk on the rank, variant) -> how many of its actions are of it.

    >>> from plans.schedules import make_schedule
    >>> dict(counts_of_variants(make_schedule("1f1b", 2, 4))[1])
    {(0, 'F.first'): 1, (0, 'B'): 3, (0, 'F'): 3, (0, 'B.last'): 1}
    """
    table, variants = schedule.table, variant_of_rows(schedule)
    found = []
    for rank in range(schedule.num_ranks):
        rows = slice(int(table.rank_start[rank]), int(table.rank_start[rank + 1]))
        number = {stage: place for place, stage in enumerate(schedule.stages_of(rank))}
        pairs = zip(table.stage[rows].tolist(), variants[rows].tolist(), strict=True)
        found.append(Counter((number[stage], VARIANTS[own]) for stage, own in pairs))
    return tuple(found)
