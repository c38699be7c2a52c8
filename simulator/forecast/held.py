"""What a rank holds over a step, from its symbolic bodies: the peak of its program in the order of its instructions.

A body takes and gives back memory as it runs; of that only two figures matter to the others: what it leaves behind, and
the most it needs on the way. An allocator follows the order in which work is issued, so no times are needed, and the
peak is that of `simulator.timeline.memory.peak_of_order` of the lowered program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plans.lower.symbolic.rank import Cells, PieceUse
from plans.lower.symbolic.template import PieceTemplate
from plans.program import Instruction, Scope, Value
from plans.schedules import Schedule
from plans.schedules.variants import VARIANTS, variant_of_rows
from simulator.forecast.symbolic import LoweredRank, Repeat

__all__ = ["Change", "RankMemory"]

Roles = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Change:
    """What a part of a program does to a rank's memory.

    Args:
        net: role -> bytes that it leaves behind.
        peak_bytes: the most above what was there before.
        at_peak: role -> bytes above what was there before, then.
    """

    net: Roles = field(default_factory=dict)
    peak_bytes: int = 0
    at_peak: Roles = field(default_factory=dict)

    @property
    def net_bytes(self) -> int:
        """Of all roles."""
        return sum(self.net.values())

    def then(self, other: Change) -> Change:
        """This one and `other` after it.

        >>> once = Change({"activation": 2}, 5, {"activation": 5})
        >>> once.then(once)
        Change(net={'activation': 4}, peak_bytes=7, at_peak={'activation': 7})
        """
        net = _sum(self.net, other.net)
        later = self.net_bytes + other.peak_bytes
        if later > self.peak_bytes:
            return Change(net, later, _sum(self.net, other.at_peak))
        return Change(net, self.peak_bytes, self.at_peak)

    def times(self, count: int) -> Change:
        """`count` times in a row: the most in the first or in the last of them."""
        if count <= 1:
            return self if count else Change()
        before = {role: (count - 1) * size for role, size in self.net.items()}
        last = sum(before.values()) + self.peak_bytes
        net = {role: count * size for role, size in self.net.items()}
        if last > self.peak_bytes:
            return Change(net, last, _sum(before, self.at_peak))
        return Change(net, self.peak_bytes, self.at_peak)


def _sum(one: Roles, other: Roles) -> dict[str, int]:
    found = dict(one)
    for role, size in other.items():
        found[role] = found.get(role, 0) + size
    return found


class _Counter:
    """Adds changes up, one after the other."""

    def __init__(self) -> None:
        self._net: dict[str, int] = {}
        self._total = 0
        self._peak = 0
        self._at_peak: dict[str, int] = {}

    def add(self, role: str, size: int) -> None:
        """Bytes are taken, or given back where `size` is negative."""
        self._net[role] = self._net.get(role, 0) + size
        self._total += size
        if self._total > self._peak:
            self._peak, self._at_peak = self._total, dict(self._net)

    def change(self) -> Change:
        """All of it."""
        return Change({role: size for role, size in self._net.items() if size}, self._peak, self._at_peak)


_BLOCK_NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)")


class RankMemory:
    """The memory of a pipeline rank.

    Args:
        rank: lowered.
        pieces: template of each piece, with the numbers of its places.
        arrival_bytes: of the tensor between stages, and of its gradient.
    """

    def __init__(
        self, rank: LoweredRank, pieces: Mapping[str, tuple[PieceTemplate, Sequence[int]]], arrival_bytes: int
    ) -> None:
        self._rank = rank
        self._pieces = pieces
        self._arrival_bytes = arrival_bytes
        self._alive: set[str] = set()
        self._sharers: dict[str, int] = {}
        self._values = rank.symbolic.values

    def kept(self) -> dict[str, int]:
        """Role -> bytes that are always there."""
        found: dict[str, int] = {}
        for value in self._values.values():
            if value.scope is Scope.KEPT and value.size_bytes:
                found[value.role] = found.get(value.role, 0) + self._copies(value.name) * value.size_bytes
        constants: dict[str, int] = {}
        for items in self._rank.symbolic.bodies.values():
            for _, item in items:
                if isinstance(item, Cells):
                    template, numbers = self._pieces[item.piece]
                    constants |= {name: numbers[size] for name, size in template.constants}
        if constants:
            found["weight"] = found.get("weight", 0) + sum(constants.values())
        return found

    def _copies(self, name: str) -> int:
        match = _BLOCK_NUMBER.search(name)
        own = None if match is None else self._repeat(int(match.group()))
        return 1 if own is None else 1 + own.more

    def _repeat(self, block: int) -> Repeat | None:
        return next((each for each in self._rank.repeats if each.first <= block < each.stop), None)

    def peak(self, schedule: Schedule, stages: Sequence[int]) -> tuple[int, dict[str, int]]:
        """The peak and what it consists of.

        Args:
            schedule: of the pipeline.
            stages: of the rank's chunks.
        """
        table, rank = schedule.table, schedule.placement[stages[0]]
        rows = range(int(table.rank_start[rank]), int(table.rank_start[rank + 1]))
        number = {stage: place for place, stage in enumerate(stages)}
        variants = variant_of_rows(schedule)
        changes: dict[tuple[int, str, bool], Change] = {}
        seen: set[tuple[int, str]] = set()
        order: list[tuple[int, Change]] = []
        opened = self._lines(self._rank.symbolic.begin)
        for row in rows:
            chunk, name = number[int(table.stage[row])], VARIANTS[int(variants[row])]
            key = chunk, name, (chunk, name[0]) in seen
            if key not in changes:
                changes[key] = self._body(chunk, name)
            seen.add((chunk, name[0]))
            order.append((row, changes[key]))
        closed = self._lines(self._rank.symbolic.end)
        received = self._received(schedule, [row for row, _ in order])
        return self._highest(opened, order, received, closed)

    def _received(self, schedule: Schedule, rows: Sequence[int]) -> list[int]:
        """Per action the bytes whose receive is posted just before it: those of the action after it."""
        table, last = schedule.table, schedule.num_stages - 1
        own = [
            self._arrival_bytes
            if (table.kind[row] == 0 and table.stage[row] > 0)
            or (table.kind[row] in (1, 2) and table.stage[row] < last)
            else 0
            for row in rows
        ]
        return [*own[1:], 0] if len(own) == 1 else [own[0] + own[1], *own[2:], 0] if own else []

    def _highest(
        self, opened: Change, order: Sequence[tuple[int, Change]], received: Sequence[int], closed: Change
    ) -> tuple[int, dict[str, int]]:
        kept = self.kept()
        posted = np.array(received, dtype=np.int64)
        nets = np.array([change.net_bytes for _, change in order], dtype=np.int64)
        peaks = np.array([change.peak_bytes for _, change in order], dtype=np.int64)
        before = opened.net_bytes + np.cumsum(posted) + np.cumsum(nets) - nets
        tops = before + peaks
        after = int(before[-1] + nets[-1]) if len(order) else opened.net_bytes
        best = int(np.argmax(tops)) if len(order) else -1
        highest = max(opened.peak_bytes, int(tops.max(initial=0)), after + closed.peak_bytes)
        roles = dict(kept)
        if highest == opened.peak_bytes:
            roles = _sum(roles, opened.at_peak)
        else:
            stop = len(order) if best < 0 or highest > int(tops[best]) else best
            roles = _sum(roles, opened.net)
            for _, change in order[:stop]:
                roles = _sum(roles, change.net)
            count = min(stop + 1, len(order))
            roles = _sum(roles, {"activation": int(posted[:count].sum())})
            roles = _sum(roles, closed.at_peak if stop == len(order) else order[stop][1].at_peak)
        return sum(kept.values()) + highest, {role: size for role, size in sorted(roles.items()) if size}

    # ------------------------------------------------------------------- changes

    def _body(self, chunk: int, name: str) -> Change:
        items = self._rank.symbolic.bodies[chunk, name]
        blocks: list[tuple[int, _Counter]] = []
        uses = self._rank.uses[chunk] if name[0] == "F" else self._rank.uses[chunk][::-1]
        arrived = {uses[0]}  # what comes from another stage has been received before
        for block, item in items:
            if not blocks or blocks[-1][0] != block:
                blocks.append((block, _Counter()))
            counter = blocks[-1][1]
            if isinstance(item, Cells):
                use = PieceUse(item.piece, None if block < 0 or item.piece == "embedding" else block)
                if use not in arrived and (item.part != "W" or name[0] == "I"):
                    # the piece before has given its output back when it was handed on
                    counter.add("activation", self._arrival_bytes)
                    arrived.add(use)
                self._cells(counter, item)
            elif isinstance(item, Instruction):
                self._line(counter, item)
        if name[0] == "I" and uses[-1] not in arrived and blocks:  # it waits for the weight gradients
            blocks.append((-1, _Counter()))
            blocks[-1][1].add("activation", self._arrival_bytes)
        return self._all(blocks)

    def _lines(self, lines: Sequence[Instruction]) -> Change:
        blocks: list[tuple[int, _Counter]] = []
        for line in lines:
            match = _BLOCK_NUMBER.search(line.name)
            block = int(match.group()) if match else -1
            if not blocks or blocks[-1][0] != block:
                blocks.append((block, _Counter()))
            self._line(blocks[-1][1], line)
        return self._all(blocks)

    def _all(self, blocks: Iterable[tuple[int, _Counter]]) -> Change:
        """One after the other; a run of blocks that stand for more of them as often as they do."""
        found, held, repeat = Change(), Change(), None
        for block, counter in blocks:
            own = self._repeat(block)
            if own is not repeat:
                if repeat is not None:
                    found = found.then(held.times(1 + repeat.more))
                held, repeat = Change(), own
            if own is None:
                found = found.then(counter.change())
            else:
                held = held.then(counter.change())
        if repeat is not None:
            found = found.then(held.times(1 + repeat.more))
        return found

    def _cells(self, counter: _Counter, cells: Cells) -> None:
        template, numbers = self._pieces[cells.piece]
        for at, sign, size, role in template.parts[cells.part].memory:
            if cells.first <= at < cells.stop or (at < 0 and cells.first == 0):
                if (cells.is_dropped and sign < 0) or (cells.is_joined and sign > 0 and at >= 0):
                    continue
                counter.add(role, sign * numbers[size])

    def _line(self, counter: _Counter, line: Instruction) -> None:
        for name in line.outputs:
            value = self._values[name]
            if value.scope is Scope.KEPT or name in self._alive:
                continue
            self._alive.add(name)
            if line.call == "cell" and name.startswith("d:"):
                continue  # its own cell took the memory
            base = self._base(value)
            before = self._sharers.get(base.name, 0)
            self._sharers[base.name] = before + 1
            if not before and base.scope is not Scope.KEPT:
                counter.add(base.role, base.size_bytes)
        for name in line.frees:
            value = self._values[name]
            self._alive.discard(name)
            if name.startswith("d:"):
                counter.add(value.role, -value.size_bytes)
                continue
            base = self._base(value)
            left = self._sharers.get(base.name, 0) - 1
            self._sharers[base.name] = left
            if not left and base.scope is not Scope.KEPT:
                counter.add(base.role, -base.size_bytes)

    def _base(self, value: Value) -> Value:
        while value.shares is not None:
            value = self._values[value.shares]
        return value
