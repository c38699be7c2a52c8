"""Ranks whose work is not slowed by others, which are simulated ahead of the clock.

The times of a rank follow from its own order and from the ends of the communication that it waits for. Every rank
therefore advances as far as it can, and resumes when the end that it waits for is known. The order in which ranks
advance does not change any time. If links are shared, communication follows the clock of
`simulator.engine.exchange.Shared`; otherwise no event is needed.

Issued communication starts after the compute issued before it (as a communication stream that waits for the current
stream does). A WAIT blocks what follows: the host itself if the host computes, or the compute stream if compute runs
asynchronously.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping

from simulator.engine.exchange import Communication, Exchange, Shared
from simulator.engine.matching import Matching, Peers
from simulator.engine.order import ISSUE, RUN, WAIT
from simulator.engine.record import HOST, Recorder, StepPrices

__all__ = ["Walk"]


_Process = Generator["Transfer | Communication", None, None]
"""A rank; it yields the communication that it waits for."""


class Transfer:
    """A SEND and its RECV on a `Channel`; created by the first of them.

    Attributes:
        end: -1 until it is known.
        waiter: what waits for it, if anything does.
        posted, work_ps, cpu_ps: of the first.
    """

    __slots__ = ("cpu_ps", "end", "posted", "waiter", "work_ps")

    def __init__(self, posted: int, work_ps: int, cpu_ps: int) -> None:
        self.posted = posted
        self.work_ps = work_ps
        self.cpu_ps = cpu_ps
        self.end = -1
        self.waiter: tuple[int, _Process] | None = None


class Channel:
    """The transfers from one rank to another if neither has other partners: the k-th SEND matches the k-th RECV.

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
        self._early: deque[Transfer] = deque()  # of which the rank that is behind has not issued its side
        self._early_is_send = False
        self._last_end = 0

    def post(self, is_send: bool, posted: int, work_ps: int, cpu_ps: int) -> Transfer:
        """One side issues the next transfer."""
        early = self._early
        if not early or self._early_is_send is is_send:
            self._early_is_send = is_send
            transfer = Transfer(posted, work_ps, cpu_ps)
            early.append(transfer)
            return transfer
        transfer = early.popleft()
        start = posted if posted > transfer.posted else transfer.posted
        if self._last_end > start:
            start = self._last_end
        if transfer.work_ps > work_ps:
            work_ps = transfer.work_ps
        if transfer.cpu_ps > cpu_ps:
            cpu_ps = transfer.cpu_ps
        transfer.end = self._last_end = end = start + work_ps + cpu_ps
        self.starts.append(start)
        self.ends.append(end)
        if transfer.waiter is not None:
            self._ready.append(transfer.waiter)
            transfer.waiter = None
        return transfer


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
        self.waiting_for: dict[int, Transfer | Communication] = {}
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
        """Run all ranks as far as they can advance."""
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
            sides = {pair.source: positions[pair.sends], pair.target: positions[pair.receives]}
            self._recorder.channel(sides, channel.starts, channel.ends)

    def _wake(self, over: Communication) -> None:
        self._ready.append(over.waiter)
        over.waiter = None
        if self._shared is not None:
            self._shared.later(over.end, self._advance)

    def _rank(self, rank: int, peers_at: Mapping[int, Peers], exchange: Exchange) -> _Process:
        is_async, host, stream = self._host_async, 0, 0
        span, channels = self._recorder.span, self._channels
        all_peers = list(peers_at.values())  # in program order
        all_channels = [channels.get(peers.stream) for peers in all_peers]
        for step in range(self._num_steps):
            prices = self._prices_of(rank, step)
            order = prices.order
            next_run, unwaited_at = iter(prices.runs).__next__, order.unwaited
            next_issue = zip(*order.places(ISSUE), all_channels, all_peers, strict=True).__next__
            next_wait = zip(*order.places(WAIT), strict=True).__next__
            dispatch_ps, work_ps, cpu_ps = prices.dispatch_ps, prices.work_ps, prices.cpu_ps
            keep = self._recorder.all_runs(prices, rank, step).append
            slots: list[Transfer | Communication | None] = [None] * order.num_slots
            unwaited: list[tuple[int, Transfer | Communication]] = []
            for kind in order.kinds:
                if kind == RUN:
                    dispatch, work, lead = next_run()
                    keep(host)
                    keep(stream)
                    if is_async:
                        ahead = host + lead
                        stream = work + (stream if stream > ahead else ahead)
                        host += dispatch
                    else:
                        host += dispatch + work
                    continue
                waited: Transfer | Communication | None
                if kind == ISSUE:
                    position, slot, channel, peers = next_issue()
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
                    position, slot = next_wait()
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
                if end > host and end > stream:
                    if not is_async:
                        self._recorder.wait(rank, step, position, host, end)
                    host = end
            host = stream = max(host, stream)
