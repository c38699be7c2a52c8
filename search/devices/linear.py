"""The bounds of `ScheduleSpace.bounds_s` for simple tables, as one matrix product for many schedules.

In a simple table the first and the last actions cost the same as all others, and the optimizer nothing. Every term of
the bound is then a sum of times of pieces and of links, with whole numbers that depend only on the schedule and the
layer split. Terms that cannot exceed another one are left out: of ranks with equal work all but the last to begin, of
chunks that are filled equally often all but the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.devices.bounds import ScheduleSpace
from search.devices.costs import WAYS, Table

__all__ = ["Linear", "Longer", "Terms"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FIRST, _FORWARD, _CLOSING, _LAST, _INPUTS, _JOINED = range(len(WAYS))

_LARGEST_CODE = 2**62


@dataclass(frozen=True, kw_only=True, eq=False)
class Longer:
    """What recomputing some blocks of every chunk adds to a table in which all blocks keep everything.

    Args:
        blocks: (spread) the least number of blocks of every chunk that recompute.
        busy_s: seconds that one such block adds to the work of its rank in a step.
        inputs_s: the same without what it adds to the gradients of weights, where these are apart.
    """

    blocks: Floats
    busy_s: float
    inputs_s: float

    @classmethod
    def of(cls, once: Table, again: Table, pieces: Sequence[int], count: int, blocks: Floats) -> Longer:
        """From the tables of blocks that keep everything and of blocks that recompute.

        Args:
            once, again: simple tables; no entry of `once` is above that of a block that is there.
            pieces: numbers of the pieces that are blocks.
            count: micro-batches.
            blocks: as the attribute.
        """
        added = (again.work - once.work)[pieces]
        inputs = count * (added[:, _FORWARD] + added[:, _INPUTS])
        # the last gradients of weights may end with reductions that hide what recomputing adds
        closing = (count - 1) * added[:, _CLOSING] + np.minimum(added[:, _CLOSING], 0.0)
        busy = inputs + closing + count * np.minimum(added[:, _JOINED], 0.0)
        return cls(blocks=blocks, busy_s=max(0.0, float(busy.min())), inputs_s=max(0.0, float(inputs.min())))


class Linear:
    """The bounds of the spreads of schedules with equally many ranks and micro-batches.

    Args:
        terms: of each schedule.

    Attributes:
        starts: the first spread of each schedule among all of them.
    """

    def __init__(self, terms: Sequence[Terms]) -> None:
        self.terms = terms
        lengths = [len(term.space.layers) for term in terms]
        self.starts = np.cumsum([0, *lengths])
        self._paths = [term.space.paths for term in terms]
        self._links: dict[tuple[float, ...], Floats] = {}
        self._num_paths = -1

    def bounds_s(self, table: Table, transfers_s: Sequence[float], longer: Longer | None = None) -> Floats:
        """A bound for each spread of each schedule, as of `ScheduleSpace.bounds_s`; `table` as of `Costs.floor_table`.

        Of one schedule they are at `starts[number] : starts[number + 1]`.
        """
        if self.num_paths != self._num_paths:
            self._num_paths = self.num_paths
            self._links.clear()
            every = [term.coefficients() for term in self.terms]
            self._coefficients = np.concatenate([each for each, _ in every])
            before = np.cumsum([0, *(len(each) for each, _ in every)])
            self._first = np.concatenate([first + own for (_, first), own in zip(every, before, strict=False)])
            self._spread = np.repeat(np.arange(len(self._first)), np.diff(self._first, append=before[-1]))
            self._blocks = np.concatenate([term.blocks() for term in self.terms], axis=1)
        key = tuple(transfers_s)
        if key not in self._links:
            self._links[key] = np.concatenate([term.on_links(key) for term in self.terms])
        terms_s = self._coefficients @ _columns(table) + self._links[key]
        if longer is not None:
            busy, inputs, largest = self._blocks
            share = np.minimum(longer.blocks[self._spread] / largest, 1.0)
            terms_s += share * (busy * longer.busy_s + inputs * longer.inputs_s)
        return np.asarray(np.maximum.reduceat(terms_s, self._first))

    @property
    def num_paths(self) -> int:
        """How many longest paths are known."""
        return sum(map(len, self._paths))

    def learn(self, table: Table, transfers_s: Sequence[float], numbers: Sequence[int]) -> bool:
        """Find the longest paths of some schedules with these times, where none are known yet; whether any were not."""
        new = [self.terms[number] for number in numbers if not len(self.terms[number].space.paths)]
        for each in new:
            each.space.learn(table, transfers_s, together=each.together)
        return bool(new)


@dataclass(eq=False)
class Terms:
    """The terms of the bounds of one schedule's spreads.

    Args:
        space: the schedule and the spreads.
        together: whether all ranks begin a step together (see `ScheduleSpace.bounds_s`).
    """

    space: ScheduleSpace
    together: bool = True

    def __post_init__(self) -> None:
        pieces = self.space.pieces
        self._before = np.cumsum(pieces, axis=1) - pieces
        self._work = np.einsum("scp,cr->srp", pieces, self.space.owners)  # (spread, rank, piece)
        # (spread, rank, piece) in any one of the rank's chunks
        ending = np.where(self.space.ends_joined[:, None], 0.0, pieces)
        by_rank = np.argsort(self.space.placement, kind="stable")
        starts = np.searchsorted(self.space.placement[by_rank], np.arange(self.space.schedule.num_ranks))
        self._least_chunk = np.minimum.reduceat(ending[:, by_rank], starts, axis=1)
        self._joined = np.einsum("scp,cr->srp", pieces, self.space.joined[:, None] * self.space.owners)
        self._ranks = self._distinct_ranks()
        self._chunks = self._distinct_chunks()
        self._closed = self._closed_form()

    def coefficients(self) -> tuple[Floats, Ints]:
        """(term, column) how often each of `_columns` counts, and the first term of each spread."""
        known = self.space.paths
        own = np.arange(len(known)) if self.together else np.flatnonzero(known.ends == self.space.placement[0])
        self._on_paths = known.links[own]
        first, usual, closing, last, inputs, joined = np.moveaxis(known.actions[own], 2, 0)
        times = np.stack([first + usual, closing + last, inputs, joined], axis=2)
        *ways, whole = np.moveaxis(np.einsum("scp,ncw->snwp", self.space.pieces, times), 2, 0)
        paths = _ways(*ways, joined=whole, update=self._work[:, known.ends[own]])
        every = np.concatenate([self._closed, paths])
        num_spreads = len(self.space.layers)
        of = np.concatenate([self._of, np.repeat(np.arange(num_spreads), len(own))])
        self._order = np.argsort(of, kind="stable")
        starts = np.searchsorted(of[self._order], np.arange(num_spreads))
        return np.ascontiguousarray(every[self._order]), starts

    def blocks(self) -> Floats:
        """(kind, term) blocks in the work of a rank, in its work without gradients of weights, and of its largest
        chunk: all that a rank recomputes if k blocks of every chunk do is at least its blocks times k / largest."""
        space, (spread, rank, _) = self.space, self._ranks
        blocks = space.pieces[..., 1] + space.pieces[..., 3:].sum(axis=2)  # spread, chunk
        own = (blocks @ space.owners)[spread, rank]
        largest = np.stack([(blocks * mine).max(axis=1) for mine in space.owners.T], axis=1)[spread, rank]
        found = np.zeros((3, len(self._order)))
        found[2] = 1.0
        found[0, : len(own)] = own
        found[1 if space.split else 0, len(own) : 2 * len(own)] = own
        found[2, : 2 * len(own)] = np.tile(np.maximum(largest, 1.0), 2)
        return found[:, self._order]

    def on_links(self, transfers_s: tuple[float, ...]) -> Floats:
        """(term) the time on links."""
        space, (_, rank, _), (_, chunk) = self.space, self._ranks, self._chunks
        hops = space.hops_s(transfers_s)
        travelled = np.cumsum(hops)
        there = travelled[space.begins[rank]]
        cycle = 2 * travelled[chunk] + space.rounds[chunk] * (2 * (travelled[-1] - travelled[chunk]))
        paths = np.tile(self._on_paths @ hops, len(space.layers))
        begun = there if self.together else np.zeros_like(there)
        return np.asarray(np.concatenate([begun, 2 * there, cycle, paths])[self._order])

    def _distinct_ranks(self) -> tuple[Ints, Ints, Floats]:
        """(spread, rank) of the terms of ranks, and the pieces of each."""
        space = self.space
        work = self._work
        by_begin = np.argsort(-space.begins, kind="stable")
        spread, place = _first_of_each(np.concatenate([work, self._joined], axis=2)[:, by_begin])
        rank = by_begin[place]
        return spread, rank, work[spread, rank]

    def _distinct_chunks(self) -> tuple[Ints, Ints]:
        """(spread, chunk) of the terms of chunks."""
        space = self.space
        filled = np.stack([space.rounds, space.rest], axis=1).astype(np.float64)
        every = np.broadcast_to(filled, (len(space.pieces), *filled.shape))
        return _first_of_each(np.concatenate([space.pieces, every], axis=2))

    def _closed_form(self) -> Floats:
        """(term, column) of the terms that need no paths; `_of` has the spread of each."""
        space, before, (spread, rank, work) = self.space, self._before, self._ranks
        count, split = space.schedule.num_micro_batches, space.split
        head = before[spread, space.begins[rank]]
        none, start = np.zeros_like(head), head if self.together else np.zeros_like(head)
        all_work = count * work
        first, ending = space.pieces[:, 0], self._work[:, space.placement[0]]
        # gathers may be over before the tensor of a rank's first chunk arrives; those of later chunks may be hidden
        alone = ~start.any(axis=1, keepdims=True) * space.pieces[spread, space.begins[rank]]
        busy = _ways(
            start + all_work, all_work, all_work if split else none, gathers=alone,
            reductions=self._least_chunk[spread, rank], joined=self._joined[spread, rank], update=work,
        )  # fmt: skip
        if split:  # the weight gradients of the first chunk come when all else is done
            through = _ways(head + all_work, first[spread], head + all_work, update=ending[spread])
        else:
            through = _ways(head + all_work, head + all_work, none, update=ending[spread])
        at, chunk = self._chunks
        mine, rounds, rest = before[at, chunk], space.rounds[chunk, None], space.rest[chunk, None]
        around = rounds * (space.pieces.sum(axis=1)[at] - mine)
        forward, back = mine + around + rest * space.pieces[at, chunk], mine + around
        closing, inputs = (first[at], back) if split else (back, np.zeros_like(back))
        cycle = _ways(forward, closing, inputs, update=ending[at])
        self._of = np.concatenate([spread, spread, at])
        return np.concatenate([busy, through, cycle])


def _columns(table: Table) -> Floats:
    """The times of a table that terms count: what every action takes, and what gathers, reductions, update add."""
    work = table.work
    gathers, reductions = work[:, _FIRST] - work[:, _FORWARD], work[:, _LAST] - work[:, _CLOSING]
    return np.concatenate(
        [work[:, _FORWARD], work[:, _CLOSING], work[:, _INPUTS], gathers, reductions, work[:, _JOINED], table.update]
    )  # fmt: skip


def _ways(
    forward: Floats,
    closing: Floats,
    inputs: Floats,
    *,
    gathers: Floats | None = None,
    reductions: Floats | None = None,
    joined: Floats | None = None,
    update: Floats,
) -> Floats:
    """(term, column) how often the times of `_columns` count; each given as (..., piece)."""
    none = np.zeros_like(forward)
    optional = [none if times is None else times for times in (gathers, reductions, joined)]
    return np.concatenate([forward, closing, inputs, *optional, update], axis=-1).reshape(-1, 7 * forward.shape[-1])


def _first_of_each(values: Floats) -> tuple[Ints, Ints]:
    """(spread, place) of the first of all equal vectors of each spread, given (spread, place, whole numbers)."""
    num_spreads, num_places, width = values.shape
    code, size = np.repeat(np.arange(num_spreads), num_places), num_spreads
    for column in values.reshape(-1, width).astype(np.int64).T:
        more = int(column.max()) + 1
        if size * more >= _LARGEST_CODE:
            known, code = np.unique(code, return_inverse=True)
            size = len(known)
        code, size = code * more + column, size * more
    first = np.sort(np.unique(code, return_index=True)[1])
    return np.divmod(first, num_places)
