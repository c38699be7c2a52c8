"""Complete plans: solutions of stages combined, simulated, and ranked under the memory limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from costmodels import Machine
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.graph import Graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.units import Seconds
from search.attach_prediction import predicted
from search.operators.describe import alternatives
from search.operators.equal_blocks import alike_plans
from search.operators.fitting import leaner_plan, peaks, picks_that_may_fit
from search.operators.ranking import NUM_NEAR, Ranking
from search.operators.shape_costs import ShapeCosts
from search.operators.shapes import Option, PipelineShape, ShapeSpace, ranks_of
from search.operators.stage import StageAnswer, StageSearch
from search.operators.ways import LEVELS, Ways, at_level
from search.physics import physics_s
from search.result import Alternative, AlternativesTo, Rejected, SearchResult

__all__ = ["PlanSearch"]

NUM_NEIGHBOURS = 6
"""Number of the cheapest answers of a stage that are simulated."""

_MOST_LARGE = 4
"""Number of plans over the memory limit that are changed to fit, if they remain the fastest."""

_WORTH_VARYING = 1.5
"""Largest factor over the fastest plan at which a plan is still varied: micro-batches, schedule, level."""

_LEAN = 4
"""Number of answers of a stage whose memory is checked even after the time limit."""

_TO_SHAPES = 0.7
"""Share of the time after which no further shapes are simulated if some have no bound yet."""

_TO_BOUND = 0.9
"""Share of the time after which the bound is left as it is; the rest is for the plans at their own clocks."""


class _OutOfTimeError(Exception):
    """Time is up, and there is an answer."""


@dataclass(slots=True)
class PlanSearch:
    """The search of complete plans; see `search.search` for the arguments."""

    graph: Graph
    machine: Machine
    num_devices: int
    interleave: int
    schedule: str
    recompute: tuple[str, ...]
    ways: Ways
    optimizer: Optimizer
    full_batch: bool
    output_broadcast: bool
    fused: bool
    limit_bytes: int | None
    pinned: dict[str, Strategy]
    say: Callable[[str], None]
    started: float
    deadline: float | None
    rejected: list[Rejected] = field(default_factory=list)
    complete: bool = True
    _is_searching: bool = False
    _is_ended: bool = False
    _stages: dict[tuple[int, int, int], StageSearch] = field(default_factory=dict)
    _tried: dict[Plan, Plan] = field(default_factory=dict)

    def stage_search(self, num_micro_batches: int, num_ranks: int, level: int | None = None) -> StageSearch:
        """The search of stages of plans with these micro-batches and ranks, at an optimizer-parallel level."""
        level = self.optimizer.parallel_level if level is None else level
        key = num_micro_batches, num_ranks, level
        if key not in self._stages:
            optimizer = msgspec.structs.replace(self.optimizer, parallel_level=level)
            others = [search for other, search in self._stages.items() if other[:2] == key[:2]]  # at other levels
            self._stages[key] = StageSearch(
                graph=self.graph, machine=self.machine, num_ranks=num_ranks, num_micro_batches=num_micro_batches,
                interleave=self.interleave, optimizer=optimizer, full_batch=self.full_batch, fused=self.fused,
                in_order=self.interleave == 1 and not self.ways.slices, pinned=self.pinned,
                check_time=self._check_time,
                known=others[0].known if others else {}, moves=others[0].moves if others else {},
            )  # fmt: skip
        return self._stages[key]

    def is_over(self) -> bool:
        """Whether time is up, or Ctrl-C was pressed."""
        if self.deadline is not None and time.perf_counter() > self.deadline:
            self.complete, self._is_ended = False, True
        return self._is_ended

    def time_left_s(self) -> float:
        """Seconds until the time limit."""
        return float("inf") if self.deadline is None else self.deadline - time.perf_counter()

    def _check_time(self) -> None:
        """End long work when time is up, if there is an answer.

        Raises:
            _OutOfTimeError: that it is.
        """
        if self._is_searching and self.is_over() and self._fitting():
            raise _OutOfTimeError

    def _is_late(self) -> bool:
        """Whether the search of strategies has used its share of the time; the rest is for simulations."""
        return self._has_used(0.5)

    def _has_used(self, share: float) -> bool:
        """Whether a share of the time is over."""
        return self.deadline is not None and time.perf_counter() > self.started + share * (self.deadline - self.started)

    def run(
        self,
        stages: Sequence[Sequence[str]] | None,
        num_stages: int | None,
        widths: str | Sequence[int] | None,
        num_micro_batches: int | None,
        top_k: int,
    ) -> SearchResult[Plan]:
        """Search the shapes, then the strategies of the best; the results at the time limit count."""
        given = None if stages is None else tuple(tuple(stage) for stage in stages)
        if widths is None:
            divides = num_stages is not None and self.num_devices % num_stages == 0
            widths = "even" if divides else "any"
        costs = ShapeCosts(
            ShapeSpace(self.graph, self.num_devices, given), self.machine, self.stage_search, self._is_late
        )
        options = costs.space.options(
            num_stages, widths, num_micro_batches, interleave=self.interleave, weights=costs.weights
        )
        if not options:
            raise TwofoldError(
                f"no number of micro-batches up to 32 times {self.interleave} slices divides the batch of "
                f"{self.graph.batch_size}"
            )
        asked: list[PipelineShape] = []
        priced: list[Option] = []
        self._is_searching = True
        try:
            self._searched(costs, options, asked, priced)
        except _OutOfTimeError:
            pass
        except KeyboardInterrupt:
            self.complete, self._is_ended = False, True
            if not self._fitting():
                raise
        self._is_searching = False
        fitting = self._fitting()
        smallest = min(_peak_bytes(plan) for plan in self._tried.values())
        if not fitting and self.limit_bytes is not None:
            fitting, smallest = self._leaner(asked, self.limit_bytes, smallest)
        if not fitting:
            raise TwofoldError(
                f"no plan fits into {self.limit_bytes:,} bytes of memory per device; the smallest found that would is "
                f"{smallest:,} bytes: raise the limit, or use more devices, stages or micro-batches, or recompute more"
            )
        plans = sorted(fitting, key=_rank)
        least_s = physics_s(self.graph, self.machine, self.num_devices, self.optimizer)
        relaxed_s = least_s
        if len(priced) == len(options):
            relaxed_s = max(least_s, costs.relaxed_s(options, lambda: self._has_used(_TO_BOUND)))
        return SearchResult(
            plans=plans[:top_k],
            lower_bound_s=relaxed_s,
            relaxed_bound_s=relaxed_s,
            physics_bound_s=least_s,
            complete=self.complete,
            search_s=time.perf_counter() - self.started,
            num_evaluated=len(self._tried),
            strategies_gap=self._strategies_gap(plans[0], asked[0]),
            num_combinations=sum(stage.num_combinations for stage in self._stages.values()),
            alternatives_to=AlternativesTo(self._alternatives),
            rejected=self.rejected,
        )

    def _searched(
        self, costs: ShapeCosts, options: Sequence[Option], asked: list[PipelineShape], priced: list[Option]
    ) -> None:
        """Simulate shapes and the neighbours of the best; fill `asked` with them, the fastest that fits first, and
        `priced` with the options that there was time to bound.
        """
        if self.deadline is not None and not self.pinned:
            self._usual(costs, options, asked)
            if len(options) > 1:
                self._ways(costs.weights)
                self._check_time()
                self._neighbours(asked[0])
        priced[:] = costs.affordable(options, lambda: self._has_used(0.35))
        is_priced = len(priced) == len(options)
        self.complete = self.complete and is_priced
        if priced and not (asked and self.is_over()):
            self._shapes(costs, priced, asked, self.is_over if is_priced else lambda: self._has_used(_TO_SHAPES))
        if self._fitting() and self.deadline is not None and not self._has_floors(asked[0]):
            self.complete = False  # strategies take longer to search than to bound
            costs.affordable(priced, lambda: self._has_used(_TO_BOUND))
        elif not (self._fitting() and self.is_over()):
            self._neighbours(asked[0])
            self._leveled(asked[0])
        self._fitted()
        self._ways(costs.weights)
        priced[:] = costs.affordable(options, lambda: self._has_used(_TO_BOUND))

    # --------------------------------------------------------------- simulation

    def _usual(self, costs: ShapeCosts, options: Sequence[Option], asked: list[PipelineShape]) -> None:
        """Simulate the baselines, so that there is an early answer, and fill `asked`.

        Data parallelism on all devices, on half of them and so on, and even pipelines of it in more and more
        micro-batches, each row of them until it gets slower, or is much slower than another.
        """
        found: list[tuple[bool, float, int, PipelineShape]] = []
        for row in costs.space.usual(options, costs.weights) if len(options) > 1 else [options]:
            before_s = float("inf")
            for option in row:
                if found and self._is_late():
                    break
                shape = costs.space.shape(option)
                plan = self._simulated(self._spread(shape))
                step_s = _rank(plan)[0]
                found.append((not self._fits(plan), step_s, len(found), shape))
                asked[:] = [pipeline_shape for *_, pipeline_shape in sorted(found)]
                self.say(f"{shape}, data parallel: {Seconds(step_s)}")
                if step_s > min(before_s, _WORTH_VARYING * min(found)[1]):
                    break
                before_s = step_s

    def _shapes(
        self, costs: ShapeCosts, options: Sequence[Option], asked: list[PipelineShape], is_over: Callable[[], bool]
    ) -> None:
        """Simulate the best answer of the most promising shapes, and fill `asked`: the fastest that fits first."""
        if len(options) == 1:
            asked.append(costs.space.shape(options[0]))
            return
        ranking, found = Ranking(costs, options), list[tuple[tuple[bool, float, int], Option]]()

        def simulate(option: Option, estimate_s: float) -> None:
            shape = costs.space.shape(option)
            plan = self._simulated(self._plan(shape, [answer[0] for answer in self._answers(shape, 1)]))
            assert plan.prediction is not None
            ranking.learn(option, estimate_s, plan.prediction.step_s)
            found.append(((not self._fits(plan), plan.prediction.step_s, len(found)), option))
            found.sort()
            asked[:] = [costs.space.shape(each) for _, each in found]
            self.say(f"{shape}: {Seconds(plan.prediction.step_s)}")

        for option in filter(self._is_plain, options):
            if (estimate_s := ranking.take(option)) < float("inf"):
                simulate(option, estimate_s)
        while (following := ranking.next(lambda: bool(found) and is_over())) is not None:
            simulate(*following)
        if not found:
            raise TwofoldError(costs.reason)
        left, best, listed, tried = NUM_NEAR, None, set(options), set(options)
        while left and found[0][1] != best:
            best = found[0][1]
            moved = [option for option in costs.space.moved(best) if option not in tried]
            tried.update(moved)
            for option in [*moved, *ranking.near(best)][:left]:
                if is_over():
                    return
                estimate_s = (ranking if option in listed else Ranking(costs, [option])).take(option)
                if estimate_s < float("inf"):
                    simulate(option, estimate_s)
                left -= 1
                if found[0][1] != best:
                    break

    def _is_plain(self, option: Option) -> bool:
        """Everything on all devices at once: the default without a search of shapes."""
        return option[0] == 1 and option[2] == (self.num_devices,)

    def _neighbours(self, shape: PipelineShape) -> None:
        """Simulate data parallelism in a shape, the best answers of all its stages, and their nearest neighbours.

        If strategies have used their share of the time, data parallelism is enough.
        """
        if not self.pinned:
            self._simulated(self._spread(shape))
            if self._fitting() and self._is_late():
                self.complete = False
                return
        answers = self._answers(shape, NUM_NEIGHBOURS)
        for number, (stage, found) in enumerate(zip(shape.names, answers, strict=True)):
            self.say(
                f"stage {number}: {len(stage)} operators on {shape.widths[number]} devices, additive cost "
                f"{Seconds(found[0].cost_s)}"
            )
        for number, pick in enumerate(_picks([len(found) for found in answers])):
            if number and self.is_over():
                break
            self._check_time()
            self._simulated(self._plan(shape, [found[at] for found, at in zip(answers, pick, strict=True)]))
        fitting = self._fitting()
        for plan in alike_plans(min(fitting, key=_rank), self.pinned) if fitting else ():
            if self.is_over():
                break
            self._simulated(plan)

    def _leveled(self, shape: PipelineShape) -> None:
        """Simulate the best answers of a shape at every optimizer-parallel level, where that is searched and there is
        time; `_ways` varies the levels of the best plans in any case.
        """
        for level in LEVELS if self.ways.levels and max(shape.widths) > 1 else ():
            if level != self.optimizer.parallel_level and not self.is_over():
                if self._is_late():
                    self.complete = False
                    return
                answers = [answer[0] for answer in self._answers(shape, 1, level)]
                self._simulated(at_level(self._plan(shape, answers), level))

    def _fitted(self) -> None:
        """Change the fastest plans that do not fit so that they do, if levels and recomputation are searched."""
        limit_bytes = self.limit_bytes
        best_s = min((_rank(plan)[0] for plan in self._fitting()), default=float("inf"))
        if limit_bytes is None or not (self.ways.levels or self.ways.recompute):
            return
        large = sorted((plan for plan in self._tried.values() if not self._fits(plan)), key=_rank)
        for plan in large[:_MOST_LARGE]:
            if self.is_over() or _rank(plan)[0] >= best_s:
                return
            for leaner in self.ways.leaner(plan, lambda each: self._fits(self._simulated(each))):
                found = self._simulated(leaner)
                best_s = min(best_s, _rank(found)[0]) if self._fits(found) else best_s

    def _ways(self, weights: Callable[[], Sequence[float]]) -> None:
        """Vary one setting at a time of the best plans of every number of stages, until none is faster."""
        fitting = sorted(self._fitting(), key=_rank)
        by_stages = {len(plan.stages): plan for plan in reversed(fitting)}
        for start in sorted(by_stages.values(), key=_rank):
            if _rank(start)[0] > _WORTH_VARYING * _rank(fitting[0])[0]:
                return
            before, best = None, start
            while best is not before:
                before = best
                for other in self.ways.others(before, weights):
                    if self.is_over():
                        return
                    with contextlib.suppress(TwofoldError):  # slices that do not divide, a tied weight in two chunks
                        found = self._simulated(other)
                        best = min(best, found, key=_rank) if self._fits(found) else best

    def _answers(self, shape: PipelineShape, count: int, level: int | None = None) -> list[list[StageAnswer]]:
        search = self.stage_search(shape.num_micro_batches, self._num_ranks(shape.widths), level)
        return [
            search.answers(names, ranks, count, self._is_late)
            for names, ranks in zip(shape.names, ranks_of(shape.widths), strict=True)
        ]

    def _strategies_gap(self, best: Plan, shape: PipelineShape) -> float | None:
        """The relative amount by which the strategies may exceed the cheapest ones of the same stages, if known.

        Chunks keep the strategies of the stages they were made of, those of `shape`; so do levels that were varied.
        """
        key = best.num_micro_batches, self._num_ranks([best.num_ranks])
        own = [(stage.operators, stage.mesh.num_ranks) for stage in best.stages]
        for level in (best.optimizer.parallel_level, self.optimizer.parallel_level):
            solved = self.stage_search(*key, level).solved
            if all(stage in solved for stage in own):
                return _gap([solved[stage] for stage in own])
        solved, made_of = self._search_of(shape).solved, list(zip(shape.names, shape.widths, strict=True))
        return _gap([solved[stage] for stage in made_of]) if all(stage in solved for stage in made_of) else None

    def _has_floors(self, shape: PipelineShape) -> bool:
        """Whether there was time to bound the kernels of all operators in a shape."""
        search = self._search_of(shape)
        return all(search.has_floors(range(width)) for width in shape.widths)

    def _num_ranks(self, widths: Sequence[int]) -> int:
        """Whose prices count: of a plan with stages of these widths."""
        return self.num_devices if self.machine.host_async else sum(widths)

    def _search_of(self, shape: PipelineShape) -> StageSearch:
        return self.stage_search(shape.num_micro_batches, self._num_ranks(shape.widths))

    def _plan(self, shape: PipelineShape, answers: Sequence[StageAnswer]) -> Plan:
        return self._plan_on(shape, [(answer.mesh, answer.strategies) for answer in answers])

    def _spread(self, shape: PipelineShape) -> Plan:
        """The plan of a shape that splits the batch and nothing else."""
        search = self._search_of(shape)
        return self._plan_on(shape, list(map(search.batch_split, shape.names, ranks_of(shape.widths))))

    def _plan_on(self, shape: PipelineShape, found: Sequence[tuple[Layout, dict[str, Strategy]]]) -> Plan:
        """The plan of a shape with the mesh and the strategies of every stage."""
        strategies: dict[str, Strategy] = {}
        for _, each in found:
            strategies.update(each)
        return Plan(
            graph=self.graph,
            stages=tuple(
                Stage(mesh=mesh, operators=names) for names, (mesh, _) in zip(shape.names, found, strict=True)
            ),
            strategies={name: strategy for name, strategy in strategies.items() if strategy != Strategy()},
            num_micro_batches=shape.num_micro_batches, interleave=self.interleave, schedule=self.schedule,
            recompute=self.recompute, optimizer=self.optimizer, full_batch=self.full_batch,
            output_broadcast=self.output_broadcast, memory_limit_bytes=self.limit_bytes, fused=self.fused,
        )  # fmt: skip

    def _simulated(self, plan: Plan) -> Plan:
        """The plan with the simulator's prediction."""
        if plan not in self._tried:
            found = self._tried[plan] = predicted(plan, self.machine, self.limit_bytes, self.time_left_s)
            assert found.prediction is not None
            if not self._fits(found):
                what = f"candidate {len(self._tried)}"
                reason = f"needs {found.prediction.peak_bytes:,} bytes per device, the limit is {self.limit_bytes:,}"
                self.rejected.append(Rejected(what=what, reason=reason))
        return self._tried[plan]

    def _fits(self, plan: Plan) -> bool:
        assert plan.prediction is not None
        return self.limit_bytes is None or plan.prediction.peak_bytes <= self.limit_bytes

    def _fitting(self) -> list[Plan]:
        return [plan for plan in self._tried.values() if self._fits(plan)]

    # ------------------------------------------------------------------- memory

    def _leaner(self, asked: Sequence[PipelineShape], limit_bytes: int, smallest: int) -> tuple[list[Plan], int]:
        """If the fastest solutions do not fit: check the memory of the others, then go down from the leanest of all."""
        self.say("the fastest plans do not fit into the memory limit; looking for plans that need less memory")
        for shape in asked:
            search = self._search_of(shape)
            per_stage = [
                search.every(names, ranks, self.is_over)
                for names, ranks in zip(shape.names, ranks_of(shape.widths), strict=True)
            ]

            def plan_of(
                pick: Sequence[int], shape: PipelineShape = shape, per_stage: Sequence[list[StageAnswer]] = per_stage
            ) -> Plan:
                return self._plan(shape, [answers[at] for answers, at in zip(per_stage, pick, strict=True)])

            for pick in picks_that_may_fit(plan_of, [len(answers) for answers in per_stage], limit_bytes, self.is_over):
                smallest = min(smallest, _peak_bytes(self._simulated(plan_of(pick))))
            if fitting := self._fitting():
                return fitting, smallest
            alone = []
            for stage, answers in enumerate(per_stage):
                needed: dict[int, int] = {}
                for at in reversed(range(len(answers))):  # the leanest are among the slowest
                    if self.is_over() and len(needed) >= _LEAN:
                        break
                    needed[at] = peaks(plan_of([at if other == stage else 0 for other in range(len(per_stage))]))[stage]
                alone.append(min(needed, key=lambda at: (needed[at], at)))
            start = plan_of(alone)
            choices = {
                operator.name: offered
                for stage_, names in zip(start.stages, shape.names, strict=True)
                for costs in [search.costs(names, stage_.mesh)]
                for operator, offered in zip(costs.operators, costs.choices, strict=True)
            }
            smallest = min(smallest, _peak_bytes(self._simulated(leaner_plan(start, choices))))
            if fitting := self._fitting():
                return fitting, smallest
        return [], smallest

    def _alternatives(self, best: Plan) -> list[Alternative]:
        """Changes of single operators of the best plan, and their costs."""
        key = best.num_micro_batches, self._num_ranks([best.num_ranks]), best.optimizer.parallel_level
        return alternatives(self.stage_search(*key), best)


def _gap(found: Sequence[tuple[float, float]]) -> float | None:
    """How far the result may exceed the proven least cost of all stages, in parts of it; None: nothing is proven."""
    bound_s = sum(stage_s for _, stage_s in found)
    return max(0.0, sum(cost_s for cost_s, _ in found) / bound_s - 1.0) if bound_s else None


def _peak_bytes(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.peak_bytes


def _rank(plan: Plan) -> tuple[float, int, int]:
    assert plan.prediction is not None
    return plan.prediction.step_s, plan.prediction.peak_bytes, plan.num_ranks


def _picks(counts: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """The best answer of every stage; one of them a neighbour; all of them the neighbours of one number."""
    zero = (0,) * len(counts)
    picks = {zero: None}
    for number, count in enumerate(counts):
        picks |= {(*zero[:number], at, *zero[number + 1 :]): None for at in range(1, count)}
    return picks | {(at,) * len(counts): None for at in range(min(counts))}
