"""Ranks whose own work is not slowed by others: they run ahead of any clock.

A rank's times follow from its own order and from the ends of what it waits for. So every rank goes ahead as far as it
can, and is resumed when the end that it waits for is known; in which order that happens changes no time. Where links
are shared too, communication is worked off by the clock of `simulator.engine.exchange.Shared`; where nothing is, no
event is needed at all.

Communication that is issued starts after the compute issued before it (as a communication stream that waits for the
current stream does), and a WAIT holds up what follows: the host itself where the host computes, the compute stream
where compute runs behind the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping

from simulator.engine.exchange import Communication, Exchange, Shared
from simulator.engine.matching import Matching, Peers
from simulator.engine.order import ISSUE, RUN
from simulator.engine.record import HOST, Recorder, StepPrices

__all__ = ["Walk"]


_Process = Generator["Side | Communication", None, None]
"""A rank; it yields what it waits for."""


class Side:
    """One side of a transfer on a `Channel`; class attributes are what holds until it is known.

    Attributes:
        end: of the transfer; -1 until it is known.
        waiter: what waits for it, if anything does.
    """

    end = -1
    waiter: tuple[int, _Process] | None = None
    posted: int
    work_ps: int
    cpu_ps: int


class Channel:
    """The transfers from one rank to another where neither has other partners: the k-th SEND meets the k-th RECV.

    Args:
        ready: where a waiter goes when the end that it waits for is known.

    Attributes:
        starts, ends: of the transfers whose two sides have been posted.
    """

    __slots__ = ("_early", "_early_is_send", "_last_end", "_ready", "ends", "starts")

    def __init__(self, ready: deque[tuple[int, _Process]]) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self._ready = ready
        self._early: deque[Side] = deque()  # of the rank that is ahead
        self._early_is_send = False
        self._last_end = 0

    def post(self, is_send: bool, posted: int, work_ps: int, cpu_ps: int) -> Side:
        """One side of the next transfer is issued."""
        early, side = self._early, Side()
        if not early or self._early_is_send is is_send:
            self._early_is_send = is_send
            side.posted, side.work_ps, side.cpu_ps = posted, work_ps, cpu_ps
            early.append(side)
            return side
        other = early.popleft()
        start = posted if posted > other.posted else other.posted
        if self._last_end > start:
            start = self._last_end
        end = (
            start
            + (work_ps if work_ps > other.work_ps else other.work_ps)
            + (cpu_ps if cpu_ps > other.cpu_ps else other.cpu_ps)
        )
        side.end = other.end = self._last_end = end
        self.starts.append(start)
        self.ends.append(end)
        if other.waiter is not None:
            self._ready.append(other.waiter)
            other.waiter = None
        return side


class Walk:
    """All ranks of a program, from their first step to their last.

    Args:
        matching: of the program.
        prices_of: (rank, step) -> its prices.
        recorder: of the spans.
        num_steps: steps to run, one after the other.
        host_async: whether compute runs behind the host.
        shared: links that communication shares, if it does.

    Attributes:
        waiting_for: rank -> the communication that it waits for and that never ends; empty where all came to their end.
    """

    def __init__(
        self,
        matching: Matching,
        prices_of: Callable[[int, int], StepPrices],
        recorder: Recorder,
        *,
        num_steps: int,
        host_async: bool,
        shared: Shared | None = None,
    ) -> None:
        self.waiting_for: dict[int, Side | Communication] = {}
        self._prices_of = prices_of
        self._recorder = recorder
        self._num_steps = num_steps
        self._host_async = host_async
        self._ready: deque[tuple[int, _Process]] = deque()
        self._shared = shared
        self._channels: dict[int, Channel] = {}  # by stream, of both sides
        for pair in matching.pairs if shared is None else ():
            self._channels[pair.sends] = self._channels[pair.receives] = Channel(self._ready)
        self._matching = matching

    def run(self) -> None:
        """Run all ranks as far as they come."""
        exchange = Exchange(self._recorder.communication, self._wake, self._shared)
        self._ready.extend((rank, self._rank(rank, peers, exchange)) for rank, peers in self._matching.peers.items())
        self._advance()
        if self._shared is not None:
            self._shared.run()
        if not self.waiting_for and self._channels:
            self._record_channels()

    def _advance(self) -> None:
        ready, waiting = self._ready, self.waiting_for
        while ready:
            rank, process = ready.popleft()
            awaited = next(process, None)
            if awaited is not None:
                waiting[rank] = awaited
                awaited.waiter = (rank, process)
            elif rank in waiting:
                del waiting[rank]

    def _record_channels(self) -> None:
        positions = self._matching.positions
        for pair in self._matching.pairs:
            channel = self._channels[pair.sends]
            self._recorder.channel(pair.source, positions[pair.sends], channel.starts, channel.ends)
            self._recorder.channel(pair.target, positions[pair.receives], channel.starts, channel.ends)

    def _wake(self, over: Communication) -> None:
        self._ready.append(over.waiter)
        over.waiter = None
        if self._shared is not None:
            self._shared.later(over.end, self._advance)

    def _rank(self, rank: int, peers_at: Mapping[int, Peers], exchange: Exchange) -> _Process:
        is_async, host, stream = self._host_async, 0, 0
        span, channels = self._recorder.span, self._channels
        issues = [(channels.get(peers.stream), peers) for peers in peers_at.values()]  # in program order
        for step in range(self._num_steps):
            prices = self._prices_of(rank, step)
            order, runs, unwaited_at = prices.order, iter(prices.runs), prices.order.unwaited
            dispatch_ps, work_ps, cpu_ps = prices.dispatch_ps, prices.work_ps, prices.cpu_ps
            begins = self._recorder.all_runs(prices, rank, step)
            slots: list[Side | Communication | None] = [None] * order.num_slots
            unwaited: list[tuple[int, Side | Communication]] = []
            next_issue = iter(issues).__next__
            for kind, position, slot in order.segments:
                if kind == RUN:
                    dispatch, work, lead = next(runs)
                    begins.append(host)
                    begins.append(stream)
                    if is_async:
                        ahead = host + lead
                        stream = work + (stream if stream > ahead else ahead)
                        host += dispatch
                    else:
                        host += dispatch + work
                    continue
                waited: Side | Communication | None
                if kind == ISSUE:
                    channel, peers = next_issue()
                    if not peers.keys:  # no piece of the transfer is this rank's
                        continue
                    if dispatch := dispatch_ps[position]:
                        span(rank, HOST, step, order.name[position], host, host + dispatch)
                        host += dispatch
                    posted = host if host > stream else stream
                    if channel is not None:
                        waited = channel.post(peers.is_send, posted, work_ps[position], cpu_ps[position])
                    else:
                        waited = Communication(
                            rank, step, position, order.instructions[position], peers, work_ps[position],
                            cpu_ps[position],
                        )  # fmt: skip
                        exchange.post(waited, posted)
                    if slot >= 0:
                        slots[slot] = waited
                        if position in unwaited_at:
                            unwaited.append((position, waited))
                        continue
                else:
                    if dispatch := dispatch_ps[position]:
                        span(rank, HOST, step, order.name[position], host, host + dispatch)
                        host += dispatch
                    waited = slots[slot]
                    if waited is None:
                        continue
                if waited.end < 0:
                    yield waited
                end = waited.end
                if is_async:
                    if end > stream:
                        stream = end
                elif end > host:
                    self._recorder.wait(rank, step, position, host, end)
                    host = end
            for position, waited in unwaited:
                if waited.end < 0:
                    yield waited
                end = waited.end
                if end > max(host, stream):
                    if not is_async:
                        self._recorder.wait(rank, step, position, host, end)
                    host = end
            host = stream = max(host, stream)
