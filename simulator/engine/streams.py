"""Ranks with several compute streams: one SimPy process for each stream.

The host issues in program order and never waits, so its issue times are known when a step begins. Each stream runs its
instructions in order, waits as in `plans.streams`, and shares the device with the other streams
(`simulator.engine.fluid.Fabric`). Communication begins in program order on every channel, whichever stream issues it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import simpy

from plans.program import Instruction
from plans.streams import StreamOrder
from simulator.engine.exchange import Communication
from simulator.engine.fluid import Fabric, Now
from simulator.engine.matching import Peers
from simulator.engine.order import ISSUE, RUN, WAIT, Order
from simulator.engine.prices import PriceTable
from simulator.engine.ranks import Process, TimedRanks
from simulator.engine.record import COMPUTE, HOST

__all__ = ["ShareOf", "on_streams"]


ShareOf = Callable[[Instruction, int], Fraction]
"""(instruction that computes, its picoseconds alone) -> the share of the device that it keeps busy, above 0."""


def on_streams(
    ranks: TimedRanks, rank: int, peers_at: Mapping[int, Peers], fabric: Fabric, share_of: ShareOf
) -> Process:
    """The process of a rank whose instructions are on several streams."""
    start = 0
    for step in range(ranks.num_steps):
        table = ranks.prices_of(rank, step)
        assert table.order.stream_order is not None
        order = table.order.stream_order
        start = yield from _Step(ranks, fabric, share_of, rank, step, table, peers_at, order, start).run()
    ranks.finished.add(rank)


@dataclass(slots=True)
class _Step:
    """One step of a rank, which begins at `start`."""

    ranks: TimedRanks
    fabric: Fabric
    share_of: ShareOf
    rank: int
    step: int
    table: PriceTable
    peers_at: Mapping[int, Peers]
    streams: StreamOrder
    start: int
    issued_ps: dict[int, int] = field(default_factory=dict)  # position -> when the host has issued it
    over_ps: dict[int, int] = field(default_factory=dict)  # position that others wait for -> when it is over
    free_ps: list[int] = field(default_factory=list)  # when each stream is done
    points: dict[int, simpy.Event] = field(default_factory=dict)
    slots: dict[int, Communication] = field(default_factory=dict)
    unwaited: list[Communication] = field(default_factory=list)
    queues: dict[int, Iterator[int]] = field(default_factory=dict)  # channel -> positions that are still to come
    next_of: dict[int, int] = field(default_factory=dict)
    early: dict[int, tuple[Communication, int]] = field(default_factory=dict)

    def run(self) -> Generator[simpy.Event, object, int]:
        """Run all streams of a rank; returns when they have ended."""
        env = self.ranks.env
        self.points = {position: env.event() for position in self.streams.awaited}
        lines, host = self._issue()
        yield from [env.process(self._stream(line)) for line in lines]
        end = max(host, *self.free_ps)
        for issued in self.unwaited:
            end = max(end, (yield from self._over(issued)))
        return end

    def _issue(self) -> tuple[list[list[tuple[int, int, int]]], int]:
        """The lines of every stream as (kind, position, slot), and the time at which the host is done."""
        lines: list[list[tuple[int, int, int]]] = [[] for _ in range(self.streams.count)]
        order, host, channels = self.table.order, self.start, dict[int, list[int]]()
        for kind, position, slot in _lines(order):
            if kind == ISSUE:
                peers = self.peers_at[position]
                if not peers.keys:  # no piece of the transfer is this rank's
                    lines[self.streams.streams[position]].append((-1, position, slot))
                    continue
                channels.setdefault(peers.stream, []).append(position)
            if dispatch := self.table.dispatch_ps[position]:
                self.ranks.recorder.span(self.rank, HOST, self.step, order.name[position], host, host + dispatch)
                host += dispatch
            self.issued_ps[position] = host
            lines[self.streams.streams[position]].append((kind, position, slot))
        self.queues = {channel: iter(positions) for channel, positions in channels.items()}
        self.next_of = {channel: next(positions) for channel, positions in self.queues.items()}
        return lines, host

    def _stream(self, lines: list[tuple[int, int, int]]) -> Process:
        """Execute the instructions of one stream."""
        at = self.start
        for kind, position, slot in lines:
            for awaited in self.streams.waits.get(position, ()):
                if awaited not in self.over_ps:
                    yield self.points[awaited]
                at = max(at, self.over_ps[awaited])
            if kind == RUN:
                at = yield from self._compute(position, max(at, self.issued_ps[position]))
            elif kind == ISSUE:
                issued = self._post(position, max(at, self.issued_ps[position]))
                if slot < 0:
                    at = max(at, (yield from self._over(issued)))
                else:
                    self.slots[slot] = issued
                    if position in self.table.order.unwaited:
                        self.unwaited.append(issued)
            elif kind == WAIT and slot in self.slots:
                at = max(at, (yield from self._over(self.slots[slot])))
            if position in self.points:
                self.over_ps[position] = at
                self.points[position].succeed()
        self.free_ps.append(at)

    def _compute(self, position: int, begins: int) -> Generator[simpy.Event, object, int]:
        env, end, work_ps = self.ranks.env, begins, self.table.work_ps[position]
        order = self.table.order
        if work_ps:
            if begins > env.now:
                yield env.timeout(begins - int(env.now))
            ended = Now(env)
            instruction = order.instructions[position]
            share = self.share_of(instruction, work_ps)
            self.fabric.compute(self.rank, instruction, work_ps, ended.happen, share=share)
            yield ended
            end = int(env.now)
        self.ranks.recorder.span(self.rank, COMPUTE, self.step, order.name[position], begins, end)
        return end

    def _over(self, issued: Communication) -> Generator[simpy.Event, object, int]:
        """Wait for a communication; returns its end."""
        if issued.end < 0:
            yield self.ranks.over(issued)
        return issued.end

    def _post(self, position: int, posted: int) -> Communication:
        """Issue a communication. It is posted after everything that the program issues before it on its channel."""
        channel = self.peers_at[position].stream
        issued = self.ranks.communication(self.rank, self.step, position, self.peers_at[position], self.table)
        self.early[position] = issued, posted
        while (following := self.next_of[channel]) in self.early:
            self.next_of[channel] = next(self.queues[channel], -1)
            self.ranks.exchange.post(*self.early.pop(following))
        return issued


def _lines(order: Order) -> Iterator[tuple[int, int, int]]:
    """The segments of an order with runs spelled out, one line per instruction."""
    for kind, position, slot in order.segments:
        if kind == RUN:
            yield from ((RUN, at, -1) for at in range(*order.runs[position]))
        else:
            yield kind, position, slot
