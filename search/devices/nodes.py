"""What is decided at a time, and how each kind of node opens.

The decisions: the mesh with the samples of a micro-batch; sequence parallel and what recomputes; the optimizer-parallel
level; the schedule with its chunks per rank; the spread of the layers with the number of blocks that recompute. Every
node has a bound on the forecast of all configurations below it, each tighter than that of its parent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search.devices.bounds import Frame, Rows
from search.devices.costs import Inner, Table, anywhere, kept, ordered, piece_counts
from search.devices.estimates import Estimates
from search.devices.problem import Problem
from search.devices.space import (
    Mesh,
    Shape,
    levels,
    micro_batches,
    recomputes,
    sequence_parallels,
    values_of,
)
from search.result import Rejected
from simulator.forecast.chunks import Chunk

__all__ = ["Child", "Kind", "Nodes", "after_leaf", "leaf_values"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Kind(IntEnum):
    """What a node has decided last."""

    MESH = 0
    INNER = 1
    LEVEL = 2
    MEMORY = 3
    SHAPE = 4
    SPREADS = 5
    LEAF = 6


Child = tuple[float, Kind, tuple[Any, ...]]
"""A bound, the kind of a node, and what it consists of."""


@dataclass(kw_only=True)
class Nodes:
    """The nodes of one search.

    Args:
        estimates: what is known of its meshes before a schedule is chosen, with what that rests on.
    """

    estimates: Estimates

    def __post_init__(self) -> None:
        known = self.estimates
        self.problem, self.costs, self.footing = known.problem, known.costs, known.footing
        self.frames, self.places = known.frames, known.places
        self._open: dict[Kind, Callable[..., Iterator[Child]]] = {
            Kind.MESH: self._open_mesh, Kind.INNER: self._open_inner, Kind.LEVEL: self._open_level,
            Kind.MEMORY: self._open_memory, Kind.SHAPE: self._open_shape, Kind.SPREADS: self._open_spreads,
        }  # fmt: skip

    def open(self, kind: Kind, bound: float, node: tuple[Any, ...], enough_s: float) -> Iterator[Child]:
        """The parts of a node; some of those whose bound is not below `enough_s` may be missing."""
        return self._open[kind](bound, enough_s, *node)

    def roots(self, mesh: Mesh) -> Iterator[Child]:
        """A mesh with the samples of a micro-batch."""
        places = self.places.of(mesh)
        for size in micro_batches(self.problem, mesh):
            sps = sequence_parallels(self.problem, mesh)
            if not sps or not self.estimates.may_hold(mesh, size, max(sps)):
                continue
            bound = min(self.estimates.mesh_bound_s(mesh, size, sp) for sp in sps)
            yield bound, Kind.MESH, (mesh, size, True)
            for place in places[1:]:
                # where no group inside a stage lies on nearer links, the bound is no less: priced when it comes up
                is_farther = self.places.is_farther(place, mesh)
                if not is_farther:
                    bound = min(self.estimates.mesh_bound_s(place, size, sp) for sp in sps)
                yield bound, Kind.MESH, (place, size, not is_farther)

    def _open_mesh(self, bound: float, enough_s: float, mesh: Mesh, size: int, priced: bool) -> Iterator[Child]:
        sps = sequence_parallels(self.problem, mesh)
        if not priced:
            own = min(self.estimates.mesh_bound_s(mesh, size, sp) for sp in sps)
            yield max(bound, own), Kind.MESH, (mesh, size, True)
            return
        for sp in sps:
            if len(sps) > 1 and self.estimates.mesh_bound_s(mesh, size, sp) >= enough_s:
                continue
            for split in self.estimates.splits(mesh):
                for recompute in recomputes(self.problem):
                    inner = self.places.inner(mesh, sp, size, recompute, split)
                    chosen = self.estimates.fitting_levels(mesh, inner, levels(self.problem, mesh))
                    if not chosen:
                        continue
                    if self.estimates.saves_nothing(anywhere(inner)):
                        continue
                    needed = min(self.estimates.excess_bytes(mesh, inner, level) for level in chosen)
                    own = self.estimates.inner_bound_s(mesh, size, inner, needed)
                    yield max(bound, own), Kind.INNER, (mesh, size, inner, chosen)

    def _open_inner(
        self, bound: float, enough_s: float, mesh: Mesh, size: int, inner: Inner, chosen: tuple[int, ...]
    ) -> Iterator[Child]:
        for level in chosen:
            own = bound
            if len(chosen) > 1 and (excess := self.estimates.excess_bytes(mesh, inner, level)):
                own = self.estimates.inner_bound_s(mesh, size, inner, excess)
            if level >= 3 and self.costs.recompute_only_adds:
                own = max(own, self.estimates.quick_bound_s(mesh, size, inner, level))
            if max(bound, own) < enough_s:
                own = max(own, self.estimates.level_bound_s(mesh, size, inner, level))
                yield max(bound, own), Kind.LEVEL, (mesh, size, inner, level)

    def _open_level(
        self, bound: float, enough_s: float, mesh: Mesh, size: int, inner: Inner, level: int
    ) -> Iterator[Child]:
        partial = self.frames.is_partial(inner.recompute)
        count = self.problem.global_batch // (mesh.dp * size)
        table = self.estimates.floor(mesh, inner, level)
        transfers, step_s = self._transfers(mesh, inner), self.problem.stack.step_s
        for shape, frame in self.frames.all_of(mesh.pp, count, split=inner.split):
            bounds = self.frames.linear(frame).bounds_s(table, transfers, together=self.frames.together(shape)) + step_s
            if (least := max(bound, float(bounds.min()))) < enough_s:
                if partial:
                    yield least, Kind.MEMORY, (mesh, size, inner, level, shape, np.flatnonzero(bounds < enough_s))
                else:
                    yield least, Kind.SHAPE, (mesh, size, inner, level, shape, None)

    def _table(self, inner: Inner, dp: int, level: int) -> Table:
        """With what pieces of rows of a mode cost."""
        if self.frames.is_partial(inner.recompute):
            return self.costs.some(inner, dp, level, settled=True)
        return self.costs.settled(inner, dp, level)

    def _open_memory(
        self,
        bound: float,
        enough_s: float,
        mesh: Mesh,
        size: int,
        inner: Inner,
        level: int,
        shape: Shape,
        spreads: Ints,
    ) -> Iterator[Child]:
        """Which numbers of blocks that recompute may fit."""
        frame = self._frame(mesh, size, shape)
        rows = self.frames.rows(frame, inner.recompute)
        chosen = np.flatnonzero(np.isin(rows.spread, spreads))
        fit = chosen[self._fitting(mesh, inner, level, shape, frame, rows.take(chosen))]
        if not len(fit):
            return
        placed = self.estimates.in_orders(mesh, inner, level)
        first = fit
        if all(
            self.costs.some_are_longer(each, mesh.dp, level) for each in placed
        ):  # the fewest that fit are the least
            first = fit[np.unique(rows.spread[fit], return_index=True)[1]]
        table = functools.reduce(
            Table.least, [self.costs.some(each, mesh.dp, level, settled=False) for each in placed]
        )  # fmt: skip
        bounds = self._bounds_s(mesh, inner, shape, frame, table, rows.take(first))
        yield max(bound, float(bounds.min())), Kind.SHAPE, (mesh, size, inner, level, shape, fit)

    def _fitting(self, mesh: Mesh, inner: Inner, level: int, shape: Shape, frame: Frame, rows: Rows) -> Ints:
        """The rows that may fit the memory."""
        limit = self.problem.limit_bytes
        peaks = self.footing.peaks_bytes(anywhere(inner), frame, dp=mesh.dp, level=level, rows=rows)
        if not (peaks <= limit).all():
            self._refuse_memory(mesh, inner, shape, level, peaks, limit)
        return np.flatnonzero(peaks <= limit)

    def _open_shape(
        self,
        bound: float,
        enough_s: float,
        mesh: Mesh,
        size: int,
        inner: Inner,
        level: int,
        shape: Shape,
        fit: Ints | None,
    ) -> Iterator[Child]:
        frame = self._frame(mesh, size, shape)
        rows = self.frames.rows(frame, inner.recompute)
        if fit is None:
            fit = self._fitting(mesh, inner, level, shape, frame, rows)
        if not len(fit):
            return
        for order in self.places.orders(mesh):
            place, own = replace(mesh, order=order), ordered(inner, order)
            left = self._not_beaten(place, own, level, shape, frame, fit)
            if not len(left):
                continue
            bounds = self._bounds_s(place, own, shape, frame, self._table(own, mesh.dp, level), rows.take(left))
            yield max(bound, float(bounds.min())), Kind.SPREADS, (place, size, own, level, shape, left)

    def _not_beaten(self, mesh: Mesh, inner: Inner, level: int, shape: Shape, frame: Frame, fit: Ints) -> Ints:
        """Without the rows of which another one surely fits, and surely takes no longer, with fewer blocks made again.

        Only where one plan is asked for, where all ranks begin together, so that no action that takes longer can make a
        step shorter, and where the stack adds nothing to the memory that is known here.
        """
        problem, limit = self.problem, self.problem.limit_bytes
        if (
            self.estimates.keep > 1
            or problem.stack.adds_memory
            or not self.frames.together(shape)
            or not self.frames.is_partial(inner.recompute)
        ):
            return fit
        if not self.costs.longer_with_recompute(inner, mesh.dp, level):
            return fit
        rows = self.frames.rows(frame, inner.recompute)
        bare = anywhere(inner)
        most = self.footing.peaks_bytes(bare, frame, dp=mesh.dp, level=level, rows=rows, most=True)
        fewest = np.full(len(frame.layers), np.iinfo(np.int64).max)
        sure = np.flatnonzero(most <= limit)
        np.minimum.at(fewest, rows.spread[sure], rows.recomputed[sure])
        if "none" in recomputes(problem):
            once = self.footing.peaks_bytes(kept(bare), frame, dp=mesh.dp, level=level, most=True)
            fewest[once <= limit] = 0
        return np.asarray(fit[rows.recomputed[fit] <= fewest[rows.spread[fit]]])

    def _open_spreads(
        self,
        bound: float,
        enough_s: float,
        mesh: Mesh,
        size: int,
        inner: Inner,
        level: int,
        shape: Shape,
        fit: Ints,
    ) -> Iterator[Child]:
        frame = self._frame(mesh, size, shape)
        rows = self.frames.rows(frame, inner.recompute).take(fit)
        some = rows.kept if self.frames.is_partial(inner.recompute) else np.zeros_like(frame.layers)[rows.spread]
        trailing = np.array(
            [
                [
                    self.costs.trailing_s(inner, mesh.dp, level, chunk)
                    for chunk in _chunks(frame.layers[spread], frame.num_dense, whole)
                ]
                for spread, whole in zip(rows.spread.tolist(), some.tolist(), strict=True)
            ]
        )  # fmt: skip
        bounds = self._bounds_s(mesh, inner, shape, frame, self._table(inner, mesh.dp, level), rows, trailing)
        order = sorted(range(len(fit)), key=lambda number: (float(bounds[number]), number))
        ranked = tuple((max(bound, float(bounds[number])), frame.choice(rows, number)) for number in order)
        yield ranked[0][0], Kind.LEAF, (mesh, size, inner, level, shape, ranked, 0)

    def _bounds_s(
        self, mesh: Mesh, inner: Inner, shape: Shape, frame: Frame, table: Table, rows: Rows,
        trailing_s: Floats | None = None,
    ) -> Floats:  # fmt: skip
        """For each of `rows`."""
        transfers_s, together = self._transfers(mesh, inner), self.frames.together(shape)
        return frame.bounds_s(table, transfers_s, trailing_s, together=together, rows=rows) + self.problem.stack.step_s

    def _frame(self, mesh: Mesh, size: int, shape: Shape) -> Frame:
        found = self.frames.of(shape, mesh.pp, self.problem.global_batch // (mesh.dp * size))
        assert found is not None
        return found

    def _transfers(self, mesh: Mesh, inner: Inner) -> tuple[float, ...]:
        """Between stages; the least of all orders where none is chosen yet."""
        if inner.order:
            return self.costs.transfer_s(inner, mesh.dp, mesh.pp)
        every = [self.costs.transfer_s(ordered(inner, each), mesh.dp, mesh.pp) for each in self.places.orders(mesh)]
        return tuple(map(min, *every)) if len(every) > 1 else every[0]

    def _refuse_memory(self, mesh: Mesh, inner: Inner, shape: Shape, level: int, peaks: Any, limit: int) -> None:
        over = peaks[peaks > limit]
        what = (
            f"dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} pp {mesh.pp} micro-batch {inner.micro_batch} {shape.schedule} x "
            f"{shape.virtual} recompute {inner.recompute} optimizer level {level}"
        )
        self.estimates.rejected.append(
            Rejected(what=what, reason="memory", count=len(over), excess_bytes=int(over.min()) - limit)
        )


def leaf_values(problem: Problem, node: tuple[Any, ...]) -> dict[str, Any]:
    """The plain values of the configuration that a leaf stands for."""
    mesh, size, inner, level, shape, ranked, at = node
    layers, some = ranked[at][1]
    return values_of(mesh, size, inner.sequence_parallel, inner.recompute, shape, level, layers, problem, some)


def after_leaf(node: tuple[Any, ...]) -> Iterator[Child]:
    """The next best of the spreads that a leaf was the best of, if there is one."""
    *rest, ranked, at = node
    if at + 1 < len(ranked):
        yield ranked[at + 1][0], Kind.LEAF, (*rest, ranked, at + 1)


def _chunks(layers: Sequence[int], dense: int, whole: Sequence[int]) -> list[Chunk]:
    """Of a spread, with the blocks of each chunk that keep everything beside others that recompute."""
    last, counts = len(layers) - 1, piece_counts([layers], dense)[0, :, 3:].sum(axis=1).tolist()
    return [
        Chunk(num_blocks=count, has_embedding=number == 0, has_head=number == last, num_dense=plain, num_kept=own)
        for number, (count, plain, own) in enumerate(zip(layers, counts, whole, strict=True))
    ]
