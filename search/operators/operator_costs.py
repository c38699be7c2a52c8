"""What one operator costs by itself: its kernels, its parameters, and bringing its output to where it is handed on.

Prices come from the very instructions that lowering would write: forward and gradients once per micro-batch, gradient
reduction, weight gather and update once per step (each micro-batch anew, where the optimizer's level says so).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from plans.layout import Layout, TensorLayout
from plans.lower.chunk import LOSSES
from plans.lower.emit import Emitter, ValueTable, channel_of
from plans.lower.optimizer import padded_shard, shard_axes
from plans.lower.statistic import gather_statistic
from plans.model.graph import Graph, Operator
from plans.plan import Optimizer, Strategy
from plans.program import Instruction, Kind, Value
from search.operators.moves import Moves, MoveSeconds

__all__ = ["ComputeSeconds", "InstructionCost", "OperatorCosts", "OwnSeconds", "seconds_of_least_bytes"]

InstructionCost = Callable[[Instruction], float]
"""Seconds of one instruction on the machine, as the search counts them.

It may have methods: `group_key(mesh, axes)`, where sets of axes with equal keys make collectives of equal cost, and
`parts(instruction)`, the seconds on the host and on the device.
"""

_Operand = tuple[tuple[int, ...], str]
"""Shape and dtype of what a rank has of a tensor."""


class ComputeSeconds(NamedTuple):
    """Forward and gradients of one micro-batch, and those of their kernels on the host and on the device."""

    total_s: float
    host_s: float
    device_s: float


class OwnSeconds(NamedTuple):
    """What an operator takes by itself in a step: compute, all else, and its compute on the host and on the device."""

    compute_s: float
    others_s: float
    host_s: float
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCosts:
    """Seconds of single operators on a mesh.

    Args:
        micro: the graph of one micro-batch.
        mesh: the stage's mesh; a strategy may have its own.
        num_micro_batches: how often forward and backward run in a step.
        optimizer: what happens to the parameters.
        cost: seconds of an instruction.
        moves: seconds of redistributions.
    """

    micro: Graph
    mesh: Layout
    num_micro_batches: int
    optimizer: Optimizer
    cost: InstructionCost
    moves: Moves

    def own_s(self, operator: Operator, strategy: Strategy) -> OwnSeconds:
        """All that the operator takes by itself in a step."""
        times, compute = self.num_micro_batches, self.compute_parts_s(operator, strategy)
        others_s = self.step_s(operator, strategy) + self.hand_on_s(operator, strategy)
        return OwnSeconds(times * compute.total_s, others_s, times * compute.host_s, times * compute.device_s)

    # ------------------------------------------------------------------ kernels

    def compute_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds of an operator's forward and gradients for one micro-batch."""
        return self.compute_parts_s(operator, strategy).total_s

    def compute_parts_s(self, operator: Operator, strategy: Strategy) -> ComputeSeconds:
        """Seconds of `compute_s`, and those of its kernels on the host and on the device (0 if `cost` has no parts)."""
        spec, mesh, dims = self.micro.spec(operator), strategy.mesh or self.mesh, strategy.dims
        inputs = [self._local(name, spec.input_layout(index, mesh, dims)) for index, name in enumerate(operator.inputs)]
        outputs = [
            self._local(name, spec.output_layout(index, mesh, dims)) for index, name in enumerate(operator.outputs)
        ]
        saved = {f"x{index}": each for index, each in enumerate(inputs)}
        saved |= {f"y{index}": each for index, each in enumerate(outputs)}
        total_s = host_s = device_s = 0.0
        if spec.statistic_layout(mesh, dims) is not None:
            total_s, saved["s0"] = self._statistic(operator, strategy, inputs)
            inputs.append(saved["s0"])
        parts_of = getattr(self.cost, "parts", None)
        for kernel in self._kernels(operator, strategy, inputs, outputs, saved):
            total_s += self.cost(kernel)
            if parts_of is not None:
                host, device = parts_of(kernel)
                host_s, device_s = host_s + host, device_s + device
        return ComputeSeconds(total_s, host_s, device_s)

    def _statistic(self, operator: Operator, strategy: Strategy, inputs: Sequence[_Operand]) -> tuple[float, _Operand]:
        """Seconds to gather the statistic of an operator whose dim is split, and what is gathered."""
        spec, mesh = self.micro.spec(operator), strategy.mesh or self.mesh
        table, emitter = _scratch(mesh)
        names = [table.add(Value(name=f"x{at}", shape=shape, dtype=dtype)) for at, (shape, dtype) in enumerate(inputs)]
        made = gather_statistic(emitter, operator, spec, mesh, strategy.dims, names)
        assert made is not None
        emitter.flush()
        return _total_s(self.cost, emitter), (table[made].shape, table[made].dtype)

    def _kernels(
        self, operator: Operator, strategy: Strategy, inputs: Sequence[_Operand], outputs: Sequence[_Operand],
        saved: dict[str, _Operand],
    ) -> Iterator[Instruction]:  # fmt: skip
        """The forward, the gradients of what it reads, then those of its parameters; `saved` as in `Gradient.needs`."""
        spec, mesh, attrs = self.micro.spec(operator), strategy.mesh or self.mesh, dict(operator.attrs)
        fraction = spec.local_fraction(mesh, strategy.dims)

        def kernel(call: str, part: str, operands: Sequence[_Operand], flops: int) -> Instruction:
            return Instruction(
                name=operator.name, kind=Kind.COMPUTE, call=f"{operator.kind}.{call}", part=part, flops=flops,
                shapes=tuple(shape for shape, _ in operands), dtype=operands[0][1], attrs=attrs,
            )  # fmt: skip

        yield kernel("forward", "F", [*inputs, *outputs], spec.flops // fraction)
        indices = self.micro.trained_inputs(operator)
        weights = [index for index in indices if self._is_parameter(operator.inputs[index])]
        groups = [(group, "B") for group in spec.gradient_groups(set(indices) - set(weights))]
        for group, part in groups + [(group, "W") for group in spec.gradient_groups(weights)]:
            given = [] if operator.kind in LOSSES else outputs[:1]
            needs = [saved[need] for need in spec.gradient_needs(group) if need in saved]
            made = [
                self._local(operator.inputs[index], spec.gradient_layout(index, mesh, strategy.dims)) for index in group
            ]
            flops = sum(spec.gradients[index].flops for index in group) // fraction
            yield kernel(f"grad{''.join(map(str, group))}", part, [*given, *needs, *made], flops)

    # --------------------------------------------------------------- parameters

    def step_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds per step for an operator's parameters, each alone: gathers, reductions, update."""
        spec, mesh = self.micro.spec(operator), strategy.mesh or self.mesh
        table, emitter = _scratch(mesh)
        again: list[tuple[int, Instruction]] = []
        for index, name in enumerate(operator.inputs):
            if self._is_parameter(name) and index in spec.gradients:
                home = spec.input_layout(index, mesh, strategy.dims)
                summed_over = spec.gradient_layout(index, mesh, strategy.dims).partial
                again += self._emit_update(table, emitter, name, home, summed_over)
        again_s = 0.0
        for times, instruction in again:
            again_s += times * self.cost(instruction)
        return again_s + _total_s(self.cost, emitter)

    def _emit_update(
        self, table: ValueTable, emitter: Emitter, name: str, home: TensorLayout, summed_over: tuple[str, ...]
    ) -> list[tuple[int, Instruction]]:
        """Write what a parameter takes in a step; collectives that a step has more often, and how often beside once."""
        tensor, mesh, optimizer = self.micro.tensors[name], emitter.mesh, self.optimizer
        shape, dtype = self._local(name, home)
        weight = kept = table.add(Value(name=f"{name}@{home}{len(table.values)}", shape=shape, dtype=dtype))
        again = []

        def collective(call: str, over: tuple[str, ...], other: str, times: int) -> None:
            if mesh.size(over) > 1:
                full = table[weight]
                emitter.add(
                    Instruction(
                        name=f"{name}.{call}", kind=Kind.COLLECTIVE, call=call, part="C", mesh=mesh, axes=over,
                        channel=channel_of(mesh, over), message_bytes=full.span_bytes, dtype=full.dtype,
                        shapes=(full.shape, table[other].shape),
                    )
                )  # fmt: skip
                again.append((times - 1, emitter.instructions[-1]))

        if optimizer.parallel_level >= 1 and tensor.size_bytes >= optimizer.threshold_bytes:
            over = shard_axes(home, summed_over)
            part = (padded_shard(math.prod(shape), mesh.size(over)),)
            kept = table.add(Value(name=f"{name}#shard", shape=part, dtype=dtype))
            times = self.num_micro_batches
            collective("all_gather_flat", over, kept, 2 * times if optimizer.parallel_level == 3 else 1)
            collective("reduce_scatter_flat", summed_over, kept, times if optimizer.reduces_each else 1)
            if mesh.size(over) > mesh.size(summed_over):
                emitter.compute(f"{name}.slice", "flat_slice", "U", (weight,), (kept,))
        else:
            collective("all_reduce", summed_over, weight, 1)
        emitter.compute(f"{name}.U", f"{optimizer.kind}.update", "U", (kept, kept), (kept,))
        return again

    # ------------------------------------------------------------- handing on

    def hand_on_s(self, operator: Operator, strategy: Strategy) -> float:
        """Seconds per step to bring an operator's output to the layout its strategy hands it on in, and back."""
        if strategy.out is None:
            return 0.0
        spec, mesh, name = self.micro.spec(operator), strategy.mesh or self.mesh, operator.outputs[0]
        made, handed_on = spec.output_layout(0, mesh, strategy.dims), strategy.output_layout(spec, 0, mesh)
        back_s = self.move_s(handed_on, made.without_partial(), name) if name in self.micro.needs_gradient() else 0.0
        return self.num_micro_batches * (self.move_s(made, handed_on, name) + back_s)

    def move_s(self, source: TensorLayout, target: TensorLayout, name: str) -> float:
        """Seconds to bring a tensor from one layout to another."""
        tensor = self.micro.tensors[name]
        return self.moves.price(source, target, tensor.shape, tensor.dtype)

    def _local(self, name: str, layout: TensorLayout) -> _Operand:
        tensor = self.micro.tensors[name]
        return layout.local_shape(tensor.shape), tensor.dtype

    def _is_parameter(self, name: str) -> bool:
        return self.micro.tensors[name].kind == "parameter"


def seconds_of_least_bytes(cost: InstructionCost) -> MoveSeconds:
    """What redistributions take by the steps that move least bytes."""

    def seconds(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> float:
        table, emitter = _scratch(source.mesh)
        value = table.add(Value(name="before", shape=source.local_shape(shape), dtype=dtype))
        emitter.move(value, "moved", source, target, shape)
        emitter.flush()
        return _total_s(cost, emitter)

    return seconds


def _scratch(mesh: Layout) -> tuple[ValueTable, Emitter]:
    table = ValueTable()
    return table, Emitter(mesh=mesh, table=table)


def _total_s(cost: InstructionCost, emitter: Emitter) -> float:
    return sum(cost(instruction) for instruction in emitter.instructions)
