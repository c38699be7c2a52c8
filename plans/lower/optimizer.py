"""The start and the end of a step: gathering weights, reducing gradients, updating.

At optimizer-parallel level 1 a parameter that is large enough lives as a shard of its flattened local weight, cut over
all axes along which ranks hold the same weight. The weight is gathered once at the start of the step, and the update
touches the shard only. Its gradient is reduce-scattered once over those of the axes along which it is a partial sum
(the batch is split there); along the others every rank has the same gradient already and keeps its part of it. Other
parameters are kept whole and their gradients are all-reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from plans.graph import Tensor
from plans.layout import Layout, TensorLayout
from plans.lower.emit import Emitter, ValueTable, channel_of
from plans.plan import Optimizer
from plans.program import Instruction, Kind, ParameterHome, Scope, Value

__all__ = ["OptimizerLowering", "padded_shard", "shard_axes"]


def padded_shard(num_elements: int, num_shards: int) -> int:
    """Elements of one shard of a flattened tensor that is padded with zeros to a multiple of the number of shards."""
    return -(-num_elements // num_shards)


@dataclass(slots=True)
class OptimizerLowering:
    """Gathers, reductions and updates of the parameters of one group.

    `homes` gives each parameter's layout and `reduced` the layout of its accumulated gradient.
    """

    optimizer: Optimizer
    mesh: Layout
    table: ValueTable
    parameters: Mapping[str, Tensor]
    homes: Mapping[str, TensorLayout]
    reduced: Mapping[str, TensorLayout]
    reducing: dict[str, Instruction] = field(default_factory=dict)

    def places(self) -> tuple[ParameterHome, ...]:
        """Enter the weights, shards and states, and say where they are."""
        return tuple(self._place(tensor) for tensor in self.parameters.values())

    def _place(self, tensor: Tensor) -> ParameterHome:
        home = self.homes[tensor.name]
        shape = home.local_shape(tensor.shape)
        axes = self._shard_axes(tensor)
        shard, kept_shape = None, shape
        if axes:
            kept_shape = (padded_shard(math.prod(shape), home.mesh.size(axes)),)
            shard = self.table.add(
                Value(
                    name=f"{tensor.name}#shard", shape=kept_shape, dtype=tensor.dtype, scope=Scope.KEPT, role="weight"
                )
            )
        scope = Scope.STEP if shard else Scope.KEPT
        self.table.add(Value(name=tensor.name, shape=shape, dtype=tensor.dtype, scope=scope, role="weight"))
        states = tuple(
            self.table.add(
                Value(
                    name=f"{tensor.name}#state{number}",
                    shape=kept_shape,
                    dtype=tensor.dtype,
                    scope=Scope.KEPT,
                    role="optimizer",
                )
            )
            for number in range(self.optimizer.num_states)
        )
        return ParameterHome(
            name=tensor.name, shape=tensor.shape, dtype=tensor.dtype, layout=home, weight=tensor.name, shard=shard,
            shard_axes=axes, reduce_axes=self.reduced[tensor.name].partial, states=states,
        )  # fmt: skip

    def _shard_axes(self, tensor: Tensor) -> tuple[str, ...]:
        """The axes over which a parameter is sharded, those of its gradient's partial sums first; () for none."""
        if self.optimizer.parallel_level < 1 or tensor.size_bytes < self.optimizer.threshold_bytes:
            return ()
        return shard_axes(self.homes[tensor.name], self.reduced[tensor.name].partial)

    def gathers(self) -> tuple[list[Instruction], dict[str, str]]:
        """The gathers at the start of a step, and for each gathered weight its token."""
        emitter = Emitter(mesh=self.mesh, table=self.table)
        for tensor in self.parameters.values():
            if axes := self._shard_axes(tensor):
                self._collective(emitter, tensor, "all_gather_flat", f"{tensor.name}#shard", tensor.name, axes)
        return emitter.instructions, dict(emitter.pending)

    def reduce(self, emitter: Emitter, name: str) -> None:
        """Start the reduction of the accumulated gradient of parameter `name`, where one is due."""
        tensor, reduced = self.parameters[name], self.reduced[name]
        summed, gradient = reduced.partial, f"g:{name}"
        if reduced.mesh.size(summed) <= 1:
            return
        if axes := self._shard_axes(tensor):
            result = self._flat_gradient(name, f"g:{name}#sum", _left(reduced.mesh, axes, summed))
            self._collective(emitter, tensor, "reduce_scatter_flat", gradient, result, summed)
        else:
            self._collective(emitter, tensor, "all_reduce", gradient, gradient, summed)
        self.reducing[name] = emitter.instructions[-1]
        emitter.pending.clear()  # waited for in the closing block

    def _flat_gradient(self, name: str, label: str, num_shards: int) -> str:
        """Enter a flat value that holds `num_shards` shards of a gradient."""
        shard = self.table[f"{name}#shard"]
        shape = (num_shards * shard.shape[0],)
        return self.table.add(replace(shard, name=label, shape=shape, scope=Scope.STEP, role="gradient"))

    def _collective(
        self, emitter: Emitter, tensor: Tensor, call: str, value: str, result: str, axes: tuple[str, ...]
    ) -> None:
        mesh = self.homes[tensor.name].mesh
        before, after = self.table[value], self.table[result]
        name = f"{result}.{call}"
        emitter.add(
            Instruction(
                name=name, kind=Kind.COLLECTIVE, call=call, part="C", inputs=(value,), outputs=(result,), mesh=mesh,
                axes=axes, channel=channel_of(mesh, axes), message_bytes=max(before.span_bytes, after.span_bytes),
                token=emitter.token(name, Scope.STEP), shapes=(before.shape, after.shape), dtype=tensor.dtype,
            )
        )  # fmt: skip

    def updates(self, homes: Iterable[ParameterHome]) -> list[Instruction]:
        """The end of a step: wait for each gradient, update, free."""
        emitter = Emitter(mesh=self.mesh, table=self.table)
        for home in homes:
            name, gradient = home.name, f"g:{home.name}"
            freed = [gradient]
            if (instruction := self.reducing.get(name)) is not None:
                gradient = instruction.outputs[0]
                emitter.pending[gradient] = str(instruction.token)
                freed.append(gradient)
            same = tuple(axis for axis in home.shard_axes if axis not in home.reduce_axes)
            if same:
                part = self._flat_gradient(name, f"g:{name}#part", 1)
                attrs = {"axes": same}
                emitter.compute(
                    f"{part}.slice", "flat_slice", "U", (gradient,), (part,), mesh=home.layout.mesh, attrs=attrs
                )
                gradient = part
                freed.append(part)
            if home.shard is not None:
                freed.append(home.weight)
            kept = (home.shard or home.weight, *home.states)
            emitter.compute(
                f"{name}.U", f"{self.optimizer.kind}.update", "U", (kept[0], gradient, *home.states), kept,
                attrs=dict(self.optimizer.settings),
                flops=2 * (1 + len(home.states)) * math.prod(self.table[kept[0]].shape),
                frees=tuple(dict.fromkeys(freed)),
            )  # fmt: skip
        return emitter.instructions


def shard_axes(home: TensorLayout, partial: tuple[str, ...]) -> tuple[str, ...]:
    """All axes along which ranks hold the same weight, those in `partial` first; () when there are none."""
    same = tuple(axis for axis in home.replicated if axis not in partial and home.mesh.size((axis,)) > 1)
    axes = (*partial, *same)
    return axes if home.mesh.size(axes) > 1 else ()


def _left(mesh: Layout, axes: tuple[str, ...], without: tuple[str, ...]) -> int:
    return mesh.size(axis for axis in axes if axis not in without)
