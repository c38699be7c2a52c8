"""The cause of each start on a timeline, by the order of its program.

Nothing of this is recorded: a rank issues in program order, so what an instruction can wait for is known from the
program, and which of it was last is seen in the times. On a predicted timeline the last cause ends exactly where the
effect starts. On a measured one there may be a gap (work that leaves no span), and a rank comes to a
collective when its own span starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from plans.program import Instruction, Kind, Program
from plans.timeline import STREAMS, Timeline
from simulator.engine.order import ISSUE, RUN, Names, Order

__all__ = ["Arrival", "Causes", "Event"]

_HOST, _COMPUTE, _COMM = range(3)


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """A finished activity of one rank. Of activities that end at the same time, communication counts as the later.

    Args:
        end_ps: when.
        stream: number of the stream, as in `plans.timeline.STREAMS`.
        rank, step, position: the instruction; position is its place in the order of a step.
        start_ps: when its span starts.
    """

    end_ps: int
    stream: int
    rank: int
    step: int
    position: int
    start_ps: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank arrived at a meeting at `time_ps`, right after `cause` (None at the start of everything)."""

    time_ps: int
    rank: int
    cause: Event | None


class Causes:
    """The causes of events on a timeline of a program.

    Args:
        program: whose instruction ids the spans carry.
        timeline: predicted or measured; spans that it lacks are passed over.
        host_async: whether compute runs behind the host; None: seen from the spans.
    """

    def __init__(self, program: Program, timeline: Timeline, *, host_async: bool | None = None) -> None:
        self.timeline = timeline
        names = Names()
        self._orders = [Order(group, names) for group in program.groups]
        self._order_of = {rank: order for order in self._orders for rank in order.group.ranks}
        number_of = {triple: number for number, triple in enumerate(timeline.names)}
        self._number = {number: number_of.get(triple, -1) for number, triple in enumerate(names)}
        rows = np.lexsort((timeline.end_ps, timeline.step, timeline.rank))
        keys = timeline.rank[rows].astype(np.int64) * timeline.num_steps + timeline.step[rows]
        self._rows = rows
        self._bounds = np.searchsorted(keys, np.arange(timeline.num_ranks * timeline.num_steps + 1))
        self._spans: dict[tuple[int, int], tuple[dict[int, list[tuple[int, int]]], ...]] = {}
        self._waits = {id(order): _Waits(order) for order in self._orders}
        self._channel_before: dict[int, tuple[dict[int, int], dict[tuple[str, str], int]]] = {}
        self._twins_of: dict[int, Mapping[int, tuple[int, ...]]] = {}
        self._where: dict[str, list[tuple[Order, int]]] = {}
        self._transfers: dict[tuple[str, int, int, bool], list[int]] = {}
        self._count: dict[tuple[int, int, int, int], int] = {}
        self._indexed: set[int] = set()
        for order in self._orders:
            self._index(order)
        self.is_exact = timeline.kind == "predicted"
        self._is_async = self._looks_async() if host_async is None else host_async

    # ------------------------------------------------------------------------------------- lookup

    def instruction(self, event: Event) -> tuple[str, Instruction]:
        """The id and the instruction of an event."""
        order = self._order_of[event.rank]
        return order.ids[event.position], order.instructions[event.position]

    def collectives(self, rank: int) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Id, position and members of every collective of a rank with others."""
        order = self._order_of[rank]
        for kind, position, _ in order.segments:
            if kind == ISSUE and order.instructions[position].kind is Kind.COLLECTIVE:
                members = order.group.members(order.instructions[position], rank)
                if len(members) > 1:
                    yield order.ids[position], position, members

    def spans(self, rank: int, step: int, position: int, stream: int) -> list[Event]:
        """The instruction's span on a stream, if it has one.

        The SEND and the RECV of a transfer inside a group have one name: where it is not seen whose a span is, both are
        given, and the times have to tell.
        """
        number = self._number[self._order_of[rank].name[position]]
        found = self._of(rank, step)[stream].get(number, [])
        twins = self._twins(rank).get(position)
        if twins is not None and stream == _HOST and len(twins) == len(found):
            found = [found[twins.index(position)]]
        return [Event(end_ps, stream, rank, step, position, start_ps) for start_ps, end_ps in found]

    def events(self, rank: int, step: int) -> Iterator[Event]:
        """Every span of a rank in a step, once for each instruction that it may belong to."""
        for position in range(len(self._order_of[rank].instructions)):
            for stream in range(len(STREAMS)):
                yield from self.spans(rank, step, position, stream)

    def last(self, step: int) -> Event | None:
        """The event that ends a step."""
        found = (self._latest(self._end_of(rank, step)) for rank in self.timeline.represents)
        return max((event for event in found if event is not None), default=None)

    def arrivals(self) -> dict[tuple[int, int, str], int]:
        """(rank, step, id) -> when the rank came to that communication, in ps; of equal ids the earliest."""
        found: dict[tuple[int, int, str], int] = {}
        for rank in self.timeline.represents:
            order = self._order_of[rank]
            for kind, position, _ in order.segments:
                if kind == ISSUE:
                    for step in range(self.timeline.num_steps):
                        if self.spans(rank, step, position, _COMM):
                            key, time_ps = (rank, step, order.ids[position]), self.arrival(rank, step, position).time_ps
                            found[key] = min(time_ps, found.get(key, time_ps))
        return found

    # ------------------------------------------------------------------------------------- causes

    def cause(self, event: Event) -> tuple[int, Event | None, list[Arrival]]:
        """The start of the event's work, its last cause, and for communication the arrivals of its members."""
        rank, step, position = event.rank, event.step, event.position
        if event.stream == _COMM:
            arrivals = self.meeting(rank, step, position)
            last = max(arrivals, key=lambda each: (each.time_ps, each.rank == rank))
            return min(last.time_ps, event.end_ps), last.cause, arrivals
        if event.stream == _HOST or not self._is_async:
            return event.start_ps, self._latest(self._host_before(rank, step, position), event.start_ps), []
        return event.start_ps, self._latest(self._ready(rank, step, position), event.start_ps), []

    def meeting(self, rank: int, step: int, position: int) -> list[Arrival]:
        """The arrivals at the meeting that ends a communication; for a transfer, at the pair that was complete last."""
        order = self._order_of[rank]
        instruction = order.instructions[position]
        meetings: list[list[tuple[int, int]]] = []
        if instruction.kind is Kind.COLLECTIVE:
            members = order.group.members(instruction, rank)
            meetings.append([(member, self._position(order.ids[position], member)) for member in members])
        else:
            is_send = instruction.kind is Kind.SEND
            for source, target in _pairs(instruction, rank):
                partner = target if is_send else source
                self._index_transfers(rank)
                self._index_transfers(partner)
                count = self._count[rank, position, source, target]
                other = self._transfers[instruction.channel, source, target, not is_send][count]
                if source != target or not is_send:
                    meetings.append([(rank, position), (partner, other)])
        arrived = [[self.arrival(member, step, at) for member, at in meeting] for meeting in meetings]
        if not arrived:
            return [self.arrival(rank, step, position)]
        return max(arrived, key=lambda each: max(arrival.time_ps for arrival in each))

    def arrival(self, rank: int, step: int, position: int) -> Arrival:
        """The arrival of a rank at a communication."""
        own = self.spans(rank, step, position, _COMM)
        limit = max((event.start_ps for event in own), default=None)
        found = self._latest([*self._ready(rank, step, position), *self._held(rank, step, position)], limit)
        if self.is_exact or limit is None:
            limit = found.end_ps if found else self.timeline.step_start_ps[0]
        return Arrival(limit, rank, found)

    # ------------------------------------------------------------------------------------ internals

    def _latest(self, events: list[Event] | Iterator[Event], by_ps: int | None = None) -> Event | None:
        """The last to end, by a time where one is given.

        On a measured timeline a device may begin before the host's call has returned, and the span of a communication
        begins with its issue: what has only begun by then counts as ended then, unless it is communication.
        """
        if by_ps is None:
            return max(events, default=None)
        found = [
            event
            for event in events
            if event.end_ps <= by_ps or (not self.is_exact and event.stream != _COMM and event.start_ps <= by_ps)
        ]
        return max(found, key=lambda event: (min(event.end_ps, by_ps), event), default=None)

    def _ready(self, rank: int, step: int, position: int) -> list[Event]:
        """The causes of an instruction on its own rank: its dispatch (or the host before it), and the stream."""
        host = self._dispatch(rank, step, position) or self._host_before(rank, step, position)
        return [*host, *self._stream_before(rank, step, position)] if self._is_async else host

    def _dispatch(self, rank: int, step: int, position: int) -> list[Event]:
        order = self._order_of[rank]
        if order.instructions[position].kind is Kind.COMPUTE and not self._is_async:
            return []
        return self.spans(rank, step, position, _HOST)

    def _host_before(self, rank: int, step: int, position: int) -> list[Event]:
        """The last work of the host before an instruction."""
        order, waits, found = self._order_of[rank], self._waits[id(self._order_of[rank])], list[Event]()
        for at in range(position - 1, -1, -1):
            if not self._is_async:
                if order.instructions[at].kind is Kind.COMPUTE:
                    if done := self.spans(rank, step, at, _COMPUTE):
                        return [*found, *done]
                    continue
                if (waited := waits.of.get(at)) is not None:
                    found += self.spans(rank, step, waited, _COMM)
            if issued := self.spans(rank, step, at, _HOST):
                found += issued
                if at not in self._twins(rank):  # of twins either may be the one before
                    return found
        return [*found, *(self._end_of(rank, step - 1) if step else ())]

    def _stream_before(self, rank: int, step: int, position: int) -> list[Event]:
        """The last cause or work of an instruction's compute stream before it, on other streams too."""
        order, waits, found = self._order_of[rank], self._waits[id(self._order_of[rank])], list[Event]()
        todo, seen = list(waits.before(position)), set[int]()
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            if at < 0:
                found += self._end_of(rank, step - 1) if step else ()
                continue
            if order.instructions[at].kind is Kind.COMPUTE:
                if done := self.spans(rank, step, at, _COMPUTE):
                    found += done
                    continue
            elif (waited := waits.of.get(at)) is not None:
                found += self.spans(rank, step, waited, _COMM)
            todo += waits.before(at)
        return found

    def _end_of(self, rank: int, step: int) -> list[Event]:
        """The event that ends a step on a rank."""
        order = self._order_of[rank]
        size = len(order.instructions)
        found = self._host_before(rank, step, size)
        if self._is_async:
            found = [*found, *self._stream_before(rank, step, size)]
        return [*found, *(event for at in order.unwaited for event in self.spans(rank, step, at, _COMM))]

    def _held(self, rank: int, step: int, position: int) -> list[Event]:
        """The previous communication on its channel, possibly of the previous step."""
        before, last = self._channels(rank)
        if position in before:
            return self.spans(rank, step, before[position], _COMM)
        instruction = self._order_of[rank].instructions[position]
        return self.spans(rank, step - 1, last[_channel(instruction)], _COMM) if step else []

    def _twins(self, rank: int) -> Mapping[int, tuple[int, ...]]:
        """Position -> all positions of its name on this rank, where there are several."""
        if rank not in self._twins_of:
            order = self._order_of[rank]
            by_name: dict[int, list[int]] = {}
            for kind, position, _ in order.segments:
                if kind == ISSUE:
                    instruction = order.instructions[position]
                    if instruction.kind is Kind.COLLECTIVE or _pairs(instruction, rank):
                        by_name.setdefault(order.name[position], []).append(position)
            self._twins_of[rank] = {
                position: tuple(twins) for twins in by_name.values() if len(twins) > 1 for position in twins
            }
        return self._twins_of[rank]

    def _channels(self, rank: int) -> tuple[dict[int, int], dict[tuple[str, str], int]]:
        if rank not in self._channel_before:
            order = self._order_of[rank]
            before: dict[int, int] = {}
            last: dict[tuple[str, str], int] = {}
            for kind, position, _ in order.segments:
                instruction = order.instructions[position] if kind == ISSUE else None
                if instruction is None or (instruction.kind is not Kind.COLLECTIVE and not _pairs(instruction, rank)):
                    continue
                key = _channel(instruction)
                if key in last:
                    before[position] = last[key]
                last[key] = position
            self._channel_before[rank] = (before, last)
        return self._channel_before[rank]

    def _position(self, id_: str, rank: int) -> int:
        return next(position for order, position in self._where[id_] if rank in order.group.ranks)

    def _index(self, order: Order) -> None:
        for kind, position, _ in order.segments:
            if kind == ISSUE and order.instructions[position].kind is Kind.COLLECTIVE:
                self._where.setdefault(order.ids[position], []).append((order, position))

    def _index_transfers(self, rank: int) -> None:
        """Number the sends and receives of a rank by pair, once."""
        if rank in self._indexed:
            return
        self._indexed.add(rank)
        order = self._order_of[rank]
        for kind, position, _ in order.segments:
            instruction = order.instructions[position]
            if kind != ISSUE or instruction.kind is Kind.COLLECTIVE:
                continue
            is_send = instruction.kind is Kind.SEND
            for source, target in _pairs(instruction, rank):
                side = self._transfers.setdefault((instruction.channel, source, target, is_send), [])
                self._count[rank, position, source, target] = len(side)
                side.append(position)

    def _of(self, rank: int, step: int) -> tuple[dict[int, list[tuple[int, int]]], ...]:
        """Stream -> name -> (start, end) of each span, by end."""
        key = (rank, step)
        if key not in self._spans:
            timeline = self.timeline
            at = timeline.representatives[rank] * timeline.num_steps + step
            found: tuple[dict[int, list[tuple[int, int]]], ...] = tuple({} for _ in STREAMS)
            rows = self._rows[self._bounds[at] : self._bounds[at + 1]]
            columns = (timeline.stream, timeline.name_index, timeline.start_ps, timeline.end_ps)
            for stream, name, start, end in zip(*(column[rows].tolist() for column in columns), strict=True):
                found[stream].setdefault(name, []).append((start, end))
            for of_stream in found:
                for each in of_stream.values():
                    each.sort()
            self._spans[key] = found
        return self._spans[key]

    def _looks_async(self) -> bool:
        """Compute has a host span of its own only where it runs behind the host."""
        timeline = self.timeline
        compute = np.zeros(len(timeline.names) + 1, dtype=bool)
        for order in self._orders:
            for kind, number, _ in order.segments:
                if kind == RUN:
                    first, stop = order.runs[number]
                    compute[[self._number[order.name[at]] for at in range(first, stop)]] = True
        compute[-1] = False
        return bool(np.any(compute[timeline.name_index] & (timeline.stream == _HOST)))


class _Waits:
    """The dependencies of the instructions of an order on their rank.

    Attributes:
        of: position of a WAIT or of a blocking communication -> position of the communication that it waits for.
    """

    def __init__(self, order: Order) -> None:
        self.of: Mapping[int, int]
        found: dict[int, int] = {}
        issued: dict[int, int] = {}
        for kind, position, slot in order.segments:
            if kind == ISSUE:
                if slot < 0:
                    found[position] = position
                else:
                    issued[slot] = position
            elif kind != RUN and slot in issued:
                found[position] = issued[slot]
        self.of = found
        self._streams = order.stream_order
        self._before: list[int] = []
        self._last: list[int] = []
        if self._streams is not None:
            self._last = [-1] * self._streams.count
            for position, stream in enumerate(self._streams.streams):
                self._before.append(self._last[stream])
                self._last[stream] = position

    def before(self, position: int) -> tuple[int, ...]:
        """The positions that a compute stream has come to before another, that of the end of the step included.

        -1 is the start of the step.
        """
        if self._streams is None:
            return (position - 1,)
        if position == len(self._before):
            return tuple(self._last)
        return (self._before[position], *self._streams.waits.get(position, ()))


def _pairs(instruction: Instruction, rank: int) -> tuple[tuple[int, ...], ...]:
    return instruction.pieces.pairs_of(rank, sends=instruction.kind is Kind.SEND)


def _channel(instruction: Instruction) -> tuple[str, str]:
    return instruction.channel, "both" if instruction.kind is Kind.COLLECTIVE else str(instruction.kind)
