"""Branch and bound, best first: each step fixes one decision, and branches that cannot win are pruned.

The node with the lowest bound is opened next (`search.devices.nodes`). A leaf is first estimated, which takes a
millisecond, and forecast when its estimate is the lowest value left. Bounds and estimates may exceed forecasts by a
margin (`Branching.margin`), which the search learns from its forecasts. When the lowest bound left exceeds the best
forecast by more than the margin, the best is proven under that margin. Software other than twofold's executor is only
estimated: its estimate is the forecast, and the margin is 0.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from plans.degrees import ORDER, Degrees
from plans.errors import TwofoldError
from search.candidate import Candidate, describe, identity
from search.devices.axis_orders import AxisOrders
from search.devices.bounds import LayerSplits, ScheduleSpace
from search.devices.costs import Costs
from search.devices.estimates import Estimates
from search.devices.nodes import Child, Kind, Nodes, Scheduled, after_leaf, leaf_values, likely_leaves
from search.devices.peak_memory import PeakMemory
from search.devices.problem import Pins, Problem
from search.devices.schedule_space import ScheduleSpaces
from search.devices.seeds import seeds
from search.devices.space import ScheduleChoice, meshes
from search.result import Rejected
from simulator.estimate.estimate import rates_of
from simulator.estimate.grid import Grid
from simulator.forecast import Forecast, forecast
from simulator.forecast.predict import step_forecast, step_machine
from simulator.forecast.step import StepForecast

__all__ = ["ESTIMATE_MARGIN", "Branching"]

ESTIMATE_MARGIN = 0.05
"""Assumed largest relative excess of an estimate over its forecast before anything has been forecast."""

_FEW_FORECASTS = 32

_LATER_MARGIN = 0.005
"""The same after `_FEW_FORECASTS`, until which it falls evenly, unless a step that the search lowered was further below
its estimate."""

_CONTENTION_MARGIN = 0.001
"""Assumed largest relative excess of a step without contention over its forecast, unless the search saw a larger
one."""

_WALKED_MARGIN, _FEW_WALKS = 0.03, 8
"""By how much more than that a step that is simulated in time order may be below it before any was, and the number of
those until which this falls evenly to 0: without contention, bodies are slowed one by one, and can take longer."""

_WIDER = 1.1
"""A margin is this many times the largest excess that the search saw."""

_DIVES, _LATE_DIVES = 4, 24
"""Meshes with the least bounds that are followed down to one configuration each before the search, and at half of the
time that was given."""

_MOST_IN_DIVE = 24
"""Nodes that are opened for that on each of them."""

_ESTIMATED_AT_ONCE = 16
"""Spreads of a schedule that are estimated together: each takes a fifth of the time that it takes alone."""

_SAFE = 1.0 - 1e-9
"""Bounds and forecasts add the same numbers in another order."""


_Entry = tuple[float, int, Kind, tuple[Any, ...]]
"""A node with its bound and its number: nodes with equal bounds are opened in the order in which they came up."""


@dataclass(kw_only=True)
class Branching:
    """The state of one branch-and-bound search.

    Args:
        problem: what is asked.
        keep: how many of the fastest are searched for; the search ends when no other can be among them.
        deadline_s: `time.monotonic()` at which it ends with the best so far.
        on_better: called with every new best.
        midway: called with this, once, when half of the time that was given is gone.
        proves: whether a bound on what is left is asked for. Without, estimates count as good as in the search that
            this is a part of.

    Attributes:
        contention_margin: what the proof assumes to be the largest relative excess of a step without contention over
            its forecast; 0 where it does not need it.
    """

    problem: Problem
    keep: int = 1
    deadline_s: float | None = None
    on_better: Callable[[Candidate], None] | None = None
    midway: Callable[[Branching], None] | None = None
    proves: bool = True
    candidates: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    relaxed_s: float = float("inf")
    bound_s: float = 0.0
    complete: bool = False
    interrupted: bool = False
    num_proven: int = 0
    num_opened: int = 0
    num_forecasts: int = 0
    contention_margin: float = 0.0

    def __post_init__(self) -> None:
        self.costs = Costs(problem=self.problem, rates=rates_of(self.problem.machine, self.problem.stack))
        self.peak_memory = PeakMemory(costs=self.costs)
        self.spaces = ScheduleSpaces(problem=self.problem)
        self._grid = Grid(self.problem.config, self.problem.machine, self.problem.stack)
        self._heap: list[_Entry] = []
        self._steps: list[_Entry] = []  # lowered, to be forecast
        self._number = 0
        self._rooted = False
        self._now_s = float("inf")
        self._too_large: set[tuple[Any, ...]] = set()
        self._seen: dict[tuple[Any, ...], Candidate] = {}
        self._estimates: dict[tuple[Any, ...], Forecast] = {}
        self._margin_seen = 0.0
        self._contention_seen = 0.0
        self._num_before = self._num_lowered = self._num_walked = 0
        self._dropped_s = float("inf")

    # ------------------------------------------------------------------- the loop

    def run(self, *, most: int | None = None) -> None:
        """Search to the end, to the deadline, or until interrupted.

        Args:
            most: end after this many nodes, and begin with none of the usual configurations.
        """
        now = time.monotonic()
        half_s = float("inf") if self.deadline_s is None else (now + self.deadline_s) / 2
        nodes = self._nodes()
        try:
            if most is None:
                self._seed()
            self._rooted = self._roots(nodes)
            if most is None and self._rooted:
                self._dive(nodes, _DIVES)
            while heap := self._next_heap():
                if self.midway is not None and time.monotonic() > half_s:
                    half_s = float("inf")
                    self.midway(self)
                    assert self.deadline_s is not None
                    self._dive(nodes, _LATE_DIVES, (time.monotonic() + self.deadline_s) / 2)
                    continue
                if self._is_late or self.num_opened == most:
                    self.interrupted = True
                    break
                self._push(self._opened(nodes, heapq.heappop(heap)))
        except KeyboardInterrupt:
            self.interrupted = True
            if most is not None:
                raise
        self.complete = not self.interrupted
        if self._steps:
            self.contention_margin = max(self.contention_margin, self._steps_margin)
        if self._rooted:
            left_s = self._left_s()
            # of several plans, those that nothing left can come before
            ahead = sum(candidate.forecast.step_s * _SAFE**2 <= left_s for candidate in self.candidates)
            self.num_proven = min(self.keep, ahead)
            self.bound_s = self._best_s if self.num_proven else min(left_s, self._best_s)

    def _next_heap(self) -> list[_Entry]:
        """The heap with the lowest node that may be good enough; empty if there is none."""
        heaps = (self._heap, self.margin), (self._steps, self._steps_margin)
        good = [heap for heap, margin in heaps if heap and heap[0][0] < self._above_s(margin)]
        return min(good, key=lambda heap: heap[0], default=[])

    def _push(self, entries: Iterable[_Entry]) -> None:
        for entry in entries:
            heapq.heappush(self._steps if entry[2] is Kind.STEP else self._heap, entry)

    def _left_s(self) -> float:
        """A forecast that nothing that is left is below."""
        left_s = min(self._heap[0][0] if self._heap else float("inf"), self._dropped_s) * (1.0 - self.margin)
        if self._steps:
            left_s = min(left_s, self._steps[0][0] * (1.0 - self._steps_margin))
        if self.interrupted:  # the node that was being opened counts with its own bound
            left_s = min(left_s, self._now_s * (1.0 - max(self.margin, self._steps_margin)))
        return left_s

    def _nodes(self) -> Nodes:
        axis_orders = AxisOrders(problem=self.problem, costs=self.costs, only_best=self.keep == 1)
        estimates = Estimates(
            problem=self.problem, keep=self.keep, costs=self.costs, peak_memory=self.peak_memory, spaces=self.spaces,
            axis_orders=axis_orders, rejected=self.rejected,
        )  # fmt: skip
        return Nodes(estimates=estimates)

    @property
    def _is_late(self) -> bool:
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    @property
    def _best_s(self) -> float:
        return self.candidates[0].forecast.step_s if self.candidates else float("inf")

    def _above_s(self, margin: float) -> float:
        """The bound or estimate from which on a forecast, less by no more than a margin, is not good enough."""
        if len(self.candidates) < self.keep:
            return float("inf")
        return self.candidates[self.keep - 1].forecast.step_s * _SAFE / (1.0 - margin)

    def _limit_s(self) -> float:
        """The bound from which on nodes are dropped; by the widest margin, so that it may grow later."""
        limit_s = self._above_s(max(self._widest_margin, self.margin))
        self._dropped_s = min(self._dropped_s, limit_s)
        return limit_s

    def _roots(self, nodes: Nodes) -> bool:
        """Bound all meshes; False if the time ran out before."""
        found, refused = meshes(self.problem)
        self.rejected += [
            Rejected(what="meshes", reason=reason, count=count) for reason, count in sorted(refused.items())
        ]
        limit_s = self._limit_s()
        for mesh in found:
            if self._is_late and self._heap:
                self.interrupted = True
                return False
            for child in nodes.roots(mesh, limit_s):
                self.relaxed_s = min(self.relaxed_s, child[0])
                if child[0] < limit_s:
                    heapq.heappush(self._heap, self._entry(child))
        return True

    def _seed(self) -> None:
        """Forecast a few usual configurations, the fastest by estimate first: most others then need no forecast."""
        usual: list[tuple[float, int, Degrees]] = []
        for rough_s, degrees in seeds(self.problem, self.costs, self.spaces, self.peak_memory):
            if usual and (rough_s >= min(usual)[0] or self._is_late):
                break
            if (found := self.estimated(degrees)) is not None:
                usual.append((found.step_s, len(usual), degrees))
        for estimated_s, _, degrees in sorted(usual):
            if estimated_s < self._best_s:
                self.consider(degrees)
            if self._is_late and self.candidates:
                return

    def _dive(self, nodes: Nodes, most: int, until_s: float = float("inf")) -> None:
        """Follow the best meshes down to one configuration each: a good one that is known early leaves out others.

        Args:
            nodes: opens them.
            most: how many meshes.
            until_s: `time.monotonic()` after which no further mesh is followed.
        """
        chosen: dict[tuple[int, ...], _Entry] = {}
        for entry in sorted(self._heap):
            first = entry[3][0]
            mesh = first.mesh if isinstance(first, Scheduled) else first
            chosen.setdefault((mesh.dp, mesh.cp, mesh.tp, mesh.pp, mesh.ep), entry)
            if len(chosen) == most:
                break
        for entry in chosen.values():
            if self._is_late or time.monotonic() > until_s:
                break
            self._dive_from(nodes, entry)

    def _dive_from(self, nodes: Nodes, entry: _Entry) -> None:
        """Open nodes depth first until a configuration is forecast; what is left of them goes back to the others."""
        self._heap.remove(entry)
        heapq.heapify(self._heap)
        left, before = [entry], self.num_forecasts
        try:
            for _ in range(_MOST_IN_DIVE):
                if not left or self.num_forecasts > before or self._is_late:
                    break
                at = min(range(len(left)), key=lambda number: (-left[number][2], left[number][0]))
                left += self._opened(nodes, left.pop(at))
        finally:
            self._push(left)

    def _opened(self, nodes: Nodes, entry: _Entry) -> list[_Entry]:
        """The parts of a node; a configuration whose estimate comes up is forecast, and has none."""
        self._now_s, _, kind, node = entry
        self.num_opened += 1
        limit_s = self._limit_s()
        if kind is Kind.STEP:
            self._of_step(*node)
            return []
        if kind is Kind.FORECAST:
            children = self._of_estimate(*node)
        elif kind is Kind.LEAF:
            children = self._of_leaf(self._now_s, node)
        else:
            children = nodes.open(kind, self._now_s, node, limit_s)
        return [self._entry(child) for child in children if child[1] is Kind.STEP or child[0] < limit_s]

    def _entry(self, child: Child) -> _Entry:
        self._number += 1
        return child[0], self._number, *child[1:]

    def _of_leaf(self, bound: float, node: tuple[Any, ...]) -> Iterator[Child]:
        """Estimate a configuration; what may be good enough is forecast when it comes up."""
        degrees = self.problem.degrees(leaf_values(self.problem, node))
        if identity(degrees) not in self._estimates:
            others = likely_leaves(node, self._above_s(self.margin), _ESTIMATED_AT_ONCE)
            with suppress(TwofoldError):  # each says why when it comes up
                self._estimate([self.problem.degrees(leaf_values(self.problem, other)) for other in others])
        found = self.estimated(degrees)
        if found is not None and self._may_fit(degrees, found):
            yield max(bound, found.step_s), Kind.FORECAST, (degrees,)
        yield from after_leaf(node)

    @property
    def _widest_margin(self) -> float:
        """Estimates of other software are forecasts."""
        if not self.problem.stack.runs_programs:
            return 0.0
        if not self.proves:
            return _LATER_MARGIN
        return ESTIMATE_MARGIN

    @property
    def margin(self) -> float:
        """The assumed largest relative excess of bounds and estimates over forecasts."""
        later = min(self._widest_margin, _LATER_MARGIN)
        return max(self._lasting_margin, later + self._share_unknown * (self._widest_margin - later))

    @property
    def _lasting_margin(self) -> float:
        """The margin that is left after some forecasts."""
        return max(min(self._widest_margin, _LATER_MARGIN), _WIDER * self._margin_seen)

    @property
    def _steps_margin(self) -> float:
        """The assumed largest relative excess of steps without contention over forecasts."""
        return max(_CONTENTION_MARGIN, _WIDER * self._contention_seen)

    @property
    def _share_unknown(self) -> float:
        """The share of the widest margin that is still assumed: it falls with every forecast."""
        return max(0.0, 1.0 - (self._num_before + self._num_lowered) / _FEW_FORECASTS)

    def estimated(self, degrees: Degrees) -> Forecast | None:
        """The quick estimate of a configuration, made once; None, and a reason, where there is none."""
        key = identity(degrees)
        if key not in self._estimates:
            try:
                self._estimate([degrees])
            except TwofoldError as error:
                self.rejected.append(Rejected(what=str(degrees), reason=str(error), count=1))
                return None
        return self._estimates[key]

    def _estimate(self, every: Sequence[Degrees]) -> None:
        """Estimate some configurations together.

        Raises:
            TwofoldError: one of them cannot be estimated.
        """
        for degrees, found in zip(every, self._grid.forecasts(every), strict=True):
            self._estimates[identity(degrees)] = found

    def _may_fit(self, degrees: Degrees, found: Forecast) -> bool:
        """Whether a configuration may fit by its estimate, which can be a little above the peak of its program."""
        limit = self.problem.memory_limit(
            pp=degrees.pp, count=degrees.num_micro_batches, level=degrees.optimizer.parallel_level
        )
        return self._fits(degrees, found.peak_bytes - (limit - self.problem.limit_bytes))

    def _fits(self, degrees: Degrees, peak_bytes: int) -> bool:
        """Whether a configuration fits, which the order of its axes does not change; if not, it is noted why."""
        anyhow = identity(replace(degrees, order=ORDER))
        excess_bytes = peak_bytes - self.problem.limit_bytes
        if excess_bytes > 0 and anyhow not in self._too_large:
            self._too_large.add(anyhow)
            self.rejected.append(Rejected(what=describe(degrees), reason="memory", count=1, excess_bytes=excess_bytes))
        return anyhow not in self._too_large

    # ------------------------------------------------------------------- what is asked of it from outside

    def space(self, shape: ScheduleChoice, pp: int, count: int) -> ScheduleSpace | None:
        """A schedule for these numbers of ranks and micro-batches with all spreads; None where there is none."""
        return self.spaces.of(shape, pp, count)

    def rows(self, space: ScheduleSpace, mode: str) -> LayerSplits:
        """The spreads of layers in a space for a recompute mode."""
        return self.spaces.rows(space, mode)

    def evaluate(self, degrees: Degrees) -> Candidate:
        """The forecast of a configuration, made once, whether it fits or not.

        Raises:
            TwofoldError: a configuration that cannot be.
        """
        found = self._known(degrees)
        return found if isinstance(found, Candidate) else self._timed(degrees, found)

    def _known(self, degrees: Degrees) -> Candidate | StepForecast:
        """The forecast of a configuration if it is known, otherwise its lowered program, whose memory is known."""
        key, problem = identity(degrees), self.problem
        if key in self._seen:
            return self._seen[key]
        if problem.stack.runs_programs and not degrees.takes_turns:
            return step_forecast(problem.config, degrees, step_machine(problem.config, degrees, problem.machine))
        found = None if problem.stack.runs_programs else self._estimates.get(key)
        return self._keep(degrees, found or forecast(problem.config, degrees, problem.machine, stack=problem.stack))

    def _timed(self, degrees: Degrees, step: StepForecast) -> Candidate:
        return self._keep(degrees, step.forecast())

    def _keep(self, degrees: Degrees, found: Forecast) -> Candidate:
        self.num_forecasts += 1
        known = self._seen[identity(degrees)] = Candidate(degrees=degrees, forecast=found)
        return known

    def consider(self, degrees: Degrees) -> None:
        """Forecast what may be good enough by its estimate and fits, and keep it."""
        for _, _, node in self._of_estimate(degrees):
            self._of_step(*node)

    def _of_estimate(self, degrees: Degrees) -> Iterator[Child]:
        """Lower what may be good enough; what fits is forecast when it comes up as what it takes without contention."""
        found = self.estimated(degrees)
        if found is None or found.step_s >= self._above_s(self.margin) or not self._may_fit(degrees, found):
            return
        try:
            known = self._known(degrees)
            if isinstance(known, Candidate):
                self._take(known)
                return
            self._num_lowered += 1
            if not self._fits(degrees, known.peak_above(self.problem.limit_bytes) or 0):
                return
            if _WIDER * (1.0 - known.alone_s / found.step_s) > self._lasting_margin:
                self._learn(degrees, known)  # contention may make up for it: only its forecast says by how much
                return
            yield self._least_s(known), Kind.STEP, (degrees, known)
        except TwofoldError as error:
            self.rejected.append(Rejected(what=str(degrees), reason=str(error), count=1))

    def _of_step(self, degrees: Degrees, step: StepForecast) -> None:
        """Forecast a step, unless it would not be good enough without contention."""
        if self._least_s(step) >= self._above_s(self._steps_margin):
            self.contention_margin = max(self.contention_margin, self._steps_margin)
            return
        self._learn(degrees, step)

    def _least_s(self, step: StepForecast) -> float:
        """The step without contention, less what one that is simulated in time order may be below it."""
        share = max(0.0, 1.0 - self._num_walked / _FEW_WALKS)
        return step.alone_s * (1.0 - _WALKED_MARGIN * share) if share and step.is_walked else step.alone_s

    def _learn(self, degrees: Degrees, step: StepForecast) -> None:
        """Forecast a step, and learn both margins from it."""
        known = self._timed(degrees, step)
        self._num_walked += step.is_walked
        self._contention_seen = max(self._contention_seen, 1.0 - known.forecast.step_s / step.alone_s)
        self._take(known)

    def _take(self, known: Candidate) -> None:
        """Learn the margin from a forecast, and keep it if it fits."""
        degrees, step_s = known.degrees, known.forecast.step_s
        self._margin_seen = max(self._margin_seen, 1.0 - step_s / self._estimates[identity(degrees)].step_s)
        if known in self.candidates or not self._fits(degrees, known.forecast.peak_bytes):
            return
        better = known.key < self.candidates[0].key if self.candidates else True
        self.candidates.append(known)
        self.candidates.sort(key=lambda each: each.key)
        if better and self.on_better is not None:
            self.on_better(known)

    def near(self, share: float) -> list[tuple[Degrees, float]]:
        """What was lowered and takes, without contention, at most that share longer than the best, with its seconds.

        Of configurations that differ only in their layers or in how many blocks recompute, only the fastest.
        """
        lowered = [(degrees, step.alone_s) for _, _, _, (degrees, step) in self._steps]
        known = [(each.degrees, each.forecast.step_s) for each in self.candidates]
        chosen: dict[tuple[Any, ...], tuple[Degrees, float]] = {}
        for degrees, step_s in sorted([*known, *lowered], key=lambda each: each[1]):
            if step_s <= self._best_s * (1.0 + share):
                alike = replace(degrees, layers=None, recompute_layers=None)
                chosen.setdefault(identity(alike), (degrees, step_s))
        return list(chosen.values())

    def narrowed(self, pins: Pins, *, proves: bool = True) -> Branching:
        """A search of a part of the space that reuses known results."""
        other = Branching(problem=self.problem.changed(pins=pins), deadline_s=self.deadline_s, proves=proves)
        other._seen, other._estimates, other._grid = self._seen, self._estimates, self._grid
        other._num_before, other._margin_seen = self._num_before + self._num_lowered, self._margin_seen
        other._contention_seen, other._num_walked = self._contention_seen, self._num_walked
        other.costs, other.peak_memory = self.costs, self.peak_memory
        other.spaces = self.spaces.narrowed(other.problem)
        return other
