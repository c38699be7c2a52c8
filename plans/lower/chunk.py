"""One chunk of the graph, lowered to a forward body and a backward body (whole, or split into input and weight parts).

Forward: each operator's inputs are brought to the layouts its strategy asks for, once per (tensor, target layout).
Backward: operators in reverse; the gradients of a tensor are summed per layout before they are redistributed, so that
several readers cost one reduction. Input gradients come before weight gradients, whose work then hides the reduction.
What a recomputed operator made is made again just before the backward needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from plans.graph import Graph, Operator
from plans.layout import Layout, TensorLayout
from plans.lower.emit import Emitter, ValueTable
from plans.operators import OperatorSpec
from plans.plan import Plan
from plans.program import Instruction, Scope, Value

__all__ = ["LOSSES", "Border", "ChunkLowering"]

LOSSES = frozenset({"l1_loss", "mse_loss", "cross_entropy"})

Placed = tuple[TensorLayout, str]
"""A layout and the value that holds a tensor in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """A tensor that crosses from one stage to a later one.

    `source` is the (summed) layout on the making stage, `target` the layout in which the reading stage wants it.
    """

    tensor: str
    from_stage: int
    to_stage: int
    source: TensorLayout
    target: TensorLayout


@dataclass(slots=True)
class ChunkLowering:
    """Lowers stage `number` of `plan`; `micro` is the graph of one micro-batch.

    `arriving` and `leaving` are the borders whose reading and making stage this is; `homes` gives each parameter's
    layout, `reduced` the partial axes that its gradient keeps until the end of the step.
    """

    plan: Plan
    micro: Graph
    number: int
    table: ValueTable
    arriving: tuple[Border, ...]
    leaving: tuple[Border, ...]
    homes: Mapping[str, TensorLayout]
    reduced: Mapping[str, TensorLayout]
    placed: dict[str, list[Placed]] = field(default_factory=dict)
    makers: dict[str, Instruction] = field(default_factory=dict)
    tensor_of: dict[str, str] = field(default_factory=dict)

    @property
    def mesh(self) -> Layout:
        """The stage's mesh."""
        return self.plan.stages[self.number].mesh

    def operators(self) -> list[Operator]:
        """The chunk's operators in graph order."""
        mine = set(self.plan.stages[self.number].operators)
        return [operator for operator in self.micro.operators if operator.name in mine]

    def mesh_of(self, operator: Operator) -> Layout:
        """The mesh that an operator's strategy speaks of."""
        return self.plan.strategy(operator).mesh or self.mesh

    # ------------------------------------------------------------------ forward

    def forward(self, send: Callable[[Emitter, Border, str], None]) -> list[Instruction]:
        """The forward body; `send` writes the SEND of a border tensor as soon as it is made."""
        emitter = Emitter(mesh=self.mesh, table=self.table)
        for border in self.arriving:
            name = f"{border.tensor}@{border.target}"
            self.placed.setdefault(border.tensor, []).append((border.target, name))
            emitter.pending[name] = f"token:{self.crossing(border)}.recv"
        for operator in self.operators():
            spec = self.micro.spec(operator)
            self._forward_operator(emitter, operator, spec)
            for border in self.leaving:
                if border.tensor in operator.outputs:
                    send(emitter, border, self.obtain(emitter, border.tensor, border.source))
        emitter.flush()
        for instruction in emitter.instructions:
            for name in instruction.outputs:
                self.makers[name] = instruction
        return emitter.instructions

    def _forward_operator(self, emitter: Emitter, operator: Operator, spec: OperatorSpec) -> None:
        mesh, assignment = self.mesh_of(operator), self.plan.strategy(operator).dims
        inputs = tuple(
            self.obtain(emitter, name, spec.input_layout(index, mesh, assignment))
            for index, name in enumerate(operator.inputs)
        )
        outputs = []
        for index, name in enumerate(operator.outputs):
            tensor, layout = self.micro.tensors[name], spec.output_layout(index, mesh, assignment)
            outputs.append(
                self.table.add(
                    Value(
                        name=f"{name}@{layout}", shape=layout.local_shape(tensor.shape), dtype=tensor.dtype,
                        role="activation", shares=inputs[0] if spec.aliases else None,
                    )
                )
            )  # fmt: skip
            self.placed.setdefault(name, []).append((layout, outputs[-1]))
            self.tensor_of[outputs[-1]] = name
        emitter.compute(
            f"{operator.name}.F", f"{operator.kind}.forward", "F", inputs, tuple(outputs), operator=operator.name,
            flops=spec.flops // spec.local_fraction(mesh, assignment), mesh=mesh, attrs=self._attrs(operator, spec),
        )  # fmt: skip

    def _attrs(self, operator: Operator, spec: OperatorSpec) -> dict[str, object]:
        attrs: dict[str, object] = dict(operator.attrs)
        assignment = self.plan.strategy(operator).dims
        if operator.kind in LOSSES:
            labels = self.micro.tensors[operator.inputs[1]]
            attrs["count"] = labels.num_elements  # of the whole micro-batch: local parts add up to the mean
        if spec.additive and (axes := tuple(axis for dim in spec.contracted for axis in assignment.get(dim, ()))):
            attrs["bias_axes"] = axes
        return attrs

    def obtain(self, emitter: Emitter, name: str, target: TensorLayout) -> str:
        """The value that holds tensor `name` in layout `target`, redistributed when it is not there yet."""
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
        else:
            made, source = found[0]
            role = {"input": "input", "parameter": "weight"}.get(tensor.kind, "activation")
            value = emitter.move(source, name, made, target, tensor.shape, role=role)
        found.append((target, value))
        self.tensor_of[value] = name
        return value

    def _load(self, emitter: Emitter, name: str, target: TensorLayout) -> str:
        """Take the micro-batch's rows of what the rank is fed: the whole batch, or its own part of it."""
        tensor, found = self.micro.tensors[name], self.placed[name]
        layout, source = target, "full"
        if not self.plan.full_batch:
            layout, source = fed_layout(self.mesh, tensor.shape), "local"
        value = self.table.add(
            Value(name=f"{name}@{layout}", shape=layout.local_shape(tensor.shape), dtype=tensor.dtype, role="input")
        )
        attrs = {"tensor": name, "layout": layout, "shape": tensor.shape, "source": source}
        emitter.compute(f"{value}.load", "load", "L", (), (value,), attrs=attrs)
        if layout.same_placement(target):
            return value
        found.append((layout, value))
        return emitter.move(value, name, layout, target, tensor.shape, role="input")

    # ----------------------------------------------------------------- backward

    def backward(
        self,
        send: Callable[[Emitter, Border, str], None],
        reduce: Callable[[Emitter, str], None] | None = None,
        *,
        split: bool = False,
    ) -> tuple[list[Instruction], list[Instruction]]:
        """The backward body (or, `split`, the input-gradient and the weight-gradient body).

        `send` writes the SEND of a border tensor's gradient; `reduce`, given for the last micro-batch, starts the
        reduction of a parameter's gradient as soon as it is whole.
        """
        return _Backward(chunk=self, send=send, reduce=reduce, split=split).run()

    def crossing(self, border: Border, gradient: bool = False) -> str:
        """The name of a border's transfer."""
        ends = (border.to_stage, border.from_stage) if gradient else (border.from_stage, border.to_stage)
        return f"{'d:' if gradient else ''}{border.tensor}:{ends[0]}>{ends[1]}"


@dataclass(slots=True)
class _Backward:
    chunk: ChunkLowering
    send: Callable[[Emitter, Border, str], None]
    reduce: Callable[[Emitter, str], None] | None
    split: bool
    contributions: dict[str, list[Placed]] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    final: dict[str, list[Placed]] = field(default_factory=dict)

    def run(self) -> tuple[list[Instruction], list[Instruction]]:
        chunk = self.chunk
        main = Emitter(mesh=chunk.mesh, table=chunk.table)
        late = Emitter(mesh=chunk.mesh, table=chunk.table) if self.split else main
        wanted = chunk.micro.needs_gradient()
        operators = chunk.operators()
        for border in chunk.leaving:
            if border.tensor in wanted:
                name = f"{chunk.crossing(border, gradient=True)}@{border.source}"
                self.contributions.setdefault(border.tensor, []).append((border.source, name))
                main.pending[name] = f"token:{chunk.crossing(border, gradient=True)}.recv"
        for operator in operators:
            for index in chunk.micro.spec(operator).gradients:
                name = operator.inputs[index]
                if name in wanted:
                    table = self.uses if chunk.micro.tensors[name].kind == "parameter" else self.waiting
                    table[name] = table.get(name, 0) + 1
        for operator in reversed(operators):
            spec = chunk.micro.spec(operator)
            wanted_here = [index for index in sorted(spec.gradients) if operator.inputs[index] in wanted]
            weights = [i for i in wanted_here if chunk.micro.tensors[operator.inputs[i]].kind == "parameter"]
            for index in [i for i in wanted_here if i not in weights]:
                self._gradient(main, operator, spec, index, "B")
            for index in weights:
                self._gradient(late, operator, spec, index, "W")
        main.flush()
        late.flush()
        return main.instructions, late.instructions if self.split else []

    def _gradient(self, emitter: Emitter, operator: Operator, spec: OperatorSpec, index: int, part: str) -> None:
        chunk, name = self.chunk, operator.inputs[index]
        mesh, assignment = chunk.mesh_of(operator), chunk.plan.strategy(operator).dims
        tensor, layout = chunk.micro.tensors[name], spec.gradient_layout(index, mesh, assignment)
        operands = [] if operator.kind in LOSSES else [self._finished(emitter, operator, spec, mesh)]
        operands += [self._saved(emitter, operator, spec, need) for need in spec.gradients[index].needs]
        value = chunk.table.add(
            Value(
                name=f"d:{name}.{operator.name}.{index}", shape=layout.local_shape(tensor.shape), dtype=tensor.dtype,
                role="gradient" if part == "W" else "activation",
                shares=operands[0] if spec.aliases else None,
            )
        )  # fmt: skip
        attrs = chunk._attrs(operator, spec)
        if operator.kind in LOSSES:
            attrs["scale"] = 1.0 / chunk.plan.num_micro_batches
        emitter.compute(
            f"{operator.name}.{part}{index}", f"{operator.kind}.grad{index}", part, tuple(operands), (value,),
            operator=operator.name, mesh=mesh, attrs=attrs,
            flops=spec.gradients[index].flops // spec.local_fraction(mesh, assignment),
        )  # fmt: skip
        if part == "W":
            self._accumulate(emitter, name, layout, value)
        else:
            self.contributions.setdefault(name, []).append((layout, value))
            self.waiting[name] -= 1
            if not self.waiting[name]:
                self._complete(emitter, name)

    def _saved(self, emitter: Emitter, operator: Operator, spec: OperatorSpec, need: str) -> str:
        """The operand "x<i>" or "y<i>" of the forward, made again when it was dropped."""
        chunk, index = self.chunk, int(need[1:])
        mesh, assignment = chunk.mesh_of(operator), chunk.plan.strategy(operator).dims
        if need[0] == "x":
            layout, name = spec.input_layout(index, mesh, assignment), operator.inputs[index]
        else:
            layout, name = spec.output_layout(index, mesh, assignment), operator.outputs[index]
        value = next(value for found, value in chunk.placed[name] if found.same_placement(layout))
        return self._ensure(emitter, value)

    def _ensure(self, emitter: Emitter, value: str) -> str:
        chunk = self.chunk
        dropped = {
            name for operator in chunk.operators() if operator.name in chunk.plan.recompute for name in operator.outputs
        }
        if value not in chunk.makers or chunk.tensor_of.get(value, _stem(value)) not in dropped:
            return value
        if value not in self.again:
            maker = chunk.makers[value]
            inputs = tuple(self._ensure(emitter, name) for name in maker.inputs)
            outputs = []
            for name in maker.outputs:
                old = chunk.table[name]
                shares = inputs[0] if old.shares is not None else None
                outputs.append(chunk.table.add(replace(old, name=f"{name}~again", shares=shares)))
                self.again[name] = outputs[-1]
            token = None if maker.token is None else emitter.token(f"{maker.name}~again")
            part = "R" if maker.part == "F" else maker.part
            emitter.add(
                replace(
                    maker, name=f"{maker.name}~again", inputs=inputs, outputs=tuple(outputs), token=token, part=part
                )
            )
        return self.again[value]

    def _finished(self, emitter: Emitter, operator: Operator, spec: OperatorSpec, mesh: Layout) -> str:
        """The gradient of the operator's output in the layout its strategy asks for."""
        name = operator.outputs[0]
        target = spec.output_layout(0, mesh, self.chunk.plan.strategy(operator).dims).without_partial()
        if name not in self.final:  # only readers in other stages: nothing completed it yet
            self._complete(emitter, name)
        return next(value for layout, value in self.final[name] if layout.same_placement(target))

    def _complete(self, emitter: Emitter, name: str) -> None:
        """All readers have contributed: sum what has equal layout, redistribute, add up, send on."""
        chunk = self.chunk
        maker = chunk.micro.producers().get(name)
        mine = maker is not None and maker.name in chunk.plan.stages[chunk.number].operators
        if mine:
            assert maker is not None
            spec, mesh = chunk.micro.spec(maker), chunk.mesh_of(maker)
            index = maker.outputs.index(name)
            target = spec.output_layout(index, mesh, chunk.plan.strategy(maker).dims).without_partial()
        else:
            target = next(border.target for border in chunk.arriving if border.tensor == name)
        value = self._sum(emitter, name, self.contributions[name], target)
        self.final[name] = [(target, value)]
        for border in chunk.arriving:
            if border.tensor == name:
                self.send(emitter, border, value)

    def _sum(self, emitter: Emitter, name: str, found: list[Placed], target: TensorLayout) -> str:
        shape = self.chunk.micro.tensors[name].shape
        groups: dict[TensorLayout, list[str]] = {}
        for layout, value in found:
            groups.setdefault(layout, []).append(value)
        results = []
        for number, (layout, values) in enumerate(groups.items()):
            label = f"d:{name}" if number == 0 else f"d:{name}#{number}"
            results.append(emitter.move(self._add(emitter, label, values), label, layout, target, shape))
        return self._add(emitter, f"d:{name}.total", results)

    def _add(self, emitter: Emitter, label: str, values: list[str]) -> str:
        if len(values) == 1:
            return values[0]
        like = self.chunk.table[values[0]]
        total = self.chunk.table.add(replace(like, name=f"{label}.sum{len(values)}", shares=None))
        emitter.compute(f"{total}", "sum", "B", tuple(values), (total,))
        return total

    def _accumulate(self, emitter: Emitter, name: str, layout: TensorLayout, value: str) -> None:
        chunk, target = self.chunk, self.chunk.reduced[name]
        tensor = chunk.micro.tensors[name]
        count = self.uses[name]
        value = emitter.move(value, f"d:{name}.use{count}", layout, target, tensor.shape, role="gradient")
        total = chunk.table.add(
            Value(
                name=f"g:{name}",
                shape=target.local_shape(tensor.shape),
                dtype=tensor.dtype,
                scope=Scope.STEP,
                role="gradient",
            )
        )
        emitter.compute(f"g:{name}.use{count}", "accumulate", "W", (value,), (total,))
        self.uses[name] -= 1
        if not self.uses[name] and self.reduce is not None:
            self.reduce(emitter, name)


def fed_layout(mesh: Layout, shape: tuple[int, ...]) -> TensorLayout:
    """How a batch arrives that every rank of a stage reads its own part of: dim 0 split over all axes."""
    layout = TensorLayout(mesh=mesh, dims=(mesh.alias_name, *(() for _ in shape[1:])))
    layout.check(shape, "an input that is fed in parts (full_batch=False)")
    return layout


def _stem(value: str) -> str:
    return value.split("@", 1)[0]
