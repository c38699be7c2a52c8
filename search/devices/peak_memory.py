"""Memory of many layer splits at once: the forecast's peak, or slightly less."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from plans.schedules import Schedule
from search.devices.bounds import LayerSplits, ScheduleSpace
from search.devices.costs import Costs, one_piece
from search.devices.stage_config import StageConfig, without_recompute
from simulator.estimate.memory import chunk_activations, makes_gradients
from simulator.stacks.footprint import Footprint

__all__ = ["PeakMemory", "moments"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_GRADIENT = 1
"""Among weights, gradients and states."""

_MOST_KNOWN = 2000
"""Layouts and spaces whose activations are remembered at a time."""

_KINDS = 4
"""Forward, full backward, input gradient, weight gradient."""

_KEPT, _KEPT_FOR_WEIGHTS = np.array([[1, -1, -1, 0], [0, 0, 1, -1]], dtype=np.int32)
"""(kind) what it adds to the micro-batches that are kept until the backward, and for the gradients of weights."""


@dataclass(kw_only=True)
class PeakMemory:
    """Peaks of memory by layout, made once each.

    Only the additions of a software stack are left out.
    """

    costs: Costs
    _activations: dict[tuple[StageConfig, ScheduleSpace, int, bool], Floats] = field(default_factory=dict)
    _prints: dict[tuple[StageConfig, bool], tuple[Footprint, ...]] = field(default_factory=dict)
    _static: dict[tuple[int, ...], Ints] = field(default_factory=dict)
    _least_static: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)

    def peaks_bytes(
        self,
        stage: StageConfig,
        space: ScheduleSpace,
        *,
        dp: int,
        level: int,
        rows: LayerSplits | None = None,
        most: bool = False,
    ) -> Ints:
        """The peak of the fullest rank, per spread or for each of the space's rows of some blocks that recompute.

        `most`: no less than the forecast will find, instead of no more.
        """
        rows = space.all if rows is None else rows
        owners, held = space.owners, self.static_bytes(stage, dp, level)
        total = space.pieces @ held.sum(axis=1).astype(np.float64) @ owners
        gathers = self.gathers(stage, dp, level)
        if gathers:
            total = total + self.gathered_bytes(stage, (space.pieces.transpose(0, 2, 1) @ owners) > 0, most=most)
        total = total[rows.spread]
        gradients = (space.pieces @ held[:, _GRADIENT].astype(np.float64))[rows.spread]
        if most:
            total = total + self._alive_at_once(stage, space, rows, gathers=gathers)
        elif self.costs.problem.stack.runs_programs and _alive(space.schedule).is_late:
            total = total + self._peaks(stage, space, rows, gradients)
        else:
            total = total + self._alive_at_once(stage, space, rows, gathers=gathers)
            if not self.costs.problem.stack.runs_programs and _forwards_first(space.schedule):
                # gradients come where activations were
                own = np.array([footprint.kept for footprint in self._prints_of(stage, rows)], dtype=np.float64)
                total = total - np.minimum(gradients @ owners, rows.pieces @ own @ owners)
        return np.asarray(total.max(axis=1), dtype=np.int64)

    def least_bytes(self, stage: StageConfig, *, pp: int, dp: int, level: int) -> float:
        """The least memory of the fullest rank of any schedule and spread.

        Every rank once holds the activations of one micro-batch on all of its blocks, and the fullest holds no less
        than the mean.
        """
        rest, gradient = self._least(stage, dp, level)
        return (rest + max(self.kept_of_model(stage), gradient)) / pp

    def excess_bytes(self, stage: StageConfig, *, pp: int, dp: int, level: int, limit: int) -> float:
        """The bytes that recomputing must save at least, in the model, for any schedule and spread to fit."""
        rest, _ = self._least(stage, dp, level)
        return max(0.0, self.kept_of_model(without_recompute(stage)) + rest - pp * limit)

    def _least(self, stage: StageConfig, dp: int, level: int) -> tuple[int, int]:
        """Static bytes of all blocks without their gradients, and the gradients."""
        key = stage.tp, stage.cp, stage.ep, dp, level
        if key not in self._least_static:
            numbers = list(self.costs.blocks)
            held = (self.costs.all_counts[numbers] @ self.static_bytes(stage, dp, level)[numbers]).tolist()
            self._least_static[key] = sum(held) - held[_GRADIENT], held[_GRADIENT]
        return self._least_static[key]

    def kept_of_model(self, stage: StageConfig) -> int:
        """The bytes that one micro-batch leaves in all blocks of the model."""
        prints = self._footprints(stage)
        return sum(count * prints[number].kept for number, count in self._block_counts)

    @cached_property
    def _block_counts(self) -> list[tuple[int, int]]:
        """(number of a piece, how often the model has it) of all kinds of blocks."""
        return [(number, int(self.costs.all_counts[number])) for number in self.costs.blocks]

    def kept_bytes(self, stage: StageConfig) -> tuple[int, ...]:
        """The bytes that one micro-batch leaves in one block, for each kind of block."""
        prints = self._footprints(stage)
        return tuple(prints[number].kept for number in self.costs.blocks)

    def kept_of_pieces(self, stage: StageConfig) -> tuple[Floats, Floats]:
        """(piece) bytes that one micro-batch leaves behind: until its backward, and for the gradients of weights."""
        prints = self._footprints(stage)
        return (
            np.array([own.kept for own in prints], dtype=np.float64),
            np.array([own.kept_for_weights for own in prints], dtype=np.float64),
        )

    def backward_of_pieces(self, stage: StageConfig) -> Floats:
        """(piece) the most bytes that are alive above what was kept while its backward, or input gradient, runs."""
        return np.array([own.backward for own in self._footprints(stage)], dtype=np.float64)

    def _footprints(self, stage: StageConfig, *, gathers: bool = False) -> tuple[Footprint, ...]:
        if (stage, gathers) not in self._prints:
            chunks = self.costs.widest_chunks(stage)
            self._prints[stage, gathers] = tuple(
                chunks.footprint(piece, gathers=gathers) for piece in self.costs.pieces
            )
        return self._prints[stage, gathers]

    def _prints_of(self, stage: StageConfig, rows: LayerSplits, *, gathers: bool = False) -> tuple[Footprint, ...]:
        """The bytes of the pieces, as the rows need them."""
        own = self._footprints(stage, gathers=gathers)
        if rows.pieces.shape[2] == len(own):
            return own
        other = self._footprints(without_recompute(stage))
        return (*own, *(other[number] for number in self.costs.blocks))

    def static_bytes(self, stage: StageConfig, dp: int, level: int) -> Ints:
        """(piece, role) weights, gradients and states on one rank: whatever is recomputed, and however many samples."""
        key = stage.tp, stage.cp, stage.ep, dp, level
        if key not in self._static:
            chunks = self.costs.chunks(stage, dp, level, contention=True)
            self._static[key] = np.array(
                [list(chunks.static_bytes(one_piece(piece)).values()) for piece in self.costs.pieces], dtype=np.int64
            )
        return self._static[key]

    def _whole_weights(self, stage: StageConfig) -> Ints:
        chunks = self.costs.widest_chunks(stage)
        return np.array([chunks.weight_bytes(piece) for piece in self.costs.pieces], dtype=np.int64)

    def gathers(self, stage: StageConfig, dp: int, level: int) -> bool:
        """Whether weights are gathered for each use, from other ranks."""
        return dp * stage.cp > 1 and self.costs.gathers_per_use(stage, dp, level)

    def gathered_bytes(self, stage: StageConfig, has: NDArray[np.bool_], *, most: bool = False) -> Ints:
        """Per spread and rank the full weights that are there at a time, given (spread, piece, rank) what it has.

        `most`: those of any two pieces, as where the embedding follows the head on a rank.
        """
        names = self.costs.pieces
        weights = dict(zip(names, self._whole_weights(stage).tolist(), strict=True))
        codes = np.tensordot(2 ** np.arange(len(names)), has, axes=(0, 1))  # spread, rank
        sizes = np.zeros(2 ** len(names), dtype=np.int64)
        for code in set(codes.ravel().tolist()):
            own = {piece: weights[piece] for number, piece in enumerate(names) if code >> number & 1}
            sizes[code] = 2 * max(own.values()) if most else self.costs.problem.stack.whole_bytes(own)
        return np.asarray(sizes[codes])

    def _alive_at_once(self, stage: StageConfig, space: ScheduleSpace, rows: LayerSplits, *, gathers: bool) -> Floats:
        """`_peaks`, worked out once for all levels, orders of the axes and parts of a space's rows."""
        every = rows if rows.whole is None else rows.whole
        gathers = gathers and not self.costs.problem.stack.runs_programs  # of its own programs both are equal
        key = (stage, space, every.pieces.shape[2], gathers)
        if key not in self._activations:
            if len(self._activations) >= _MOST_KNOWN:
                self._activations.clear()
            self._activations[key] = self._peaks(stage, space, every, gathers=gathers)
        found = self._activations[key]
        return found if rows.chosen is None else found[rows.chosen]

    def _peaks(
        self, stage: StageConfig, space: ScheduleSpace, rows: LayerSplits, gradients: Floats | None = None, *,
        gathers: bool = False,
    ) -> Floats:  # fmt: skip
        """Per row and pipeline rank the most bytes of activations alive at once, as of `peak_activations`.

        Args:
            stage, space, rows: of which configurations.
            gradients: (row, chunk) bytes; all of them are there from the beginning where absent.
            gathers: whether weights are gathered for each use.
        """
        prints = self._prints_of(stage, rows, gathers=gathers)
        found = chunk_activations(
            [(prints[number], rows.pieces[:, :, number]) for number in self._forward(len(prints))]
        )
        return _alive(space.schedule).peaks(found.kept, found.kept_for_weights, np.stack(found.during), gradients)

    def _forward(self, num_pieces: int) -> list[int]:
        """The pieces in the order of a forward, each kind of block before those of its kind that keep everything."""
        width, blocks = len(self.costs.pieces), self.costs.blocks
        kept = {number: [width + place] for place, number in enumerate(blocks)} if num_pieces > width else {}
        return [0, *(each for number in blocks[::-1] for each in (number, *kept.get(number, []))), 2]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Alive:
    """The moments of a schedule that can be a rank's peak, for any sizes of its chunks; every rank has as many.

    Attributes:
        chunks: (rank, chunk of the rank) number of the chunk.
        state: (rank, moment, chunk of the rank) micro-batches that it keeps then, between forward and backward, and
            behind these between the two parts of a backward, where anything is kept for weights at all.
        runs: (rank, moment) what runs then: kind x number of chunks + chunk.
        to_come: (rank, moment, chunk of the rank) 1 where its gradients are not there yet.
    """

    chunks: Ints
    state: Floats
    runs: Ints
    to_come: Floats

    @cached_property
    def is_late(self) -> bool:
        """Whether a rank's peak may be at a moment at which some of its gradients are not there yet."""
        return bool(self.to_come.any())

    def peaks(self, kept: Floats, kept_for_weights: Floats, during: Floats, gradients: Floats | None) -> Floats:
        """(row, rank) the most bytes, given (row, chunk) and (kind, row, chunk) bytes."""
        own = kept.T[self.chunks]  # rank, chunk of the rank, row
        if self.state.shape[2] > own.shape[1]:
            own = np.concatenate([own, kept_for_weights.T[self.chunks]], axis=1)
        total = self.state @ own
        kinds, rows, chunks = during.shape
        total += during.transpose(0, 2, 1).reshape(kinds * chunks, rows)[self.runs]
        if gradients is not None:
            total -= self.to_come @ gradients.T[self.chunks]
        return np.asarray(np.maximum(total.max(axis=1), 0.0).T)


def moments(schedule: Schedule) -> tuple[Ints, Floats, Floats, Ints]:
    """The moments of a schedule that can be a rank's peak.

    Returns:
        (rank, chunk of the rank) number of the chunk, the first one again where a rank has fewer; (rank, moment, chunk
        of the rank) micro-batches that it keeps then, and behind these those between the two parts of a backward;
        (rank, moment, chunk of the rank) 1 where its gradients may not be there yet; (rank, moment) the chunk whose
        backward, or input gradient, runs then, -1 where none does.
    """
    found = _alive(schedule)
    kind, chunk = np.divmod(found.runs, len(schedule.placement))
    backward = np.where((kind == 1) | (kind == 2), chunk, -1)
    if _forwards_first(schedule):
        return found.chunks, found.state, np.ones_like(found.to_come), backward
    return found.chunks, found.state, found.to_come, backward


@lru_cache(maxsize=2048)
def _alive(schedule: Schedule) -> _Alive:
    table, num_ranks = schedule.table, schedule.num_ranks
    placement = np.asarray(schedule.placement)
    of_rank = [np.flatnonzero(placement == rank) for rank in range(num_ranks)]
    most = max(len(own) for own in of_rank)
    place = np.zeros(len(placement), dtype=np.int64)
    chunks = np.zeros((num_ranks, most), dtype=np.int64)
    for rank, own in enumerate(of_rank):
        place[own] = np.arange(len(own))
        chunks[rank, : len(own)] = own
    rank_of = np.repeat(np.arange(num_ranks), np.diff(table.rank_start))
    at = place[table.stage]
    mine = at == np.arange(most)[:, None]  # (chunk of the rank, action); all that follows has actions in its last axis
    whole = _before(mine * _KEPT[table.kind], table.rank_start)
    part = _before(mine * _KEPT_FOR_WEIGHTS[table.kind], table.rank_start)
    whole += mine & (table.kind == 0)  # a forward's own count while it runs
    group = (rank_of * _KINDS + table.kind) * most + at
    there = _before(mine & makes_gradients(schedule), table.rank_start)
    state = np.concatenate([whole, part, there])
    left = _first_of_equal(group, state)
    total = state[:, left].sum(axis=0)
    left = left[np.argsort(group[left] * (total.max(initial=0) + 1) + total, kind="stable")]
    of_group, states = group[left], state[:, left]
    chosen: list[Ints] = []
    for _ in range(_CHAMPIONS):  # one that has no less than another in all is enough
        if not len(left):
            break
        champions = np.flatnonzero(np.append(of_group[1:] != of_group[:-1], True))
        best = np.repeat(states[:, champions], np.diff(champions, prepend=-1), axis=1)
        chosen.append(left[champions])
        more = np.flatnonzero((states > best).any(axis=0))
        left, of_group, states = left[more], of_group[more], states[:, more]
    moments = np.concatenate([*chosen, left])
    moments = moments[np.argsort(rank_of[moments], kind="stable")]
    begins = np.searchsorted(rank_of[moments], np.arange(num_ranks + 1))
    count = np.diff(begins)
    of = moments[begins[:-1, None] + np.minimum(np.arange(count.max()), count[:, None] - 1)]  # the last one again
    is_own = np.arange(most) < np.array([[len(own)] for own in of_rank])
    return _Alive(
        chunks=chunks, state=_by_moment(state[: 2 * most if part.any() else most], of),
        to_come=(1.0 - _by_moment(there, of)) * is_own[:, None],
        runs=table.kind[of].astype(np.int64) * len(placement) + table.stage[of],
    )  # fmt: skip


_CHAMPIONS = 8


def _by_moment(counts: Ints, of: Ints) -> Floats:
    """(rank, moment, row) the (row, action) counts at the actions `of` (rank, moment)."""
    return np.asarray(np.moveaxis(counts[:, of], 0, 2).astype(np.float64, order="C"))


def _first_of_equal(group: Ints, counts: Ints) -> Ints:
    """The first of all actions that are equal in their group and all (row, action) counts, which are not negative,
    ascending; a steady schedule repeats its states."""
    numbers = counts.max(axis=1, initial=0).astype(np.int64) + 1
    if math.prod([int(group.max(initial=0)) + 1, *numbers.tolist()]) >= 2**63:  # no code for each
        return np.arange(len(group))
    code = group.astype(np.int64)
    for row, number in zip(counts, numbers.tolist(), strict=True):
        if number > 1:
            code = code * number + row
    return np.sort(np.unique(code, return_index=True)[1])


def _before(change: Ints, starts: Ints) -> Ints:
    """(row, action) sums over the earlier actions of the same rank, whose first one is at its start."""
    total = np.cumsum(change, axis=1, dtype=np.int32) - change
    lengths = np.diff(starts)
    first = total[:, starts[:-1][lengths > 0]]
    return np.asarray(total - np.repeat(first, lengths[lengths > 0], axis=1))


@lru_cache(maxsize=2048)
def _forwards_first(schedule: Schedule) -> bool:
    """Whether some rank begins no backward before its last forward."""
    table = schedule.table
    for first, last in zip(table.rank_start[:-1].tolist(), table.rank_start[1:].tolist(), strict=True):
        kinds = table.kind[first:last]
        if not (kinds[int((kinds == 0).sum()) :] == 0).any():
            return True
    return False
