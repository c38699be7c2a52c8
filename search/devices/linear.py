"""The bounds of `ScheduleSpace.bounds_s` for tables that are quickly made, as one small matrix product for all spreads.

In such a table the first and the last actions are as all others, and the optimizer takes nothing. Every term of the
bound is then a sum of the times of pieces, with whole numbers that only the schedule and the spread know, and of times
on links. Terms that another one of their spread can never fall below are left out once and for all: of ranks with equal
work the one that begins last, of chunks that are filled equally often the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from search.devices.bounds import ScheduleSpace
from search.devices.costs import WAYS, Table

__all__ = ["Linear"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FORWARD, _CLOSING, _INPUTS = (WAYS.index(way) for way in ("F", "closing", "I"))


class Linear:
    """The bounds of a space's spreads."""

    def __init__(self, space: ScheduleSpace) -> None:
        self._space = space
        self._links: dict[tuple[tuple[float, ...], bool], Floats] = {}
        pieces = space.pieces
        self._before = np.cumsum(pieces, axis=1) - pieces
        self._ranks = self._distinct_ranks()
        self._chunks = self._distinct_chunks()
        self._terms = {together: self._coefficients(together) for together in (True, False)}

    def bounds_s(self, table: Table, transfers_s: Sequence[float], *, together: bool = True) -> Floats:
        """A bound for each spread, as of `ScheduleSpace.bounds_s`; `table` as of `Costs.early`."""
        coefficients, starts = self._terms[together]
        key = (tuple(transfers_s), together)
        if key not in self._links:
            self._links[key] = self._on_links(*key)
        times = table.work[:, [_FORWARD, _CLOSING, _INPUTS]].ravel()
        return np.maximum.reduceat(coefficients @ times + self._links[key], starts)

    def _distinct_ranks(self) -> tuple[Ints, Ints, Floats]:
        """(spread, rank) of the terms of ranks, and the pieces of each."""
        space = self._space
        work = np.einsum("scp,cr->srp", space.pieces, space.owners)
        by_begin = np.argsort(-space.begins, kind="stable")
        spread, place = _first_of_each(work[:, by_begin])
        rank = by_begin[place]
        return spread, rank, work[spread, rank]

    def _distinct_chunks(self) -> tuple[Ints, Ints]:
        """(spread, chunk) of the terms of chunks."""
        space = self._space
        filled = np.stack([space.rounds, space.rest], axis=1).astype(np.float64)
        every = np.broadcast_to(filled, (len(space.pieces), *filled.shape))
        return _first_of_each(np.concatenate([space.pieces, every], axis=2))

    def _coefficients(self, together: bool) -> tuple[Floats, Ints]:
        """(term, piece and way) how often each counts, and the first term of each spread."""
        space, before, (spread, rank, work) = self._space, self._before, self._ranks
        count, split = space.schedule.num_micro_batches, space.split
        head = before[spread, space.begins[rank]]
        none, start = np.zeros_like(head), head if together else np.zeros_like(head)
        all_work = count * work
        first = space.pieces[:, 0]  # whose weight gradients come when all else is done
        busy = _ways(start + all_work, all_work, all_work if split else none)
        if split:
            through = _ways(head + all_work, first[spread], head + all_work)
        else:
            through = _ways(head + all_work, head + all_work, none)
        at, chunk = self._chunks
        mine, rounds, rest = before[at, chunk], space.rounds[chunk, None], space.rest[chunk, None]
        around = rounds * (space.pieces.sum(axis=1)[at] - mine)
        forward, back = mine + around + rest * space.pieces[at, chunk], mine + around
        cycle = _ways(forward, first[at], back) if split else _ways(forward, back, np.zeros_like(back))
        of = np.concatenate([spread, spread, at])
        order = np.argsort(of, kind="stable")
        self._order = order
        starts = np.searchsorted(of[order], np.arange(len(space.pieces)))
        return np.ascontiguousarray(np.concatenate([busy, through, cycle])[order]), starts

    def _on_links(self, transfers_s: tuple[float, ...], together: bool) -> Floats:
        """(term) the time on links."""
        space, (_, rank, _), (_, chunk) = self._space, self._ranks, self._chunks
        travelled = np.cumsum(space.hops_s(transfers_s))
        there = travelled[space.begins[rank]]
        cycle = 2 * travelled[chunk] + space.rounds[chunk] * (2 * (travelled[-1] - travelled[chunk]))
        return np.concatenate([there if together else np.zeros_like(there), 2 * there, cycle])[self._order]


def _ways(forward: Floats, closing: Floats, inputs: Floats) -> Floats:
    """(term, piece and way), as the ravelled columns of a table."""
    return np.stack([forward, closing, inputs], axis=2).reshape(len(forward), -1)


def _first_of_each(values: Floats) -> tuple[Ints, Ints]:
    """(spread, place) of the first of all equal vectors of each spread, given (spread, place, number)."""
    code = np.zeros(values.shape[:2], dtype=np.int64)
    for number in range(values.shape[2]):
        known, own = np.unique(values[:, :, number], return_inverse=True)
        joined = code * len(known) + own.reshape(code.shape)
        code = np.unique(joined, return_inverse=True)[1].reshape(code.shape)
    code += np.arange(len(code))[:, None] * (code.max() + 1)
    first = np.sort(np.unique(code, return_index=True)[1])
    return np.divmod(first, values.shape[1])
