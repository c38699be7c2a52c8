"""Which operator or parameter each message of a program serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plans.program import GroupProgram, Instruction, Kind, Program, Scope
from simulator.timeline.labels import read_label

__all__ = ["Message", "messages_of_operators", "messages_of_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Communication that a rank takes part in.

    Args:
        instruction: of the program.
        is_forward: whether it belongs to the forward of a micro-batch.
        count: how often a step has it.
        serves: the values that it brings, and those made of them.
    """

    instruction: Instruction
    is_forward: bool = False
    count: int = 1
    serves: frozenset[str] = frozenset()


def messages_of_operators(program: Program) -> Mapping[str, Sequence[Message]]:
    """Operator -> messages of one micro-batch that it reads, or that it produced."""
    found: dict[str, list[Message]] = {}
    last = program.num_micro_batches - 1
    for group in program.groups:
        reader, maker = _neighbours(group)
        for block, instruction in group.walk():
            label = read_label(block.label)
            # the other bodies of the first and last differ by work per step
            wanted = last if label.action == "F" else 0
            if instruction.kind not in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV) or label.micro_batch != wanted:
                continue
            if any(group.values[name].scope is not Scope.MICRO for name in instruction.outputs):
                continue
            owner = next((reader[name] for name in instruction.outputs if name in reader), "")
            owner = owner or next((maker[name] for name in instruction.inputs if name in maker), "")
            found.setdefault(owner, []).append(Message(instruction=instruction, is_forward=label.action == "F"))
    return found


def _neighbours(group: GroupProgram) -> tuple[dict[str, str], dict[str, str]]:
    """value -> the first operator that reads it, value -> the operator that made it; both through moves and sums."""
    reader: dict[str, str] = {}
    maker: dict[str, str] = {}
    instructions = list({id(block.body): block.body for block in group.blocks}.values())
    flat = [instruction for body in instructions for instruction in body.instructions]
    for instruction in flat:
        if instruction.kind is Kind.COMPUTE and instruction.operator and instruction.call != "slice":
            for name in instruction.inputs:
                reader.setdefault(name, instruction.operator)
            for name in instruction.outputs:
                maker.setdefault(name, instruction.operator)
    for _ in range(4):  # moves follow one another at most a few times
        for instruction in flat:
            for name in instruction.inputs:
                if name not in reader and (
                    owner := next((reader[output] for output in instruction.outputs if output in reader), "")
                ):
                    reader[name] = owner
            for name in instruction.outputs:
                if name not in maker and (
                    owner := next((maker[each] for each in instruction.inputs if each in maker), "")
                ):
                    maker[name] = owner
    return reader, maker


def messages_of_step(group: GroupProgram) -> list[Message]:
    """The communication of a group's parameters in a step."""
    derived: dict[str, set[str]] = {}
    moves: dict[str, tuple[Instruction, int]] = {}
    for _, instruction in group.walk():
        if instruction.call in ("flat_unpack", "accumulate"):
            for name in instruction.inputs:
                derived.setdefault(name, set()).update(instruction.outputs)
        if instruction.kind is Kind.COLLECTIVE and any(
            group.values[name].scope is not Scope.MICRO for name in instruction.outputs
        ):
            _, count = moves.get(instruction.name, (instruction, 0))
            moves[instruction.name] = (instruction, count + 1)
    result = []
    for instruction, count in moves.values():
        served = {*instruction.inputs, *instruction.outputs}
        reached = set(instruction.outputs)
        while reached:
            reached = {after for name in reached for after in derived.get(name, ())} - served
            served |= reached
        result.append(Message(instruction=instruction, count=count, serves=frozenset(served)))
    return result
