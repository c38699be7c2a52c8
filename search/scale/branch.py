"""Branch and bound, best first: the space is split one decision at a time, and what cannot win is never looked at.

The decisions: the mesh with the samples of a micro-batch; sequence parallel and what recomputes; the optimizer-parallel
level; the schedule with its chunks per rank; the spread of the layers with the number of blocks that recompute. Every
node has a bound on the forecast of all configurations below it, each tighter than that of its parent; the node with the
least bound is opened next. A leaf is forecast whole. When the least bound left is no less than the best forecast, the
best is proven to be the best.
"""

from __future__ import annotations

import functools
import heapq
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plans.errors import TwofoldError
from plans.graph import itemsize
from plans.scale import ORDER, Degrees
from search.scale.bounds import Frame, Rows, mesh_bound_s
from search.scale.costs import Costs, Inner, Table, anywhere, kept, num_dense, ordered, piece_counts
from search.scale.footing import Footing
from search.scale.found import Found, Refused, describe, identity
from search.scale.linear import Linear
from search.scale.problem import Pins, Problem
from search.scale.space import (
    Mesh,
    Placement,
    Shape,
    levels,
    meshes,
    micro_batches,
    orders,
    placement,
    recompute_counts,
    recomputes,
    recomputes_some,
    schedule_of,
    sequence_parallels,
    shapes,
    spreads,
    values_of,
)
from simulator.scale import Stack, forecast
from simulator.scale.case import is_split
from simulator.scale.chunks import Chunk
from simulator.scale.predict import rates_of

__all__ = ["Branching"]

Ints = NDArray[np.int64]

_SEEDS = 12

_USUAL = ("interleaved_1f1b", "1f1b")

_SAFE = 1.0 - 1e-9
"""Bounds and forecasts add the same numbers in another order."""


@dataclass(kw_only=True)
class Branching:
    """One search.

    Args:
        problem: what is asked.
        keep: how many of the fastest are searched for; the search ends when no other can be among them.
        deadline_s: `time.monotonic()` at which it ends with the best so far.
        on_better: called with every new best.
        midway: called once, when half of the time that was given is gone.
    """

    problem: Problem
    keep: int = 1
    deadline_s: float | None = None
    on_better: Callable[[Found], None] | None = None
    midway: Callable[[], None] | None = None
    found: list[Found] = field(default_factory=list)
    rejected: list[Found] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    relaxed_s: float = float("inf")
    bound_s: float = 0.0
    complete: bool = False
    interrupted: bool = False
    num_proven: int = 0
    num_opened: int = 0
    num_forecasts: int = 0

    def __post_init__(self) -> None:
        self.costs = Costs(problem=self.problem, rates=rates_of(self.problem.machine))
        self.footing = Footing(costs=self.costs)
        self._heap: list[tuple[float, int, int, tuple[Any, ...]]] = []
        self._number = 0
        self._rooted = False
        self._now_s = float("inf")
        self._frames: dict[tuple[Shape, int, int], Frame | None] = {}
        self._framed: dict[tuple[int, int, bool], list[tuple[Shape, Frame]]] = {}
        self._linears: dict[Frame, Linear] = {}
        self._orders: dict[Mesh, tuple[tuple[str, ...], ...]] = {}
        self._spots: dict[Mesh, tuple[tuple[str, tuple[int, int]], ...]] = {}
        self._nearest: dict[Mesh, tuple[tuple[str, ...], ...]] = {}
        self._where: dict[Mesh, dict[str, tuple[int, int]]] = {}
        self._placed: dict[Mesh, list[Mesh]] = {}
        self._too_large: set[tuple[Any, ...]] = set()
        self._seen: dict[tuple[Any, ...], Found] = {}

    # ------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Search to the end, to the deadline, or until interrupted."""
        now = time.monotonic()
        half_s = float("inf") if self.deadline_s is None else (now + self.deadline_s) / 2
        try:
            self._rooted = self._roots()
            self._seed()
            while self._heap:
                bound, _, kind, node = self._heap[0]
                if bound >= self._enough_s:
                    break
                if self.midway is not None and time.monotonic() > half_s:
                    half_s = float("inf")
                    self.midway()
                if self._is_late:
                    self.interrupted = True
                    break
                heapq.heappop(self._heap)
                self._now_s = bound
                self.num_opened += 1
                self._open[kind](self, bound, *node)
        except KeyboardInterrupt:
            self.interrupted = True
        self.complete = not self.interrupted
        left_s = self._heap[0][0] if self._heap else float("inf")
        if self._rooted:  # of several plans, those that nothing left can come before
            ahead = sum(each.forecast.step_s * _SAFE <= min(left_s, self._now_s if self.interrupted else left_s)
                        for each in self.found)  # fmt: skip
            self.num_proven = min(self.keep, ahead)
        if self.complete:
            self.bound_s = self._best_s
        elif self._rooted:  # the node that was being opened counts with its own bound
            self.bound_s = min(left_s, self._now_s, self._best_s)

    @property
    def _is_late(self) -> bool:
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    @property
    def _best_s(self) -> float:
        return self.found[0].forecast.step_s if self.found else float("inf")

    @property
    def _enough_s(self) -> float:
        return self.found[self.keep - 1].forecast.step_s * _SAFE if len(self.found) >= self.keep else float("inf")

    def _push(self, bound: float, kind: int, *node: Any) -> None:
        if bound < self._enough_s:
            self._number += 1
            heapq.heappush(self._heap, (bound, self._number, kind, node))

    # ------------------------------------------------------------------- the nodes

    def _roots(self) -> bool:
        """Bound all meshes; False: there was no time for all."""
        found, refused = meshes(self.problem)
        self.refused += [
            Refused(what="meshes", reason=reason, count=count) for reason, count in sorted(refused.items())
        ]
        for mesh in found:
            if self._is_late and self._heap:
                self.interrupted = True
                return False
            places = self._places(mesh)
            for size in micro_batches(self.problem, mesh):
                sps = sequence_parallels(self.problem, mesh)
                if not sps or not self._may_hold(mesh, size, max(sps)):
                    continue
                bound = min(self._mesh_bound(mesh, size, sp) for sp in sps)
                self.relaxed_s = min(self.relaxed_s, bound)
                self._push(bound, 0, mesh, size, True)
                for place in places[1:]:
                    # where no group inside a stage lies on nearer links, the bound is no less: priced when it comes up
                    if not self._is_farther(place, mesh):
                        bound = min(self._mesh_bound(place, size, sp) for sp in sps)
                        self.relaxed_s = min(self.relaxed_s, bound)
                    self._push(bound, 0, place, size, not self._is_farther(place, mesh))
        return True

    def _places(self, mesh: Mesh) -> list[Mesh]:
        """The mesh in an order of its axes for each way in which groups inside a stage can lie, its own first."""
        if mesh not in self._orders:
            found: dict[Any, list[tuple[str, ...]]] = {}
            outer: dict[tuple[str, ...], tuple[tuple[int, int], ...]] = {}
            every = orders(self.problem, mesh)
            if self.keep == 1 and self._slower_outside and self.costs.recompute_only_adds:
                every = list(dict.fromkeys([every[0], *_undominated(every)]))  # the usual order stands for the mesh
            for order, where in every:
                found.setdefault(where.inner, []).append(order)
                outer[order] = where.groups
            usual = placement(self.problem, replace(mesh, order=ORDER)).inner
            places = []
            for inner, same in found.items():
                place = replace(mesh, order=same[0])
                places.append(place)
                self._orders[place] = tuple(same)
                self._nearest[place] = tuple(
                    order for order, _ in _undominated([(each, Placement((), outer[each])) for each in same])
                )
                self._spots[place] = () if inner == usual else inner
                self._where[place] = dict(inner)
            self._placed[mesh] = places
        return self._placed[mesh]

    def _is_farther(self, place: Mesh, mesh: Mesh) -> bool:
        """Whether every group inside a stage lies on links that are no faster than where another mesh has it."""
        here, there = self._where[place], self._where[mesh]
        return self._slower_outside and all(_no_nearer(tiers, there[name]) for name, tiers in here.items())

    @functools.cached_property
    def _slower_outside(self) -> bool:
        """Whether every tier of links is no faster than the one inside it."""
        links = self.problem.machine.links
        return all(
            one.bandwidth_Bps >= other.bandwidth_Bps and one.latency_s <= other.latency_s
            for one, other in pairwise(links)
        )

    def _inner(self, mesh: Mesh, sp: bool, size: int, recompute: str, split: bool) -> Inner:
        return Inner(mesh.tp, mesh.cp, sp, size, recompute, split, mesh.ep, self._spots.get(mesh, ()))

    def _seed(self) -> None:
        """Forecast a few usual configurations, so that there is something to beat from the start."""
        roots = sorted(
            (bound * (1 + (mesh.pp - 1) / (2 * self.problem.global_batch / mesh.dp / size)), number, mesh, size)
            for bound, number, _, (mesh, size, priced) in self._heap if priced
        )  # fmt: skip
        tried = 0
        for _, _, mesh, size in roots:
            if tried == _SEEDS or (self._is_late and self.found):
                return
            count = self.problem.global_batch // (mesh.dp * size)
            usual = [shape for shape in shapes(self.problem, mesh.pp) if shape.schedule in _USUAL]
            for shape in usual or shapes(self.problem, mesh.pp)[:1]:
                frame = self.frame(shape, mesh.pp, count)
                if frame is None:
                    continue
                sp = sequence_parallels(self.problem, mesh)[0]
                fitting = (
                    (recompute, level, int(np.flatnonzero(peaks <= self.problem.limit_bytes)[0]))
                    for recompute in recomputes(self.problem)
                    for level in levels(self.problem, mesh)
                    if (
                        peaks := self.footing.peaks_bytes(
                            Inner(mesh.tp, mesh.cp, sp, size, recompute, frame.split, mesh.ep), frame, dp=mesh.dp,
                            level=level, rows=self.rows(frame, recompute),
                        )
                    ).min() <= self.problem.limit_bytes
                )  # fmt: skip
                first = next(fitting, None)
                if first is not None:
                    recompute, level, number = first
                    layers, some = frame.choice(self.rows(frame, recompute), number)
                    values = values_of(mesh, size, sp, recompute, shape, level, layers, self.problem, some)
                    self.consider(self.problem.degrees(values))
                    tried += 1
                    break

    def _may_hold(self, mesh: Mesh, size: int, sp: bool) -> bool:
        """Whether the inputs of the blocks alone, kept in every recompute mode, leave room for sharded weights."""
        problem, config = self.problem, self.problem.config
        tokens = size * config.seq / (mesh.cp * (mesh.tp if sp else 1))
        kept = tokens * config.hidden * itemsize(config.dtype)
        assert problem.optimizer is not None
        each = problem.optimizer.bytes_per_element(config.dtype)
        each -= itemsize(problem.optimizer.accumulates_in(config.dtype))  # gradients may come where activations were
        dense = num_dense(config)
        blocks = dense * config.block_parameters() + (config.num_layers - dense) * config.block_parameters(dense)
        weights = blocks / mesh.tp * each
        weights /= mesh.dp * mesh.cp if max(levels(problem, mesh)) > 0 else mesh.ep
        least = (kept * config.num_layers + weights) / mesh.pp
        if least > problem.limit_bytes:
            what = f"dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} pp {mesh.pp} micro-batch {size}"
            self.refused.append(Refused(what=what, reason="memory", excess_bytes=int(least) - problem.limit_bytes))
        return least <= problem.limit_bytes

    def _splits(self, mesh: Mesh) -> tuple[bool, ...]:
        if self.problem.pins.schedule is not None:
            found = {
                is_split(schedule)
                for shape in shapes(self.problem, mesh.pp)
                if (schedule := schedule_of(shape, mesh.pp, 4 * mesh.pp)) is not None
            }
            return tuple(sorted(found)) or (False, True)
        return (False,) if mesh.pp == 1 else (False, True)

    def _mesh_bound(self, mesh: Mesh, size: int, sp: bool) -> float:
        """A backward in two parts takes no less than a whole one: nothing of one is hidden behind the other."""
        inner = self._inner(mesh, sp, size, recomputes(self.problem)[0], False)
        forward, backward, *_ = self.costs.whole(inner)
        return self._spread_bound(mesh, size, any(self._splits(mesh)), forward, backward, 0.0)

    def _spread_bound(
        self, mesh: Mesh, size: int, split: bool, forward_s: float, backward_s: float, weights_s: float
    ) -> float:
        """`backward_s` is the whole backward, or what must be on the way back; `weights_s` what may come later."""
        problem = self.problem
        count = problem.global_batch // (mesh.dp * size)
        looped = split or any(shape.virtual > 1 for shape in shapes(problem, mesh.pp))
        way = forward_s + (backward_s if weights_s or not split else 0.0)
        return mesh_bound_s(forward_s, backward_s + weights_s, way, mesh.pp, count, looped=looped)

    def _may_fit(self, mesh: Mesh, inner: Inner, chosen: Sequence[int]) -> tuple[int, ...]:
        """The optimizer levels among `chosen` with which it may fit."""
        limit = self.problem.limit_bytes
        found, least = [], float("inf")
        for level in chosen:
            needed = self.footing.least_bytes(anywhere(inner), pp=mesh.pp, dp=mesh.dp, level=level)
            least = min(least, needed)
            if needed <= limit:
                found.append(level)
        if not found:
            what = (
                f"dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} pp {mesh.pp} micro-batch {inner.micro_batch} recompute "
                f"{inner.recompute}"
            )
            self.refused.append(Refused(what=what, reason="memory", excess_bytes=int(least) - limit))
        return tuple(found)

    def _open_mesh(self, bound: float, mesh: Mesh, size: int, priced: bool) -> None:
        modes, sps = recomputes(self.problem), sequence_parallels(self.problem, mesh)
        if not priced:
            self._push(max(bound, min(self._mesh_bound(mesh, size, sp) for sp in sps)), 0, mesh, size, True)
            return
        for sp in sps:
            if len(sps) > 1 and self._mesh_bound(mesh, size, sp) >= self._enough_s:
                continue
            for split in self._splits(mesh):
                for recompute in modes:
                    inner = self._inner(mesh, sp, size, recompute, split)
                    chosen = self._may_fit(mesh, inner, levels(self.problem, mesh))
                    if not chosen:
                        continue
                    if self._saves_nothing(anywhere(inner)):
                        continue
                    needed = min(self._excess(mesh, inner, level) for level in chosen)
                    forward, *backward = self._least_s(inner, needed)
                    own = self._spread_bound(mesh, size, split, forward, backward[0], sum(backward[1:]))
                    self._push(max(bound, own), 1, mesh, size, inner, chosen)

    def _saves_nothing(self, inner: Inner) -> bool:
        """Whether a mode keeps no less than none at all, which takes no longer."""
        if self.keep > 1 or inner.recompute == "none" or "none" not in recomputes(self.problem):
            return False
        own, whole = self.footing.kept_bytes(inner), self.footing.kept_bytes(kept(inner))
        return self.costs.recompute_only_adds and all(map(operator.ge, own, whole))

    def _excess(self, mesh: Mesh, inner: Inner, level: int) -> float:
        """What recomputing must save in the whole model, where not all blocks must recompute."""
        if not self._is_partial(inner.recompute):
            return 0.0
        return self.footing.excess_bytes(
            anywhere(inner), pp=mesh.pp, dp=mesh.dp, level=level, limit=self.problem.limit_bytes
        )

    def _least_s(self, inner: Inner, excess_bytes: float) -> list[float]:
        """The parts of the whole model and one micro-batch at least, the first of them the forward.

        Where some blocks may keep everything: each piece as the shorter of its two kinds, and what recomputing adds to
        save so many bytes, where it adds least per byte; that counts with the last part.
        """
        costs = self.costs
        if not self._is_partial(inner.recompute):
            return [float(each) for each in costs.all_counts @ costs.alone(inner)]
        if not excess_bytes and costs.recompute_only_adds:
            return [float(each) for each in costs.all_counts @ costs.alone(kept(inner))]
        again = costs.alone(inner)
        least = np.minimum(again, costs.alone(kept(inner)))
        parts = [float(each) for each in costs.all_counts @ least]
        again_bytes, once_bytes = (self.footing.kept_bytes(anywhere(each)) for each in (inner, kept(inner)))
        saved = np.array(once_bytes) - np.array(again_bytes)
        longer = (again - least)[list(costs.blocks)].sum(axis=1)
        if excess_bytes > 0 and (saved > 0).any():
            parts[-1] += excess_bytes * float((longer[saved > 0] / saved[saved > 0]).min())
        return parts

    def _is_partial(self, mode: str) -> bool:
        """Whether some blocks may recompute in a mode while the others keep everything."""
        return recomputes_some(self.problem, mode) or self.problem.pins.recompute_layers is not None

    def rows(self, frame: Frame, mode: str) -> Rows:
        """What may be chosen in a frame for a recompute mode."""
        if not self._is_partial(mode):
            return frame.all
        return frame.some(lambda most: recompute_counts(self.problem, mode, most))

    def _open_inner(self, bound: float, mesh: Mesh, size: int, inner: Inner, chosen: tuple[int, ...]) -> None:
        for level in chosen:
            own = bound
            if len(chosen) > 1 and (excess := self._excess(mesh, inner, level)):
                forward, *backward = self._least_s(inner, excess)
                own = self._spread_bound(mesh, size, inner.split, forward, backward[0], sum(backward[1:]))
            if level >= 3 and self.costs.recompute_only_adds:  # what is quickly known first
                quick = [self.costs.quick_floor(each, mesh.dp, level) for each in self._in_orders(mesh, inner, level)]
                own = max(own, self._work_bound(mesh, size, inner, functools.reduce(np.minimum, quick)))
            if max(bound, own) < self._enough_s:
                own = max(own, self._work_bound(mesh, size, inner, self._floor(mesh, inner, level).work))
                self._push(max(bound, own), 2, mesh, size, inner, level)

    def _work_bound(self, mesh: Mesh, size: int, inner: Inner, work: Any) -> float:
        """`_spread_bound` of an early table."""
        _, forward, closing, _, inputs = (float(each) for each in self.costs.all_counts @ work)
        parts = (inputs, closing) if inner.split else (closing, 0.0)
        return self._spread_bound(mesh, size, inner.split, forward, *parts)

    def _floor(self, mesh: Mesh, inner: Inner, level: int) -> Table:
        """An early table that no configuration of a node is below, in whichever order of the axes."""
        partial = self._is_partial(inner.recompute)
        tables = [
            self.costs.floor(each, mesh.dp, level, partial=partial) for each in self._in_orders(mesh, inner, level)
        ]
        return functools.reduce(Table.least, tables)

    def _in_orders(self, mesh: Mesh, inner: Inner, level: int) -> list[Inner]:
        """The orders of the axes that an early table may be least in: it knows of the optimizer from level 2 on."""
        every = self._nearest[mesh] if self._slower_outside else self._orders[mesh]
        return [ordered(inner, order) for order in (every if level >= 2 else every[:1])]

    def _open_level(self, bound: float, mesh: Mesh, size: int, inner: Inner, level: int) -> None:
        partial = self._is_partial(inner.recompute)
        count = self.problem.global_batch // (mesh.dp * size)
        table = self._floor(mesh, inner, level)
        transfers, step_s = self._transfers(mesh, inner), self.problem.stack.step_s
        for shape, frame in self._frames_of(mesh.pp, count, split=inner.split):
            bounds = self._linear(frame).bounds_s(table, transfers, together=self._together(shape)) + step_s
            if (least := max(bound, float(bounds.min()))) < self._enough_s:
                if partial:
                    self._push(least, 3, mesh, size, inner, level, shape, np.flatnonzero(bounds < self._enough_s))
                else:
                    self._push(least, 4, mesh, size, inner, level, shape, None)

    def _table(self, inner: Inner, dp: int, level: int, *, settled: bool) -> Table:
        """With what pieces of rows of a mode cost."""
        if self._is_partial(inner.recompute):
            return self.costs.some(inner, dp, level, settled=settled)
        return (self.costs.settled if settled else self.costs.early)(inner, dp, level)

    def _open_memory(
        self, bound: float, mesh: Mesh, size: int, inner: Inner, level: int, shape: Shape, spreads: Ints
    ) -> None:
        """Which numbers of blocks that recompute may fit."""
        frame = self._known_frame(mesh, size, shape)
        rows = self.rows(frame, inner.recompute)
        chosen = np.flatnonzero(np.isin(rows.spread, spreads))
        fit = chosen[self._fitting(mesh, inner, level, shape, frame, rows.take(chosen))]
        if not len(fit):
            return
        placed = self._in_orders(mesh, inner, level)
        first = fit
        if all(
            self.costs.some_are_longer(each, mesh.dp, level) for each in placed
        ):  # the fewest that fit are the least
            first = fit[np.unique(rows.spread[fit], return_index=True)[1]]
        table = functools.reduce(
            Table.least, [self.costs.some(each, mesh.dp, level, settled=False) for each in placed]
        )  # fmt: skip
        bounds = frame.bounds_s(
            table, self._transfers(mesh, inner), together=self._together(shape), rows=rows.take(first)
        ) + self.problem.stack.step_s  # fmt: skip
        self._push(max(bound, float(bounds.min())), 4, mesh, size, inner, level, shape, fit)

    def _fitting(self, mesh: Mesh, inner: Inner, level: int, shape: Shape, frame: Frame, rows: Rows) -> Ints:
        """The rows that may fit the memory."""
        limit = self.problem.limit_bytes
        peaks = self.footing.peaks_bytes(anywhere(inner), frame, dp=mesh.dp, level=level, rows=rows)
        if not (peaks <= limit).all():
            self._refuse_memory(mesh, inner, shape, level, peaks, limit)
        return np.flatnonzero(peaks <= limit)

    def _open_shape(
        self, bound: float, mesh: Mesh, size: int, inner: Inner, level: int, shape: Shape, fit: Ints | None
    ) -> None:
        frame = self._known_frame(mesh, size, shape)
        rows = self.rows(frame, inner.recompute)
        if fit is None:
            fit = self._fitting(mesh, inner, level, shape, frame, rows)
        if not len(fit):
            return
        for order in self._orders[mesh]:
            place, own = replace(mesh, order=order), ordered(inner, order)
            left = self._not_beaten(place, own, level, shape, frame, fit)
            if not len(left):
                continue
            table, transfers = self._table(own, mesh.dp, level, settled=True), self._transfers(place, own)
            bounds = frame.bounds_s(table, transfers, together=self._together(shape), rows=rows.take(left))
            bounds = bounds + self.problem.stack.step_s
            self._push(max(bound, float(bounds.min())), 5, place, size, own, level, shape, left)

    def _not_beaten(self, mesh: Mesh, inner: Inner, level: int, shape: Shape, frame: Frame, fit: Ints) -> Ints:
        """Without the rows of which another one surely fits, and surely takes no longer, with fewer blocks made again.

        Only where one plan is asked for, where all ranks begin together, so that no action that takes longer can make a
        step shorter, and where the stack adds nothing to the memory that is known here.
        """
        problem, limit = self.problem, self.problem.limit_bytes
        exact = type(problem.stack).memory is Stack.memory
        if self.keep > 1 or not exact or not self._together(shape) or not self._is_partial(inner.recompute):
            return fit
        if not self.costs.longer_with_recompute(inner, mesh.dp, level):
            return fit
        rows = self.rows(frame, inner.recompute)
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
        self, bound: float, mesh: Mesh, size: int, inner: Inner, level: int, shape: Shape, fit: Ints
    ) -> None:
        frame = self._known_frame(mesh, size, shape)
        rows = self.rows(frame, inner.recompute).take(fit)
        some = rows.kept if self._is_partial(inner.recompute) else np.zeros_like(frame.layers)[rows.spread]
        trailing = np.array(
            [
                [
                    self.costs.trailing_s(inner, mesh.dp, level, chunk)
                    for chunk in _chunks(frame.layers[spread], frame.num_dense, whole)
                ]
                for spread, whole in zip(rows.spread.tolist(), some.tolist(), strict=True)
            ]
        )  # fmt: skip
        table, transfers = self._table(inner, mesh.dp, level, settled=True), self._transfers(mesh, inner)
        bounds = frame.bounds_s(table, transfers, trailing, together=self._together(shape), rows=rows)
        bounds = bounds + self.problem.stack.step_s
        order = sorted(range(len(fit)), key=lambda number: (float(bounds[number]), number))
        ranked = tuple((max(bound, float(bounds[number])), frame.choice(rows, number)) for number in order)
        self._push(ranked[0][0], 6, mesh, size, inner, level, shape, ranked, 0)

    def _frames_of(self, pp: int, count: int, *, split: bool) -> list[tuple[Shape, Frame]]:
        """All schedules that there are for so many ranks and micro-batches."""
        key = (pp, count, split)
        if key not in self._framed:
            found = ((shape, self.frame(shape, pp, count)) for shape in shapes(self.problem, pp))
            self._framed[key] = [(shape, frame) for shape, frame in found if frame is not None and frame.split is split]
        return self._framed[key]

    def _linear(self, frame: Frame) -> Linear:
        if frame not in self._linears:
            self._linears[frame] = Linear(frame)
        return self._linears[frame]

    def _known_frame(self, mesh: Mesh, size: int, shape: Shape) -> Frame:
        found = self.frame(shape, mesh.pp, self.problem.global_batch // (mesh.dp * size))
        assert found is not None
        return found

    def _transfers(self, mesh: Mesh, inner: Inner) -> tuple[float, ...]:
        """Between stages; the least of all orders where none is chosen yet."""
        if inner.order:
            return self.costs.transfer_s(inner, mesh.dp, mesh.pp)
        every = [self.costs.transfer_s(ordered(inner, each), mesh.dp, mesh.pp) for each in self._orders[mesh]]
        return tuple(map(min, *every)) if len(every) > 1 else every[0]

    def _together(self, shape: Shape) -> bool:
        """Whether the stack begins every step on all ranks together."""
        return self.problem.stack.steps_together(Degrees(schedule=shape.schedule, virtual=shape.virtual))

    def frame(self, shape: Shape, pp: int, count: int) -> Frame | None:
        key = (shape, pp, count)
        if key not in self._frames:
            schedule = schedule_of(shape, pp, count)
            choices = () if schedule is None else spreads(self.problem, schedule.num_stages)
            dense = num_dense(self.problem.config)
            self._frames[key] = (
                Frame(schedule=schedule, layers=choices, num_dense=dense) if schedule is not None and choices else None
            )
        return self._frames[key]

    def _open_leaf(
        self, bound: float, mesh: Mesh, size: int, inner: Inner, level: int, shape: Shape,
        ranked: tuple[tuple[float, tuple[tuple[int, ...], int | None]], ...], at: int,
    ) -> None:  # fmt: skip
        layers, some = ranked[at][1]
        values = values_of(
            mesh, size, inner.sequence_parallel, inner.recompute, shape, level, layers, self.problem, some
        )
        anyhow = tuple((name, value) for name, value in values.items() if name != "order")
        if anyhow not in self._too_large:  # which no order of the axes changes
            found = self.consider(self.problem.degrees(values))
            if found is None:
                self._too_large.add(anyhow)
        if at + 1 < len(ranked):
            self._push(ranked[at + 1][0], 6, mesh, size, inner, level, shape, ranked, at + 1)

    _open = (
        _open_mesh, _open_inner, _open_level, _open_memory, _open_shape, _open_spreads, _open_leaf
    )  # fmt: skip

    # ------------------------------------------------------------------- leaves

    def evaluate(self, degrees: Degrees) -> Found:
        """The forecast of a configuration, made once.

        Raises:
            TwofoldError: a configuration that cannot be.
        """
        key = identity(degrees)
        known = self._seen.get(key)
        if known is None:
            problem = self.problem
            self.num_forecasts += 1
            known = Found(
                degrees=degrees,
                forecast=forecast(problem.config, degrees, problem.machine, stack=problem.stack),
            )
            self._seen[key] = known
        return known

    def consider(self, degrees: Degrees) -> Found | None:
        """Forecast, and keep it if it fits and is good."""
        try:
            known = self.evaluate(degrees)
        except TwofoldError as error:
            self.refused.append(Refused(what=str(degrees), reason=str(error), count=1))
            return None
        limit = self.problem.limit_bytes
        if known.forecast.peak_bytes > limit:
            self.rejected.append(known)
            self.refused.append(
                Refused(
                    what=describe(degrees), reason="memory", count=1, excess_bytes=known.forecast.peak_bytes - limit
                )
            )
            return None
        if known not in self.found:
            better = known.key < self.found[0].key if self.found else True
            self.found.append(known)
            self.found.sort(key=lambda each: each.key)
            if better and self.on_better is not None:
                self.on_better(known)
        return known

    def narrowed(self, pins: Pins) -> Branching:
        """A search of a part of the space, with what is known already."""
        other = Branching(problem=self.problem.changed(pins=pins), deadline_s=self.deadline_s)
        other._seen = self._seen
        other.costs, other.footing = self.costs, self.footing
        own = self.problem.pins
        if pins.layers is None and own.layers is None and pins.recompute_layers == own.recompute_layers:
            other._frames, other._linears = self._frames, self._linears
        return other

    def _refuse_memory(self, mesh: Mesh, inner: Inner, shape: Shape, level: int, peaks: Any, limit: int) -> None:
        over = peaks[peaks > limit]
        what = (
            f"dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} pp {mesh.pp} micro-batch {inner.micro_batch} {shape.schedule} x "
            f"{shape.virtual} recompute {inner.recompute} optimizer level {level}"
        )
        self.refused.append(Refused(what=what, reason="memory", count=len(over), excess_bytes=int(over.min()) - limit))


def _no_nearer(tiers: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a group lies on links that are no faster than another's: a farther tier, or fewer members together."""
    return tiers[0] > other[0] or (tiers[0] == other[0] and tiers[1] <= other[1])


def _undominated(places: Sequence[tuple[tuple[str, ...], Placement]]) -> list[tuple[tuple[str, ...], Placement]]:
    """The orders without those of which another one has every group and every transfer on links that are no slower."""
    left: list[tuple[tuple[str, ...], Placement]] = []
    for order, where in places:
        if any(_is_no_nearer(where, other) for _, other in left):
            continue
        left = [each for each in left if not _is_no_nearer(each[1], where)]
        left.append((order, where))
    return left


def _is_no_nearer(place: Placement, other: Placement) -> bool:
    return (
        all(_no_nearer(own[1], its[1]) for own, its in zip(place.inner, other.inner, strict=True))
        and all(map(_no_nearer, place.groups, other.groups)) and all(map(operator.ge, place.hops, other.hops))
    )  # fmt: skip


def _chunks(layers: Sequence[int], dense: int, whole: Sequence[int]) -> list[Chunk]:
    """Of a spread, with the blocks of each chunk that keep everything beside others that recompute."""
    last, counts = len(layers) - 1, piece_counts([layers], dense)[0, :, 3:].sum(axis=1).tolist()
    return [
        Chunk(num_blocks=count, has_embedding=number == 0, has_head=number == last, num_dense=plain, num_kept=own)
        for number, (count, plain, own) in enumerate(zip(layers, counts, whole, strict=True))
    ]
