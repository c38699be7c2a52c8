"""How long the operations of a body take when compute and communication slow each other.

The body is walked once as the event engine would walk it, with the stream never short of work (or, where the host takes
longer than the device, with the host setting the pace). What comes out are the same operations with the work that they
really took, so that everything after this (`simulator.forecast.body`) is the arithmetic of undisturbed operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from costmodels.machine.machine import Machine
from plans.timeline import PS_PER_S
from simulator.forecast.body import ARRIVE, COMPUTE, ISSUE, WAIT, Op

__all__ = ["PairRates", "pair_rates", "slowed"]

PairRates = Callable[[str, int, str, int], tuple[float, float]]
"""(class of compute, its picoseconds alone, call of a collective, its picoseconds alone) -> rates of both, 1 is
alone."""

_SLOWEST = 1e-6


@lru_cache(maxsize=64)
def pair_rates(machine: Machine) -> PairRates | None:
    """The machine's rates of work that overlaps, as the engine has them; None where nothing slows anything."""
    if not machine.overlap:
        return None
    pairs = {(str(entry.compute), entry.collective): entry for entry in machine.overlap}

    @lru_cache(maxsize=65_536)
    def rates(kind: str, kernel_ps: int, call: str, message_ps: int) -> tuple[float, float]:
        pair = pairs.get((kind, call))
        if pair is None:
            return 1.0, 1.0
        mine, theirs = pair.rates(kernel_ps / PS_PER_S, message_ps / PS_PER_S)
        return mine, max(theirs, _SLOWEST)

    return rates


def slowed(ops: Sequence[Op], rates: PairRates | None) -> tuple[Op, ...]:
    """The operations with the work that they take beside each other.

    Args:
        ops: of a body, or of bodies that follow each other.
        rates: of pairs; None: overlap costs nothing.

    >>> body = [Op(ISSUE, 0, 400, "all_reduce", "dp", "t"), Op(COMPUTE, 0, 1000, "matrix"), Op(WAIT, 0, token="t")]
    >>> [op.work_ps for op in slowed(body, lambda *pair: (0.7, 0.5))]
    [800, 1240, 0]
    """
    if rates is None or not any(op.kind == ISSUE for op in ops):
        return tuple(ops)
    walk = _Walk(rates, is_late=_host_sets_the_pace(ops))
    for number, op in enumerate(ops):
        walk.step(number, op)
    walk.drain()
    return tuple([
        op._replace(work_ps=walk.taken[number]) if number in walk.taken and walk.taken[number] != op.work_ps else op
        for number, op in enumerate(ops)
    ])  # fmt: skip


def _host_sets_the_pace(ops: Sequence[Op]) -> bool:
    work = sum(op.work_ps for op in ops if op.kind == COMPUTE)
    return sum(op.dispatch_ps for op in ops) > work


class _Flow:
    """A collective: issued, under way or over."""

    __slots__ = ("alone", "begun", "call", "end", "left", "number", "ready")

    def __init__(self, number: int, op: Op, ready: float) -> None:
        self.number = number
        self.call = op.name
        self.alone = op.work_ps
        self.left = float(op.work_ps)
        self.ready = ready
        self.begun = self.end = -1.0


_DONE_PS = 0.5
"""Less work than this is done."""


class _Walk:
    """One rank's stream, host and channels."""

    def __init__(self, rates: PairRates, *, is_late: bool) -> None:
        self.taken: dict[int, int] = {}
        self._rates = rates
        self._is_late = is_late
        self._host = 0.0
        self._stream = 0.0
        self._clock = 0.0
        self._queues: dict[str, list[_Flow]] = {}
        self._flows: dict[str, _Flow] = {}
        self._num_flows = 0

    def step(self, number: int, op: Op) -> None:
        """Do one operation."""
        if self._is_late:
            self._host += op.dispatch_ps
        if op.kind == COMPUTE:
            begin = max(self._stream, self._host)
            if not self._num_flows:
                self._stream = begin + op.work_ps
                return
            self._run(begin, None, 0)
            if op.work_ps and self._num_flows:
                self._stream = self._run(begin, op, op.work_ps)
                self.taken[number] = round(self._stream) - round(begin)
            else:
                self._stream = begin + op.work_ps
                self._run(self._stream, None, 0)
        elif op.kind == ISSUE:
            flow = self._flows[op.token] = _Flow(number, op, max(self._stream, self._host))
            self._queues.setdefault(op.channel, []).append(flow)
            self._num_flows += 1
        elif op.kind == WAIT:
            flow_ = self._flows.get(op.token)
            if flow_ is not None:
                if flow_.end < 0:
                    self._run(self._stream, None, 0)
                if flow_.end < 0:
                    self._idle_for(flow_)
                self._stream = max(self._stream, flow_.end)
        elif op.kind == ARRIVE:
            self._stream = max(self._stream, self._host)

    def drain(self) -> None:
        """All that is under way ends, with nothing beside it."""
        while self._num_flows:
            for queue in self._queues.values():
                if queue:
                    self._idle_for(queue[-1])

    def _idle_for(self, flow: _Flow) -> None:
        """Nothing computes until a collective is over."""
        for queue in self._queues.values():
            if flow in queue:
                while flow.end < 0:
                    first = queue[0]
                    begin = max(first.ready, self._clock) if first.begun < 0 else self._clock
                    self._run(begin + first.left, None, 0)
                return

    def _run(self, until: float, compute: Op | None, work_ps: int) -> float:
        """Follow the channels while `compute` takes its work from `until` on, or up to the time `until` without one."""
        time, left = (until, float(work_ps)) if compute is not None else (self._clock, 0.0)
        while self._num_flows:
            running, later = self._running(time)
            speed, step = 1.0, float("inf")
            moving = []
            for queue, flow in running:
                mine, theirs = 1.0, 1.0
                if compute is not None:
                    mine, theirs = self._rates(compute.name, compute.work_ps, flow.call, flow.alone)
                speed = min(speed, mine)
                step = min(step, flow.left / theirs)
                moving.append((queue, flow, theirs))
            if compute is not None:
                step = min(step, left / speed)
            else:
                step = min(step, until - time)
            step = max(0.0, min(step, later - time))
            time += step
            for queue, flow, rate in moving:
                flow.left -= step * rate
                if flow.left < _DONE_PS:
                    self._finish(queue, flow, time)
            if compute is not None:
                left -= step * speed
                if left < _DONE_PS:
                    break
            elif time >= until:
                break
        else:
            time = time + left if compute is not None else until
        self._clock = max(self._clock, time)
        return time

    def _running(self, time: float) -> tuple[list[tuple[list[_Flow], _Flow]], float]:
        """The first collective of each channel that is ready, and when the next one will be."""
        running, later = [], float("inf")
        for queue in self._queues.values():
            if not queue:
                continue
            flow = queue[0]
            if flow.ready > time:
                later = min(later, flow.ready)
                continue
            if flow.begun < 0:
                flow.begun = max(flow.ready, time)
            running.append((queue, flow))
        return running, later

    def _finish(self, queue: list[_Flow], flow: _Flow, time: float) -> None:
        flow.end = time
        self.taken[flow.number] = round(time) - round(flow.begun)
        queue.pop(0)
        self._num_flows -= 1
        if queue:
            queue[0].ready = max(queue[0].ready, time)
