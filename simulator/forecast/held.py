"""The memory of a rank over a step, from its symbolic bodies: the peak of its program in instruction order.

Two figures describe a body for this purpose: the bytes that remain after it, and its peak. An allocator follows the
order in which work is issued, so no times are needed. The peak equals that of `simulator.timeline.memory.peak_of_order`
for the lowered program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plans.lower.symbolic.items import SEND, Cells, PieceUse
from plans.lower.symbolic.template import PieceTemplate
from plans.lower.symbolic.wide import block_number, is_wide
from plans.program import Instruction, Scope
from plans.schedules import Schedule
from plans.schedules.arrivals import releases_of_rows
from plans.schedules.variants import VARIANTS, variant_of_rows
from simulator.forecast.symbolic import LoweredRank, Repeat

__all__ = ["Change", "RankMemory"]

Roles = Mapping[str, int]
Ints = npt.NDArray[np.int64]


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
        net = _sum(self.net, other.net)
        later = self.net_bytes + other.peak_bytes
        if later > self.peak_bytes:
            return Change(net, later, _sum(self.net, other.at_peak))
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
        net = _added(self._parts)
        at_peak = _sum(_added(self._parts[: self._before_peak]), self._rest_of_peak)
        return Change({role: size for role, size in net.items() if size}, self._peak, at_peak)


def _added(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for role, size in parts:
        found[role] = found.get(role, 0) + size
    return found


BodyKey = tuple[int, str, bool]
"""(chunk of the rank, variant of its action, whether the rank has done an action of this kind before)."""


class _Alive:
    """Which values are alive after some bodies; what a body changes depends on that.

    `after` keeps what further bodies changed from here, so that ranks and schedules that begin alike share it.
    """

    def __init__(self, alive: set[str], sharers: dict[str, int]) -> None:
        self.names = alive
        self.sharers = sharers
        self.after: dict[BodyKey | str, tuple[Change, _Alive]] = {}

    def copy(self) -> _Alive:
        """A copy with the same values and no knowledge of what follows."""
        return _Alive(set(self.names), dict(self.sharers))


class _Held(NamedTuple):
    """The memory of a value: that of the value whose memory it shares, 0 bytes where that is there all the time."""

    base: str
    role: str
    size_bytes: int
    is_always_there: bool


def _once(name: str) -> int:
    return 1


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
        self._values = rank.symbolic.values
        self._spans: dict[Cells, Change] = {}
        self._memory_of: dict[str, _Held] = {}
        self._start = _Alive(set(), {})

    @cached_property
    def kept(self) -> dict[str, int]:
        """Role -> bytes that are allocated during the entire step."""
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
        block = block_number(name)
        return 1 if block is None else self._rank.copies.get(block, 1)

    def _repeat(self, block: int) -> Repeat | None:
        return next((repeat for repeat in self._rank.repeats if repeat.first <= block < repeat.stop), None)

    def peak(
        self, schedule: Schedule, stages: Sequence[int], *, posts_ahead: bool = True
    ) -> tuple[int, dict[str, int]]:
        """The peak of the step and its composition.

        Args:
            schedule: schedule of the pipeline.
            stages: stages of the rank's chunks.
            posts_ahead: whether receives are posted one action ahead.
        """
        table, rank = schedule.table, schedule.placement[stages[0]]
        rows = slice(int(table.rank_start[rank]), int(table.rank_start[rank + 1]))
        chunks = np.searchsorted(stages, table.stage[rows])
        names, kinds = variant_of_rows(schedule)[rows], table.kind[rows]
        is_later = np.ones(len(chunks), dtype=np.int64)
        is_later[np.unique(4 * chunks + kinds, return_index=True)[1]] = 0
        keys, firsts, number = np.unique(
            2 * (len(VARIANTS) * chunks + names) + is_later, return_index=True, return_inverse=True
        )
        opened, state = self._after(self._start, "begin")
        changes = [Change()] * len(keys)
        for place in np.argsort(firsts).tolist():
            at = firsts[place]
            key = int(chunks[at]), VARIANTS[int(names[at])], bool(is_later[at])
            changes[place], state = self._after(state, key)
        closed, _ = self._after(state, "end")
        released = self._arrival_bytes * releases_of_rows(schedule)[rows]
        return self._highest(opened, changes, number, self._received(schedule, rows, posts_ahead), released, closed)

    def _received(self, schedule: Schedule, rows: slice, posts_ahead: bool) -> Ints:
        """For each action, the bytes of the receive posted just before it: its own, or that of the next action."""
        table, last = schedule.table, schedule.num_stages - 1
        kind, stage = table.kind[rows], table.stage[rows]
        receives = ((kind == 0) & (stage > 0)) | (((kind == 1) | (kind == 2)) & (stage < last))
        own = np.where(receives, self._arrival_bytes, 0).astype(np.int64)
        if not posts_ahead:
            return own
        posted = np.append(own[1:], 0)
        posted[0] += own[0]
        return posted

    def _highest(
        self, opened: Change, changes: Sequence[Change], number: Ints, posted: Ints, released: Ints, closed: Change
    ) -> tuple[int, dict[str, int]]:
        """The peak from the changes of actions.

        Args:
            opened, closed: by the blocks at the start and at the end of the step.
            changes: the kinds of changes.
            number: the kind of each action.
            posted: bytes that are received into, taken just before each action.
            released: bytes of earlier sends, released just after each action.
        """
        nets = np.array([change.net_bytes for change in changes], dtype=np.int64)[number]
        peaks = np.array([change.peak_bytes for change in changes], dtype=np.int64)[number]
        before = opened.net_bytes + np.cumsum(posted) + np.cumsum(nets - released) - nets + released
        tops = before + peaks
        count = len(number)
        after = int(before[-1] + nets[-1] - released[-1]) if count else opened.net_bytes
        best = int(np.argmax(tops)) if count else -1
        highest = max(opened.peak_bytes, int(tops.max(initial=0)), after + closed.peak_bytes)
        if highest == opened.peak_bytes:
            roles = _sum(self.kept, opened.at_peak)
        else:
            stop = count if best < 0 or highest > int(tops[best]) else best
            roles = _sum(self.kept, opened.net)
            for own, times in zip(changes, np.bincount(number[:stop], minlength=len(changes)).tolist(), strict=True):
                roles = _sum(roles, own.repeated(times))
            roles = _sum(roles, {"activation": int(posted[: stop + 1].sum() - released[:stop].sum())})
            roles = _sum(roles, closed.at_peak if stop == count else changes[number[stop]].at_peak)
        return sum(self.kept.values()) + highest, {role: size for role, size in sorted(roles.items()) if size}

    # ------------------------------------------------------------------- changes

    def _after(self, state: _Alive, key: BodyKey | str) -> tuple[Change, _Alive]:
        """The changes of a body, or of the opening or closing block of a step, and the live values at that point."""
        found = state.after.get(key)
        if found is None:
            alive = state.copy()
            if key == "begin" or key == "end":
                symbolic = self._rank.symbolic
                change = self._lines(alive, symbolic.begin if key == "begin" else symbolic.end)
            else:
                change = self._body(alive, int(key[0]), str(key[1]))
            found = state.after[key] = change, alive
        return found

    def _body(self, alive: _Alive, chunk: int, name: str) -> Change:
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
                counter.follow(self._span(item))
            elif isinstance(item, Instruction):
                self._line(alive, counter, item)
            elif item == SEND:
                counter.add("activation", self._arrival_bytes)  # its cell frees it, but it is kept until its WAIT
        if name[0] == "I" and uses[-1] not in arrived and blocks:  # it waits for the weight gradients
            blocks.append((-1, _Counter()))
            blocks[-1][1].add("activation", self._arrival_bytes)
        return self._all(blocks)

    def _lines(self, alive: _Alive, lines: Sequence[Instruction]) -> Change:
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

    def _line(self, alive: _Alive, counter: _Counter, line: Instruction) -> None:
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
