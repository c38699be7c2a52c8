"""A COMPUTE instruction as a call: its kernel on a device, the kernel's context, and its operands."""

from __future__ import annotations

from executor.device import Device
from executor.kernels import OpContext, Rule, StepCounter
from executor.kernels.fused import FusedRun
from plans.program import GroupProgram, Instruction

__all__ = ["operands_of", "prepared"]


def prepared(
    instruction: Instruction, group: GroupProgram, rank: int, micro_batch: int, counter: StepCounter, device: Device
) -> tuple[Rule, OpContext]:
    """The rule of an instruction for one rank and micro-batch, and its context.

    Args:
        instruction: a COMPUTE instruction, not "load", which reads what the interpreter is fed.
        group: group of the rank.
        rank: rank of all.
        micro_batch: number of the block that the instruction is in.
        counter: of the rank's steps.
        device: device of the rank.

    Raises:
        TwofoldError: an unknown call.
    """
    first = group.values[instruction.outputs[0]]
    number, count = instruction.attrs.get("slice", (0, 1))
    context = OpContext(
        rank=rank, mesh=instruction.mesh or group.mesh, shape=first.shape, dtype=first.dtype,
        shares=first.shares is not None, counter=counter, micro_batch=micro_batch * count + number,
        device=device.torch_device, can_assert=device.own.can_assert,
    )  # fmt: skip
    if instruction.call == "fused":
        return FusedRun(instruction, group.values, context, device.rule_of), context
    return device.rule_of(instruction.call), context


def operands_of(instruction: Instruction) -> tuple[str, ...]:
    """The names of the values that its rule takes: the inputs, and the values changed in place."""
    changes = instruction.call in ("accumulate", "store") or instruction.attrs.get("adds", False)
    return (*instruction.inputs, *instruction.outputs) if changes else instruction.inputs
