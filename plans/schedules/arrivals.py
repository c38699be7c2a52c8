"""Where a rank waits for what it has sent to other stages.

A send does not report that it is complete everywhere: gloo has no such query, and a recorded CUDA graph forbids it. A
rank keeps a sent tensor until its arrival is proven by a message that the rank waits for anyway:

* The receiver uses the tensor, then sends a message back.
* The micro-batch of the tensor comes to a later stage of the rank, by way of the receiver.

After that action a WAIT for the send takes no time, and the tensor is released. Each message that arrives releases at
most one tensor, the one that was proven first. A tensor that no message proves is kept until the end of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    rank, never = rank_of_rows(schedule.table), len(schedule.table.kind)
    source, target = rank[senders], rank[receivers]
    proven = np.minimum(
        _answered(senders, receivers, rank, pairs, never), _on_the_way(schedule, senders, receivers, never)
    )
    released = np.where(source == target, receivers, -1)
    for here in np.unique(source).tolist():
        own = np.flatnonzero((source == here) & (target != here) & (proven < never))
        own = own[np.lexsort((senders[own], proven[own]))]
        arrivals = np.unique(receivers[(target == here) & (source != here)])
        number = np.arange(len(own))
        turn = number + np.maximum.accumulate(np.searchsorted(arrivals, proven[own]) - number)  # one after the other
        is_released = turn < len(arrivals)
        released[own[is_released]] = arrivals[turn[is_released]]
    return released


def _answered(senders: _Ints, receivers: _Ints, rank: _Ints, pairs: npt.ArrayLike, never: int) -> _Ints:
    """The row in which an answer of the receiver arrives, for each message; `never` where none does."""
    source, target = rank[senders], rank[receivers]
    # the first row of the receiver whose messages prove that it has the tensor
    proves = receivers + 2 * np.isin(receivers, np.asarray(pairs, dtype=np.int64))
    found = np.full(len(senders), never, dtype=np.int64)
    ends = np.stack([source, target], axis=1)
    for here, there in np.unique(ends[source != target], axis=0).tolist():
        sent = np.flatnonzero((source == here) & (target == there))
        back = np.flatnonzero((source == there) & (target == here))
        back = back[np.argsort(receivers[back], kind="stable")]
        first = np.searchsorted(np.maximum.accumulate(senders[back]), proves[sent])
        is_answered = first < len(back)
        found[sent[is_answered]] = receivers[back[first[is_answered]]]
    return found


def _on_the_way(schedule: Schedule, senders: _Ints, receivers: _Ints, never: int) -> _Ints:
    """The row in which the micro-batch of each message comes back to the rank that sent it; `never` where it does
    not."""
    if not len(senders):
        return senders
    table, num_stages = schedule.table, schedule.num_stages
    node = np.where(table.kind == 0, table.stage, num_stages + table.stage)  # forwards, then backwards
    row_of = np.full((2 * num_stages, schedule.num_micro_batches), never, dtype=np.int64)
    passing = np.flatnonzero(table.kind != 3)
    row_of[node[passing], table.micro_batch[passing]] = passing
    rank_of = [*schedule.placement, *schedule.placement]
    edges, edge = np.unique(np.stack([node[senders], node[receivers]], axis=1), axis=0, return_inverse=True)
    following = {stage: [num_stages + stage] for stage in range(num_stages)}  # a backward follows its forward
    for here, there in edges.tolist():
        following.setdefault(here, []).append(there)
    messages = np.split(np.argsort(edge, kind="stable"), np.cumsum(np.bincount(edge))[:-1])
    found = np.full(len(senders), never, dtype=np.int64)
    for (here, there), own in zip(edges.tolist(), messages, strict=True):
        for back in _returns(following, there, rank_of[here], rank_of):
            found[own] = np.minimum(found[own], row_of[back, table.micro_batch[senders[own]]])
    return found


def _returns(following: Mapping[int, Sequence[int]], begin: int, rank: int, rank_of: Sequence[int]) -> list[int]:
    """The nodes of a rank at which the ways from a node first come to the rank."""
    found, seen, left = list[int](), set[int](), [begin]
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        if rank_of[node] == rank:
            found.append(node)
        else:
            left += following.get(node, ())
    return found


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
