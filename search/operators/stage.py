"""One stage of a plan: its operators on some devices, the cheapest strategies, and lower bounds of their time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from costmodels import Machine
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import Choice
from plans.model.graph import Graph
from plans.optimizer import Optimizer
from plans.plan import Strategy
from search.operators.additive import StageCosts
from search.operators.move_floors import Floors
from search.operators.moves import Moves
from search.operators.operator_costs import OperatorSeconds
from search.operators.pinned import on_ranks, suggestions
from search.operators.pricing import instruction_cost, known_moves, redistribution_choice
from search.operators.refine import NO_LOOK, Answers, Question, cheapest, glance
from search.operators.runs import AtBorders, at_borders
from search.operators.space import AXIS_NAMES, finest, meshes

__all__ = ["Floor", "StageAnswer", "StageSearch"]

_EVERY = 1 << 30

_MANY = 100
"""Operators of a stage above which the tables of only one mesh are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAnswer:
    """Strategies of one stage on one mesh, with their additive cost."""

    cost_s: float
    mesh: Layout
    strategies: dict[str, Strategy]


class Floor(NamedTuple):
    """Lower bounds on the time of an operator's kernels on one of its ranks in one step, on host and device."""

    host_s: float
    device_s: float


@dataclass(slots=True)
class StageSearch:
    """Searches stages of one graph on one machine.

    Args:
        graph: graph of the full batch.
        machine: whose prices are taken.
        num_ranks: number of ranks of the complete plan.
        num_micro_batches, interleave, optimizer, full_batch, fused: as of a `Plan`.
        in_order: whether every rank of the plans has one compute stream.
        pinned: operator -> strategy to keep.
        check_time: called between steps of long work; may raise to end it.
        known, moves: costs of operators, and of redistributions on each mesh; searches that differ only in the
            optimizer's level share them.

    `solved` has the cost of the best answer and a lower bound, by operators and number of devices.
    """

    graph: Graph
    machine: Machine
    num_ranks: int
    num_micro_batches: int
    interleave: int
    optimizer: Optimizer
    full_batch: bool
    fused: bool
    in_order: bool
    pinned: Mapping[str, Strategy]
    check_time: Callable[[], None]
    known: dict[object, OperatorSeconds]
    moves: dict[Layout, Moves]
    num_combinations: int = 0
    solved: dict[tuple[tuple[str, ...], int], tuple[float, float]] = field(init=False, default_factory=dict)
    micro: Graph = field(init=False)
    _choice: Choice = field(init=False)
    _places: dict[str, AtBorders] = field(init=False)
    _known_moves: dict[object, float] = field(init=False)
    _floors: dict[tuple[int, ...], dict[str, Floor]] = field(init=False, default_factory=dict)
    _floors_left: dict[tuple[int, ...], list[tuple[str, ...]]] = field(init=False, default_factory=dict)
    _least_own: dict[tuple[int, ...], dict[str, float]] = field(init=False, default_factory=dict)
    _answers: dict[object, list[StageAnswer]] = field(init=False, default_factory=dict)
    _costs: dict[tuple[tuple[str, ...], Layout], StageCosts] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.micro = self.graph.with_batch(self.graph.batch_size // (self.num_micro_batches * self.interleave))
        self._choice = redistribution_choice(self.machine, self.num_ranks)
        self._places = (
            at_borders(self.micro) if self.fused else {operator.name: AtBorders() for operator in self.micro.operators}
        )
        self._known_moves = known_moves(self.machine, self.num_ranks)

    def costs(self, names: Sequence[str], mesh: Layout) -> StageCosts:
        """The cost tables of some operators on a mesh."""
        key = tuple(names), mesh
        if key in self._costs:
            return self._costs[key]
        mine = set(names)
        pinned = {name: on_ranks(kept, mesh, name) for name, kept in self.pinned.items() if name in mine}
        self._costs[key] = self._tables(names, mesh, pinned, self._choice.price_of)  # type: ignore[arg-type]
        return self._costs[key]

    def _tables(
        self, names: Sequence[str], mesh: Layout, pinned: dict[str, Strategy], floors: Callable[[str], Floors] | None
    ) -> StageCosts:
        mine = set(names)
        if floors is None:
            moves = Moves(self._choice.seconds, None, self._known_moves)
        else:
            moves = self.moves.setdefault(mesh, Moves(self._choice.seconds, floors, self._known_moves))
        return StageCosts(
            micro=self.micro, operators=[operator for operator in self.micro.operators if operator.name in mine],
            mesh=mesh, num_micro_batches=self.num_micro_batches * self.interleave, optimizer=self.optimizer,
            full_batch=self.full_batch, pinned=pinned, suggested=suggestions(self.micro, mine, pinned, mesh),
            cost=instruction_cost(self.machine, mesh, self.num_ranks, fused=self.fused), choice=self._choice,
            moves=moves, known=self.known, places=self._places, in_order=self.in_order,
            check_time=self.check_time,
        )  # fmt: skip

    def meshes(self, names: Sequence[str], ranks: Sequence[int]) -> list[Layout]:
        """The meshes that are searched: of those that differ only by how finely axes are cut, the finest.

        Where pins name axes without a separate mesh, every mesh that they fit.

        Raises:
            TwofoldError: pins that fit no mesh.
        """
        tiered = len(self.machine.links) > 1 and self.machine.tier(tuple(ranks)) > 0
        every = meshes(ranks, ordered=tiered)
        mine = set(names)
        named = [
            (operator, self.pinned[operator.name]) for operator in self.micro.operators
            if operator.name in mine and operator.name in self.pinned
            and self.pinned[operator.name].mesh is None and self.pinned[operator.name].dims
        ]  # fmt: skip
        if not named:
            return finest(every)
        kept, reason = [], ""
        for mesh in every:
            try:
                for operator, strategy in named:
                    self.micro.spec(operator).check(mesh, strategy.dims, operator.name)
                kept.append(mesh)
            except TwofoldError as error:
                reason = str(error)
        if not kept:
            raise TwofoldError(f"pinned strategies fit no mesh of {len(ranks)} devices; on the last one: {reason}")
        return kept

    def answers(
        self, names: Sequence[str], ranks: Sequence[int], count: int, is_over: Callable[[], bool] = lambda: False
    ) -> list[StageAnswer]:
        """The cheapest strategies of a stage and their neighbours, over all meshes.

        `is_over`: whether time is up; then only the meshes evaluated so far count, at least one.
        """
        key = tuple(names), tuple(ranks), count
        if key not in self._answers:
            self._answers[key] = self._solved(names, ranks, count, is_over)
        return self._answers[key]

    def _solved(
        self, names: Sequence[str], ranks: Sequence[int], count: int, is_over: Callable[[], bool]
    ) -> list[StageAnswer]:
        meshes = self.meshes(names, ranks)
        looks = [self._look(names, mesh, is_over) if len(meshes) > 1 else NO_LOOK for mesh in meshes]
        found = {(each.cost_s, at, each.values) for at, look in enumerate(looks) for each in look.found}
        above_s = min((cost_s for cost_s, *_ in found), default=math.inf)
        bound_s = math.inf
        for at in sorted(range(len(meshes)), key=lambda at: looks[at].bound_s):
            if looks[at].bound_s > above_s or (found and is_over()):
                bound_s = min(bound_s, looks[at].bound_s)
                continue
            costs = self.costs(names, meshes[at])
            self.num_combinations += math.prod(costs.sizes)
            answers = cheapest(costs.question(), count, above_s, is_over)
            bound_s = min(bound_s, max(answers.bound_s, looks[at].bound_s))
            found |= {(each.cost_s, at, each.values) for each in answers.found}
            best = sorted(found)[: 1 if looks[at].found else count]  # neighbours of large problems are of one mesh
            if looks[at].found or len(best) == count:
                above_s = min(above_s, best[-1][0])
            if looks[at].found:
                self._forget(names, meshes[at])
        kept = [
            self._answer(self.costs(names, meshes[at]), cost_s, values) for cost_s, at, values in sorted(found)[:count]
        ]
        self.solved[tuple(names), len(ranks)] = kept[0].cost_s, min(bound_s, kept[0].cost_s)
        return [self._coarser(names, kept[0]), *kept[1:]]

    def _look(self, names: Sequence[str], mesh: Layout, is_over: Callable[[], bool]) -> Answers:
        """A first bound for a mesh; if time is up, only that of the kernels, where it is known."""
        if is_over():
            least = self._floors.get(tuple(mesh.rank_list), {})
            return Answers(found=[], bound_s=sum(max(least[name]) for name in names) if least else 0.0)
        look = glance(self.costs(names, mesh).question())
        if look is not NO_LOOK:
            self._forget(names, mesh)
        return look

    def _forget(self, names: Sequence[str], mesh: Layout) -> None:
        """Tables of large problems on many meshes would fill the memory."""
        self._costs.pop((tuple(names), mesh), None)
        self.moves.pop(mesh, None)

    def batch_split(self, names: Sequence[str], ranks: Sequence[int]) -> tuple[Layout, dict[str, Strategy]]:
        """Every operator's batch split over as many ranks as divide it: the baseline without a search.

        Returns:
            the mesh, and on it the strategies.
        """
        width = len(ranks)
        parts = math.gcd(self.micro.batch_size, width)
        sizes = (parts, width // parts) if parts < width else (width,)
        mesh, mine = Layout(sizes, AXIS_NAMES[: len(sizes)], ranks), set(names)
        found = {}
        for operator in self.micro.operators:
            spec, batch = self.micro.spec(operator), self.micro.batch_dims.get(operator.name)
            split: dict[str, tuple[str, ...]] = {batch: AXIS_NAMES[:1]} if batch in spec.splittable else {}
            if operator.name in mine and parts > 1 and split and spec.fits(mesh, split):
                found[operator.name] = Strategy(dims=split)
        return mesh, found

    def least_s(self, names: Sequence[str], ranks: Sequence[int], is_over: Callable[[], bool] = lambda: False) -> float:
        """The least additive cost of a stage over all meshes, or over those that there is time for."""
        return self.answers(names, ranks, 1, is_over)[0].cost_s

    def every(self, names: Sequence[str], ranks: Sequence[int], is_over: Callable[[], bool]) -> list[StageAnswer]:
        """The cheapest answer with every remaining strategy of every operator on every mesh, and leaner answers; only
        the leaner ones where time is over.

        Their costs are estimates where redistributions were not priced; they are for searching what fits into memory.
        """
        found = []
        for mesh in self.meshes(names, ranks):
            costs = self.costs(names, mesh)
            question = Question(problem=costs.problem(), price=_as_it_is, start=costs.batch_split())
            lean = [question.priced(values) for values in self._lean(costs)]
            found += [
                self._answer(costs, each.cost_s, each.values)
                for each in {*(() if is_over() else cheapest(question, _EVERY, is_over=is_over).found), *lean}
            ]
        return sorted(found, key=lambda answer: (answer.cost_s, str(answer.strategies)))

    def floors(self, ranks: Sequence[int], is_over: Callable[[], bool] = lambda: False) -> dict[str, Floor]:
        """A lower bound on the time of every operator's kernels on some ranks, for any strategy.

        `is_over`: whether time is up; operators that are left have a bound of 0 until the next call. Those that take
        longest come first.
        """
        key = tuple(ranks)
        found = self._floors.setdefault(key, {operator.name: Floor(0.0, 0.0) for operator in self.micro.operators})
        if is_over() or self._floors_left.get(key) == []:
            return found
        every = list(self._all_tables(ranks))
        left = self._floors_left.setdefault(key, every[0].longest_first()[::-1])
        while left and not is_over():
            alike = left.pop()
            position = self.micro.position(self.micro.by_name[alike[0]])
            host, device = zip(*(costs.least_kernels_s(position) for costs in every), strict=True)
            found |= dict.fromkeys(alike, Floor(min(host), min(device)))
        return found

    def has_floors(self, ranks: Sequence[int]) -> bool:
        """Whether `floors` has the bounds of all operators on some ranks."""
        return self._floors_left.get(tuple(ranks)) == []

    def least_own_s(self, ranks: Sequence[int]) -> dict[str, float]:
        """A lower bound on the additive cost of every operator on some ranks, without tensors between operators."""
        if tuple(ranks) not in self._least_own:
            found = dict.fromkeys((operator.name for operator in self.micro.operators), math.inf)
            for costs in self._all_tables(ranks):
                for position, operator in enumerate(costs.operators):
                    found[operator.name] = min(found[operator.name], costs.least_own_s(position))
            self._least_own[tuple(ranks)] = found
        return self._least_own[tuple(ranks)]

    def _all_tables(self, ranks: Sequence[int]) -> Iterator[StageCosts]:
        """Costs of all operators of the graph, on every mesh of some ranks."""
        names = tuple(operator.name for operator in self.micro.operators)
        for mesh in self.meshes((), ranks):
            yield self._tables(names, mesh, {}, self._choice.price_of)  # type: ignore[arg-type]

    def stream_s(self, names: Sequence[str], ranks: Sequence[int], is_over: Callable[[], bool]) -> float:
        """A lower bound on the time of a stage's compute streams in a step, for any strategies (`StageCosts`); 0 if
        time is up before all meshes have one.
        """
        found = math.inf
        for mesh in self.meshes((), ranks):
            if is_over():
                return 0.0
            found = min(found, self.costs(names, mesh).stream_s())
            if len(names) > _MANY:
                self._forget(names, mesh)
        return found

    # ---------------------------------------------------------------- helpers

    def _answer(self, costs: StageCosts, cost_s: float, values: Sequence[int]) -> StageAnswer:
        return StageAnswer(cost_s=cost_s, mesh=costs.mesh, strategies=costs.picked(values))

    def _coarser(self, names: Sequence[str], answer: StageAnswer) -> StageAnswer:
        """The same placement on a mesh with fewer axes, if that costs no more: axes that are always used together
        become one.
        """
        mesh = answer.mesh
        if any(name in self.pinned for name in names):
            return answer  # what is pinned names the axes of this mesh
        if any(strategy.mesh is not None or strategy.out is not None for strategy in answer.strategies.values()):
            return answer
        runs = [[mesh.alias_name[0]]]
        for one, two in zip(mesh.alias_name, mesh.alias_name[1:], strict=False):
            together = all(_together(one, two, strategy) for strategy in answer.strategies.values())
            runs[-1:] = [[*runs[-1], two]] if together else [runs[-1], [two]]
        if len(runs) == len(mesh.alias_name):
            return answer
        sizes = [mesh.size(run) for run in runs]
        coarse = Layout(sizes, mesh.alias_name[: len(runs)], mesh.rank_list)
        name = {run[0]: new for run, new in zip(runs, coarse.alias_name, strict=True)}
        chosen = {
            operator: Strategy(
                dims={dim: tuple(name[a] for a in axes if a in name) for dim, axes in strategy.dims.items()}
            )
            for operator, strategy in answer.strategies.items()
        }
        try:
            costs = self._tables(names, coarse, chosen, None)
            cost_s = costs.problem().total((0,) * len(names))
        except TwofoldError:  # pins that mean something else on the coarser mesh
            return answer
        if cost_s > answer.cost_s * (1 + 1e-9):
            return answer
        return StageAnswer(cost_s=cost_s, mesh=coarse, strategies=chosen)

    def _lean(self, costs: StageCosts) -> list[tuple[int, ...]]:
        """Answers that trade time for memory: the additive cost with a growing price on local bytes."""
        weigh = [self._bytes(costs, position) for position in range(len(costs.operators))]
        largest = max(float(each.max()) for each in weigh) or 1.0
        scale = sum(float(own.max()) for own in costs.problem().own) / largest
        answers = []
        for weight in (0.01, 0.1, 1.0, 100.0):
            problem = costs.problem_with([each * scale * weight for each in weigh])
            question = Question(problem=problem, price=_as_it_is, start=costs.batch_split())
            answers.append(cheapest(question, 1).found[0].values)
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


def _together(one: str, two: str, strategy: Strategy) -> bool:
    for axes in strategy.dims.values():
        if one in axes or two in axes:
            return one in axes and axes.index(one) + 1 < len(axes) and axes[axes.index(one) + 1] == two
    return True


def _as_it_is(values: Sequence[int]) -> bool:
    """Prices nothing, because bounds are sufficient."""
    return False
