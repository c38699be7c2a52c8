"""A group's program spelled out: one step as a sequence of runs of compute, issues of communication, and waits.

The sequence is the same on every rank of a group and in every step. Bodies are looked at once, however many blocks
share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plans.errors import TwofoldError
from plans.program import Body, GroupProgram, Instruction, Kind, Scope

__all__ = ["ISSUE", "RUN", "WAIT", "Names", "Order"]

RUN, ISSUE, WAIT = 0, 1, 2
"""Segments: (RUN, number of the run, 0), (ISSUE, position, slot), (WAIT, position, slot); slot -1 blocks."""


class Names:
    """The (id, call, part) triples of spans, numbered in order of their first appearance."""

    def __init__(self) -> None:
        self.table: dict[tuple[str, str, str], int] = {}

    def number(self, id_: str, call: str, part: str) -> int:
        """The number of a triple."""
        table = self.table
        return table.setdefault((id_, call, part), len(table))

    def numbers(self, ids: Sequence[str], calls: Sequence[str], parts: Sequence[str]) -> list[int]:
        """The numbers of many triples."""
        table, first = self.table, len(self.table)
        added = dict(zip(zip(ids, calls, parts, strict=True), range(first, first + len(ids)), strict=True))
        if len(added) == len(ids) and table.keys().isdisjoint(added):
            table.update(added)
            return list(range(first, first + len(ids)))
        return [table.setdefault(triple, len(table)) for triple in zip(ids, calls, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class _Line:
    """A communication or wait of a body: where it stands, and the token that it issues or waits for, if any."""

    offset: int
    instruction: Instruction
    is_wait: bool
    token: str | None
    by_micro_batch: bool
    micro_batch: int | None


class _CompiledBody:
    """What the blocks of a body share."""

    __slots__ = ("calls", "ends", "instructions", "lines", "parts")

    def __init__(self, body: Body, group: GroupProgram, label: str) -> None:
        self.instructions = body.instructions
        self.ends = [f"/{instruction.name}" for instruction in body.instructions]
        self.calls = [instruction.call for instruction in body.instructions]
        self.parts = [instruction.part for instruction in body.instructions]
        self.lines = [
            _line(offset, instruction, group, label)
            for offset, instruction in enumerate(body.instructions)
            if instruction.kind is not Kind.COMPUTE
        ]


def _line(offset: int, instruction: Instruction, group: GroupProgram, label: str) -> _Line:
    is_wait = instruction.kind is Kind.WAIT
    token = instruction.waits if is_wait else instruction.token
    if (is_wait or token is not None) and (token is None or token not in group.values):
        raise TwofoldError(
            f"'{label}/{instruction.name}' names the token {token!r}, which is not among the values of its group"
        )
    by_micro_batch = token is not None and group.values[token].scope is Scope.MICRO
    micro_batch = instruction.attrs.get("micro_batch") if is_wait else None
    return _Line(offset, instruction, is_wait, token, by_micro_batch, micro_batch)


class Order:
    """One step of `group`.

    Attributes:
        instructions, ids: one entry per instruction of the step.
        name: number of the span that each makes, in `names`.
        segments: see `ISSUE`.
        runs: (first, stop) positions of each run of consecutive COMPUTE instructions.
        num_slots: how many tokens there are.
        unwaited: positions of communications that no later WAIT of the step takes.

    Raises:
        TwofoldError: a WAIT for a token that was never issued.
    """

    def __init__(self, group: GroupProgram, names: Names) -> None:
        self.group = group
        self.instructions: list[Instruction] = []
        self.ids: list[str] = []
        self.segments: list[tuple[int, int, int]] = []
        self.runs: list[tuple[int, int]] = []
        self.unwaited: set[int] = set()
        slots: dict[tuple[str | None, int | None], int] = {}
        issued: dict[int, int] = {}
        compiled: dict[int, _CompiledBody] = {}
        calls: list[str] = []
        parts: list[str] = []
        free = 0  # the position after the last communication or wait
        begin = 0
        for block in group.blocks:
            label, micro_batch = block.label, block.micro_batch
            body = compiled.get(id(block.body))
            if body is None:
                body = compiled[id(block.body)] = _CompiledBody(block.body, group, label)
            self.instructions += body.instructions
            self.ids += map(label.__add__, body.ends)
            calls += body.calls
            parts += body.parts
            for line in body.lines:
                position = begin + line.offset
                if free < position:
                    self._run(free, position)
                free = position + 1
                key = line.token, (
                    None if not line.by_micro_batch else micro_batch if line.micro_batch is None else line.micro_batch
                )
                if line.is_wait:
                    if key not in slots and group.values[str(line.token)].scope is not Scope.KEPT:
                        raise TwofoldError(
                            f"{self.ids[position]!r} waits for token {line.token!r}, which nothing before it in the "
                            "step issues"
                        )
                    slot = slots.setdefault(key, len(slots))
                    self.segments.append((WAIT, position, slot))
                    self.unwaited.discard(issued.get(slot, -1))
                elif line.token is None:
                    self.segments.append((ISSUE, position, -1))
                else:
                    slot = slots.setdefault(key, len(slots))
                    self.segments.append((ISSUE, position, slot))
                    issued[slot] = position
                    self.unwaited.add(position)
            begin += len(body.instructions)
        if free < begin:
            self._run(free, begin)
        self.num_slots = len(slots)
        self.name = names.numbers(self.ids, calls, parts)

    def _run(self, first: int, stop: int) -> None:
        self.segments.append((RUN, len(self.runs), 0))
        self.runs.append((first, stop))
