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

from simulator.forecast.overlap import PairRates
from simulator.lines import COLLECTIVE, COMPUTE, WAIT, Line

__all__ = ["Body", "ClockMap", "body_of", "measure"]


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
            tail_ps=max(0.0, self.tail_ps + (count - _SETTLED) * self.drift_per_repeat_ps)
            if self.drift_per_repeat_ps
            else self.tail_ps,
            tail_if_host_bound_ps=self.tail_if_host_bound_ps,
            channel_busy_ps=count
            * (self.work_ps + self.drift_per_repeat_ps if self.drift_per_repeat_ps else self.channel_busy_ps),
            prefetch_ps=self.prefetch_ps,
        )


_SETTLED = 4
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
        self._clock_maps: dict[tuple[tuple[Line, ...], tuple[Line, ...], bool], ClockMap] = {}
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

    def _clock_map(self, before: tuple[Line, ...], after: tuple[Line, ...], steady: bool) -> ClockMap:
        if not self._has_collectives and all(line.kind != COLLECTIVE for line in (*before, *after)):
            return _alone([*before, *self._lines, *after])
        lines = [*before, *self._working, *after]
        if before:
            walk, late = _Walk(self._rates), _Walk(self._rates)
            walk.run(lines)
            late.run([*before, *self._lines, *after], late=True)
        else:
            walk, late = self._ahead.again(), self._late.again()
            walk.run(after)
            late.run(after, late=True)
        late_end = late.last_end()
        begin = busy = 0.0
        exposed: dict[str, float] = {}
        trailing, earlier, lag = max(0.0, walk.last_end() - walk.stream), 0.0, 0.0
        left: _Left = ()
        for _ in range(1, _SETTLED if steady else 1):
            remains = walk.left()
            if remains == left:
                break
            left = remains
            begin, exposed, busy, earlier = walk.stream, dict(walk.exposed), walk.compute, trailing
            walk.run(lines)
            trailing = max(0.0, walk.last_end() - walk.stream)
        else:
            lag = max(0.0, trailing - earlier) if steady and walk.left() != left else 0.0
        return ClockMap(
            work_ps=_dyadic(walk.stream - begin),
            cold_start_ps=_dyadic(late.stream),
            dispatch_ps=self._dispatch + sum(line.dispatch_ps for line in (*before, *after)),
            compute_ps=walk.compute - busy,
            exposed_ps={
                call: time - exposed.get(call, 0.0)
                for call, time in walk.exposed.items()
                if time > exposed.get(call, 0.0)
            },
            tail_ps=_dyadic(trailing),
            tail_if_host_bound_ps=_dyadic(max(0.0, late_end - late.stream)),
            drift_per_repeat_ps=_dyadic(lag),
            channel_busy_ps=_unwaited(lines),
        )


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


_NEVER = float("inf")
_LEAST_PS = 0.5
"""Less work than this is done: clocks of hours are exact to a thousandth of it."""


class _Flow:
    """A collective in progress; `alone` is its work without its siblings, `most` as in `simulator.forecast.overlap`."""

    __slots__ = ("alone", "call", "end", "left", "most", "start", "token", "work")

    def __init__(self, call: str, token: int, start: float, work: float, alone: float) -> None:
        self.call = call
        self.token = token
        self.start = start  # earliest; it may have to wait for the one before it on its channel
        self.work = self.left = work
        self.alone = alone
        self.most = work / alone if alone else 1.0
        self.end = -1.0

    def again(self) -> _Flow:
        """A copy that continues independently."""
        flow = _Flow(self.call, self.token, self.start, self.work, self.alone)
        flow.left = self.left
        return flow


_Left = tuple[object, ...]


class _Walk:
    """One rank's stream and its channels."""

    def __init__(self, rates: PairRates | None) -> None:
        self.stream = 0.0
        self.compute = 0.0
        self.exposed: dict[str, float] = {}
        self._rates = rates
        self._channels: dict[str, list[_Flow]] = {}
        self._clock = 0.0  # up to where the channels have been followed
        self._tail: dict[str, float] = {}
        self._num_flows = 0  # under way
        self._host = 0.0

    def run(self, lines: Sequence[Line], *, late: bool = False) -> None:
        """Walk the lines; `late`: the host starts at 0 with the stream idle, else it is far ahead."""
        host = self._host
        tokens: dict[int, _Flow] = {}
        for kind, dispatch, work, name, channel, token, _, _, alone in lines:
            if late:
                host += dispatch
            ready = max(self.stream, host)
            if kind == COMPUTE:
                if not self._num_flows:
                    self.stream = self._clock = ready + work
                    self.compute += work
                elif work:
                    self.stream = self._compute(ready, float(work), name)
                    self.compute += self.stream - ready
                else:
                    self.stream = ready
            elif kind == COLLECTIVE:
                queue = self._channels.setdefault(channel, [])
                tokens[token] = flow = _Flow(name, token, ready, float(work), float(alone or work))
                queue.append(flow)
                self._num_flows += 1
                if token < 0:
                    self._wait(flow, ready)
            elif (waited := tokens.get(token)) is not None:
                self._wait(waited, ready)
            else:
                self.stream = ready
        self._host = host

    def again(self) -> _Walk:
        """A copy of the walk that continues from here independently."""
        walk = _Walk(self._rates)
        walk.stream, walk.compute, walk.exposed = self.stream, self.compute, dict(self.exposed)
        walk._channels = {
            channel: [flow.again() for flow in queue] for channel, queue in self._channels.items() if queue
        }
        walk._clock, walk._tail, walk._num_flows = self._clock, dict(self._tail), self._num_flows
        walk._host = self._host
        return walk

    def left(self) -> _Left:
        """The communication in progress, relative to the time of the stream. If it is equal, walks continue equally."""
        if not self._num_flows:
            return ()
        return self._clock - self.stream, tuple(
            (channel, flow.call, flow.start - self.stream, flow.work, flow.alone, flow.left)
            for channel, queue in self._channels.items() for flow in queue
        )  # fmt: skip

    def last_end(self) -> float:
        """The end of the last collective if no compute follows."""
        ends = list(self._tail.values())
        for queue in self._channels.values():
            end = self._clock
            for flow in queue:
                end = max(end, flow.start) + flow.left
            ends.append(end)
        return max(ends, default=0.0)

    def _wait(self, flow: _Flow, ready: float) -> None:
        self._idle_until(ready)
        end = flow.end
        if end < 0:
            end = self._idle_for(flow)
        if end > ready:
            self.exposed[flow.call] = self.exposed.get(flow.call, 0.0) + end - ready
        self.stream = max(ready, end)

    def _finish(self, channel: str, flow: _Flow, at: float) -> None:
        flow.end = at
        self._num_flows -= 1
        queue = self._channels[channel]
        queue.pop(0)
        self._tail[channel] = at
        if queue:
            queue[0].start = max(queue[0].start, at)

    def _idle_until(self, time: float) -> None:
        """Advance the channels to a time without compute."""
        clock = self._clock
        if self._num_flows:
            for channel, queue in self._channels.items():
                while queue:
                    flow = queue[0]
                    begin = flow.start if flow.start > clock else clock
                    if begin + flow.left > time:
                        if time > begin:
                            flow.left -= time - begin
                        break
                    self._finish(channel, flow, begin + flow.left)
        if time > clock:
            self._clock = time

    def _idle_for(self, flow: _Flow) -> float:
        for channel, queue in self._channels.items():
            if flow in queue:
                clock, end = self._clock, -1.0
                for each in list(queue):
                    end = max(each.start, clock) + each.left
                    clock = end
                    self._finish(channel, each, end)
                    if each is flow:
                        break
                return end
        raise AssertionError("the collective is on no channel")

    def _compute(self, start: float, work: float, kind: str) -> float:
        self._idle_until(start)
        time, left = start, work
        rates = self._rates
        while self._num_flows:
            running: list[tuple[str, _Flow, float]] = []
            speed, first, later = 1.0, _NEVER, _NEVER
            for channel, queue in self._channels.items():
                if not queue:
                    continue
                flow = queue[0]
                if flow.start > time:
                    if flow.start < later:
                        later = flow.start
                    continue
                mine, theirs = rates(kind, work, flow.call, flow.alone) if rates is not None else (1.0, 1.0)
                theirs = min(1.0, theirs * flow.most)
                running.append((channel, flow, theirs))
                if mine < speed:
                    speed = mine
                if flow.left / theirs < first:
                    first = flow.left / theirs
            until = time + left / speed
            if time + first < until:
                until = time + first
            if later < until:
                until = later
            passed = until - time
            for channel, flow, rate in running:
                flow.left -= passed * rate
                if flow.left < _LEAST_PS:
                    self._finish(channel, flow, until)
            left -= passed * speed
            time = until
            if left < _LEAST_PS:
                break
        else:
            time += left
        self._clock = time
        return time
