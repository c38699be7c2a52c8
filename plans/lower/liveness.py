"""Liveness: the last instruction that reads a value frees it.

For one micro-batch, bodies run in a known order (receive, forward, receive, backward), so the last use of a value is
found by walking this sequence once. A value with the scope of a body is freed in the body that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plans.program import Instruction, Scope, Value

__all__ = ["with_frees"]


def with_frees(bodies: Sequence[Sequence[Instruction]], values: Mapping[str, Value]) -> list[list[Instruction]]:
    """The same bodies with `frees` filled in for values of a micro-batch, and for those that live within a body.

    A value that shares another's memory keeps that one alive; what a communication reads stays alive until its
    WAIT, if that is in one of the bodies. Values that live for the step are freed where instructions already free them.
    """
    flat = [instruction for body in bodies for instruction in body]
    number_of = [number for number, body in enumerate(bodies) for _ in body]
    reads_of_token = {instruction.token: instruction.inputs for instruction in flat if instruction.token is not None}
    issued_in = {(line.token, number) for line, number in zip(flat, number_of, strict=True) if line.token is not None}
    last: dict[tuple[str, int | None], int] = {}
    for position, instruction in enumerate(flat):
        here, sent = number_of[position], reads_of_token.get(instruction.waits or "", ())
        used = [(name, True) for name in (*instruction.inputs, *instruction.outputs)]
        for name, is_here in (*used, *((name, (instruction.waits, here) in issued_in) for name in sent)):
            for owner in _owners(name, values):
                scope = values[owner].scope
                if scope is Scope.MICRO:
                    last[owner, None] = position
                elif scope is Scope.BODY and is_here:
                    last[owner, here] = position
    frees: dict[int, list[str]] = {}
    for (name, _), position in last.items():
        frees.setdefault(position, []).append(name)
    result, position = [], 0
    for body in bodies:
        lines = []
        for instruction in body:
            more = frees.get(position)
            lines.append(replace(instruction, frees=(*instruction.frees, *more)) if more else instruction)
            position += 1
        result.append(lines)
    return result


def _owners(name: str, values: Mapping[str, Value]) -> Sequence[str]:
    if values[name].shares is None:
        return (name,)
    owners = [name]
    while (base := values[owners[-1]].shares) is not None:
        owners.append(base)
    return owners
