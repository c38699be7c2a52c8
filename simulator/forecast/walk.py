"""A step simulated in time order, with one rank for each pipeline rank.

Clock maps (`simulator.forecast.clock_map`) describe one rank alone. Here all pipeline ranks run at the same time, one
rank for all equal ones. Concurrent communication shares links max-min fairly (`costmodels.price.sharing`) and slows the
compute at both ends. The rules are those of `simulator.engine`; times are floating-point picoseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from costmodels.price.sharing import max_min_rates
from plans.step_parts import PartsTally
from simulator.channels import PairRates
from simulator.forecast.body import ARRIVE, COMPUTE, ISSUE, SEND, WAIT, Op
from simulator.forecast.run import Run, call_of

__all__ = ["POST", "Actions", "Line", "TransferQueue", "Transmission", "simulate_steps"]

POST = 5
"""The kind of a line that posts a receive, next to those of the operations of bodies."""

_BEGIN, _END, _WAKE = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class Transmission:
    """Communication of one kind, with that of all sibling groups.

    Args:
        call: of the collective, or "transfer".
        work_ps: alone.
        claims: (number of a link, what all siblings need of it at rate 1), of the links that may be short.
    """

    call: str
    work_ps: float
    claims: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class TransferQueue:
    """The transfers from one pipeline rank to another; the k-th send is matched with the k-th receive.

    Args:
        transmission: the communication of each transfer; None where sender and receiver are the same rank.
    """

    transmission: Transmission | None
    early: deque[_Flow] = field(default_factory=deque)
    is_sent_early: bool = False
    arriving: deque[_Flow] = field(default_factory=deque)
    channel: deque[_Flow] = field(default_factory=deque)


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line of a rank's work.

    Args:
        kind: POST, or the kind of an operation of a body; COMPUTE stands for a run of operations.
        dispatch_ps: host time to issue it.
        work_ps: duration of a collective without contention.
        token, channel, transmission, call: of a collective. A WAIT without a token waits for a send that is complete.
        run: the operations of a COMPUTE line.
    """

    kind: int
    dispatch_ps: int = 0
    work_ps: float = 0
    token: str = ""
    channel: str = ""
    transmission: Transmission | None = None
    run: Run | None = None
    call: str = "collective"


Actions = Sequence[tuple[Sequence[Line], TransferQueue | None, TransferQueue | None]]
"""A rank's step: (lines, the queue from which they receive, the queue to which they send)."""


class _Flow:
    """Communication that is posted, in progress or complete.

    `begun` and `end` are its start and end, -1 before; `left` is its remaining work and `rate` its speed since `since`.
    """

    __slots__ = (
        "begun",
        "call",
        "channel",
        "end",
        "issued",
        "left",
        "limit",
        "ranks",
        "rate",
        "ready",
        "since",
        "transmission",
        "version",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, transmission: Transmission | None, work_ps: float, rank: _Rank, posted: float, call: str = ""
    ) -> None:
        self.transmission = transmission
        self.call = call
        self.left = work_ps
        self.ranks = [rank]
        self.ready = posted
        self.issued = posted
        self.begun = self.end = -1.0
        self.limit = self.rate = self.since = 0.0
        self.version = 0
        self.waiting: list[_Rank] = []
        self.channel: deque[_Flow] = deque()


class _Rank:
    """A rank's device: the communication in progress (`active`) or posted (`pending`), and the operation."""

    __slots__ = (
        "active", "channels", "is_quiet", "left", "op", "own", "pending", "process", "rate", "since", "steps",
        "version",
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps: list[PartsTally] = []
        self.own: list[_Flow] = []  # collectives that may still be in progress
        self.active: dict[_Flow, None] = {}
        self.channels: dict[str, deque[_Flow]] = {}
        self.pending = self.version = 0
        self.op: Op | None = None
        self.left = self.rate = self.since = 0.0
        self.is_quiet = False
        self.process: Generator[None, None, None]


def simulate_steps(
    ranks: Sequence[Actions], rates: PairRates | None, *, launch_ps: int = 0, num_steps: int = 1
) -> list[tuple[PartsTally, ...]]:
    """Simulate steps in time order and return, for each step, the parts and the end of every rank.

    Args:
        ranks: the work of each rank in a step.
        rates: the rates of compute and communication that overlap; None if they do not slow each other.
        launch_ps: host time at the start of a step.
        num_steps: number of consecutive steps.

    >>> transmission = Transmission("all_gather", 100.0, claims=((0, 0.8),))
    >>> gather = [Line(ISSUE, 0, 100.0, token="t", channel="dp", transmission=transmission), Line(WAIT, 0, token="t")]
    >>> [rank.end_ps for rank in simulate_steps([[(gather, None, None)]] * 2, None)[0]]
    [160.0, 160.0]
    """
    walk = _Walk(rates)
    for actions in ranks:
        walk.add(actions, launch_ps, num_steps)
    walk.run()
    return list(zip(*(rank.steps for rank in walk.ranks), strict=True))


def _tally_op(tally: PartsTally, op: Op, free: float, begins: float, ends: float) -> None:
    """Add an operation of a run to the tally; `free` is the time from which the stream was free."""
    if op.kind == COMPUTE:
        tally.compute_ps += ends - begins
    elif op.kind == ISSUE:
        tally.add([(call_of(op), ends - begins)], 0)
    tally.host_wait_ps += max(0.0, begins - free)


def _tally_wait(tally: PartsTally, rank: _Rank, flow: _Flow, stream: float) -> None:
    """Add the wait for a collective that has ended to the tally."""
    known = [(each.begun, each.end if each.end >= 0 else flow.end) for each in rank.own if each.begun >= 0]
    tally.add_wait(flow.call, stream, flow.issued, flow.end, known)


class _Walk:
    """The clock, and all communication in progress."""

    def __init__(self, rates: PairRates | None) -> None:
        self.ranks: list[_Rank] = []
        self._rates = rates
        self._now = 0.0
        self._number = 0
        self._events: list[tuple[float, int, int, _Flow | _Rank, int]] = []
        self._sharing: dict[_Flow, None] = {}
        self._known: dict[tuple[tuple[Transmission | None, float], ...], Sequence[float]] = {}

    def add(self, actions: Actions, launch_ps: int, num_steps: int) -> None:
        """Add a rank that runs these actions for a number of steps."""
        rank = _Rank()
        rank.process = self._process(rank, actions, launch_ps, num_steps)
        self.ranks.append(rank)

    def run(self) -> None:
        """Process events until none are left."""
        for rank in self.ranks:
            next(rank.process, None)
        events = self._events
        while events:
            time, _, kind, what, version = heappop(events)
            if what.version != version:
                continue
            self._now = time
            if isinstance(what, _Rank):
                next(what.process, None)
            elif kind == _BEGIN:
                self._begin(what)
            else:
                self._end(what)

    def _at(self, time: float, kind: int, what: _Flow | _Rank) -> None:
        self._number += 1
        heappush(self._events, (time, self._number, kind, what, what.version))

    # ------------------------------------------------------------------------------------------------ a rank

    def _process(self, rank: _Rank, actions: Actions, launch_ps: int, num_steps: int) -> Generator[None, None, None]:
        host = stream = 0.0
        for _ in range(num_steps):
            host += launch_ps
            tally = PartsTally()
            rank.steps.append(tally)
            posts: deque[float] = deque()
            issued: dict[str, _Flow] = {}
            sent: list[_Flow] = []
            for lines, source, target in actions:
                for line in lines:
                    kind = line.kind
                    if kind == COMPUTE:
                        assert line.run is not None
                        if rank.pending:
                            host, stream = yield from self._run(rank, line.run, host, stream)
                        else:
                            before = stream
                            host, stream = line.run.ends(0, host, stream)
                            line.run.tally(tally, 0, stream - before)
                        continue
                    host += line.dispatch_ps
                    posted = host if host > stream else stream
                    if kind == ISSUE:
                        issued[line.token] = self._issue(rank, line, posted, host)
                        continue
                    if kind == WAIT:
                        flow = issued.get(line.token)
                    elif kind == POST:
                        assert source is not None
                        source.arriving.append(self._post(source, rank, posted, is_send=False))
                        posts.append(host)
                        continue
                    elif kind == SEND:
                        assert target is not None
                        sent.append(self._post(target, rank, posted, is_send=True))
                        continue
                    elif kind == ARRIVE:
                        assert source is not None
                        flow = source.arriving.popleft()
                        ready = posts.popleft()
                    else:
                        raise AssertionError(f"a line of kind {kind}")
                    if flow is not None:
                        if flow.end < 0:
                            flow.waiting.append(rank)
                            yield
                        if flow.end > stream:
                            if kind == ARRIVE:
                                tally.host_wait_ps += max(0.0, min(ready, flow.end) - stream)
                            else:
                                _tally_wait(tally, rank, flow, stream)
                            stream = flow.end
            for flow in (*sent, *issued.values()):
                if flow.end < 0:
                    flow.waiting.append(rank)
                    yield
                if flow.end > stream:
                    if flow.call:
                        _tally_wait(tally, rank, flow, stream)
                    stream = flow.end
            rank.own.clear()  # all have ended
            tally.host_wait_ps += max(0.0, host - stream)
            host = stream = max(host, stream)
            tally.end_ps = stream

    def _run(self, rank: _Rank, run: Run, host: float, stream: float) -> Generator[None, None, tuple[float, float]]:
        """Execute a run: at once while the device does not communicate, otherwise operation by operation."""
        parts, at, tally = run.parts, 0, rank.steps[-1]
        while at < len(parts):
            if not rank.active:
                rank.op = None
                ended_host, ended = run.ends(at, host, stream)
                if ended > self._now:
                    rank.is_quiet = True
                    yield from self._until(rank, ended)
                    rank.is_quiet = False
                if ended <= self._now:
                    run.tally(tally, at, ended - stream)
                    return ended_host, ended
                while at < len(parts):  # communication has begun
                    op = parts[at]
                    begins = max(stream, host + op.dispatch_ps)
                    if begins + op.work_ps > self._now:
                        break
                    _tally_op(tally, op, stream, begins, begins + op.work_ps)
                    host, stream = host + op.dispatch_ps, begins + op.work_ps
                    at += 1
                else:  # as the last one ended: a sum of its operations one by one is rounded in another way
                    return host, stream
                if begins < self._now:
                    host += op.dispatch_ps
                    self._compute(rank, op, begins + op.work_ps - self._now)
                    yield
                    rank.version += 1
                    _tally_op(tally, op, stream, begins, self._now)
                    stream = self._now
                    at += 1
                continue
            op, free = parts[at], stream
            host += op.dispatch_ps
            begins = stream = max(stream, host)
            at += 1
            if op.work_ps:
                if stream > self._now:
                    self._pause(rank)
                    yield from self._until(rank, stream)
                self._compute(rank, op, op.work_ps)
                yield
                rank.version += 1
                stream = self._now
            _tally_op(tally, op, free, begins, stream)
        self._pause(rank)
        return host, stream

    def _until(self, rank: _Rank, time: float) -> Generator[None, None, None]:
        self._at(time, _WAKE, rank)
        yield
        rank.version += 1

    def _compute(self, rank: _Rank, op: Op, left: float) -> None:
        """Begin an operation, or the rest of one, while communication on the device slows it.

        It counts as executing until the next operation begins or `_pause` is called, so that rates do not change
        between two operations of the same class.
        """
        rank.op, rank.left, rank.rate, rank.since = op, left, 0.0, self._now
        self._update((rank,))

    def _pause(self, rank: _Rank) -> None:
        """Leave the device idle until its next operation begins."""
        if rank.op is not None:
            rank.op = None
            self._update((rank,))

    # ----------------------------------------------------------------------------------------- communication

    def _issue(self, rank: _Rank, line: Line, posted: float, issued: float) -> _Flow:
        flow = _Flow(line.transmission, line.work_ps, rank, posted, line.call)
        flow.issued = issued
        rank.own = [flow for flow in rank.own if not 0 <= flow.end <= posted]
        rank.own.append(flow)
        flow.channel = rank.channels.setdefault(line.channel, flow.channel)
        self._enter(flow)
        return flow

    def _post(self, queue: TransferQueue, rank: _Rank, posted: float, *, is_send: bool) -> _Flow:
        """Post a send or a receive; the transfer starts when both are posted."""
        early = queue.early
        if not early or queue.is_sent_early is is_send:
            queue.is_sent_early = is_send
            flow = _Flow(queue.transmission, queue.transmission.work_ps if queue.transmission else 0.0, rank, posted)
            early.append(flow)
            if self._rates is not None and queue.transmission is not None:
                rank.pending += 1
            return flow
        flow = early.popleft()
        flow.ready = max(flow.ready, posted)
        if queue.transmission is not None:
            flow.ranks.append(rank)
        flow.channel = queue.channel
        if self._rates is not None and queue.transmission is not None:
            flow.ranks[0].pending -= 1
        self._enter(flow)
        return flow

    def _enter(self, flow: _Flow) -> None:
        """Append communication that all its ranks have posted to its channel."""
        if self._rates is not None and flow.left:
            for rank in flow.ranks:
                rank.pending += 1
        flow.channel.append(flow)
        if flow.channel[0] is flow:
            self._at(max(flow.ready, self._now), _BEGIN, flow)

    def _begin(self, flow: _Flow) -> None:
        flow.begun = self._now
        if not flow.left:
            self._end(flow)
            return
        flow.since, flow.limit = self._now, 1.0
        if flow.transmission is not None and flow.transmission.claims:
            self._sharing[flow] = None
        for rank in flow.ranks if self._rates is not None else ():
            rank.active[flow] = None
        self._update(flow.ranks, {flow: None})
        for rank in flow.ranks:
            if rank.is_quiet:
                next(rank.process, None)

    def _end(self, flow: _Flow) -> None:
        flow.end = self._now
        flow.version += 1
        channel = flow.channel
        channel.popleft()
        if channel:
            self._at(max(channel[0].ready, self._now), _BEGIN, channel[0])
        if flow.limit:  # it has begun
            was_shared = flow in self._sharing
            if was_shared:
                del self._sharing[flow]
            for rank in flow.ranks if self._rates is not None else ():
                rank.pending -= 1
                del rank.active[flow]
            self._update(flow.ranks, is_freed=was_shared)
        for rank in flow.waiting:
            next(rank.process, None)

    # ------------------------------------------------------------------------------------------------- rates

    def _update(
        self, ranks: Iterable[_Rank], begun: dict[_Flow, None] | None = None, *, is_freed: bool = False
    ) -> None:
        """Recompute the rates of the operations and the communication on some ranks, and of flows that share links.

        Args:
            ranks: the ranks where a flow or an operation began or ended.
            begun: flows that have just begun.
            is_freed: whether a flow that shared links has ended.
        """
        changed, rates, now = begun or {}, self._rates, self._now
        for rank in ranks:
            op, slowest = rank.op, 1.0
            for flow in rank.active:
                changed[flow] = None
                if op is not None:
                    assert rates is not None and flow.transmission is not None
                    mine = rates(op.name, op.work_ps, flow.transmission.call, flow.transmission.work_ps)[0]
                    slowest = mine if mine < slowest else slowest
            if op is not None and slowest != rank.rate:
                rank.left -= (now - rank.since) * rank.rate
                rank.since, rank.rate = now, slowest
                rank.version += 1
                self._at(now + rank.left / slowest, _WAKE, rank)
        for flow in changed:
            limit = 1.0
            for rank in flow.ranks:
                op = rank.op
                if op is not None:
                    assert rates is not None and flow.transmission is not None
                    theirs = rates(op.name, op.work_ps, flow.transmission.call, flow.transmission.work_ps)[1]
                    limit = theirs if theirs < limit else limit
            if flow not in self._sharing:
                self._set(flow, limit)
            elif limit != flow.limit or not flow.rate:
                is_freed = True
            flow.limit = limit
        if is_freed and self._sharing:
            self._share()

    def _share(self) -> None:
        """Set the rates of all flows that share links."""
        key = tuple([(flow.transmission, flow.limit) for flow in self._sharing])
        found = self._known.get(key)
        if found is None:
            claims = [transmission.claims for transmission, _ in key if transmission is not None]
            found = self._known[key] = max_min_rates([limit for _, limit in key], claims)
        for flow, rate in zip(self._sharing, found, strict=True):
            self._set(flow, rate)

    def _set(self, flow: _Flow, rate: float) -> None:
        if rate != flow.rate:
            flow.left -= (self._now - flow.since) * flow.rate
            flow.since, flow.rate = self._now, rate
            flow.version += 1
            self._at(self._now + flow.left / rate, _END, flow)
