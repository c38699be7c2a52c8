"""The times of the operations of a body when compute and communication slow each other.

A body is simulated once, like in the event engine, with a stream that always has work, or with the host setting the
pace if it takes longer than the device. The result is the same operations with longer work, so that all later steps
(`simulator.forecast.body`) need no overlap model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from costmodels.machine.machine import Machine
from costmodels.price.overlap import overlap_law
from plans.timeline import PS_PER_S
from simulator.forecast.body import ARRIVE, COMPUTE, ISSUE, WAIT, Op

__all__ = ["PairRates", "host_lead_ps", "pair_rates", "slowed"]

PairRates = Callable[[str, float, str, float], tuple[float, float]]
"""(class of compute, its picoseconds alone, call of a collective, its picoseconds alone) -> rates of both, 1 is
alone."""


@lru_cache(maxsize=64)
def pair_rates(machine: Machine) -> PairRates | None:
    """The machine's rates of work that overlaps, as the engine has them; None where nothing slows anything."""
    law = overlap_law(machine)
    if law is None:
        return None

    @lru_cache(maxsize=16_384)
    def rates(kind: str, kernel_ps: float, call: str, message_ps: float) -> tuple[float, float]:
        assert law is not None
        return law(kind, kernel_ps / PS_PER_S, call, message_ps / PS_PER_S)

    return rates


def slowed(ops: Sequence[Op], rates: PairRates | None, arrival_ps: int = 0) -> tuple[Op, ...]:
    """The operations with the work that they need under mutual slowdown.

    Args:
        ops: of a body, or of bodies that follow each other.
        rates: of pairs; None: overlap costs nothing.
        arrival_ps: picoseconds from their begin to the arrival of the tensor for which an ARRIVE waits.

    >>> body = [Op(ISSUE, 0, 400, "all_reduce", "dp", "t"), Op(COMPUTE, 0, 1000, "matrix"), Op(WAIT, 0, token="t")]
    >>> [op.work_ps for op in slowed(body, lambda *pair: (0.7, 0.5))]
    [800, 1240, 0]
    """
    return _slowed(ops, rates, is_late=_host_sets_the_pace(ops), arrival_ps=arrival_ps)


def host_lead_ps(ops: Sequence[Op], rates: PairRates) -> tuple[int, int]:
    """By how much a body lets its host get ahead, and how much longer its compute takes if the host was ahead before.

    `slowed` takes the host to set the pace where it has more to do than the device. A body before may have given it a
    lead, by compute or by collectives that the stream waited for; then more of the communication runs beside compute.
    """
    is_late = _host_sets_the_pace(ops)
    walk = _Walk(rates, is_late=is_late)
    lead_ps = max(0, round(walk.run(ops)) - sum(op.dispatch_ps for op in ops))
    if not is_late:
        return lead_ps, 0
    late, early = (_computed(_slowed(ops, rates, is_late=each)) for each in (True, False))
    return lead_ps, abs(early - late)


def _slowed(ops: Sequence[Op], rates: PairRates | None, *, is_late: bool, arrival_ps: int = 0) -> tuple[Op, ...]:
    if rates is None or not any(op.kind == ISSUE for op in ops):
        return tuple(ops)
    walk = _Walk(rates, is_late=is_late, arrival_ps=arrival_ps)
    walk.run(ops)
    found = list(ops)
    for number, work_ps in walk.taken.items():
        if work_ps != ops[number].work_ps:
            found[number] = ops[number]._replace(work_ps=work_ps)
    return tuple(found)


def _host_sets_the_pace(ops: Sequence[Op]) -> bool:
    return sum(op.dispatch_ps for op in ops) > _computed(ops)


def _computed(ops: Sequence[Op]) -> int:
    return sum(op.work_ps for op in ops if op.kind == COMPUTE)


class _Flow:
    """A collective: issued, under way or over; `most` is the largest rate relative to its work next to its siblings, if
    none of them used the links."""

    __slots__ = ("alone", "begun", "call", "end", "left", "most", "number", "ready")

    def __init__(self, number: int, op: Op, ready: float) -> None:
        self.number = number
        self.call = op.name
        self.alone = op.alone_ps or op.work_ps
        self.most = op.work_ps / self.alone if self.alone else 1.0
        self.left = float(op.work_ps)
        self.ready = ready
        self.begun = self.end = -1.0


_DONE_PS = 0.5
"""Less work than this is done."""

_NEVER = float("inf")


class _Walk:
    """One rank's stream, host and channels."""

    def __init__(self, rates: PairRates, *, is_late: bool, arrival_ps: int = 0) -> None:
        self.taken: dict[int, int] = {}
        self._rates = rates
        self._is_late = is_late
        self._arrival_ps = arrival_ps
        self._clock = 0.0
        self._queues: dict[str, list[_Flow]] = {}
        self._flows: dict[str, _Flow] = {}
        self._num_flows = 0

    def run(self, ops: Sequence[Op]) -> float:
        """Do all operations; returns when the stream is free."""
        stream, host, is_late = 0.0, 0.0, self._is_late
        for number, op in enumerate(ops):
            kind, dispatch_ps, work_ps, _, channel, token, _, _, _ = op
            if is_late:
                host += dispatch_ps
            if kind == COMPUTE:
                begin = stream if stream >= host else host
                if not self._num_flows:
                    stream = begin + work_ps
                    continue
                self._follow(begin)
                if work_ps and self._num_flows:
                    stream = self._compute(begin, op)
                    self.taken[number] = round(stream) - round(begin)
                else:
                    stream = begin + work_ps
                    self._follow(stream)
            elif kind == ISSUE:
                flow = self._flows[token] = _Flow(number, op, max(stream, host))
                self._queues.setdefault(channel, []).append(flow)
                self._num_flows += 1
            elif kind == WAIT:
                flow_ = self._flows.get(token)
                if flow_ is not None:
                    if flow_.end < 0:
                        self._follow(stream)
                    if flow_.end < 0:
                        self._idle_for(flow_)
                    stream = max(stream, flow_.end)
            elif kind == ARRIVE:
                stream = max(stream, host, self._arrival_ps)
        self._drain()
        return stream

    def _drain(self) -> None:
        """Let everything in progress end, without concurrent compute."""
        while self._num_flows:
            for queue in self._queues.values():
                if queue:
                    self._idle_for(queue[-1])

    def _idle_for(self, flow: _Flow) -> None:
        """Advance without compute until a collective has ended."""
        for queue in self._queues.values():
            if flow in queue:
                while flow.end < 0:
                    first = queue[0]
                    begin = max(first.ready, self._clock) if first.begun < 0 else self._clock
                    self._follow(begin + first.left)
                return

    def _follow(self, until: float) -> None:
        """Advance the channels to a time, without compute."""
        time = self._clock
        while self._num_flows:
            step, later = until - time, _NEVER
            moving = []
            for queue in self._queues.values():
                if not queue:
                    continue
                flow = queue[0]
                if flow.ready > time:
                    if flow.ready < later:
                        later = flow.ready
                    continue
                if flow.begun < 0:
                    flow.begun = time
                if flow.left < step:
                    step = flow.left
                moving.append((queue, flow))
            if later - time < step:
                step = later - time
            if step > 0:
                time += step
                for _, flow in moving:
                    flow.left -= step
            for queue, flow in moving:
                if flow.left < _DONE_PS:
                    self._finish(queue, flow, time)
            if time >= until:
                break
        else:
            time = until
        if time > self._clock:
            self._clock = time

    def _compute(self, time: float, op: Op) -> float:
        """Advance the channels while an operation executes from a given time; returns its end."""
        name, work_ps, rates = op.name, op.work_ps, self._rates
        left = float(work_ps)
        while self._num_flows:
            speed, step, later = 1.0, _NEVER, _NEVER
            moving = []
            for queue in self._queues.values():
                if not queue:
                    continue
                flow = queue[0]
                if flow.ready > time:
                    if flow.ready < later:
                        later = flow.ready
                    continue
                if flow.begun < 0:
                    flow.begun = time
                mine, theirs = rates(name, work_ps, flow.call, flow.alone)
                theirs = min(1.0, theirs * flow.most)  # siblings that compute slows leave each other more of the links
                if mine < speed:
                    speed = mine
                ending = flow.left / theirs
                if ending < step:
                    step = ending
                moving.append((queue, flow, theirs))
            step = max(0.0, min(step, left / speed, later - time))
            time += step
            for queue, flow, rate in moving:
                flow.left -= step * rate
                if flow.left < _DONE_PS:
                    self._finish(queue, flow, time)
            left -= step * speed
            if left < _DONE_PS:
                break
        else:
            time += left
        if time > self._clock:
            self._clock = time
        return time

    def _finish(self, queue: list[_Flow], flow: _Flow, time: float) -> None:
        flow.end = time
        self.taken[flow.number] = round(time) - round(flow.begun)
        queue.pop(0)
        self._num_flows -= 1
        if queue:
            queue[0].ready = max(queue[0].ready, time)
