"""The effect of a sequence of instructions on the clocks of a rank, as a map that composes.

The host of a rank is free at time h and its compute stream at time c. After the sequence they are free at h + dispatch
and at max(c + work, h + lead): in the first case the stream always had work, in the second it waited for the host. Such
maps compose like matrices, with max for the sum and + for the product (Heidergott, Olsder and van der Woude, Max Plus
at Work, 2006, chapter 1), so n equal sequences in a row are one map again.

`work` comes from simulating the sequence once. While a collective and compute run at the same time, each proceeds at
the rate of the pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import NamedTuple

from simulator.channels import Channels, Flow, PairRates
from simulator.lines import COLLECTIVE, COMPUTE, WAIT, Line

__all__ = ["SETTLED", "Body", "ClockMap", "Sequenced", "body_of", "measure"]


class ClockMap(NamedTuple):
    """A sequence of instructions as a map of clocks (see the module), and the composition of its path on the stream.

    Args:
        work_ps: the stream's time where it is never short of work.
        cold_start_ps: from the host's start to the end on the stream where the stream is idle at first.
        dispatch_ps: the host's time.
        compute_ps: the part of `work_ps` in which compute runs.
        exposed_ps: call of a collective -> the part of `work_ps` in which the stream waits for it.
        tail_ps: how long after the end its collectives that nothing waits for still run.
        tail_if_host_bound_ps: the same where the host comes late, so that the channel has caught up with all but the
            last of them.
        drift_per_repeat_ps: by how much `tail_ps` grows with every repetition, where the channel is slower than the
            stream.
        channel_busy_ps: how long a channel works for its collectives that nothing waits for.
        prefetch_ps: the first part of `work_ps`, which waits for no tensor of another rank.
    """

    work_ps: float = 0.0
    cold_start_ps: float = 0.0
    dispatch_ps: float = 0.0
    compute_ps: float = 0.0
    exposed_ps: Mapping[str, float] = MappingProxyType({})
    tail_ps: float = 0.0
    tail_if_host_bound_ps: float = 0.0
    drift_per_repeat_ps: float = 0.0
    channel_busy_ps: float = 0.0
    prefetch_ps: float = 0.0

    def then(self, other: ClockMap) -> ClockMap:
        """The map of this sequence followed by `other`.

        >>> first = ClockMap(work_ps=5, cold_start_ps=6, dispatch_ps=2)
        >>> second = ClockMap(work_ps=1, cold_start_ps=9, dispatch_ps=8)
        >>> both = first.then(second)
        >>> both.work_ps, both.cold_start_ps, both.dispatch_ps
        (6, 11, 10)
        """
        exposed = self.exposed_ps or other.exposed_ps
        if self.exposed_ps and other.exposed_ps:
            exposed = dict(self.exposed_ps)
            for call, time in other.exposed_ps.items():
                exposed[call] = exposed.get(call, 0) + time
        return ClockMap(
            work_ps=self.work_ps + other.work_ps,
            cold_start_ps=max(self.cold_start_ps + other.work_ps, self.dispatch_ps + other.cold_start_ps),
            dispatch_ps=self.dispatch_ps + other.dispatch_ps,
            compute_ps=self.compute_ps + other.compute_ps,
            exposed_ps=exposed,
            # what is left on the channel goes before what `other` puts there (Lindley's recursion)
            tail_ps=max(self.tail_ps + other.channel_busy_ps - other.work_ps, other.tail_ps, 0.0),
            tail_if_host_bound_ps=max(
                other.tail_if_host_bound_ps, self.tail_if_host_bound_ps - max(other.work_ps, other.dispatch_ps)
            ),
            channel_busy_ps=self.channel_busy_ps + other.channel_busy_ps,
            prefetch_ps=self.prefetch_ps,
        )

    def times(self, count: int) -> ClockMap:
        """The map of `count` repetitions of the sequence.

        The late host: it is last late in some repetition j, and the others behind j are stream's work, those before it
        dispatch: h + (j - 1) dispatch + lead + (count - j) work, largest for the first or the last j.

        >>> ClockMap(work_ps=5, cold_start_ps=6, dispatch_ps=2).times(3).cold_start_ps
        16
        """
        if count == 0:
            return ClockMap()
        if count == 1 and not self.drift_per_repeat_ps:
            return self
        return ClockMap(
            work_ps=count * self.work_ps,
            cold_start_ps=self.cold_start_ps + (count - 1) * max(self.work_ps, self.dispatch_ps),
            dispatch_ps=count * self.dispatch_ps,
            compute_ps=count * self.compute_ps,
            exposed_ps={call: count * time for call, time in self.exposed_ps.items()},
            tail_ps=max(0.0, self.tail_ps + (count - SETTLED) * self.drift_per_repeat_ps)
            if self.drift_per_repeat_ps
            else self.tail_ps,
            tail_if_host_bound_ps=self.tail_if_host_bound_ps,
            channel_busy_ps=count
            * (self.work_ps + self.drift_per_repeat_ps if self.drift_per_repeat_ps else self.channel_busy_ps),
            prefetch_ps=self.prefetch_ps,
        )


SETTLED = 4
"""Repetitions after which a sequence during the communication of its neighbours is taken as steady."""


def measure(lines: Sequence[Line], rates: PairRates | None = None, *, steady: bool = False) -> ClockMap:
    """The map of a sequence.

    Args:
        lines: in program order.
        rates: of pairs of compute and collective; None: overlap costs nothing.
        steady: the sequence is one of many in a row, and what its collectives leave running slows the next: walk it
            several times and take the last.

    >>> reduce = Line(COLLECTIVE, 1, 6, "all_reduce", "tp", 0)
    >>> clock_map = measure([Line(COMPUTE, 1, 10, "matrix"), reduce, Line(WAIT, 1, 0, token=0)])
    >>> clock_map.work_ps, clock_map.cold_start_ps, clock_map.dispatch_ps, dict(clock_map.exposed_ps)
    (16.0, 17.0, 3.0, {'all_reduce': 6.0})
    """
    return body_of(tuple(lines), rates).clock_map(steady=steady)


@lru_cache(maxsize=16_384)
def body_of(lines: tuple[Line, ...], rates: PairRates | None = None) -> Body:
    """The body for these lines. Layouts with equal lines share one `Body` and its results."""
    return Body(lines, rates)


class Sequenced(NamedTuple):
    """Lines between those of the optimizer: what is issued before them, and what follows; `steady` as of `measure`."""

    before: tuple[Line, ...]
    lines: tuple[Line, ...]
    after: tuple[Line, ...]
    steady: bool

    def clock_map(self, rates: PairRates | None) -> ClockMap:
        """The map of all three."""
        return body_of(self.lines, rates).clock_map(self.before, self.after, steady=self.steady)

    def stream_ps(self, rates: PairRates | None) -> float:
        """`clock_map(rates).work_ps`."""
        if rates is None and (alone := _undisturbed_ps((*self.before, *self.lines, *self.after))) is not None:
            return alone
        return body_of(self.lines, rates).stream_ps(self.before, self.after, steady=self.steady)


def _undisturbed_ps(lines: Sequence[Line]) -> float | None:
    """The time of the stream where overlap costs nothing and the host is far ahead; None if the lines leave a
    collective running, which the next repetition may wait for."""
    stream, ends, free = 0, dict[int, int](), dict[str, int]()
    for kind, _, work_ps, _, channel, token, _, _, _ in lines:
        if kind == COMPUTE:
            stream += work_ps
        elif kind == WAIT:
            stream = max(stream, ends.pop(token, 0))
        else:
            end = free[channel] = max(stream, free.get(channel, 0)) + work_ps
            if token < 0:
                stream = end
            else:
                ends[token] = end
    return None if ends else float(stream)


class Body:
    """A sequence that is measured alone and next to several others. Equal repetitions are walked once.

    Args:
        lines: in program order.
        rates: of pairs of compute and collective; None: overlap costs nothing.
    """

    def __init__(self, lines: Sequence[Line], rates: PairRates | None = None) -> None:
        self._lines = lines
        self._rates = rates
        self._working = [line for line in lines if line.kind != COMPUTE or line.work_ps]
        self._clock_maps: dict[_Around, ClockMap] = {}
        self._paces: dict[_Around, _Pace] = {}
        self._dispatch = float(sum(line.dispatch_ps for line in lines))
        self._has_collectives = any(line.kind == COLLECTIVE for line in lines)

    @cached_property
    def _ahead(self) -> _Walk:
        """The state after the sequence alone, with the host far ahead."""
        walk = _Walk(self._rates)
        walk.run(self._working)
        return walk

    @cached_property
    def _late(self) -> _Walk:
        """The state after the sequence alone, with the host starting at the same time."""
        walk = _Walk(self._rates)
        walk.run(self._lines, late=True)
        return walk

    def clock_map(self, before: Sequence[Line] = (), after: Sequence[Line] = (), *, steady: bool = False) -> ClockMap:
        """The map of `before`, the sequence and `after`.

        `steady` as of `measure`. Once a repetition ends in the same state as the previous one, all further ones are
        equal.
        """
        key = (tuple(before), tuple(after), steady)
        found = self._clock_maps.get(key)
        if found is None:
            found = self._clock_maps[key] = self._clock_map(*key)
        return found

    def stream_ps(self, before: tuple[Line, ...], after: tuple[Line, ...], *, steady: bool) -> float:
        """`clock_map(...).work_ps`, without a walk of the late host."""
        if self._is_alone(before, after):
            return float(sum(line.work_ps for lines in (before, self._lines, after) for line in lines))
        return self._pace(before, after, steady).work_ps

    def _is_alone(self, before: Sequence[Line], after: Sequence[Line]) -> bool:
        return not self._has_collectives and all(line.kind != COLLECTIVE for line in (*before, *after))

    def _clock_map(self, before: tuple[Line, ...], after: tuple[Line, ...], steady: bool) -> ClockMap:
        if self._is_alone(before, after):
            return _alone([*before, *self._lines, *after])
        if before:
            late = _Walk(self._rates)
            late.run([*before, *self._lines, *after], late=True)
        else:
            late = self._late.copy()
            late.run(after, late=True)
        pace = self._pace(before, after, steady)
        return ClockMap(
            work_ps=pace.work_ps,
            cold_start_ps=_dyadic(late.stream_ps),
            dispatch_ps=self._dispatch + sum(line.dispatch_ps for line in (*before, *after)),
            compute_ps=pace.compute_ps,
            exposed_ps=pace.exposed_ps,
            tail_ps=_dyadic(pace.tail_ps),
            tail_if_host_bound_ps=_dyadic(late.tail_ps),
            drift_per_repeat_ps=_dyadic(pace.drift_ps),
            channel_busy_ps=_unwaited([*before, *self._working, *after]),
        )

    def _pace(self, before: tuple[Line, ...], after: tuple[Line, ...], steady: bool) -> _Pace:
        """The last of several repetitions whose host is far ahead."""
        key = (before, after, steady)
        if key in self._paces:
            return self._paces[key]
        lines = [*before, *self._working, *after]
        if before:
            walk = _Walk(self._rates)
            walk.run(lines)
        else:
            walk = self._ahead.copy()
            walk.run(after)
        begin = busy = earlier_tail = drift = 0.0
        exposed: dict[str, float] = {}
        tail = walk.tail_ps
        state: tuple[object, ...] = ()
        for _ in range(1, SETTLED if steady else 1):
            if walk.state() == state:
                break
            state, begin, exposed, busy = walk.state(), walk.stream_ps, dict(walk.exposed_ps), walk.compute_ps
            earlier_tail = tail
            walk.run(lines)
            tail = walk.tail_ps
        else:
            drift = max(0.0, tail - earlier_tail) if steady and walk.state() != state else 0.0
        own = {
            call: time - exposed.get(call, 0.0) for call, time in walk.exposed_ps.items()
            if time > exposed.get(call, 0.0)
        }  # fmt: skip
        self._paces[key] = _Pace(_dyadic(walk.stream_ps - begin), walk.compute_ps - busy, own, tail, drift)
        return self._paces[key]


_Around = tuple[tuple[Line, ...], tuple[Line, ...], bool]
"""Lines before and after a body, and whether it is one of many."""


class _Pace(NamedTuple):
    """The parts of a `ClockMap` in which the stream is never short of work."""

    work_ps: float
    compute_ps: float
    exposed_ps: Mapping[str, float]
    tail_ps: float
    drift_ps: float


def _unwaited(lines: Sequence[Line]) -> float:
    """The work of the busiest channel in collectives that no line waits for."""
    waited = {line.token for line in lines if line.kind == WAIT}
    channels: dict[str, float] = {}
    for line in lines:
        if line.kind == COLLECTIVE and line.token >= 0 and line.token not in waited:
            channels[line.channel] = channels.get(line.channel, 0.0) + line.work_ps
    return max(channels.values(), default=0.0)


def _dyadic(time_ps: float) -> float:
    """Round to the nearest 64th of a picosecond: sums of such times are exact up to two minutes, in any order."""
    return round(64 * time_ps) / 64


def _alone(lines: Sequence[Line]) -> ClockMap:
    """The map of a sequence without concurrent communication."""
    dispatch, work, lead = 0, 0, 0
    for line in lines:
        dispatch += line.dispatch_ps
        work += line.work_ps
        lead = max(lead + line.work_ps, dispatch + line.work_ps)
    return ClockMap(work_ps=float(work), cold_start_ps=float(lead), dispatch_ps=float(dispatch), compute_ps=float(work))


class _Walk:
    """One rank's host, stream and channels.

    Attributes:
        stream_ps: when the stream is free.
        compute_ps: the part of it in which compute ran.
        exposed_ps: call of a collective -> the part of it in which the stream waited for it.
        channels: what is in progress.
    """

    def __init__(self, rates: PairRates | None) -> None:
        self.stream_ps = 0.0
        self.compute_ps = 0.0
        self.exposed_ps: dict[str, float] = {}
        self.channels = Channels(rates)
        self._host_ps = 0.0

    def run(self, lines: Sequence[Line], *, late: bool = False) -> None:
        """Walk the lines; `late`: the host starts at 0 with the stream idle, else it is far ahead."""
        channels, host, stream = self.channels, self._host_ps, self.stream_ps
        flows: dict[int, Flow] = {}
        for kind, dispatch_ps, work_ps, name, channel, token, _, _, alone_ps in lines:
            if late:
                host += dispatch_ps
            ready = stream if stream >= host else host
            if kind == COMPUTE:
                if not channels.num_flows:
                    stream = channels.clock_ps = ready + work_ps
                    self.compute_ps += work_ps
                elif work_ps:
                    stream = channels.compute(ready, float(work_ps), name)
                    self.compute_ps += stream - ready
                else:
                    stream = ready
            elif kind == COLLECTIVE:
                flow = channels.issue(channel, name, ready, float(work_ps), float(alone_ps))
                flows[token] = flow
                stream = self._wait(flow, ready) if token < 0 else stream
            else:
                stream = self._wait(flows[token], ready) if token in flows else ready
        self._host_ps, self.stream_ps = host, stream

    @property
    def tail_ps(self) -> float:
        """How long after the end of the stream the last collective ends if no compute follows."""
        return max(0.0, self.channels.last_end_ps() - self.stream_ps)

    def state(self) -> tuple[object, ...]:
        """The communication in progress, relative to the time of the stream. If it is equal, walks continue equally."""
        return self.channels.state(self.stream_ps)

    def copy(self) -> _Walk:
        """A copy of the walk that continues from here independently."""
        walk = _Walk(None)
        walk.stream_ps, walk.compute_ps, walk.exposed_ps = self.stream_ps, self.compute_ps, dict(self.exposed_ps)
        walk.channels, walk._host_ps = self.channels.copy(), self._host_ps
        return walk

    def _wait(self, flow: Flow, ready_ps: float) -> float:
        """Wait for a collective; returns when the stream continues."""
        self.channels.advance(ready_ps)
        end_ps = self.channels.wait(flow)
        if end_ps > ready_ps:
            self.exposed_ps[flow.call] = self.exposed_ps.get(flow.call, 0.0) + end_ps - ready_ps
        return max(ready_ps, end_ps)
