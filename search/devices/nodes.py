"""The decisions of the search: one kind of node for each, and the nodes that it opens.

The decisions are, in order: mesh and micro-batch; sequence parallelism, recompute mode and optimizer level; schedule
and chunks per rank; layer split and recomputed blocks. The bound of a node holds for all configurations below it and is
never lower than that of its parent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from search.devices.bounds import LayerSplits, ScheduleSpace
from search.devices.costs import SHORTER, Table, piece_counts
from search.devices.estimates import Estimates
from search.devices.problem import Problem
from search.devices.schedule_space import ScheduleGroup
from search.devices.space import (
    Mesh,
    ScheduleChoice,
    levels,
    micro_batches,
    sequence_parallels,
    values_of,
)
from search.devices.stage_config import StageConfig, in_any_place, in_order, without_recompute
from search.result import Rejected
from simulator.estimate.chunk import Chunk

__all__ = ["Child", "Kind", "Nodes", "Scheduled", "after_leaf", "leaf_values", "likely_leaves"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


_MOST_BOUNDS = 512
"""Layouts whose bounds of all spreads are kept at a time, for the recompute modes that share them."""


class Kind(IntEnum):
    """The kind of a node: the last decision that was made."""

    MESH = 0
    INNER = 1
    LEVEL = 2
    MEMORY = 3
    SHAPE = 4
    SPREADS = 5
    LEAF = 6
    FORECAST = 7
    STEP = 8


Child = tuple[float, Kind, tuple[Any, ...]]
"""A bound, the kind of a node, and its content."""


class Scheduled(NamedTuple):
    """The decisions up to the schedule: all but the layers of every chunk and the blocks that recompute."""

    mesh: Mesh
    stage: StageConfig
    level: int
    shape: ScheduleChoice


@dataclass(kw_only=True)
class Nodes:
    """The nodes of one search.

    Args:
        estimates: bounds for its meshes before a schedule is chosen, with the data they use.
    """

    estimates: Estimates

    def __post_init__(self) -> None:
        known = self.estimates
        self.problem, self.costs, self.peak_memory = known.problem, known.costs, known.peak_memory
        self.spaces, self.axis_orders = known.spaces, known.axis_orders
        self._bounds: dict[tuple[object, ...], Floats] = {}
        self._fit: dict[tuple[StageConfig, int, int, int], tuple[Mask, Floats]] = {}

    def open(self, kind: Kind, bound: float, node: tuple[Any, ...], enough_s: float) -> Iterator[Child]:
        """The parts of a node; some of those whose bound is not below `enough_s` may be missing."""
        opened: dict[Kind, Callable[..., Iterator[Child]]] = {
            Kind.MESH: self._open_mesh, Kind.INNER: self._open_inner, Kind.LEVEL: self._open_level,
            Kind.MEMORY: self._open_memory, Kind.SHAPE: self._open_shape, Kind.SPREADS: self._open_spreads,
        }  # fmt: skip
        return opened[kind](bound, enough_s, *node)

    def roots(self, mesh: Mesh, enough_s: float) -> Iterator[Child]:
        """A mesh with the samples of a micro-batch; bounds from `enough_s` on may be lower than they could be."""
        places, nearest = self.axis_orders.of(mesh), self.axis_orders.nearest_tiers(mesh)
        sps = sequence_parallels(self.problem, mesh)
        for size in micro_batches(self.problem, mesh):
            if not sps or not self.estimates.may_hold(mesh, size, max(sps)):
                continue
            if len(places) > 1 and nearest is not None:  # bounds all places, which are priced when they come up
                bound = min(self.estimates.mesh_bound_s(mesh, size, sp, nearest, enough_s=enough_s) for sp in sps)
                for place in places:
                    yield bound, Kind.MESH, (place, size, self.axis_orders.has_tiers(place, nearest))
                continue
            for place in places:
                own = min(self.estimates.mesh_bound_s(place, size, sp, enough_s=enough_s) for sp in sps)
                yield own, Kind.MESH, (place, size, True)

    def _open_mesh(self, bound: float, enough_s: float, mesh: Mesh, size: int, priced: bool) -> Iterator[Child]:
        sps = sequence_parallels(self.problem, mesh)
        if not priced:
            own = min(self.estimates.mesh_bound_s(mesh, size, sp, enough_s=enough_s) for sp in sps)
            yield max(bound, own), Kind.MESH, (mesh, size, True)
            return
        every = levels(self.problem, mesh)
        for sp in sps:
            if len(sps) > 1 and self.estimates.mesh_bound_s(mesh, size, sp, enough_s=enough_s) >= enough_s:
                continue
            for split in self.estimates.splits(mesh):
                first = self.axis_orders.stage_config(mesh, sp, size, self.estimates.modes[0], split)
                fast = [
                    level for level in every if self.estimates.plain_level_bound_s(mesh, size, first, level) < enough_s
                ]
                if not fast:
                    continue
                for recompute in self.estimates.modes:
                    stage = self.axis_orders.stage_config(mesh, sp, size, recompute, split)
                    chosen = self.estimates.fitting_levels(mesh, stage, fast)
                    if not chosen:
                        continue
                    if self.estimates.saves_nothing(in_any_place(stage)):
                        continue
                    for level in chosen:
                        own = self.estimates.level_bound_s(mesh, size, stage, level, enough_s)
                        yield max(bound, own), Kind.INNER, (mesh, size, stage, level)

    def _open_inner(
        self, bound: float, enough_s: float, mesh: Mesh, size: int, stage: StageConfig, level: int
    ) -> Iterator[Child]:
        """The same with the bounds of its schedules, of those that may fit."""
        count = self.problem.global_batch // (mesh.dp * size)
        group = self.spaces.group(mesh.pp, count, split=stage.split)
        if group is None:
            return
        bounds = self._quick_bounds_s(mesh, stage, level, group, self.estimates.quick_floor)
        if bounds.min() >= enough_s:
            return
        may_fit, _ = self._may_fit(mesh, stage, level, group)
        own = max(bound, float(bounds.min(where=may_fit, initial=np.inf)))
        if own < enough_s:
            yield own, Kind.LEVEL, (mesh, size, stage, level)

    def _quick_bounds_s(
        self, mesh: Mesh, stage: StageConfig, level: int, group: ScheduleGroup,
        table_of: Callable[[Mesh, StageConfig, int], Table],
    ) -> Floats:  # fmt: skip
        """The bound of each spread of each schedule of a group, by a table; equal for modes with the same table."""
        alike = stage
        if self.spaces.is_partial(stage.recompute) and self.costs.recompute_only_adds:
            alike = without_recompute(stage)  # as if every block kept everything
        key = mesh, alike, level, table_of.__name__, group.linear.num_paths
        if key not in self._bounds:
            if len(self._bounds) >= _MOST_BOUNDS:
                del self._bounds[next(iter(self._bounds))]  # the first that was made
            found = group.linear.bounds_s(table_of(mesh, stage, level), self.estimates.transfers_s(mesh, stage))
            self._bounds[key] = found + self.problem.stack.step_s
        return self._bounds[key]

    def _recomputing_bounds_s(
        self, mesh: Mesh, stage: StageConfig, level: int, group: ScheduleGroup, blocks: Floats
    ) -> Floats:
        """The same with no gathers or reductions beside blocks, of which at least a number (spread) recompute."""
        count = self.problem.global_batch // (mesh.dp * stage.micro_batch)
        table, longer = self.estimates.floor_and_longer(mesh, stage, level, count, blocks)
        return group.linear.bounds_s(table, self.estimates.transfers_s(mesh, stage), longer) + self.problem.stack.step_s

    def _may_fit(self, mesh: Mesh, stage: StageConfig, level: int, group: ScheduleGroup) -> tuple[Mask, Floats]:
        """Which spreads of each schedule of a group may fit, and the least blocks of every chunk that recompute."""
        key = (in_any_place(stage), mesh.pp, mesh.dp, level)
        if key not in self._fit:
            limit = self._limit_bytes(mesh, stage, level)
            least, blocks = group.memory.needs(
                self.peak_memory, key[0], dp=mesh.dp, level=level, partial=self.spaces.is_partial(stage.recompute),
                limit=limit,
            )  # fmt: skip
            self._fit[key] = least <= limit, blocks
            if (least > limit).any():
                self._refuse_memory(f"{_text(mesh, stage)} optimizer level {level}", least, limit)
        return self._fit[key]

    def _limit_bytes(self, mesh: Mesh, stage: StageConfig, level: int) -> int:
        count = self.problem.global_batch // (mesh.dp * stage.micro_batch)
        return self.problem.memory_limit(pp=mesh.pp, count=count, level=level)

    def _open_level(
        self, bound: float, enough_s: float, mesh: Mesh, size: int, stage: StageConfig, level: int
    ) -> Iterator[Child]:
        partial = self.spaces.is_partial(stage.recompute)
        group = self.spaces.group(mesh.pp, self.problem.global_batch // (mesh.dp * size), split=stage.split)
        assert group is not None
        may_fit, blocks = self._may_fit(mesh, stage, level, group)
        starts = group.linear.starts

        def bounded() -> tuple[Floats, Floats]:
            bounds = self._quick_bounds_s(mesh, stage, level, group, self.estimates.floor)
            bounds = np.where(may_fit, bounds, np.inf)
            if blocks.any() and bounds.min() < enough_s:
                bounds = np.maximum(bounds, self._recomputing_bounds_s(mesh, stage, level, group, blocks))
            return bounds, np.minimum.reduceat(bounds, starts[:-1])

        bounds, least = bounded()
        if not (good := np.flatnonzero(least < enough_s).tolist()):
            return
        if group.linear.learn(self.estimates.floor(mesh, stage, level), self.estimates.transfers_s(mesh, stage), good):
            bounds, least = bounded()
        for number in np.flatnonzero(least < enough_s).tolist():
            decided, own = Scheduled(mesh, stage, level, group.shapes[number]), max(bound, float(least[number]))
            if partial:
                spreads = np.flatnonzero(bounds[starts[number] : starts[number + 1]] < enough_s)
                yield own, Kind.MEMORY, (decided, spreads)
            else:
                yield own, Kind.SHAPE, (decided, None)

    def _table(self, stage: StageConfig, dp: int, level: int) -> Table:
        """With what pieces of rows of a mode cost."""
        if self.spaces.is_partial(stage.recompute):
            return self.costs.mixed_table(stage, dp, level, exact=True)
        return self.costs.exact_table(stage, dp, level)

    def _open_memory(self, bound: float, enough_s: float, decided: Scheduled, spreads: Ints) -> Iterator[Child]:
        """Which numbers of blocks that recompute may fit."""
        mesh, stage, level, shape = decided
        space = self._space_of(decided)
        rows = self.spaces.rows(space, stage.recompute)
        chosen = np.flatnonzero(np.isin(rows.spread, spreads))
        fit = chosen[self._fitting(decided, space, rows.take(chosen))]
        if not len(fit):
            return
        placed = self.estimates.in_orders(mesh, stage)
        first, share = fit, 1.0
        # the fewest that fit are the least
        if all(self.costs.some_are_longer(ordered, mesh.dp, level) for ordered in placed):
            first, share = fit[np.unique(rows.spread[fit], return_index=True)[1]], 1.0 - SHORTER
        table = functools.reduce(
            Table.least, [self.costs.mixed_table(ordered, mesh.dp, level, exact=False) for ordered in placed]
        )  # fmt: skip
        bounds = self._bounds_s(mesh, stage, shape, space, table, rows.take(first))
        yield max(bound, share * float(bounds.min())), Kind.SHAPE, (decided, fit)

    def _fitting(self, decided: Scheduled, space: ScheduleSpace, rows: LayerSplits) -> Ints:
        """The rows that may fit the memory."""
        mesh, stage, level, shape = decided
        limit = self._limit_bytes(mesh, stage, level)
        peaks = self.peak_memory.peaks_bytes(in_any_place(stage), space, dp=mesh.dp, level=level, rows=rows)
        if not (peaks <= limit).all():
            what = f"{_text(mesh, stage)} {shape.schedule} x {shape.virtual} optimizer level {level}"
            self._refuse_memory(what, peaks, limit)
        return np.flatnonzero(peaks <= limit)

    def _open_shape(self, bound: float, enough_s: float, decided: Scheduled, fit: Ints | None) -> Iterator[Child]:
        mesh, stage, level, shape = decided
        space = self._space_of(decided)
        rows = self.spaces.rows(space, stage.recompute)
        if fit is None:
            fit = self._fitting(decided, space, rows)
        if not len(fit):
            return
        for order in self.axis_orders.orders(mesh):
            place, own = replace(mesh, order=order), in_order(stage, order)
            ordered = Scheduled(place, own, level, shape)
            left = self._not_beaten(ordered, space, fit)
            if not len(left):
                continue
            bounds = self._bounds_s(place, own, shape, space, self._table(own, mesh.dp, level), rows.take(left))
            yield max(bound, float(bounds.min())), Kind.SPREADS, (ordered, left)

    def _not_beaten(self, decided: Scheduled, space: ScheduleSpace, fit: Ints) -> Ints:
        """Without the rows of which another one surely fits, and surely takes no longer, with fewer blocks recomputed.

        Only where one plan is asked for, and where the stack adds nothing to the memory that is known here.
        """
        mesh, stage, level, shape = decided
        problem, limit = self.problem, self.problem.limit_bytes
        if self.estimates.keep > 1 or problem.stack.adds_memory or not self.spaces.is_partial(stage.recompute):
            return fit
        if not self.costs.longer_with_recompute(stage, mesh.dp, level, together=self.spaces.together(shape)):
            return fit
        rows = self.spaces.rows(space, stage.recompute)
        bare = in_any_place(stage)
        most = self.peak_memory.peaks_bytes(bare, space, dp=mesh.dp, level=level, rows=rows, most=True)
        fewest = np.full(len(space.layers), np.iinfo(np.int64).max)
        sure = np.flatnonzero(most <= limit)
        np.minimum.at(fewest, rows.spread[sure], rows.recomputed[sure])
        if "none" in self.estimates.modes:
            once = self.peak_memory.peaks_bytes(without_recompute(bare), space, dp=mesh.dp, level=level, most=True)
            fewest[once <= limit] = 0
        return np.asarray(fit[rows.recomputed[fit] <= fewest[rows.spread[fit]]])

    def _open_spreads(self, bound: float, enough_s: float, decided: Scheduled, fit: Ints) -> Iterator[Child]:
        mesh, stage, level, shape = decided
        space = self._space_of(decided)
        rows = self.spaces.rows(space, stage.recompute).take(fit)
        some = rows.kept if self.spaces.is_partial(stage.recompute) else np.zeros_like(space.layers)[rows.spread]
        trailing = np.array(
            [
                [
                    self.costs.trailing_s(stage, mesh.dp, level, chunk, joined=bool(space.ends_joined.any()))
                    for chunk in _chunks(space.layers[spread], space.num_dense, whole)
                ]
                for spread, whole in zip(rows.spread.tolist(), some.tolist(), strict=True)
            ]
        )  # fmt: skip
        bounds = self._bounds_s(mesh, stage, shape, space, self._table(stage, mesh.dp, level), rows, trailing)
        order = sorted(range(len(fit)), key=lambda number: (float(bounds[number]), number))
        ranked = tuple((max(bound, float(bounds[number])), space.choice(rows, number)) for number in order)
        yield ranked[0][0], Kind.LEAF, (decided, ranked, 0)

    def _bounds_s(
        self, mesh: Mesh, stage: StageConfig, shape: ScheduleChoice, space: ScheduleSpace, table: Table,
        rows: LayerSplits, trailing_s: Floats | None = None,
    ) -> Floats:  # fmt: skip
        """The bound of each of `rows`."""
        transfers_s, together = self.estimates.transfers_s(mesh, stage), self.spaces.together(shape)
        return space.bounds_s(table, transfers_s, trailing_s, together=together, rows=rows) + self.problem.stack.step_s

    def _space_of(self, decided: Scheduled) -> ScheduleSpace:
        mesh, stage, _, shape = decided
        found = self.spaces.of(shape, mesh.pp, self.problem.global_batch // (mesh.dp * stage.micro_batch))
        assert found is not None
        return found

    def _refuse_memory(self, what: str, peaks: Any, limit: int) -> None:
        over = peaks[peaks > limit]
        self.estimates.rejected.append(
            Rejected(what=what, reason="memory", count=len(over), excess_bytes=int(over.min()) - limit)
        )


def _text(mesh: Mesh, stage: StageConfig) -> str:
    return (
        f"dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} pp {mesh.pp} micro-batch {stage.micro_batch} recompute "
        f"{stage.recompute}"
    )


def leaf_values(problem: Problem, node: tuple[Any, ...]) -> dict[str, Any]:
    """The values of the configuration of a leaf."""
    (mesh, stage, level, shape), ranked, at = node
    layers, some = ranked[at][1]
    return values_of(mesh, stage.micro_batch, stage.sequence_parallel, stage.recompute, shape, level, layers, some)


def after_leaf(node: tuple[Any, ...]) -> Iterator[Child]:
    """The next best of the spreads that a leaf was the best of, if there is one."""
    decided, ranked, at = node
    if at + 1 < len(ranked):
        yield ranked[at + 1][0], Kind.LEAF, (decided, ranked, at + 1)


def likely_leaves(node: tuple[Any, ...], enough_s: float, most: int) -> list[tuple[Any, ...]]:
    """A leaf, and those after it whose bounds are below `enough_s`: at most a number of them in all."""
    decided, ranked, at = node
    others = (number for number in range(at + 1, min(at + most, len(ranked))) if ranked[number][0] < enough_s)
    return [(decided, ranked, number) for number in (at, *others)]


def _chunks(layers: Sequence[int], dense: int, whole: Sequence[int]) -> list[Chunk]:
    """The children of a spread: numbers of blocks of each chunk that keep everything while the others recompute."""
    last, counts = len(layers) - 1, piece_counts([layers], dense)[0, :, 3:].sum(axis=1).tolist()
    return [
        Chunk(num_blocks=count, has_embedding=number == 0, has_head=number == last, num_dense=plain, num_kept=own)
        for number, (count, plain, own) in enumerate(zip(layers, counts, whole, strict=True))
    ]
