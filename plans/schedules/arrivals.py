"""Where a rank waits for what it has sent to other stages.

A send does not report that it is complete everywhere: gloo has no such query, and a recorded CUDA graph forbids it. A
rank keeps a sent tensor until its arrival is proven: the receiver uses the tensor, then sends a message back, and the
rank waits for that message anyway. After this action a WAIT for the send takes no time, and the tensor is released.
Each message that arrives releases at most one tensor, the oldest of those that are proven. Without such a message the
tensor is kept until the end of the step.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.schedules.dependencies import rank_of_rows, remote_dependencies
from plans.schedules.schedule import Schedule

__all__ = ["release_rows", "releases_of_rows"]

_Ints = npt.NDArray[np.int64]


def release_rows(
    schedule: Schedule, senders: npt.ArrayLike, receivers: npt.ArrayLike, pairs: npt.ArrayLike = ()
) -> _Ints:
    """The row of the sender's rank after which each message is released, -1 for the end of the step.

    Args:
        schedule: whose table has the rows.
        senders, receivers: (messages) the rows that send and receive each message.
        pairs: rows that run at the same time as the row after them (`plans.schedules.pairs`).

    >>> from plans.schedules import make_schedule
    >>> schedule = make_schedule("1f1b", 2, 3)
    >>> [schedule.cell_text(row) for row in range(6)]  # of rank 0
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']
    >>> release_rows(schedule, [0, 1, 3, 7, 9, 11], [6, 8, 10, 2, 4, 5]).tolist()
    [2, 4, 5, 10, -1, -1]
    """
    senders, receivers = np.asarray(senders, dtype=np.int64), np.asarray(receivers, dtype=np.int64)
    rank = rank_of_rows(schedule.table)
    source, target = rank[senders], rank[receivers]
    released = np.where(source == target, receivers, -1)
    # the first row of the receiver whose messages prove that it has the tensor
    proves = receivers + 2 * np.isin(receivers, np.asarray(pairs, dtype=np.int64))
    ends = np.stack([source, target], axis=1)
    for here, there in np.unique(ends[source != target], axis=0).tolist():
        sent = np.flatnonzero((source == here) & (target == there))
        back = np.flatnonzero((source == there) & (target == here))
        if not len(back):
            continue
        sent = sent[np.argsort(senders[sent], kind="stable")]
        back = back[np.argsort(receivers[back], kind="stable")]
        first = np.searchsorted(np.maximum.accumulate(senders[back]), proves[sent])
        number = np.arange(len(sent))
        turn = number + np.maximum.accumulate(first - number)  # one after the other
        is_proven = turn < len(back)
        released[sent[is_proven]] = receivers[back[turn[is_proven]]]
    return released


@lru_cache(maxsize=512)
def releases_of_rows(schedule: Schedule) -> _Ints:
    """(rows) how many tensors the rank of each row releases after it, where each stage sends one tensor to the next.

    >>> from plans.schedules import make_schedule
    >>> releases_of_rows(make_schedule("gpipe", 2, 2)).tolist()  # F F B B, then the same on the last stage
    [0, 0, 1, 1, 0, 0, 0, 0]
    """
    needed = remote_dependencies(schedule)
    receivers = np.flatnonzero(needed >= 0)
    released = release_rows(schedule, needed[receivers], receivers)
    found = np.bincount(released[released >= 0], minlength=len(needed)).astype(np.int64)
    found.setflags(write=False)
    return found
