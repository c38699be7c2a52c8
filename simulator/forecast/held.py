"""Changes of a rank's memory by the symbolic bodies of its chunks.

Two figures describe a body for this purpose: the bytes that remain after it, and its peak. An allocator follows the
order in which work is issued, so no times are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from plans.lower.symbolic.items import SEND, Cells, PieceUse
from plans.lower.symbolic.template import PieceTemplate
from plans.lower.symbolic.wide import block_number, is_wide
from plans.program import Instruction, Scope
from simulator.forecast.symbolic import LoweredChunks, Repeat

__all__ = ["Change", "ChunksMemory", "Roles", "State", "added"]

Roles = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of a part of a program on a rank's memory.

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
        """Bytes of all roles."""
        return sum(self.net.values())

    def then(self, other: Change) -> Change:
        """The memory change of this body followed by `other`.

        >>> once = Change({"activation": 2}, 5, {"activation": 5})
        >>> once.then(once)
        Change(net={'activation': 4}, peak_bytes=7, at_peak={'activation': 7})
        """
        net = added(self.net, other.net)
        later = self.net_bytes + other.peak_bytes
        if later > self.peak_bytes:
            return Change(net, later, added(self.net, other.at_peak))
        return Change(net, self.peak_bytes, self.at_peak)

    def repeated(self, count: int) -> Roles:
        """Role -> bytes that remain allocated after `count` of them."""
        return {role: count * size for role, size in self.net.items()}

    def times(self, count: int) -> Change:
        """`count` repetitions; the peak is in the first or the last of them."""
        if count <= 1:
            return self if count else Change()
        before, net = self.repeated(count - 1), self.repeated(count)
        last = sum(before.values()) + self.peak_bytes
        if last > self.peak_bytes:
            return Change(net, last, added(before, self.at_peak))
        return Change(net, self.peak_bytes, self.at_peak)


def added(one: Roles, other: Roles) -> dict[str, int]:
    """The bytes of both, by role."""
    found = dict(one)
    for role, size in other.items():
        found[role] = found.get(role, 0) + size
    return found


class _Counter:
    """Adds changes up, one after the other."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, int]] = []
        self._total = 0
        self._peak = 0
        self._before_peak = 0
        self._rest_of_peak: Roles = {}

    def add(self, role: str, size: int) -> None:
        """Allocate bytes, or release them if `size` is negative."""
        self._parts.append((role, size))
        self._total += size
        if self._total > self._peak:
            self._peak, self._before_peak, self._rest_of_peak = self._total, len(self._parts), {}

    def follow(self, change: Change) -> None:
        """Append the change of another part."""
        highest = self._total + change.peak_bytes
        if highest > self._peak:
            self._peak, self._before_peak, self._rest_of_peak = highest, len(self._parts), change.at_peak
        self._parts += change.net.items()
        self._total += change.net_bytes

    def change(self) -> Change:
        """The memory change of the complete body."""
        net = _totals(self._parts)
        at_peak = added(_totals(self._parts[: self._before_peak]), self._rest_of_peak)
        return Change({role: size for role, size in net.items() if size}, self._peak, at_peak)


def _totals(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for role, size in parts:
        found[role] = found.get(role, 0) + size
    return found


BodyKey = tuple[int, str, bool] | Literal["begin"] | int
"""(chunk, variant of its action, whether it has done an action of this kind before); what opens the step; or the number
of a part of its end."""


class State:
    """Which values are alive after some bodies; what a body changes depends on that.

    `after` keeps what further bodies changed from here, so that ranks and schedules that begin alike share it.
    """

    def __init__(self, alive: set[str], sharers: dict[str, int]) -> None:
        self.names = alive
        self.sharers = sharers
        self.after: dict[BodyKey, tuple[Change, State]] = {}

    def copy(self) -> State:
        """A copy with the same values and no knowledge of what follows."""
        return State(set(self.names), dict(self.sharers))


class _Held(NamedTuple):
    """The memory of a value: that of the value whose memory it shares, 0 bytes where that is there all the time."""

    base: str
    role: str
    size_bytes: int
    is_always_there: bool


def _once(name: str) -> int:
    return 1


class ChunksMemory:
    """The memory of chunks that are lowered together.

    Args:
        lowered: the chunks.
        pieces: template of each piece, with the numbers of its places.
        arrival_bytes: of the tensor between stages, and of its gradient.
    """

    def __init__(
        self, lowered: LoweredChunks, pieces: Mapping[str, tuple[PieceTemplate, Sequence[int]]], arrival_bytes: int
    ) -> None:
        self._lowered = lowered
        self._pieces = pieces
        self._arrival_bytes = arrival_bytes
        self._values = lowered.symbolic.values
        self._spans: dict[Cells, Change] = {}
        self._memory_of: dict[str, _Held] = {}
        self.start = State(set(), {})

    @cached_property
    def kept(self) -> dict[str, int]:
        """Role -> bytes that are allocated during the entire step, besides constants."""
        found: dict[str, int] = {}
        for value in self._values.values():
            if value.scope is Scope.KEPT and value.size_bytes:
                found[value.role] = found.get(value.role, 0) + self._copies(value.name) * value.size_bytes
        return found

    @cached_property
    def constants(self) -> dict[str, int]:
        """Constant -> bytes; chunks of a rank share those of one name."""
        found: dict[str, int] = {}
        for items in self._lowered.symbolic.bodies.values():
            for _, item in items:
                if isinstance(item, Cells):
                    template, numbers = self._pieces[item.piece]
                    found |= {name: numbers[size] for name, size in template.constants}
        return found

    @property
    def num_ends(self) -> int:
        """The number of parts of the end of a step."""
        return len(self._lowered.symbolic.ends)

    def _copies(self, name: str) -> int:
        block = block_number(name)
        return 1 if block is None else self._lowered.copies.get(block, 1)

    def _repeat(self, block: int) -> Repeat | None:
        return next((repeat for repeat in self._lowered.repeats if repeat.first <= block < repeat.stop), None)

    def after(self, state: State, key: BodyKey) -> tuple[Change, State]:
        """The changes of a body, or of what opens or closes a step, and the live values at that point."""
        found = state.after.get(key)
        if found is None:
            alive = state.copy()
            if isinstance(key, tuple):
                change = self._body(alive, key[0], key[1])
            else:
                symbolic = self._lowered.symbolic
                change = self._lines(alive, symbolic.begin if key == "begin" else symbolic.ends[int(key)])
            found = state.after[key] = change, alive
        return found

    def _body(self, alive: State, chunk: int, name: str) -> Change:
        items = self._lowered.symbolic.bodies[chunk, name]
        blocks: list[tuple[int, _Counter]] = []
        uses = self._lowered.uses[chunk] if name[0] == "F" else self._lowered.uses[chunk][::-1]
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
                counter.follow(self._span(item))
            elif isinstance(item, Instruction):
                self._line(alive, counter, item)
            elif item == SEND:
                counter.add("activation", self._arrival_bytes)  # its cell frees it, but it is kept until its WAIT
        if name[0] == "I" and uses[-1] not in arrived and blocks:  # it waits for the weight gradients
            blocks.append((-1, _Counter()))
            blocks[-1][1].add("activation", self._arrival_bytes)
        return self._all(blocks)

    def _lines(self, alive: State, lines: Sequence[Instruction]) -> Change:
        blocks: list[tuple[int, _Counter]] = []
        for line in lines:
            named = block_number(line.name)
            block = -1 if named is None else named
            if not blocks or blocks[-1][0] != block:
                blocks.append((block, _Counter()))
            self._line(alive, blocks[-1][1], line)
        return self._all(blocks)

    def _all(self, blocks: Iterable[tuple[int, _Counter]]) -> Change:
        """The changes of all blocks in order; blocks that represent several are repeated."""
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

    def _span(self, cells: Cells) -> Change:
        found = self._spans.get(cells)
        if found is None:
            counter = _Counter()
            template, numbers = self._pieces[cells.piece]
            for at, sign, size, role in template.parts[cells.part].memory:
                is_within = cells.first <= at < cells.stop or (at < 0 and cells.first == 0)
                is_elsewhere = (cells.is_dropped and sign < 0) or (cells.is_joined and sign > 0 and at >= 0)
                if is_within and not is_elsewhere:
                    counter.add(role, sign * numbers[size])
            found = self._spans[cells] = counter.change()
        return found

    def _line(self, alive: State, counter: _Counter, line: Instruction) -> None:
        copies = self._copies if is_wide(line) else _once
        for name in line.outputs:
            if name in alive.names:
                continue
            own = self._held(name)
            if own.is_always_there:
                continue
            alive.names.add(name)
            if line.call == "cell" and name.startswith("d:"):
                continue  # its own cell took the memory
            before = alive.sharers.get(own.base, 0)
            alive.sharers[own.base] = before + 1
            if not before and own.size_bytes:
                counter.add(own.role, copies(name) * own.size_bytes)
        for name in line.frees:
            own = self._held(name)
            alive.names.discard(name)
            if name.startswith("d:"):
                counter.add(own.role, -copies(name) * own.size_bytes)
                continue
            left = alive.sharers.get(own.base, 0) - 1
            alive.sharers[own.base] = left
            if not left and own.size_bytes:
                counter.add(own.role, -copies(name) * own.size_bytes)

    def _held(self, name: str) -> _Held:
        """The memory that a value uses."""
        found = self._memory_of.get(name)
        if found is None:
            value = base = self._values[name]
            while base.shares is not None:
                base = self._values[base.shares]
            size = 0 if base.scope is Scope.KEPT else base.size_bytes
            found = self._memory_of[name] = _Held(base.name, base.role, size, value.scope is Scope.KEPT)
        return found
