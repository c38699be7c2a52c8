"""Number of activations that a schedule keeps alive."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from plans.schedules.schedule import Schedule

__all__ = ["live_counts", "peak_in_flight"]

# what an action of kind F, B, I, W adds to: activations before their backward, activations kept for a weight gradient
_BEFORE_BACKWARD = np.array([1, -1, -1, 0])
_KEPT_FOR_WEIGHTS = np.array([0, 0, 1, -1])


def live_counts(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """After each row of the table, on its rank: activations before their backward, and kept for a weight gradient.

    A rank does one action at a time, so the counts depend on the order alone, not on any duration.
    """
    table = schedule.table
    counts = []
    for change in (_BEFORE_BACKWARD[table.kind], _KEPT_FOR_WEIGHTS[table.kind]):
        total = np.cumsum(change)
        before = np.concatenate(([0], total))[table.rank_start[:-1]]
        counts.append(total - np.repeat(before, np.diff(table.rank_start)))
    return counts[0], counts[1]


def peak_in_flight(schedule: Schedule, *, kept_for_weights: int | Fraction = 1) -> tuple[int | Fraction, ...]:
    """Per rank the most activations alive at once, in units of one micro-batch on one chunk; exact.

    An activation lives from its forward to the end of its backward. Where the backward is split, the input gradient
    frees all but the share `kept_for_weights`, which lives until the weight gradient is done (M_W / M_B in the words of
    the zero-bubble paper, arXiv 2401.10241, section 2.3).

    Args:
        schedule: a valid schedule.
        kept_for_weights: between 0 and 1.

    >>> from plans.schedules import make_schedule
    >>> peak_in_flight(make_schedule("1f1b", 4, 8))
    (4, 3, 2, 1)
    >>> peak_in_flight(make_schedule("zb_h2", 4, 8))
    (7, 7, 7, 7)
    """
    before_backward, kept = live_counts(schedule)
    starts = schedule.table.rank_start.tolist()
    peaks: list[int | Fraction] = []
    for first, last in pairwise(starts):
        pairs = set(zip(before_backward[first:last].tolist(), kept[first:last].tolist(), strict=True))
        peaks.append(max((whole + kept_for_weights * part for whole, part in pairs), default=0))
    return tuple(peaks)
