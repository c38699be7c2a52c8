"""Lowers the forward of one chunk of the graph to a body, and names its tensors in both bodies.

The inputs of each operator are redistributed to the layouts of its strategy, once per (tensor, target layout). See
`plans.lower.backward` for the other body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from plans.layout import Layout, TensorLayout
from plans.lower.chunk_plan import ChunkPlan, StageBoundary, fed_layout, is_recomputed
from plans.lower.completed import completed_parameters
from plans.lower.emit import Emitter, ValueTable, value_name
from plans.lower.statistic import gather_statistic, kept_values
from plans.model.graph import Graph, Operator
from plans.operators import OperatorSpec
from plans.program import ConstantPlacement, Instruction, Kind, Scope, Value

__all__ = ["LOSSES", "ChunkLowering", "Placed"]

LOSSES = frozenset({"l1_loss", "mse_loss", "cross_entropy", "mean_loss"})

Placed = tuple[TensorLayout, str]
"""A layout and the value that holds a tensor in it."""


@dataclass(slots=True)
class ChunkLowering:
    """Lowers stage `number` of `plan`; `micro` is the graph of one micro-batch.

    `arriving` and `leaving` are the borders whose reading and making stage this is; `homes` gives each parameter's
    layout, `reduced` the partial axes that its gradient keeps until it is reduced, `accumulators` the value that it is
    accumulated in. `returned` has gradients that exist when the backward begins. `joins`: whether calls that can add
    their gradient to the others of a step do so, without a separate instruction.
    """

    plan: ChunkPlan
    micro: Graph
    number: int
    table: ValueTable
    arriving: tuple[StageBoundary, ...]
    leaving: tuple[StageBoundary, ...]
    homes: Mapping[str, TensorLayout]
    reduced: Mapping[str, TensorLayout]
    accumulators: Mapping[str, Value]
    placed: dict[str, list[Placed]] = field(default_factory=dict)
    makers: dict[str, Instruction] = field(default_factory=dict)
    senders: dict[str, Instruction] = field(default_factory=dict)
    statistics: dict[str, str] = field(default_factory=dict)
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    returned: dict[str, Placed] = field(default_factory=dict)
    joins: bool = True
    shared: frozenset[str] | None = None
    mine: list[Operator] | None = None

    @property
    def mesh(self) -> Layout:
        """The stage's mesh."""
        return self.plan.stages[self.number].mesh

    def operators(self) -> list[Operator]:
        """The chunk's operators in graph order."""
        if self.mine is None:
            names = set(self.plan.stages[self.number].operators)
            self.mine = [operator for operator in self.micro.operators if operator.name in names]
        return self.mine

    def mesh_of(self, operator: Operator) -> Layout:
        """The mesh of an operator's strategy."""
        return self.plan.strategy(operator).mesh or self.mesh

    def name_of(self, tensor: str, layout: TensorLayout) -> str:
        """The name of the value that holds `tensor` in `layout`."""
        return value_name(self.label(tensor), layout, self.mesh)

    def label(self, tensor: str) -> str:
        """The name of a tensor in names of values.

        The tensor's name; with the stage's number where another stage on the same ranks makes or holds it too.
        """
        if self.shared is None:
            self.shared = self._find_shared()
        return f"{tensor}.stage{self.number}" if tensor in self.shared else tensor

    def _find_shared(self) -> frozenset[str]:
        """The tensors that another stage on these ranks also uses and this one does not compute."""
        ranks, found = set(self.mesh.rank_list), set[str]()
        for number, stage in enumerate(self.plan.stages):
            if number != self.number and set(stage.mesh.rank_list) == ranks:
                found.update(*_touched(self.micro, stage.operators))
        return frozenset(found - _touched(self.micro, self.plan.stages[self.number].operators)[1])

    # ------------------------------------------------------------------ forward

    def forward(self, send: Callable[[Emitter, StageBoundary, str], None]) -> list[Instruction]:
        """The forward body; `send` writes the SEND of a border tensor as soon as it is made."""
        emitter = Emitter(mesh=self.mesh, table=self.table)
        for border in self.arriving:
            name = self.name_of(border.tensor, border.target)
            self.placed.setdefault(border.tensor, []).append((border.target, name))
            emitter.pending[name] = f"token:{border.crossing()}.recv"
        for operator in self.operators():
            spec = self.micro.spec(operator)
            self._forward_operator(emitter, operator, spec)
            for border in self.leaving:
                if border.tensor in operator.outputs:
                    send(emitter, border, self.obtain(emitter, border.tensor, border.source))
        emitter.flush()
        self._note_makers(emitter.instructions)
        return emitter.instructions

    def _note_makers(self, instructions: Sequence[Instruction]) -> None:
        """Note the producer of each value, and which values are dropped: those of recomputed operators, those computed
        from dropped values, and those computed from a weight that lives within a body.
        """
        self.senders |= {send.name: send for send in instructions if send.kind is Kind.SEND}
        for instruction in instructions:
            again = instruction.part == "F" and is_recomputed(self.plan, self.micro, instruction.operator)
            if instruction.part == "C":
                again = any(self._is_dropped(name) for name in self.sources(instruction))
            for name in instruction.outputs:
                self.makers[name] = instruction
                if again:
                    self.dropped.add(name)

    def _is_dropped(self, name: str) -> bool:
        return name in self.dropped or self.table[name].scope is Scope.BODY

    def sources(self, instruction: Instruction) -> tuple[str, ...]:
        """The values that an instruction of the forward reads; a transfer inside the stage reads in its SEND."""
        return (self.senders[instruction.name] if instruction.kind is Kind.RECV else instruction).inputs

    def _forward_operator(self, emitter: Emitter, operator: Operator, spec: OperatorSpec) -> None:
        mesh, assignment = self.mesh_of(operator), self.plan.strategy(operator).dims
        inputs = tuple(
            self.obtain(emitter, name, spec.input_layout(index, mesh, assignment))
            for index, name in enumerate(operator.inputs)
        )
        if statistic := gather_statistic(emitter, operator, spec, mesh, assignment, inputs):
            inputs = (*inputs, statistic)
            self.statistics[operator.name] = statistic
        outputs = []
        for index, name in enumerate(operator.outputs):
            tensor, layout = self.micro.tensors[name], spec.output_layout(index, mesh, assignment)
            outputs.append(
                self.table.add(
                    Value(
                        name=self.name_of(name, layout), shape=layout.local_shape(tensor.shape), dtype=tensor.dtype,
                        role="activation", shares=inputs[0] if spec.aliases else None,
                    )
                )
            )  # fmt: skip
            self.placed.setdefault(name, []).append((layout, outputs[-1]))
        kept = kept_values(emitter, operator, spec, mesh, assignment, self.table[inputs[0]].dtype) if inputs else ()
        self.kept[operator.name] = kept
        kept += tuple(inputs[index] for index in spec.updated)
        emitter.compute(
            f"{operator.name}.F", f"{operator.kind}.forward", "F", inputs, (*outputs, *kept), operator=operator.name,
            flops=spec.flops // spec.local_fraction(mesh, assignment), mesh=mesh, attrs=self.attributes(operator, spec),
        )  # fmt: skip
        self._hand_on(emitter, operator, spec)

    def _hand_on(self, emitter: Emitter, operator: Operator, spec: OperatorSpec) -> None:
        """Convert an output to the strategy's `out` layout, from which its readers start."""
        for index, name in enumerate(operator.outputs):
            layout = self.plan.strategy(operator).output_layout(spec, index, self.mesh_of(operator))
            self.obtain(emitter, name, layout)
            self.placed[name].sort(key=lambda placed: not placed[0].same_placement(layout))

    def attributes(self, operator: Operator, spec: OperatorSpec) -> dict[str, object]:
        """The attributes of an operator's calls."""
        attrs: dict[str, object] = dict(operator.attrs)
        assignment = self.plan.strategy(operator).dims
        if operator.kind in LOSSES:
            terms = self.micro.tensors[operator.inputs[:2][-1]]  # the labels, where there are any
            attrs["count"] = terms.num_elements  # of the full micro-batch: local parts add up to the mean
        return attrs | spec.local_attrs(assignment)

    def obtain(self, emitter: Emitter, name: str, target: TensorLayout) -> str:
        """The value that holds tensor `name` in layout `target`, redistributed if necessary."""
        found = self.placed.setdefault(name, [])
        for layout, value in found:
            if layout.same_placement(target):
                return value
        tensor = self.micro.tensors[name]
        if tensor.kind == "input" and (not found or self.plan.full_batch):
            value = self._load(emitter, name, target)
        elif tensor.kind == "parameter" and not found:
            found.append((self.homes[name], name))
            return self.obtain(emitter, name, target)
        elif tensor.kind == "constant":
            value = self._keep(name, target)
        else:
            made, source = found[0]
            role = {"input": "input", "parameter": "weight"}.get(tensor.kind, "activation")
            value = emitter.move(source, self.label(name), made, target, tensor.shape, role=role)
        found.append((target, value))
        return value

    def _keep(self, name: str, target: TensorLayout) -> str:
        """Keep a constant in this layout: every rank can cut its part from the full value."""
        tensor = self.micro.tensors[name]
        kept = Value(
            name=self.name_of(name, target), shape=target.local_shape(tensor.shape), dtype=tensor.dtype,
            scope=Scope.KEPT, role="weight",
        )  # fmt: skip
        self.table.constants[self.table.add(kept)] = ConstantPlacement(
            name=name, shape=tensor.shape, layout=target, value=kept.name, is_updated=name in self.micro.updated
        )
        return kept.name

    def _load(self, emitter: Emitter, name: str, target: TensorLayout) -> str:
        """Take the rows of the micro-batch from the rank's input, which is the full batch or its part."""
        tensor, found = self.micro.tensors[name], self.placed[name]
        layout, source = target, "full"
        if not self.plan.full_batch:
            layout, source = fed_layout(self.mesh, tensor.shape), "local"
        value = self.table.add(
            Value(
                name=self.name_of(name, layout), shape=layout.local_shape(tensor.shape), dtype=tensor.dtype,
                role="input",
            )
        )  # fmt: skip
        attrs = {"tensor": name, "layout": layout, "shape": tensor.shape, "source": source}
        emitter.compute(f"{value}.load", "load", "L", (), (value,), attrs=attrs)
        if layout.same_placement(target):
            return value
        found.append((layout, value))
        return emitter.move(value, self.label(name), layout, target, tensor.shape, role="input")

    def completed(self) -> list[tuple[str, str]]:
        """See `completed_parameters`."""
        return completed_parameters(self.micro, self.operators())

    def is_parameter(self, name: str) -> bool:
        """Whether a tensor is a parameter."""
        return self.micro.tensors[name].kind == "parameter"


@lru_cache(maxsize=256)
def _touched(graph: Graph, operators: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """The tensors that these operators read or write."""
    by_name = graph.by_name
    found = [by_name[name] for name in operators]
    return (
        frozenset(name for operator in found for name in operator.inputs),
        frozenset(name for operator in found for name in operator.outputs),
    )
