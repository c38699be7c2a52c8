"""The additive cost of a stage: one table per operator and one per tensor that is handed on.

Prices come from the very instructions that lowering would write: an operator's forward and gradients once per
micro-batch, its gradient reduction, weight gather and update once per step, and for every tensor the redistributions
between its maker's layout and each distinct layout its readers ask for, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from plans.graph import Graph, Operator
from plans.layout import Layout, TensorLayout
from plans.lower import Choice
from plans.lower.chunk import LOSSES
from plans.lower.emit import Emitter, ValueTable, channel_of
from plans.lower.optimizer import padded_shard, shard_axes
from plans.lower.statistic import gather_statistic
from plans.operators import OperatorSpec
from plans.plan import Optimizer, Strategy
from plans.program import Instruction, Kind, Value
from search.eliminate import Table
from search.space import strategies

__all__ = ["InstructionCost", "StageCosts"]

_Layouts = tuple[tuple[TensorLayout, TensorLayout], ...]
"""Of a tensor where an operator reads it, and of the gradient that this makes."""

InstructionCost = Callable[[Instruction], float]
"""Seconds of one instruction on the machine, as the search counts them."""


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
    choices: list[list[Strategy]] = field(init=False)
    _own: dict[int, tuple[np.ndarray, np.ndarray]] = field(init=False, default_factory=dict)
    _tensor: list[Table] | None = field(init=False, default=None)
    _moves: dict[tuple[TensorLayout, TensorLayout, tuple[int, ...], str], float] = field(
        init=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        self.choices = [self._choices(operator) for operator in self.operators]

    def _choices(self, operator: Operator) -> list[Strategy]:
        if operator.name in self.pinned:
            return [self.pinned[operator.name]]
        spec = self.micro.spec(operator)
        found = [*strategies(spec, self.mesh), *self.suggested.get(operator.name, ())]
        if self.allowed is None:
            return found
        return [strategy for strategy in found if self.allowed(operator, spec, strategy, self.mesh)]

    @property
    def sizes(self) -> list[int]:
        """Number of strategies per operator."""
        return [len(choices) for choices in self.choices]

    def tables(self, compute_only: bool = False) -> list[Table]:
        """All cost tables; `compute_only` leaves out communication (a lower bound on any choice)."""
        result = [self._own_table(position, compute_only) for position in range(len(self.operators))]
        if not compute_only:
            if self._tensor is None:
                self._tensor = self._tensor_tables()
            result += self._tensor
        return result

    # ------------------------------------------------------------ one operator

    def _own_table(self, position: int, compute_only: bool) -> Table:
        if position not in self._own:
            operator, choices = self.operators[position], self.choices[position]
            compute_s = [self.num_micro_batches * self.compute_s(operator, strategy) for strategy in choices]
            others_s = [self.step_s(operator, strategy) + self.hand_on_s(operator, strategy) for strategy in choices]
            self._own[position] = np.array(compute_s), np.array(others_s)
        compute, others = self._own[position]
        return Table((position,), compute if compute_only else compute + others)

    def compute_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds of an operator's forward and gradients for one micro-batch."""
        spec, mesh = self.micro.spec(operator), self._mesh(strategy)
        table, emitter = self._scratch(mesh)
        fraction = spec.local_fraction(mesh, strategy.dims)
        inputs = [
            self._value(table, name, spec.input_layout(index, mesh, strategy.dims))
            for index, name in enumerate(operator.inputs)
        ]
        outputs = [
            self._value(table, name, spec.output_layout(index, mesh, strategy.dims))
            for index, name in enumerate(operator.outputs)
        ]
        statistic = gather_statistic(emitter, operator, spec, mesh, strategy.dims, inputs)
        saved = {f"x{index}": value for index, value in enumerate(inputs)}
        saved |= {f"y{index}": value for index, value in enumerate(outputs)}
        if statistic is not None:
            saved["s0"] = statistic
            inputs.append(statistic)
        emitter.compute(
            "F", f"{operator.kind}.forward", "F", tuple(inputs), tuple(outputs), flops=spec.flops // fraction
        )
        wanted = self.micro.needs_gradient()
        indices = [index for index in spec.gradients if operator.inputs[index] in wanted]
        weights = [index for index in indices if self._is_parameter(operator.inputs[index])]
        groups = [(group, "B") for group in spec.gradient_groups(set(indices) - set(weights))]
        for group, part in groups + [(group, "W") for group in spec.gradient_groups(weights)]:
            operands = [] if operator.kind in LOSSES else outputs[:1]
            operands += [saved[need] for need in spec.gradient_needs(group) if need in saved]
            results = [
                self._value(table, operator.inputs[index], spec.gradient_layout(index, mesh, strategy.dims))
                for index in group
            ]
            which = "".join(str(index) for index in group)
            emitter.compute(
                f"{part}{which}", f"{operator.kind}.grad{which}", part, tuple(operands), tuple(results),
                flops=sum(spec.gradients[index].flops for index in group) // fraction,
            )  # fmt: skip
        return self._total(emitter)

    def hand_on_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds per step to bring an operator's output to the layout its strategy hands it on in, and back."""
        if strategy.out is None:
            return 0.0
        spec, mesh, name = self.micro.spec(operator), self._mesh(strategy), operator.outputs[0]
        made, handed_on = spec.output_layout(0, mesh, strategy.dims), strategy.handed_on(spec, 0, mesh)
        back = self._move_s(handed_on, made.without_partial(), name) if name in self.micro.needs_gradient() else 0.0
        return self.num_micro_batches * (self._move_s(made, handed_on, name) + back)

    def step_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds per step for an operator's parameters, each alone: gathers, reductions, update."""
        again_s = 0.0
        spec, mesh = self.micro.spec(operator), self._mesh(strategy)
        table, emitter = self._scratch(mesh)
        for index, name in enumerate(operator.inputs):
            if not self._is_parameter(name) or index not in spec.gradients:
                continue
            tensor = self.micro.tensors[name]
            home = spec.input_layout(index, mesh, strategy.dims)
            axes = spec.gradient_layout(index, mesh, strategy.dims).partial
            weight = kept = self._value(table, name, home)
            optimizer, full = self.optimizer, table[weight]

            def collective(
                call: str, over: tuple[str, ...], other: str, times: int, full: Value = full, name: str = name
            ) -> None:
                nonlocal again_s
                if mesh.size(over) > 1:
                    emitter.add(
                        Instruction(
                            name=f"{name}.{call}", kind=Kind.COLLECTIVE, call=call, part="C", mesh=mesh, axes=over,
                            channel=channel_of(mesh, over), message_bytes=full.span_bytes, dtype=full.dtype,
                            shapes=(full.shape, table[other].shape),
                        )
                    )  # fmt: skip
                    again_s += (times - 1) * self.cost(emitter.instructions[-1])

            if optimizer.parallel_level >= 1 and tensor.size_bytes >= optimizer.threshold_bytes:
                over = shard_axes(home, axes)
                part = (padded_shard(math.prod(full.shape), mesh.size(over)),)
                kept = table.add(Value(name=f"{name}#shard", shape=part, dtype=tensor.dtype))
                gathers = 2 * self.num_micro_batches if optimizer.parallel_level == 3 else 1
                collective("all_gather_flat", over, kept, gathers)
                collective("reduce_scatter_flat", axes, kept, self.num_micro_batches if optimizer.reduces_each else 1)
                if mesh.size(over) > mesh.size(axes):
                    emitter.compute(f"{name}.slice", "flat_slice", "U", (weight,), (kept,))
            else:
                collective("all_reduce", axes, weight, 1)
            emitter.compute(f"{name}.U", f"{self.optimizer.kind}.update", "U", (kept, kept), (kept,))
        return again_s + self._total(emitter)

    # ------------------------------------------------------- tensors handed on

    def _tensor_tables(self) -> list[Table]:
        position = {operator.name: number for number, operator in enumerate(self.operators)}
        producers, consumers = self.micro.producers(), self.micro.consumers()
        wanted = self.micro.needs_gradient()
        result = []
        for name in dict.fromkeys(
            name for operator in self.operators for name in (*operator.inputs, *operator.outputs)
        ):
            readers = [operator for operator in consumers[name] if operator.name in position]
            maker = producers.get(name)
            fed = self.full_batch and not self._is_parameter(name)
            if not readers or (maker is None and (fed or self.micro.tensors[name].kind == "constant")):
                continue  # nothing to move, or something whole, of which every rank takes its part
            inside = maker is not None and maker.name in position
            if not inside and len(readers) < 2:
                continue  # arrives in its reader's layout
            variables = ([position[maker.name]] if inside and maker is not None else []) + [
                position[reader.name] for reader in readers
            ]
            if len(set(variables)) < 2:
                continue
            result.append(self._tensor_table(name, maker if inside else None, readers, variables, name in wanted))
        return result

    def _tensor_table(
        self, name: str, maker: Operator | None, readers: Sequence[Operator], variables: Sequence[int], wanted: bool
    ) -> Table:
        """Strategies that hand the tensor on, or read it, in the same layouts cost the same: priced once per kind."""
        kinds: list[dict[_Layouts, int]] = []
        kind_of: list[list[int]] = []
        for number, variable in enumerate(variables):
            known: dict[_Layouts, int] = {}
            operator = maker if maker is not None and number == 0 else readers[number - (maker is not None)]
            made = maker is not None and number == 0
            layouts = [self._layouts_of(name, operator, strategy, made) for strategy in self.choices[variable]]
            kind_of.append([known.setdefault(each, len(known)) for each in layouts])
            kinds.append(known)
        costs = np.zeros(tuple(len(each) for each in kinds))
        for cell in product(*(enumerate(each) for each in kinds)):
            picked = [layouts for _, layouts in cell]
            source = picked.pop(0)[0][0] if maker is not None else None
            costs[tuple(at for at, _ in cell)] = self._layouts_s(
                name, source, [pair for each in picked for pair in each], wanted
            )
        return Table(tuple(variables), costs[np.ix_(*kind_of)])

    def _layouts_of(self, name: str, operator: Operator, strategy: Strategy, made: bool) -> _Layouts:
        """In which layout a strategy hands a tensor on; or in which it is read, and its gradient made, each time."""
        spec, mesh = self.micro.spec(operator), self._mesh(strategy)
        if made:
            layout = strategy.handed_on(spec, operator.outputs.index(name), mesh)
            return ((layout, layout),)
        return tuple(
            (spec.input_layout(index, mesh, strategy.dims), spec.gradient_layout(index, mesh, strategy.dims))
            for index, read in enumerate(operator.inputs)
            if read == name
        )

    def _layouts_s(
        self, name: str, source: TensorLayout | None, targets: Sequence[tuple[TensorLayout, TensorLayout]], wanted: bool
    ) -> float:
        if source is None:
            source = targets[0][0]
        moves = dict.fromkeys((source, target, name) for target, _ in targets)
        if wanted and not self._is_parameter(name):
            moves |= dict.fromkeys((back, source.without_partial(), name) for _, back in targets)
        return self.num_micro_batches * sum(self._move_s(*move) for move in moves)

    def _move_s(self, source: TensorLayout, target: TensorLayout, name: str) -> float:
        tensor = self.micro.tensors[name]
        key = (source, target, tensor.shape, tensor.dtype)
        if key not in self._moves:
            if self.choice is not None:
                self._moves[key] = self.choice.seconds(source, target, tensor.shape, tensor.dtype)
            else:
                table, emitter = self._scratch(source.mesh)
                emitter.move(self._value(table, name, source), name, source, target, tensor.shape)
                emitter.flush()
                self._moves[key] = self._total(emitter)
        return self._moves[key]

    # ----------------------------------------------------------------- helpers

    def _mesh(self, strategy: Strategy) -> Layout:
        return strategy.mesh or self.mesh

    def _is_parameter(self, name: str) -> bool:
        return self.micro.tensors[name].kind == "parameter"

    def _scratch(self, mesh: Layout) -> tuple[ValueTable, Emitter]:
        table = ValueTable()
        return table, Emitter(mesh=mesh, table=table)

    def _value(self, table: ValueTable, name: str, layout: TensorLayout) -> str:
        tensor = self.micro.tensors[name]
        label = f"{name}@{layout}{len(table.values)}"
        return table.add(Value(name=label, shape=layout.local_shape(tensor.shape), dtype=tensor.dtype))

    def _total(self, emitter: Emitter) -> float:
        return sum(self.cost(instruction) for instruction in emitter.instructions)
