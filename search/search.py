"""The double recursive search.

First recursion, over devices: every mesh of a stage's ranks (`space.meshes`). Second recursion, over the graph: the
exact minimum of the additive cost over all combinations of strategies (`eliminate`), for every mesh of every stage on
its own, since stages meet only at their borders. The cheapest stage answers and their nearest neighbours are then put
together and simulated as whole programs; the simulated step time decides, under the memory limit.

    additive cost of a stage = micro-batches x (operators' forward and backward + redistributions both ways)
                               + weight gathers, gradient reductions and updates
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from costmodels import Machine
from plans.errors import TwofoldError
from plans.graph import Graph
from plans.layout import Layout, TensorLayout
from plans.plan import Optimizer, Plan, Stage, Strategy
from search.additive import StageCosts
from search.eliminate import Table, best_assignment, min_marginals
from search.fitting import leaner_plan, peaks, picks_that_may_fit
from search.pinned import on_ranks, suggestions
from search.planset import Alternative, PlanSet, Rejected
from search.predicting import predicted
from search.pricing import instruction_cost, redistribution_choice
from search.space import meshes
from search.stages import balanced_cuts

__all__ = ["search"]

NUM_NEIGHBOURS = 6
"""How many of the cheapest neighbours of a stage's best answer are simulated beside it."""


def search(
    graph: Graph,
    machine: Machine,
    *,
    num_devices: int | None = None,
    num_stages: int = 1,
    stages: Sequence[Sequence[str]] | None = None,
    num_micro_batches: int = 1,
    interleave: int = 1,
    schedule: str = "1f1b",
    recompute: Sequence[str] = (),
    optimizer: Optimizer | None = None,
    full_batch: bool = True,
    output_broadcast: bool = False,
    memory_limit_bytes: int | None = None,
    pinned: Mapping[str, Strategy] | None = None,
    global_batch: int | None = None,
    top_k: int = 5,
    on_progress: Callable[[str], None] | None = None,
) -> PlanSet:
    """The best plans for one training step of `graph` on `machine`.

    Args:
        graph: of the whole batch; `global_batch` resizes it.
        num_devices: ranks to use; all of the machine's by default.
        num_stages: pipeline stages; they must divide the devices.
        stages: per stage its operators (as configured by the user); balanced by cost when absent.
        num_micro_batches: into which the batch is cut.
        interleave: slices of a micro-batch that hide their communication behind each other's compute.
        schedule: of the pipeline.
        recompute: operators whose outputs are made again in the backward.
        optimizer: kind, settings and parallel level.
        full_batch, output_broadcast: see `Plan`.
        memory_limit_bytes: per rank; by default the machine's device memory without what its runtime takes.
        pinned: operator -> strategy to keep. A mesh of its own has the ranks of its stage, or counts them from 0.
        top_k: plans to return.
        on_progress: called with a line now and then.

    Raises:
        TwofoldError: stages that do not divide the devices, micro-batches that do not divide the batch, a memory limit
            that nothing fits in (it names the smallest that would), pins that do not fit.
    """
    started = time.perf_counter()
    if global_batch is not None:
        graph = graph.with_batch(global_batch)
    num_devices = machine.num_devices if num_devices is None else num_devices
    if num_devices > machine.num_devices:
        raise TwofoldError(f"{num_devices} devices asked for, machine {machine.name!r} has {machine.num_devices}")
    if num_stages < 1 or num_devices % num_stages:
        raise TwofoldError(
            f"{num_stages} pipeline stages do not divide {num_devices} devices: {num_devices} % {num_stages} != 0"
        )
    if num_micro_batches < 1 or graph.batch_size % num_micro_batches:
        raise TwofoldError(
            f"{num_micro_batches} micro-batches do not divide the batch of {graph.batch_size}: "
            f"{graph.batch_size} % {num_micro_batches} != 0"
        )
    if isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1:
        raise TwofoldError(f"interleave is {interleave!r}; it is a number of slices, an int of at least 1")
    if graph.batch_size % (num_micro_batches * interleave):
        micro_batch = graph.batch_size // num_micro_batches
        raise TwofoldError(
            f"interleave {interleave} does not divide the micro-batch of {micro_batch}: "
            f"{micro_batch} % {interleave} != 0"
        )
    if unknown := set(pinned or {}) - {operator.name for operator in graph.operators}:
        raise TwofoldError(f"strategies are pinned for {sorted(unknown)}, which the graph does not have")
    run = _Search(
        graph=graph, machine=machine, num_devices=num_devices, num_stages=num_stages,
        num_micro_batches=num_micro_batches, interleave=interleave, schedule=schedule, recompute=tuple(recompute),
        optimizer=optimizer or Optimizer(), full_batch=full_batch,
        output_broadcast=output_broadcast, limit_bytes=memory_limit_bytes or machine.room_bytes,
        pinned=dict(pinned or {}), say=on_progress or (lambda line: None),
    )  # fmt: skip
    return run.run(stages, top_k, started)


@dataclass(slots=True)
class _StageAnswer:
    """Strategies of one stage on one mesh, with their additive cost."""

    cost_s: float
    mesh: Layout
    strategies: dict[str, Strategy]


@dataclass(slots=True)
class _Search:
    graph: Graph
    machine: Machine
    num_devices: int
    num_stages: int
    num_micro_batches: int
    interleave: int
    schedule: str
    recompute: tuple[str, ...]
    optimizer: Optimizer
    full_batch: bool
    output_broadcast: bool
    limit_bytes: int | None
    pinned: dict[str, Strategy]
    say: Callable[[str], None]
    rejected: list[Rejected] = field(default_factory=list)
    num_combinations: int = 0

    def run(self, stages: Sequence[Sequence[str]] | None, top_k: int, started: float) -> PlanSet:
        width = self.num_devices // self.num_stages
        ranks = [tuple(range(number * width, (number + 1) * width)) for number in range(self.num_stages)]
        names = [tuple(stage) for stage in stages] if stages else self._balanced(ranks[0])
        if len(names) != self.num_stages:
            raise TwofoldError(f"operators are given for {len(names)} stages, but there are {self.num_stages}")
        bound, per_stage, costs_of = 0.0, [], []
        for number, (stage, group) in enumerate(zip(names, ranks, strict=True)):
            answers, floor_s, best_costs = self._stage(stage, group)
            bound = max(bound, floor_s)
            per_stage.append(answers)
            costs_of.append(best_costs)
            self.say(
                f"stage {number}: {len(stage)} operators on {width} devices, additive cost {answers[0].cost_s:.4g} s"
            )
        plans = self._simulated(names, per_stage)
        best = plans[0]
        return PlanSet(
            plans=plans[:top_k],
            lower_bound_s=bound,
            search_s=time.perf_counter() - started,
            num_candidates=len(plans),
            num_combinations=self.num_combinations,
            alternatives=self._alternatives(best, names, costs_of),
            rejected=self.rejected,
        )

    # ------------------------------------------------------------------ stages

    def _balanced(self, ranks: Sequence[int]) -> list[tuple[str, ...]]:
        """Cut the operators, in graph order, so that the stages' compute on replicated devices is even."""
        operators = list(self.graph.operators)
        if self.num_stages == 1:
            return [tuple(operator.name for operator in operators)]
        costs = self._costs([operator.name for operator in operators], meshes(ranks)[0])
        weights = [costs.compute_s(operator, Strategy()) for operator in costs.operators]
        return [tuple(operator.name for operator in operators[a:b]) for a, b in balanced_cuts(weights, self.num_stages)]

    def _costs(self, names: Sequence[str], mesh: Layout) -> StageCosts:
        num_slices = self.num_micro_batches * self.interleave
        part = self.graph.with_batch(self.graph.batch_size // num_slices)
        mine = set(names)
        pinned = {name: on_ranks(kept, mesh, name) for name, kept in self.pinned.items() if name in mine}
        return StageCosts(
            micro=part, operators=[operator for operator in part.operators if operator.name in mine], mesh=mesh,
            num_micro_batches=num_slices, optimizer=self.optimizer, full_batch=self.full_batch,
            cost=instruction_cost(self.machine, mesh, self.num_devices), pinned=pinned,
            suggested=suggestions(part, mine, pinned, mesh),
            choice=redistribution_choice(self.machine, self.num_devices),
        )  # fmt: skip

    def _stage(
        self, names: Sequence[str], ranks: Sequence[int]
    ) -> tuple[list[_StageAnswer], float, dict[Layout, StageCosts]]:
        found: list[_StageAnswer] = []
        floor_s, every = math.inf, {}
        for mesh in meshes(ranks):
            costs = self._costs(names, mesh)
            every[mesh] = costs
            self.num_combinations += math.prod(costs.sizes)
            tables = costs.tables()
            floor_s = min(floor_s, best_assignment(costs.sizes, costs.tables(compute_only=True))[0])
            seen: dict[tuple[int, ...], float] = {}
            total, values = best_assignment(costs.sizes, tables)
            seen[values] = total
            for row in min_marginals(costs.sizes, tables):
                for cost_s, other in row:
                    if np.isfinite(cost_s):
                        seen.setdefault(other, cost_s)
            for other in self._lean(costs, tables):
                seen.setdefault(other, _total(tables, other))
            for other, cost_s in sorted(seen.items(), key=lambda item: (item[1], item[0])):
                chosen = {
                    operator.name: costs.choices[position][value]
                    for position, (operator, value) in enumerate(zip(costs.operators, other, strict=True))
                }
                found.append(_StageAnswer(cost_s, mesh, chosen))
        found.sort(key=lambda answer: answer.cost_s)
        return found, floor_s, every

    def _lean(self, costs: StageCosts, tables: Sequence[Table]) -> list[tuple[int, ...]]:
        """Answers that trade time for memory: the additive cost with a growing price on local bytes."""
        weigh = [Table((position,), self._bytes(costs, position)) for position in range(len(costs.operators))]
        largest = max(float(table.costs.max()) for table in weigh) or 1.0
        scale = sum(float(table.costs[np.isfinite(table.costs)].max()) for table in tables) / largest
        answers = []
        for weight in (0.01, 0.1, 1.0, 100.0):
            priced = [Table(table.variables, table.costs * scale * weight) for table in weigh]
            answers.append(best_assignment(costs.sizes, [*tables, *priced])[1])
        return answers

    def _bytes(self, costs: StageCosts, position: int) -> np.ndarray:
        """Local bytes of an operator's parameters (with gradient and state) and outputs, per strategy."""
        operator, sizes = costs.operators[position], []
        spec = costs.micro.spec(operator)
        copies = 2 + self.optimizer.num_states
        for strategy in costs.choices[position]:
            mesh, total = strategy.mesh or costs.mesh, 0
            for index, name in enumerate(operator.inputs):
                tensor = costs.micro.tensors[name]
                if tensor.kind == "parameter":
                    split = math.prod(spec.input_layout(index, mesh, strategy.dims).split_counts)
                    total += copies * tensor.size_bytes // split
            for index, name in enumerate(operator.outputs):
                split = math.prod(spec.output_layout(index, mesh, strategy.dims).split_counts)
                total += costs.micro.tensors[name].size_bytes // split
            sizes.append(float(total))
        return np.array(sizes)

    # -------------------------------------------------------------- whole plans

    def _plan(self, names: Sequence[Sequence[str]], answers: Sequence[_StageAnswer]) -> Plan:
        strategies: dict[str, Strategy] = {}
        for answer in answers:
            strategies.update(answer.strategies)
        return Plan(
            graph=self.graph,
            stages=tuple(
                Stage(mesh=answer.mesh, operators=tuple(stage)) for stage, answer in zip(names, answers, strict=True)
            ),
            strategies={name: strategy for name, strategy in strategies.items() if strategy != Strategy()},
            num_micro_batches=self.num_micro_batches, interleave=self.interleave, schedule=self.schedule,
            recompute=self.recompute, optimizer=self.optimizer, full_batch=self.full_batch,
            output_broadcast=self.output_broadcast, memory_limit_bytes=self.limit_bytes,
        )  # fmt: skip

    def _simulated(self, names: Sequence[Sequence[str]], per_stage: Sequence[list[_StageAnswer]]) -> list[Plan]:
        """Simulate the best combination and its neighbours; the fastest that fits comes first."""
        picks: dict[tuple[int, ...], None] = {(0,) * len(per_stage): None}
        for number, answers in enumerate(per_stage):
            for at in range(1, min(NUM_NEIGHBOURS, len(answers))):
                picks[tuple(at if stage == number else 0 for stage in range(len(per_stage)))] = None
        same = min(NUM_NEIGHBOURS, *(len(answers) for answers in per_stage))
        picks |= {(at,) * len(per_stage): None for at in range(same)}
        fitting, smallest = self._tried(names, per_stage, picks)
        if not fitting and self.limit_bytes is not None:
            fitting, smallest = self._leaner(names, per_stage, self.limit_bytes, picks, smallest)
        if not fitting:
            raise TwofoldError(
                f"no plan fits into {self.limit_bytes:,} bytes of memory per device; the smallest found that would is "
                f"{smallest:,} bytes: raise the limit, or use more devices, stages or micro-batches, or recompute more"
            )
        return sorted(fitting, key=lambda plan: (plan.prediction.step_s, plan.prediction.peak_bytes))  # type: ignore[union-attr]

    def _leaner(
        self,
        names: Sequence[Sequence[str]],
        per_stage: Sequence[list[_StageAnswer]],
        limit_bytes: int,
        tried: Mapping[tuple[int, ...], None],
        smallest: int,
    ) -> tuple[list[Plan], int]:
        """The fastest answers do not fit: ask the others for their memory, then go down from the leanest of all."""
        self.say("the fastest plans do not fit into the memory limit; looking for leaner ones")

        def plan_of(pick: Sequence[int]) -> Plan:
            return self._plan(names, [answers[at] for answers, at in zip(per_stage, pick, strict=True)])

        picks = picks_that_may_fit(plan_of, [len(answers) for answers in per_stage], limit_bytes)
        fitting, least = self._tried(names, per_stage, {pick: None for pick in picks if pick not in tried})
        smallest = min(smallest, least)
        if fitting:
            return fitting, smallest
        alone = []
        for stage, answers in enumerate(per_stage):
            needed = [self._alone(plan_of, stage, at) for at in range(len(answers))]
            alone.append(needed.index(min(needed)))
        start = plan_of(alone)
        choices = {
            operator.name: offered
            for stage, names_of in zip(start.stages, names, strict=True)
            for costs in [self._costs(names_of, stage.mesh)]
            for operator, offered in zip(costs.operators, costs.choices, strict=True)
        }
        plan, peak = self._predicted(leaner_plan(start, choices))
        return ([plan] if peak <= limit_bytes else []), min(smallest, peak)

    def _alone(self, plan_of: Callable[[Sequence[int]], Plan], stage: int, at: int) -> int:
        return peaks(plan_of([at if number == stage else 0 for number in range(self.num_stages)]))[stage]

    def _predicted(self, plan: Plan) -> tuple[Plan, int]:
        """The plan with what the simulator says of it, and its peak memory."""
        plan = predicted(plan, self.machine, self.limit_bytes)
        assert plan.prediction is not None
        return plan, plan.prediction.peak_bytes

    def _tried(
        self,
        names: Sequence[Sequence[str]],
        per_stage: Sequence[list[_StageAnswer]],
        picks: Mapping[tuple[int, ...], None],
    ) -> tuple[list[Plan], int]:
        fitting, smallest = [], 2**62
        for pick in picks:
            plan = self._plan(names, [answers[at] for answers, at in zip(per_stage, pick, strict=True)])
            plan, peak = self._predicted(plan)
            smallest = min(smallest, peak)
            if self.limit_bytes is not None and peak > self.limit_bytes:
                reason = f"needs {peak:,} bytes per device, the limit is {self.limit_bytes:,}"
                self.rejected.append(Rejected(what=f"candidate {pick}", reason=reason))
            else:
                fitting.append(plan)
        return fitting, smallest

    def _alternatives(
        self, best: Plan, names: Sequence[Sequence[str]], costs_of: Sequence[Mapping[Layout, StageCosts]]
    ) -> list[Alternative]:
        found = []
        for stage, every in zip(best.stages, costs_of, strict=True):
            costs = every[stage.mesh]
            marginals = min_marginals(costs.sizes, costs.tables())
            for position, operator in enumerate(costs.operators):
                kept = best.strategy(operator)
                least = min(cost_s for cost_s, _ in marginals[position])
                for strategy, (cost_s, _) in zip(costs.choices[position], marginals[position], strict=True):
                    if np.isfinite(cost_s):
                        found.append(
                            Alternative(
                                operator=operator.name, strategy=describe(strategy), extra_s=cost_s - least,
                                chosen=strategy == kept,
                            )
                        )  # fmt: skip
        return found


def _total(tables: Sequence[Table], values: Sequence[int]) -> float:
    return float(sum(table.costs[tuple(values[variable] for variable in table.variables)] for table in tables))


def describe(strategy: Strategy) -> str:
    """A strategy in one line.

    >>> describe(Strategy(dims={"b0": ("d0",), "n": ("d1",)}))
    'b0 over d0, n over d1'
    """
    parts = [f"{dim} over {'.'.join(axes)}" for dim, axes in strategy.dims.items() if axes]
    text = ", ".join(parts) or "replicated"
    if strategy.mesh is not None:
        text += f" of {strategy.mesh!r}"
    if strategy.out is not None:
        text += (
            f", handed on as {TensorLayout(mesh=strategy.mesh, dims=strategy.out)}"
            if strategy.mesh
            else (f", handed on as {strategy.out}")
        )
    return text
