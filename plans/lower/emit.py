"""Writes instructions: values, redistribution steps, lazy waits.

An `Emitter` fills one body. Communication is issued with a token, and its WAIT is written just before the first
instruction that reads its result, so that everything in between overlaps with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from plans.layout import Layout, TensorLayout
from plans.model.graph import itemsize
from plans.program import ConstantPlacement, Instruction, Kind, Scope, Value
from plans.redistribution import Step, StepKind, pieces, redistribute

__all__ = [
    "Emitter",
    "ValueTable",
    "Ways",
    "channel_of",
    "least_bytes",
    "step_instructions",
    "transfer_pair",
    "value_name",
]

Ways = Callable[[TensorLayout, TensorLayout, tuple[int, ...], str], tuple[Step, ...]]
"""The steps from a source to a target layout, for a full shape and a dtype; all layouts on the way are even."""


def least_bytes(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> tuple[Step, ...]:
    """The redistribution steps with the fewest bytes in which every rank's part always has the same shape, as `Value`
    requires."""
    return redistribute(source, target, shape, itemsize=itemsize(dtype), even=True)


@dataclass(slots=True)
class ValueTable:
    """The values of one group, each entered once; `constants` are those that no instruction produces.

    `ways` chooses the redistribution steps between two layouts, `loss_scale` is the value with the scale of the loss,
    if there is one.
    """

    values: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, ConstantPlacement] = field(default_factory=dict)
    ways: Ways = least_bytes
    loss_scale: tuple[str, ...] = ()

    def add(self, value: Value) -> str:
        """Enter a value; a second entry of the same name must be equal."""
        known = self.values.setdefault(value.name, value)
        assert known == value, (known, value)
        return value.name

    def __getitem__(self, name: str) -> Value:
        return self.values[name]


@dataclass(slots=True)
class Emitter:
    """Fills one body of a group on `mesh`.

    `pending` maps a value that is still under way to its token, `sent` holds the tokens of what was sent.
    """

    mesh: Layout
    table: ValueTable
    instructions: list[Instruction] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    made: set[str] = field(default_factory=set)

    def taken(self) -> list[Instruction]:
        """What was written since it was taken last."""
        found, self.instructions = self.instructions, []
        return found

    def add(self, instruction: Instruction) -> None:
        """Append an instruction after the waits for its inputs."""
        self.wait_for(instruction.inputs)
        self.instructions.append(instruction)
        self.made.update(instruction.outputs)
        if instruction.token is not None and instruction.kind is not Kind.SEND:
            for name in instruction.outputs:
                self.pending[name] = instruction.token

    def wait_for(self, names: tuple[str, ...]) -> None:
        """Write the WAITs for those of `names` that are in flight."""
        for name in names:
            if token := self.pending.pop(name, None):
                self._wait(token, (name,))

    def _wait(self, token: str, names: tuple[str, ...] = ()) -> None:
        self.instructions.append(
            Instruction(name=f"{token}.wait", kind=Kind.WAIT, call="wait", part="C", inputs=names, waits=token)
        )

    def flush(self) -> None:
        """Wait for all communication in flight."""
        self.wait_for(tuple(self.pending))
        while self.sent:
            self._wait(self.sent.pop(0))

    def compute(
        self,
        name: str,
        call: str,
        part: str,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        **rest: object,
    ) -> None:
        """Append a COMPUTE instruction; the shapes its price depends on are those of its operands."""
        shapes = tuple(self.table[value].shape for value in (*inputs, *outputs))
        dtype = self.table[(*inputs, *outputs)[0]].dtype
        self.add(
            Instruction(
                name=name, kind=Kind.COMPUTE, call=call, part=part, inputs=inputs, outputs=outputs,
                shapes=shapes, dtype=dtype, **rest,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def token(self, name: str, scope: Scope = Scope.MICRO) -> str:
        """A new token value."""
        return self.table.add(Value(name=f"token:{name}", shape=(), scope=scope, role="token"))

    def move(
        self,
        value: str,
        tensor: str,
        source: TensorLayout,
        target: TensorLayout,
        shape: tuple[int, ...],
        role: str = "activation",
        operator: str = "",
    ) -> str:
        """Bring `value` from layout `source` to `target`; returns the value that holds the result.

        `tensor` names it in instruction and value names.
        """
        if source == target:
            return value
        dtype = self.table[value].dtype
        for step in self.table.ways(source, target, shape, dtype):
            name = value_name(tensor, step.after, self.mesh)
            result = self.table.add(Value(name=name, shape=step.after.local_shape(shape), dtype=dtype, role=role))
            if result not in self.made:  # another target may have passed through here
                self.step(f"{name}.{step.kind}", step, value, result, shape, operator)
            value = result
        return value

    def step(self, name: str, step: Step, value: str, result: str, shape: tuple[int, ...], operator: str = "") -> None:
        """Append the instructions of one redistribution step."""
        before, after, dtype = self.table[value], self.table[result], self.table[value].dtype
        attrs = {"step": step, "shape": shape}
        shapes = (before.shape, after.shape)
        mesh = step.before.mesh
        if step.kind is StepKind.SLICE:
            self.compute(name, "slice", "C", (value,), (result,), operator=operator, attrs=attrs, mesh=mesh)
        elif step.kind is StepKind.TRANSFER:
            self.transfer(name, value, result, step.before, step.after, shape, f"{name}:within", operator)
        else:
            self.add(
                Instruction(
                    name=name, kind=Kind.COLLECTIVE, call=str(step.kind), part="C", operator=operator, inputs=(value,),
                    outputs=(result,), mesh=mesh, axes=step.axes, channel=channel_of(mesh, step.axes),
                    message_bytes=max(before.span_bytes, after.span_bytes), token=self.token(name), shapes=shapes,
                    dtype=dtype, attrs=attrs,
                )
            )  # fmt: skip

    def transfer(
        self,
        name: str,
        value: str,
        result: str,
        source: TensorLayout,
        target: TensorLayout,
        shape: tuple[int, ...],
        channel: str,
        operator: str = "",
    ) -> None:
        """A point-to-point move inside the group: every rank sends and receives."""
        pair = transfer_pair(name, value, result, source, target, shape, self.table[value].dtype, channel)
        send, recv = (replace(line, operator=operator) for line in pair)
        self.table.add(Value(name=str(send.token), shape=(), role="token"))
        self.table.add(Value(name=str(recv.token), shape=(), role="token"))
        self.add(recv)
        self.add(send)
        self.sent.append(str(send.token))


def step_instructions(step: Step, shape: tuple[int, ...], dtype: str) -> list[Instruction]:
    """The instructions of one step alone, including its waits, from which it is priced."""
    table = ValueTable()
    emitter = Emitter(mesh=step.before.mesh, table=table)
    value, result = (
        table.add(Value(name=name, shape=layout.local_shape(shape), dtype=dtype))
        for name, layout in (("before", step.before), ("after", step.after))
    )
    emitter.step("step", step, value, result, shape)
    emitter.flush()
    return emitter.instructions


def value_name(tensor: str, layout: TensorLayout, mesh: Layout) -> str:
    """The name of the value that holds `tensor` in `layout`; it names the layout's mesh where that is not `mesh`."""
    return f"{tensor}@{layout}" if layout.mesh == mesh else f"{tensor}@{layout} on {layout.mesh}"


def channel_of(mesh: Layout, axes: tuple[str, ...]) -> str:
    """The channel of collectives over `axes`: one communicator per set of groups."""
    groups = mesh.groups(axes)
    return f"{'.'.join(axes)}:{groups[0]}"


def transfer_pair(
    name: str,
    value: str,
    result: str,
    source: TensorLayout,
    target: TensorLayout,
    shape: tuple[int, ...],
    dtype: str,
    channel: str,
) -> tuple[Instruction, Instruction]:
    """The SEND and the RECV that bring a tensor from one layout to another, meshes may differ."""
    parts = pieces(source, target, shape)
    common = Instruction(
        name=name, kind=Kind.SEND, call="transfer", part="C", channel=channel,
        message_bytes=parts.most_received * itemsize(dtype), dtype=dtype, pieces=parts,
        transfer=(source, target, shape), attrs={"transfer": name},
    )  # fmt: skip
    send = replace(common, inputs=(value,), token=f"token:{name}.send", shapes=(source.local_shape(shape),))
    recv = replace(
        common, kind=Kind.RECV, outputs=(result,), token=f"token:{name}.recv", shapes=(target.local_shape(shape),)
    )
    return send, recv
