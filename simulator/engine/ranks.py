"""Ranks that share cores or devices with concurrent work, as SimPy processes.

Such a rank follows the clock, because concurrent work slows it down. Compute on a device without communication takes
one event, which the next communication interrupts. The rules are those of `simulator.engine.walk`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import simpy

from simulator.engine.exchange import Communication, Exchange
from simulator.engine.fluid import Clock, Cores, Fabric, Now
from simulator.engine.matching import Peers
from simulator.engine.order import ISSUE, RUN
from simulator.engine.prices import PriceTable
from simulator.engine.record import COMPUTE, HOST, Recorder

__all__ = ["Over", "TimedRanks"]

Process = Generator[simpy.Event, object, None]


class Over(simpy.Event):
    """An event that happens after a delay, known once the communication's end is."""

    def after(self, delay_ps: int) -> None:
        """Happen `delay_ps` from now."""
        self._ok = True
        self._value = None
        self.env.schedule(self, delay=delay_ps)


@dataclass(frozen=True, slots=True)
class TimedRanks:
    """Creates the processes of ranks that follow the clock.

    Args:
        env: the environment, in picoseconds.
        exchange: of all ranks; it wakes an `Over`.
        recorder: of the spans.
        prices_of: (rank, step) -> its prices.
        num_steps: steps to run, one after the other.
        finished: ranks that have ended.
    """

    env: Clock
    exchange: Exchange
    recorder: Recorder
    prices_of: Callable[[int, int], PriceTable]
    num_steps: int
    finished: set[int]

    def on_cores(self, rank: int, peers_at: Mapping[int, Peers], cores: Cores) -> Process:
        """The process of a rank whose host computes on cores that it shares."""
        env = self.env
        span = self.recorder.span
        for step in range(self.num_steps):
            table = self.prices_of(rank, step)
            order = table.order
            slots: list[Communication | None] = [None] * order.num_slots
            unwaited: list[Communication] = []
            for kind, position, slot in order.segments:
                start = int(env.now)
                if kind == RUN:
                    marks = table.marks(position)
                    ended = env.event()
                    share = cores.add(marks[-1], ended.succeed, marks)
                    yield ended
                    for where, end in zip(range(*order.runs[position]), share.times, strict=True):
                        span(rank, COMPUTE, step, order.name[where], start, end)
                        start = end
                    continue
                is_issue = kind == ISSUE
                if is_issue and not peers_at[position].keys:
                    continue
                if dispatch := table.dispatch_ps[position]:
                    ended = env.event()
                    cores.add(dispatch, ended.succeed)
                    yield ended
                    span(rank, HOST, step, order.name[position], start, int(env.now))
                if is_issue:
                    issued = self._post(rank, step, position, peers_at[position], table, int(env.now))
                    if slot >= 0:
                        slots[slot] = issued
                        if position in order.unwaited:
                            unwaited.append(issued)
                        continue
                else:
                    waited = slots[slot]
                    if waited is None:
                        continue
                    issued = waited
                yield from self._block(issued, step, position)
            for issued in unwaited:
                yield from self._block(issued, step, issued.position)
        self.finished.add(rank)

    def on_fabric(self, rank: int, peers_at: Mapping[int, Peers], fabric: Fabric) -> Process:
        """The process of a rank whose device computes asynchronously and is slowed by its communication."""
        host, stream = 0, 0
        span = self.recorder.span
        for step in range(self.num_steps):
            table = self.prices_of(rank, step)
            order = table.order
            device = _Device(
                self.env, self.recorder, fabric, rank, step, table, *self.recorder.some_runs(table, rank, step)
            )
            slots: list[Communication | None] = [None] * order.num_slots
            unwaited: list[Communication] = []
            for kind, position, slot in order.segments:
                if kind == RUN:
                    host, stream = yield from device.run(position, host, stream)
                    continue
                is_issue = kind == ISSUE
                if is_issue and not peers_at[position].keys:
                    continue
                if dispatch := table.dispatch_ps[position]:
                    span(rank, HOST, step, order.name[position], host, host + dispatch)
                    host += dispatch
                if is_issue:
                    issued = self._post(rank, step, position, peers_at[position], table, max(host, stream))
                    if slot >= 0:
                        slots[slot] = issued
                        if position in order.unwaited:
                            unwaited.append(issued)
                        continue
                else:
                    waited = slots[slot]
                    if waited is None:
                        continue
                    issued = waited
                if issued.end < 0:
                    yield self.over(issued)
                stream = max(stream, issued.end)
            for issued in unwaited:
                if issued.end < 0:
                    yield self.over(issued)
                stream = max(stream, issued.end)
            host = stream = max(host, stream)
        self.finished.add(rank)

    def _post(self, rank: int, step: int, position: int, peers: Peers, table: PriceTable, at_ps: int) -> Communication:
        issued = self.communication(rank, step, position, peers, table)
        self.exchange.post(issued, at_ps)
        return issued

    def communication(self, rank: int, step: int, position: int, peers: Peers, table: PriceTable) -> Communication:
        """A rank's part of a communication, to be posted."""
        return Communication(
            rank, step, position, table.order.instructions[position], peers, table.work_ps[position],
            table.cpu_ps[position],
        )  # fmt: skip

    def over(self, issued: Communication) -> Over:
        """The event of the end, for all that wait for it."""
        if issued.waiter is None:
            issued.waiter = Over(self.env)
        waiter: Over = issued.waiter
        return waiter

    def _block(self, issued: Communication, step: int, position: int) -> Process:
        """Wait in virtual time, and record the span if the wait was not zero."""
        start = int(self.env.now)
        if issued.end < 0:
            yield self.over(issued)
        elif issued.end > start:
            yield self.env.timeout(issued.end - start)
        if self.env.now > start:
            self.recorder.wait(issued.rank, step, position, start, int(self.env.now))


@dataclass(frozen=True, slots=True)
class _Device:
    """A rank's device during a step; `numbers` and `free` are of `Recorder.some_runs`."""

    env: Clock
    recorder: Recorder
    fabric: Fabric
    rank: int
    step: int
    table: PriceTable
    numbers: list[int]
    free: list[int]

    def run(self, number: int, host: int, stream: int) -> Generator[simpy.Event, object, tuple[int, int]]:
        """Execute a run: until the next communication on the device in one step, then instruction by instruction.

        Returns:
            when host and stream are free.
        """
        table, order = self.table, self.table.order
        first, stop = order.runs[number]
        at = first
        while at < stop:
            begun = -1  # of an instruction that is under way
            if self.fabric.is_quiet(self.rank):
                ends = _ends(table, at, stop, host, stream)
                if ends[-1][2] > self.env.now:
                    yield self.fabric.run_ahead(self.rank, ends[-1][2])
                now = int(self.env.now)
                if ends[-1][2] <= now and at == first:
                    self.numbers.append(number)
                    self.free.extend((host, stream))
                    return ends[-1][0], ends[-1][2]
                for issued, begins, end in ends:
                    if end > now and begins >= now:  # not begun
                        break
                    self._issued(at, host, issued)
                    host = issued
                    if end > now:
                        begun, stream = begins, end
                        break
                    self._computed(at, begins, end)
                    stream = end
                    at += 1
                if at == stop:
                    break
            if begun < 0:
                self._issued(at, host, host + table.dispatch_ps[at])
                host += table.dispatch_ps[at]
                begins = stream = max(host, stream)
                work_ps = table.work_ps[at]
                if work_ps and begins > self.env.now:
                    yield self.env.timeout(begins - int(self.env.now))
            else:
                begins, work_ps = begun, stream - int(self.env.now)
            if work_ps:
                ended = Now(self.env)
                kind, whole_ps = order.instructions[at], table.work_ps[at]
                self.fabric.compute(self.rank, kind, whole_ps, ended.happen, left_ps=work_ps)
                yield ended
                stream = int(self.env.now)
            self._computed(at, begins, stream)
            at += 1
        return host, stream

    def _issued(self, position: int, start_ps: int, end_ps: int) -> None:
        if end_ps > start_ps:
            name = self.table.order.name[position]
            self.recorder.span(self.rank, HOST, self.step, name, start_ps, end_ps)

    def _computed(self, position: int, start_ps: int, end_ps: int) -> None:
        name = self.table.order.name[position]
        self.recorder.span(self.rank, COMPUTE, self.step, name, start_ps, end_ps)


def _ends(table: PriceTable, first: int, stop: int, host: int, stream: int) -> list[tuple[int, int, int]]:
    """(issued, begins, ends) of instructions that nothing slows."""
    found = []
    for dispatch, work in zip(table.dispatch_ps[first:stop], table.work_ps[first:stop], strict=True):
        host += dispatch
        begins = host if host > stream else stream
        stream = begins + work
        found.append((host, begins, stream))
    return found
