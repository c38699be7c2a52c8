"""The start and the end of a step: gathering weights, reducing gradients, updating.

At optimizer-parallel level 1 a parameter that is large enough lives as a shard of its flattened local weight, cut over
the axes along which its gradient is summed (the data-parallel group): the weight is gathered once at the start of the
step, the gradient is reduce-scattered once at the end, and the update touches the shard only. Other parameters are kept
whole and their gradients are all-reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from plans.graph import Tensor
from plans.layout import Layout, TensorLayout
from plans.lower.emit import Emitter, ValueTable, channel_of
from plans.plan import Optimizer
from plans.program import Instruction, Kind, ParameterHome, Scope, Value

__all__ = ["OptimizerLowering", "padded_shard"]


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
        home, axes = self.homes[tensor.name], self.reduced[tensor.name].partial
        shape = home.local_shape(tensor.shape)
        shard, kept_shape = None, shape
        if self._sharded(tensor):
            kept_shape = (padded_shard(_count(shape), home.mesh.size(axes)),)
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
            shard_axes=axes if shard else (), reduce_axes=axes, states=states,
        )  # fmt: skip

    def _sharded(self, tensor: Tensor) -> bool:
        axes = self.reduced[tensor.name].partial
        size = self.homes[tensor.name].mesh.size(axes)
        return self.optimizer.parallel_level >= 1 and size > 1 and tensor.size_bytes >= self.optimizer.threshold_bytes

    def gathers(self) -> tuple[list[Instruction], dict[str, str]]:
        """The gathers at the start of a step, and for each gathered weight its token."""
        emitter = Emitter(mesh=self.mesh, table=self.table)
        for tensor in self.parameters.values():
            if self._sharded(tensor):
                self._collective(emitter, tensor, "all_gather_flat", f"{tensor.name}#shard", tensor.name)
        return emitter.instructions, dict(emitter.pending)

    def reduce(self, emitter: Emitter, name: str) -> None:
        """Start the reduction of the accumulated gradient of parameter `name`, where one is due."""
        tensor, reduced = self.parameters[name], self.reduced[name]
        if reduced.mesh.size(reduced.partial) <= 1:
            return
        if self._sharded(tensor):
            shard = self.table[f"{name}#shard"]
            result = self.table.add(replace(shard, name=f"g:{name}#shard", scope=Scope.STEP, role="gradient"))
            self._collective(emitter, tensor, "reduce_scatter_flat", f"g:{name}", result)
        else:
            self._collective(emitter, tensor, "all_reduce", f"g:{name}", f"g:{name}")
        self.reducing[name] = emitter.instructions[-1]
        emitter.pending.clear()  # waited for in the closing block

    def _collective(self, emitter: Emitter, tensor: Tensor, call: str, value: str, result: str) -> None:
        home, axes = self.homes[tensor.name], self.reduced[tensor.name].partial
        before, after = self.table[value], self.table[result]
        name = f"{result}.{call}"
        emitter.add(
            Instruction(
                name=name, kind=Kind.COLLECTIVE, call=call, part="C", inputs=(value,), outputs=(result,),
                mesh=home.mesh, axes=axes, channel=channel_of(home.mesh, axes),
                message_bytes=max(before.span_bytes, after.span_bytes),
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
                emitter.pending[instruction.outputs[0]] = str(instruction.token)
                if instruction.outputs[0] != gradient:
                    gradient = instruction.outputs[0]
                    freed.append(gradient)
            if home.shard is not None:
                freed.append(home.weight)
            kept = (home.shard or home.weight, *home.states)
            emitter.compute(
                f"{name}.U", f"{self.optimizer.kind}.update", "U", (kept[0], gradient, *home.states), kept,
                attrs=dict(self.optimizer.settings),
                flops=2 * (1 + len(home.states)) * _count(self.table[kept[0]].shape),
                frees=tuple(freed),
            )  # fmt: skip
        return emitter.instructions


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
