"""A group's program spelled out: one step as a sequence of runs of compute, issues of communication, and waits.

The sequence is the same on every rank of a group and in every step. Bodies are looked at once, however many blocks
share them.
"""

from __future__ import annotations

from collections.abc import Sequence

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


_Line = tuple[int, int, "str | None", bool, "int | None"]
"""A communication or wait of a body: its place there, ISSUE or WAIT, its token, whether every micro-batch has one of
its own, and the micro-batch where that is not the block's."""


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
    return offset, WAIT if is_wait else ISSUE, token, by_micro_batch, micro_batch


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
        segments, runs, ids, unwaited = self.segments, self.runs, self.ids, self.unwaited
        slots: dict[tuple[str | None, int | None], int] = {}
        issued: dict[int, int] = {}
        compiled: dict[int, _CompiledBody] = {}
        calls: list[str] = []
        parts: list[str] = []
        begin = free = 0  # where a block begins, and what stands after the last communication or wait
        for block in group.blocks:
            label, here = block.label, block.micro_batch
            body = compiled.get(id(block.body))
            if body is None:
                body = compiled[id(block.body)] = _CompiledBody(block.body, group, label)
            self.instructions += body.instructions
            ids += [label + end for end in body.ends]
            calls += body.calls
            parts += body.parts
            for offset, kind, token, by_micro_batch, micro_batch in body.lines:
                position = begin + offset
                if free < position:
                    segments.append((RUN, len(runs), 0))
                    runs.append((free, position))
                free = position + 1
                if token is None:
                    segments.append((ISSUE, position, -1))
                    continue
                key = token, (here if micro_batch is None else micro_batch) if by_micro_batch else None
                slot = slots.get(key)
                if slot is None:
                    if kind == WAIT and group.values[token].scope is not Scope.KEPT:
                        raise TwofoldError(
                            f"{ids[position]!r} waits for token {token!r}, which nothing before it in the step issues"
                        )
                    slot = slots[key] = len(slots)
                segments.append((kind, position, slot))
                if kind == WAIT:
                    unwaited.discard(issued.get(slot, -1))
                else:
                    issued[slot] = position
                    unwaited.add(position)
            begin += len(body.ends)
        if free < begin:
            segments.append((RUN, len(runs), 0))
            runs.append((free, begin))
        self.num_slots = len(slots)
        self.name = names.numbers(self.ids, calls, parts)
