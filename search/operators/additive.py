"""The additive cost of a stage: one table per operator and one per tensor that is handed on.

The variables are the operators, or groups of them that are tied; their values are strategies on the stage's mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plans.layout import Layout
from plans.lower import Choice
from plans.lower.emit import least_bytes
from plans.model.graph import Graph, Operator
from plans.operators import OperatorSpec
from plans.plan import Optimizer, Strategy
from search.operators.cost_keys import CostKeys
from search.operators.eliminate import Memory, Table, widest
from search.operators.moves import Moves
from search.operators.operator_costs import InstructionCost, OperatorCosts, OperatorSeconds, seconds_of_least_bytes
from search.operators.space import strategies
from search.operators.tensor_costs import TensorCosts

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
        suggested: operator name -> strategies to choose from beside those on the stage's mesh.
        choice: of the steps of redistributions; those of least bytes where it is None.
        moves: seconds of redistributions, or bounds of them; by `choice`, all exact, where it is None.
        known: costs of single operators by all that they depend on; may be shared by stages and meshes.

    Besides, `choices` has the strategies of every operator, `variable_of` its variable, `own` prices single operators,
    `tensors` what is handed on, and `memory` is for `best_assignment`.
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
    choices: list[list[Strategy]] = field(init=False)
    variable_of: list[int] = field(init=False)
    memory: Memory = field(init=False, default_factory=Memory)
    own: OperatorCosts = field(init=False)
    tensors: TensorCosts = field(init=False)
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
        self.variable_of = list(range(len(self.operators)))
        self.own = OperatorCosts(
            micro=self.micro, mesh=self.mesh, num_micro_batches=self.num_micro_batches, optimizer=self.optimizer,
            cost=self.cost, ways=self.choice or least_bytes,
        )  # fmt: skip
        self.tensors = TensorCosts(
            micro=self.micro, operators=self.operators, choices=self.choices, variable_of=self.variable_of,
            mesh=self.mesh, num_micro_batches=self.num_micro_batches, full_batch=self.full_batch, moves=self.moves,
        )  # fmt: skip
        self._keys = CostKeys(self.micro, self.mesh, self.num_micro_batches, self.cost.group_key)

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
        """Number of strategies per variable: per operator, or per operators that are tied."""
        sizes = dict(zip(self.variable_of, (len(choices) for choices in self.choices), strict=True))
        return [sizes[variable] for variable in range(len(sizes))]

    def picked(self, values: Sequence[int]) -> dict[str, Strategy]:
        """operator name -> strategy, for a value of every variable."""
        return {
            operator.name: self.choices[position][values[self.variable_of[position]]]
            for position, operator in enumerate(self.operators)
        }

    def entangled(self) -> tuple[float, float]:
        """Cells of the largest table that elimination would join, and of all of them."""
        return widest(self.sizes, self.tensors.scopes())

    def tie(self) -> bool:
        """Let operators of one kind that read the same tensor (queries, keys and values) have one strategy together.

        A beam, for graphs that are too entangled to be searched without it; whether it ties anything.
        """
        groups: dict[object, list[int]] = {}
        for position, operator in enumerate(self.operators):
            free = operator.name not in self.pinned and operator.name not in self.suggested
            dims = tuple(self.micro.spec(operator).sizes)
            key = (operator.kind, operator.inputs[0], dims) if free and operator.inputs else position
            groups.setdefault(key, []).append(position)
        shared: dict[object, list[Strategy]] = {}  # equal groups share the list, as equal operators do
        for variable, members in enumerate(groups.values()):
            specs = [self.micro.spec(self.operators[at]) for at in members]
            alike = tuple((id(spec), id(self.choices[at])) for spec, at in zip(specs, members, strict=True))
            if len(members) > 1 and alike not in shared:
                offered = self.choices[members[0]]
                shared[alike] = [each for each in offered if all(s.fits(self.mesh, each.dims) for s in specs)]
            for at in members:
                self.choices[at] = shared.get(alike, self.choices[at])
                self.variable_of[at] = variable
        self.memory = Memory()
        self.tensors.forget()
        return len(groups) < len(self.operators)

    # ------------------------------------------------------------------- tables

    def tables(self, compute_only: bool = False) -> list[Table]:
        """All cost tables; `compute_only` leaves out communication (a lower bound on any choice).

        Where `moves` has bounds, the cells of tensors' tables are bounds too until `price` has been asked for them.
        """
        result = [self._own_table(position, compute_only) for position in range(len(self.operators))]
        return result if compute_only else result + self.tensors.tables()

    def price(self, values: Sequence[int]) -> bool:
        """Make the tables exact for one choice of strategies; whether anything of it was a bound."""
        return self.tensors.price(values)

    def least_parts_s(self, position: int) -> tuple[float, float, float]:
        """The least that an operator takes by itself in a step; its compute on the host, and on the device."""
        compute, others, host, device = self._own_parts(position)
        return float((compute + others).min()), float(host.min()), float(device.min())

    def _own_table(self, position: int, compute_only: bool) -> Table:
        compute, others, *_ = self._own_parts(position)
        if compute_only:
            return Table((self.variable_of[position],), compute)
        summed = self._summed.setdefault(self._column_key(position), compute + others)
        return Table((self.variable_of[position],), summed)

    def _own_parts(self, position: int) -> np.ndarray:
        """[4, strategies]: the `OperatorSeconds` of an operator with each strategy."""
        key = self._column_key(position)
        if key not in self._parts:
            operator = self.operators[position]
            self._parts[key] = np.array([self._own_s(operator, each) for each in self.choices[position]]).T
        return self._parts[key]

    def _own_s(self, operator: Operator, strategy: Strategy) -> OperatorSeconds:
        key = self._keys.of(operator, self.micro.spec(operator), strategy)
        if key not in self.known:
            self.known[key] = self.own.seconds(operator, strategy)
        return self.known[key]

    def _column_key(self, position: int) -> object:
        return self._keys.signature(self.operators[position]), id(self.choices[position])
