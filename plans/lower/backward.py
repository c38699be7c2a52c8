"""Lowers the backward of one chunk of the graph to one body, or to input and weight gradients apart.

Operators are visited in reverse order. The gradients of a tensor are summed per layout before they are redistributed,
so that several readers cost one reduction. Input gradients come before weight gradients, whose compute then overlaps
with the reduction. The outputs of recomputed operators are recomputed just before the backward needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from plans.layout import Layout, TensorLayout
from plans.lower.chunk import LOSSES, ChunkLowering, Placed
from plans.lower.chunk_plan import StageBoundary
from plans.lower.completed import adds_alike
from plans.lower.emit import Emitter
from plans.lower.reduction import Reduction
from plans.model.graph import Operator
from plans.operators import OperatorSpec
from plans.program import Instruction, Kind, Scope, Value

__all__ = ["ADDING", "lower_backward"]

ADDING = frozenset({"linear.grad1"})
"""Calls that can add their result to an existing value (attrs "adds"): a product takes its result's old value with
it."""


def lower_backward(
    chunk: ChunkLowering,
    send: Callable[[Emitter, StageBoundary, str], None],
    reduction: Reduction,
    *,
    split: bool = False,
) -> tuple[list[Instruction], list[Instruction]]:
    """The backward body of a chunk (or, `split`, the input-gradient and the weight-gradient body).

    Args:
        chunk: the chunk, whose forward has been lowered.
        send: writes the SEND of a border tensor's gradient.
        reduction: runs when a parameter's gradient is complete.
        split: whether weight gradients have a body of their own.
    """
    given = {name: [placed] for name, placed in chunk.returned.items()}
    return _Backward(chunk=chunk, send=send, reduction=reduction, split=split, contributions=given).run()


@dataclass(slots=True)
class _Backward:
    chunk: ChunkLowering
    send: Callable[[Emitter, StageBoundary, str], None]
    reduction: Reduction
    split: bool
    contributions: dict[str, list[Placed]] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    again: dict[str, str] = field(default_factory=dict)
    final: dict[str, list[Placed]] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)

    def run(self) -> tuple[list[Instruction], list[Instruction]]:
        chunk = self.chunk
        main = Emitter(mesh=chunk.mesh, table=chunk.table)
        late = Emitter(mesh=chunk.mesh, table=chunk.table) if self.split else main
        operators = chunk.operators()
        for border in chunk.leaving:
            if border.trained:
                name = f"{border.crossing(gradient=True)}@{border.source}"
                self.contributions.setdefault(border.tensor, []).append((border.source, name))
                main.pending[name] = f"token:{border.crossing(gradient=True)}.recv"
        for operator in operators:
            for index in chunk.micro.trained_inputs(operator):
                name = operator.inputs[index]
                table = self.uses if chunk.is_parameter(name) else self.waiting
                table[name] = table.get(name, 0) + 1
        later = []
        for operator in reversed(operators):
            spec = chunk.micro.spec(operator)
            trained = chunk.micro.trained_inputs(operator)
            weights = {index for index in trained if chunk.is_parameter(operator.inputs[index])}
            # a call makes gradients of both where the backward is one
            parts = (set(trained) - weights, weights) if self.split else (set(trained),)
            begun = len(main.instructions)
            for group in itertools.chain(*(spec.gradient_groups(part) for part in parts)):
                if weights.issuperset(group):
                    later.append((operator, spec, group))
                else:
                    self._gradients(main, operator, spec, group, "B")
            reduces = any(each.kind is Kind.COLLECTIVE for each in main.instructions[begun:])
            if not self.split and (reduces or not self._waits_for_sum(operator for operator, *_ in later)):
                self._weight_gradients(late, later)
        self._weight_gradients(late, later)  # last, so that they find what the input gradients have recomputed
        self.reduction.finish(late)
        main.flush()
        late.flush()
        return main.instructions, late.instructions if self.split else []

    def _waits_for_sum(self, operators: Iterable[Operator]) -> bool:
        """Whether the gradient of an input is still incomplete and will be reduced over ranks."""
        return any(
            self.waiting.get(name) and any(layout.partial for layout, _ in self.contributions.get(name, ()))
            for operator in operators
            for name in operator.inputs
        )

    def _weight_gradients(self, emitter: Emitter, later: list[tuple[Operator, OperatorSpec, tuple[int, ...]]]) -> None:
        while later:
            self._gradients(emitter, *later.pop(0), "W")

    def _gradients(
        self, emitter: Emitter, operator: Operator, spec: OperatorSpec, group: tuple[int, ...], part: str
    ) -> None:
        """One call for the gradients of a group of inputs, usually of one input."""
        chunk = self.chunk
        mesh, assignment = chunk.mesh_of(operator), chunk.plan.strategy(operator).dims
        operands = [] if operator.kind in LOSSES else [self._finished(emitter, operator, spec, mesh)]
        saved = [self._saved(emitter, operator, spec, need) for need in spec.gradient_needs(group)]
        operands += [value for value in saved if value is not None]
        made: list[tuple[str, TensorLayout, str]] = []
        adds = part == "W" and self._adds(operator, spec, group)
        for index in group:
            name = operator.inputs[index]
            tensor, layout = chunk.micro.tensors[name], spec.gradient_layout(index, mesh, assignment)
            is_weight = chunk.is_parameter(name)
            passed = index in spec.passed and not is_weight and chunk.table[operands[0]].dtype == tensor.dtype
            value = Value(
                name=f"d:{name}.{operator.name}.{index}", shape=layout.local_shape(tensor.shape), dtype=tensor.dtype,
                role="gradient" if is_weight else "activation",
                shares=operands[0] if spec.aliases or passed else None,
            )  # fmt: skip
            made.append((name, layout, chunk.table.add(chunk.accumulators[name] if adds else value)))
        attrs = chunk.attributes(operator, spec) | ({"adds": True} if adds else {})
        if operator.kind in LOSSES:
            attrs |= {"scale": 1.0 / chunk.plan.num_slices} | ({"scaled": True} if chunk.table.loss_scale else {})
            operands += chunk.table.loss_scale
        which = "".join(str(index) for index in group)
        emitter.compute(
            f"{operator.name}.{part}{which}", f"{operator.kind}.grad{which}", part, tuple(operands),
            tuple(value for _, _, value in made), operator=operator.name, mesh=mesh, attrs=attrs,
            flops=sum(spec.gradients[index].flops for index in group) // spec.local_fraction(mesh, assignment),
        )  # fmt: skip
        for name, layout, result in made:
            if adds:
                self._added(emitter, name, result)
            elif chunk.is_parameter(name):
                self._accumulate(emitter, name, layout, result)
            else:
                self.contributions.setdefault(name, []).append((layout, result))
                self.waiting[name] -= 1
                if not self.waiting[name]:
                    self._complete(emitter, name)

    def _saved(self, emitter: Emitter, operator: Operator, spec: OperatorSpec, need: str) -> str | None:
        """The operand "x<i>", "y<i>", "s<i>" or "k<i>" of the forward, recomputed when it was dropped.

        None for a statistic or a kept value that the operator's strategy leaves out.
        """
        chunk, index = self.chunk, int(need[1:])
        if need[0] == "k":
            kept = chunk.kept[operator.name]
            return self._ensure(emitter, kept[index]) if index < len(kept) else None
        if need[0] == "s":
            statistic = chunk.statistics.get(operator.name)
            return None if statistic is None else self._ensure(emitter, statistic)
        mesh, assignment = chunk.mesh_of(operator), chunk.plan.strategy(operator).dims
        if need[0] == "x":
            layout, name = spec.input_layout(index, mesh, assignment), operator.inputs[index]
        else:
            layout, name = spec.output_layout(index, mesh, assignment), operator.outputs[index]
        value = next(value for found, value in chunk.placed[name] if found.same_placement(layout))
        return self._ensure(emitter, value)

    def _ensure(self, emitter: Emitter, value: str) -> str:
        """The value, or its recomputed copy if it was dropped."""
        chunk = self.chunk
        if value not in chunk.dropped:
            return value
        if value not in self.again:
            maker = chunk.makers[value]
            inputs = tuple(self._ensure(emitter, name) for name in chunk.sources(maker))
            outputs = []
            for name in maker.outputs:
                old = chunk.table[name]
                shares = inputs[0] if old.shares is not None else None
                outputs.append(chunk.table.add(replace(old, name=f"{name}~again", shares=shares)))
                self.again[name] = outputs[-1]
            name, part = f"{maker.name}~again", "R" if maker.part == "F" else maker.part
            if maker.transfer is not None:
                emitter.transfer(name, inputs[0], outputs[0], *maker.transfer, f"{maker.channel}~again", maker.operator)
            else:
                token = None if maker.token is None else emitter.token(name)
                emitter.add(replace(maker, name=name, inputs=inputs, outputs=tuple(outputs), token=token, part=part))
        return self.again[value]

    def _finished(self, emitter: Emitter, operator: Operator, spec: OperatorSpec, mesh: Layout) -> str:
        """The gradient of the operator's output in the layout that the operator's strategy requires."""
        name = operator.outputs[0]
        target = spec.output_layout(0, mesh, self.chunk.plan.strategy(operator).dims).without_partial()
        if name not in self.final:  # only readers in other stages: nothing completed it yet
            self._complete(emitter, name)
        return next(value for layout, value in self.final[name] if layout.same_placement(target))

    def _complete(self, emitter: Emitter, name: str) -> None:
        """Combine a gradient to which all readers have contributed: sum, redistribute, add, send."""
        chunk = self.chunk
        maker = chunk.micro.producers().get(name)
        if maker is not None and maker.name in chunk.plan.stages[chunk.number].operators:
            spec, mesh, strategy = chunk.micro.spec(maker), chunk.mesh_of(maker), chunk.plan.strategy(maker)
            index = maker.outputs.index(name)
            summed_layout = strategy.output_layout(spec, index, mesh).without_partial()
            target = spec.output_layout(index, mesh, strategy.dims).without_partial()
        else:
            arriving = [border.target for border in chunk.arriving if border.tensor == name]
            if not arriving:  # the operator is lowered by itself, its maker takes the gradient from here
                return
            summed_layout = target = arriving[0]
        value = self._sum(emitter, name, self.contributions[name], summed_layout)
        shape, about = chunk.micro.tensors[name].shape, f"d:{chunk.label(name)}.handed on"
        value = emitter.move(value, about, summed_layout, target, shape)
        self.final[name] = [(target, value)]
        for border in chunk.arriving:
            if border.tensor == name:
                self.send(emitter, border, value)

    def _sum(self, emitter: Emitter, name: str, found: list[Placed], target: TensorLayout) -> str:
        shape = self.chunk.micro.tensors[name].shape
        groups: dict[TensorLayout, list[str]] = {}
        for layout, value in found:
            groups.setdefault(layout, []).append(value)
        results, about = [], f"d:{self.chunk.label(name)}"
        for number, (layout, values) in enumerate(groups.items()):
            label = about if number == 0 else f"{about}#{number}"
            results.append(emitter.move(self._add(emitter, label, values), label, layout, target, shape))
        return self._add(emitter, f"{about}.total", results)

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
        value = emitter.move(value, f"d:{chunk.label(name)}.use{count}", layout, target, tensor.shape, role="gradient")
        if self._is_accumulated(name):
            total = chunk.table.add(chunk.accumulators[name])
            emitter.compute(f"{total}.use{count}", "accumulate", "W", (value,), (total,))
            value = total
        self._added(emitter, name, value)

    def _is_accumulated(self, name: str) -> bool:
        """Whether a gradient of this parameter is accumulated; a body's only gradient is reduced directly."""
        several = self.chunk.plan.interleave > 1 or self.uses[name] > 1 or name in self.added
        return several or self.chunk.accumulators[name].scope is not Scope.BODY

    def _adds(self, operator: Operator, spec: OperatorSpec, group: tuple[int, ...]) -> bool:
        """Whether the call for a gradient adds to the gradients of other readers itself."""
        chunk, index = self.chunk, group[0]
        if not chunk.joins or len(group) > 1 or f"{operator.kind}.grad{index}" not in ADDING:
            return False
        name = operator.inputs[index]
        layout = spec.gradient_layout(index, chunk.mesh_of(operator), chunk.plan.strategy(operator).dims)
        only = chunk.plan.num_slices == 1 and self.uses[name] == 1 and name not in self.added
        same = adds_alike(chunk.accumulators[name].dtype, chunk.micro.tensors[name].dtype, is_only=only)
        return same and layout == chunk.reduced[name] and self._is_accumulated(name)

    def _added(self, emitter: Emitter, name: str, value: str) -> None:
        """Note that one more gradient of a parameter is complete; `value` holds the sum so far."""
        self.added.add(name)
        self.uses[name] -= 1
        if not self.uses[name]:
            self.reduction.add(emitter, name, value)
