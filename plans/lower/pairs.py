"""Two actions at once: the blocks of a forward and of a backward, split into parts that alternate.

Each body is split where it would wait for communication that it issued itself. A part of the forward is followed by a
part of the backward, so that one communicates while the other computes. The parts keep the label and the micro-batch of
their action: an id still names one instruction, but several blocks may share a label.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import zip_longest

from plans.program import Block, Body, Instruction, Kind, Scope, Value

__all__ = ["Pairing", "is_part", "units_of"]


def units_of(num_actions: int, pairs: Collection[int]) -> list[tuple[int, ...]]:
    """The positions of an order's actions, grouped: actions that run at the same time are one unit.

    >>> units_of(5, {1})
    [(0,), (1, 2), (3,), (4,)]
    """
    second = {place + 1 for place in pairs}
    return [(place, place + 1) if place in pairs else (place,) for place in range(num_actions) if place not in second]


_PART = ".part"


def is_part(body: Body) -> bool:
    """Whether a body is a part of an action that alternates with another one."""
    return _PART in body.name


class Pairing:
    """Interleaves the blocks of paired actions; `values` are those of the group."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = values
        self._parts: dict[tuple[int, int], list[tuple[bool, Body]]] = {}

    def blocks(self, forward: Block, backward: Block) -> list[Block]:
        """The parts of both in turn; the two one after the other if they would share values of their bodies."""
        key = id(forward.body), id(backward.body)
        if key not in self._parts:
            self._parts[key] = self._cut(forward.body, backward.body)
        result = []
        for is_backward, body in self._parts[key]:
            own = backward if is_backward else forward
            result.append(Block(label=own.label, micro_batch=own.micro_batch, body=body))
        return result

    def _cut(self, forward: Body, backward: Body) -> list[tuple[bool, Body]]:
        # The same weight, gathered for both: there is room for one only.
        if self._made_within(forward) & self._made_within(backward):
            return [(False, forward), (True, backward)]
        parts = []
        for turns in zip_longest(_parts(forward), _parts(backward)):
            parts += [(is_backward, part) for is_backward, part in enumerate(turns) if part is not None]
        return [(bool(is_backward), part) for is_backward, part in parts]

    def _made_within(self, body: Body) -> set[str]:
        """The values that live no longer than the body."""
        made = {name for instruction in body.instructions for name in instruction.outputs}
        made |= {instruction.token for instruction in body.instructions if instruction.token is not None}
        return {name for name in made if self._values[name].scope is Scope.BODY}


def _parts(body: Body) -> list[Body]:
    turns: list[list[Instruction]] = [[]]
    issued: set[str | None] = set()
    was_own = False
    for instruction in body.instructions:
        is_own = instruction.kind is Kind.WAIT and instruction.waits in issued
        if is_own and not was_own:
            turns.append([])
        turns[-1].append(instruction)
        issued.add(instruction.token)
        was_own = is_own
    if len(turns) == 1:
        return [body]
    return [Body(name=f"{body.name}{_PART}{number}", instructions=tuple(turn)) for number, turn in enumerate(turns)]
