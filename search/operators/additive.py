"""The additive cost of a stage: one table per operator, and one per tensor between operators.

The variables are the operators, by position; their values are strategies on the stage's mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from plans.layout import Layout
from plans.lower import Choice
from plans.lower.emit import least_bytes
from plans.model.graph import Graph, Operator
from plans.operators import OperatorSpec
from plans.optimizer import Optimizer
from plans.plan import Strategy
from search.operators.cost_keys import CostKeys
from search.operators.eliminate import best_assignment
from search.operators.moves import Moves
from search.operators.operator_costs import InstructionCost, OperatorCosts, OperatorSeconds, seconds_of_least_bytes
from search.operators.problem import Problem
from search.operators.refine import Question
from search.operators.runs import AtBorders
from search.operators.space import strategies
from search.operators.tensor_costs import TensorCosts
from search.operators.tensor_edges import TensorEdge

__all__ = ["StageCosts"]


@dataclass(slots=True)
class StageCosts:
    """Strategies and cost tables of the operators of one stage on one mesh.

    Args:
        micro: the graph of one micro-batch.
        operators: of the stage, in graph order.
        mesh: the stage's mesh.
        num_micro_batches: how often forward and backward run in a step.
        optimizer: what happens to the parameters.
        full_batch: whether inputs are fed whole (any layout is a free slice) or in parts.
        cost: seconds of an instruction.
        pinned: operator name -> strategy that must be kept.
        allowed: leaves only some strategies, where given.
        suggested: operator name -> strategies to choose from next to those on the stage's mesh.
        choice: of the steps of redistributions; those of least bytes where it is None.
        moves: seconds of redistributions, or bounds of them; by `choice`, all exact, where it is None.
        known: costs of single operators by all that they depend on; may be shared by stages, meshes and optimizers.
        places, in_order: as of `OperatorCosts`.
        check_time: called between steps of long work; may raise to end it.

    Besides, `choices` has the strategies of every operator, `own` prices single operators, `tensors` what is handed on,
    and `memory` is for `best_assignment`.
    """

    micro: Graph
    operators: Sequence[Operator]
    mesh: Layout
    num_micro_batches: int
    optimizer: Optimizer
    full_batch: bool
    cost: InstructionCost
    pinned: dict[str, Strategy] = field(default_factory=dict)
    allowed: Callable[[Operator, OperatorSpec, Strategy, Layout], bool] | None = None
    suggested: Mapping[str, Sequence[Strategy]] = field(default_factory=dict)
    choice: Choice | None = None
    moves: Moves | None = None
    known: dict[object, OperatorSeconds] = field(default_factory=dict)
    places: Mapping[str, AtBorders] = field(default_factory=dict)
    in_order: bool = False
    check_time: Callable[[], None] = lambda: None
    choices: list[list[Strategy]] = field(init=False)
    own: OperatorCosts = field(init=False)
    _without_gathers: OperatorCosts = field(init=False)
    tensors: TensorCosts = field(init=False)
    _problem: Problem | None = field(init=False, default=None)
    _keys: CostKeys = field(init=False)
    _offered: dict[int, list[Strategy]] = field(init=False, default_factory=dict)
    _parts: dict[object, np.ndarray] = field(init=False, default_factory=dict)
    _summed: dict[object, np.ndarray] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.moves is None:
            self.moves = Moves(
                self.choice.seconds if self.choice is not None else seconds_of_least_bytes(self.cost)
            )  # fmt: skip
        self.choices = [self._choices(operator) for operator in self.operators]
        self.own = OperatorCosts(
            micro=self.micro, mesh=self.mesh, num_micro_batches=self.num_micro_batches, optimizer=self.optimizer,
            cost=self.cost, ways=self.choice or least_bytes, places=self.places,
            in_order=self.in_order,
        )  # fmt: skip
        self._without_gathers = replace(self.own, ways=least_bytes, in_order=False)
        self.tensors = TensorCosts(
            micro=self.micro, operators=self.operators, choices=self.choices, mesh=self.mesh,
            num_micro_batches=self.num_micro_batches, full_batch=self.full_batch, moves=self.moves,
            check_time=self.check_time,
        )  # fmt: skip
        self._keys = CostKeys(
            self.micro, self.mesh, self.num_micro_batches, self.optimizer, self.cost.group_key
        )  # fmt: skip

    def _choices(self, operator: Operator) -> list[Strategy]:
        if operator.name in self.pinned:
            return [self.pinned[operator.name]]
        spec = self.micro.spec(operator)
        if id(spec) not in self._offered:
            self._offered[id(spec)] = strategies(spec, self.mesh)
        found = self._offered[id(spec)]  # equal operators share the list
        if suggested := self.suggested.get(operator.name):
            found = [*found, *suggested]
        if self.allowed is None:
            return found
        return [strategy for strategy in found if self.allowed(operator, spec, strategy, self.mesh)]

    # ---------------------------------------------------------------- variables

    @property
    def sizes(self) -> list[int]:
        """Number of strategies per operator."""
        return [len(choices) for choices in self.choices]

    def picked(self, values: Sequence[int]) -> dict[str, Strategy]:
        """operator name -> strategy, for the number of a strategy of every operator."""
        return {
            operator.name: choices[value]
            for operator, choices, value in zip(self.operators, self.choices, values, strict=True)
        }

    def batch_split(self) -> tuple[int, ...]:
        """Numbers of the strategies that split the batch dim of every operator as far as possible, and no other dim."""
        found = []
        for operator, choices in zip(self.operators, self.choices, strict=True):
            batch = self.micro.batch_dims.get(operator.name)
            parts = [
                (set(strategy.dims) <= {batch}, (strategy.mesh or self.mesh).size(strategy.dims.get(batch or "", ())))
                for strategy in choices
            ]
            found.append(parts.index(max(parts)))
        return tuple(found)

    # ------------------------------------------------------------------ problem

    def question(self) -> Question:
        """The minimisation problem, for `refine.cheapest`."""
        return Question(problem=self.problem(), price=self.tensors.price, start=self.batch_split())

    def problem(self) -> Problem:
        """The problem made of these tables.

        Where `moves` has only lower bounds, so have the tensors, until `tensors.price` prices a choice.
        """
        if self._problem is None:
            self._problem = self.problem_with([0.0] * len(self.operators))
        return self._problem

    def problem_with(self, extra: Sequence[float | np.ndarray]) -> Problem:
        """The same with an addition to the costs of each operator's strategies."""
        own = [self._own_table(position) for position in range(len(self.operators))]
        return Problem(
            own=[each + more if np.any(more) else each for each, more in zip(own, extra, strict=True)],
            edges=self.tensors.edges(), seconds=self.tensors.seconds, left=[np.arange(len(each)) for each in own],
        )  # fmt: skip

    def kind(self, position: int) -> object:
        """A key of all that the time of an operator's strategies depends on."""
        operator = self.operators[position]
        return self.places.get(operator.name), self._keys.signature(operator), id(self.choices[position])

    def least_own_s(self, position: int) -> float:
        """The least time of an operator alone in a step."""
        compute, others, *_ = self._own_parts(position)
        return float((compute + others).min())

    def longest_first(self) -> list[tuple[str, ...]]:
        """The names of equal operators; those first that take longest together with their batch split."""
        total: dict[object, float] = {}
        alike: dict[object, list[str]] = {}
        for position, value in enumerate(self.batch_split()):
            operator, kind = self.operators[position], self.kind(position)
            seconds = self._own_s(operator, self.choices[position][value])
            total[kind] = total.get(kind, 0.0) + seconds.compute_s
            alike.setdefault(kind, []).append(operator.name)
        return [tuple(alike[kind]) for kind in sorted(alike, key=lambda kind: -total[kind])]

    def least_kernels_s(self, position: int) -> tuple[float, float]:
        """Lower bounds on the time of an operator's kernels in a step, on the host and on the device."""
        key = "kernels", self.kind(position)
        if key not in self._parts:
            self._parts[key] = np.array(self._least_kernels_s(self.operators[position], self.choices[position]))
        host_s, device_s = self._parts[key].tolist()
        return host_s, device_s

    def _least_kernels_s(self, operator: Operator, choices: Sequence[Strategy]) -> tuple[float, float]:
        """The least of these bounds with any of some strategies.

        Where a strategy gathers a statistic between its kernels, they are bounded without it first, and it is priced
        only if they alone take less than with the strategies before.
        """
        place, spec, known = self.places.get(operator.name), self.micro.spec(operator), self.known
        host_s = device_s = math.inf
        gathering: dict[object, tuple[OperatorSeconds, Strategy]] = {}
        for strategy in choices:
            kernels, whole = (
                keys(operator, spec, strategy) for keys in (self._keys.of_kernels_alone, self._keys.of_kernels)
            )
            if kernels == whole:
                each = self._kernels_s(operator, strategy)
                host_s, device_s = min(host_s, each.host_s), min(device_s, each.device_s)
                continue
            key = "kernels alone", place, kernels
            if key not in known:
                known[key] = self._without_gathers.seconds(operator, strategy)
            gathering[whole] = known[key], strategy
        for alone, strategy in sorted(gathering.values(), key=lambda each: each[0].device_s):
            if alone.host_s < host_s or alone.device_s < device_s:
                each = self._kernels_s(operator, strategy)
                host_s, device_s = min(host_s, each.host_s), min(device_s, each.device_s)
        return host_s, device_s

    def _kernels_s(self, operator: Operator, strategy: Strategy) -> OperatorSeconds:
        """The bounds of an operator's kernels with a strategy; what else it takes may be that of another one."""
        key = (
            "kernels",
            self.places.get(operator.name),
            self._keys.of_kernels(operator, self.micro.spec(operator), strategy),
        )
        if key not in self.known:
            self.known[key] = self._own_s(operator, strategy)
        return self.known[key]

    def stream_s(self) -> float:
        """A lower bound on the time of the compute streams in a step, for any strategies on this mesh."""
        problem = self.stream_problem()
        return best_assignment(problem.sizes, problem.tables())[0]

    def stream_problem(self) -> Problem:
        """The part of the time of the compute streams that is a sum over operators and pairs of neighbours.

        Kernels run in the order of the graph, and backwards. If an operator reads what the one before it makes in
        another layout, no other kernel runs while the tensor is redistributed.
        """
        floors = [self._device_floors(position) for position in range(len(self.operators))]
        return Problem(
            own=floors, edges=self._awaited() if self.in_order else [], seconds=self.tensors.seconds,
            left=[np.arange(len(each)) for each in floors],
        )  # fmt: skip

    def _device_floors(self, position: int) -> np.ndarray:
        """The least time of an operator's kernels on the device in a step, with each of its strategies."""
        key = "device", self.kind(position)
        if key not in self._parts:
            operator = self.operators[position]
            self._parts[key] = np.array(
                [self._kernels_s(operator, strategy).device_s for strategy in self.choices[position]]
            )
        return self._parts[key]

    def _awaited(self) -> list[TensorEdge]:
        """Per tensor that an operator hands to the next one the redistributions during which no kernel runs."""
        found, consumers, wanted = [], self.micro.consumers(), self.micro.needs_gradient()
        for maker, reader in pairwise(self.operators):
            forward, backward = (all(self.places[each.name].alone[way] for each in (maker, reader)) for way in range(2))
            backward &= not any(self.micro.tensors[name].kind == "parameter" for name in reader.inputs)
            for name in dict.fromkeys(maker.outputs) if forward else ():
                if name in reader.inputs:
                    is_back = backward and name in wanted and len(consumers[name]) == 1
                    found.append(self.tensors.edge_of(name, maker, [reader], is_back))
        return found

    def _own_table(self, position: int) -> np.ndarray:
        """The time of each strategy of an operator; equal operators share the array."""
        compute, others, *_ = self._own_parts(position)
        return self._summed.setdefault(self.kind(position), compute + others)

    def _own_parts(self, position: int) -> np.ndarray:
        """[4, strategies]: the `OperatorSeconds` of an operator with each strategy."""
        key = self.kind(position)
        if key not in self._parts:
            self.check_time()
            operator = self.operators[position]
            self._parts[key] = np.array([self._own_s(operator, strategy) for strategy in self.choices[position]]).T
        return self._parts[key]

    def _own_s(self, operator: Operator, strategy: Strategy) -> OperatorSeconds:
        key = self.places.get(operator.name), self._keys.of(operator, self.micro.spec(operator), strategy)
        if key not in self.known:
            self.known[key] = self.own.seconds(operator, strategy)
        return self.known[key]
