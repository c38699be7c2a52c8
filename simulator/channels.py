"""The collectives of one rank that are in progress, and the speed at which they and compute proceed together.

Every channel runs its collectives one after another. While a collective and compute run at the same time, each proceeds
at its rate for the pair (`costmodels.price.overlap`), until one of them ends and the rates change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from costmodels.machine.machine import Machine
from costmodels.price.overlap import overlap_law
from plans.timeline import PS_PER_S

__all__ = ["MOST_MESSAGES", "Channels", "Flow", "PairRates", "pair_rates"]

MOST_MESSAGES = 5000
"""Messages of a step up to which a forecast simulates it in time order, at about 60 us for each. Searches on thousands
of devices evaluate steps with 100,000 of them."""

PairRates = Callable[[str, float, str, float], tuple[float, float]]
"""(class of compute, its picoseconds alone, call of a collective, its picoseconds alone) -> rates of both, 1 is
alone."""

_NEVER = float("inf")

_LEAST_PS = 0.5
"""Less work than this is done: clocks of hours are exact to a thousandth of it."""


@lru_cache(maxsize=16)
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


class Flow:
    """A collective that was issued.

    Attributes:
        call: of the collective.
        start_ps: when it starts: after it was issued and after the collective before it on its channel has ended.
        end_ps: when it ended; -1 before.
        work_ps: its time next to its siblings, which share the links with it.
        alone_ps: its time without them.
        left_ps: what is left of `work_ps`.
        largest_rate: its rate if its siblings did not use the links, relative to its work next to them.
    """

    __slots__ = ("alone_ps", "call", "end_ps", "largest_rate", "left_ps", "start_ps", "work_ps")

    def __init__(self, call: str, start_ps: float, work_ps: float, alone_ps: float) -> None:
        self.call = call
        self.start_ps = start_ps
        self.work_ps = self.left_ps = work_ps
        self.alone_ps = alone_ps
        self.largest_rate = work_ps / alone_ps if alone_ps else 1.0
        self.end_ps = -1.0

    def copy(self) -> Flow:
        """A copy that continues independently."""
        flow = Flow(self.call, self.start_ps, self.work_ps, self.alone_ps)
        flow.left_ps = self.left_ps
        return flow


class Channels:
    """The channels of one rank.

    Args:
        rates: of pairs of compute and collective; None: overlap costs nothing.

    Attributes:
        num_flows: collectives that are issued and have not ended.
        clock_ps: the time until which the channels have been simulated.

    >>> channels = Channels(lambda *pair: (0.5, 0.25))
    >>> flow = channels.issue("dp", "all_reduce", 0.0, 5.0)
    >>> channels.compute(0.0, 4.0, "matrix")  # at half its speed; the collective has done 2 of 5
    8.0
    >>> channels.wait(flow)
    11.0
    """

    __slots__ = ("_last_end_ps", "_queues", "_rates", "clock_ps", "num_flows")

    def __init__(self, rates: PairRates | None) -> None:
        self._rates = rates
        self._queues: dict[str, list[Flow]] = {}
        self._last_end_ps = 0.0
        self.clock_ps = 0.0
        self.num_flows = 0

    def issue(self, channel: str, call: str, ready_ps: float, work_ps: float, alone_ps: float = 0.0) -> Flow:
        """Queue a collective that may start at `ready_ps`; `alone_ps` is 0 where it equals `work_ps`."""
        flow = Flow(call, ready_ps, work_ps, alone_ps or work_ps)
        self._queues.setdefault(channel, []).append(flow)
        self.num_flows += 1
        return flow

    def advance(self, time_ps: float) -> None:
        """Advance to a time without compute."""
        clock = self.clock_ps
        if self.num_flows:
            for queue in self._queues.values():
                while queue:
                    flow = queue[0]
                    begin = flow.start_ps if flow.start_ps > clock else clock
                    if begin + flow.left_ps > time_ps:
                        if time_ps > begin:
                            flow.left_ps -= time_ps - begin
                        break
                    self._finish(queue, begin + flow.left_ps)
        if time_ps > clock:
            self.clock_ps = time_ps

    def wait(self, flow: Flow) -> float:
        """Let a collective end without further compute; returns when it ends."""
        if flow.end_ps < 0:
            queue = next(queue for queue in self._queues.values() if flow in queue)
            clock = self.clock_ps
            while flow.end_ps < 0:
                clock = max(queue[0].start_ps, clock) + queue[0].left_ps
                self._finish(queue, clock)
        return flow.end_ps

    def drain(self) -> None:
        """Let all collectives end without further compute."""
        for queue in self._queues.values():
            if queue:
                self.wait(queue[-1])

    def compute(self, start_ps: float, work_ps: float, kind: str) -> float:
        """Advance while an operation computes from a given time; returns when it ends.

        Args:
            start_ps: when it starts.
            work_ps: its time alone.
            kind: its class, for the rates.
        """
        self.advance(start_ps)
        time, left = start_ps, work_ps
        rates = self._rates
        while self.num_flows:
            running: list[tuple[list[Flow], Flow, float]] = []
            speed, first, later = 1.0, _NEVER, _NEVER
            for queue in self._queues.values():
                if not queue:
                    continue
                flow = queue[0]
                if flow.start_ps > time:
                    if flow.start_ps < later:
                        later = flow.start_ps
                    continue
                mine, theirs = rates(kind, work_ps, flow.call, flow.alone_ps) if rates is not None else (1.0, 1.0)
                theirs = min(1.0, theirs * flow.largest_rate)  # slowed siblings leave each other more of the links
                running.append((queue, flow, theirs))
                if mine < speed:
                    speed = mine
                if flow.left_ps / theirs < first:
                    first = flow.left_ps / theirs
            until = time + left / speed
            if time + first < until:
                until = time + first
            if later < until:
                until = later
            passed = until - time
            for queue, flow, rate in running:
                flow.left_ps -= passed * rate
                if flow.left_ps < _LEAST_PS:
                    self._finish(queue, until)
            left -= passed * speed
            time = until
            if left < _LEAST_PS:
                break
        else:
            time += left
        self.clock_ps = time
        return time

    def last_end_ps(self) -> float:
        """The end of the last collective if no compute follows."""
        last = self._last_end_ps
        for queue in self._queues.values():
            end = self.clock_ps
            for flow in queue:
                end = max(end, flow.start_ps) + flow.left_ps
            last = max(last, end)
        return last

    def state(self, stream_ps: float) -> tuple[object, ...]:
        """What is in progress, relative to a time. Channels in equal states continue equally."""
        if not self.num_flows:
            return ()
        return self.clock_ps - stream_ps, tuple(
            (channel, flow.call, flow.start_ps - stream_ps, flow.work_ps, flow.alone_ps, flow.left_ps)
            for channel, queue in self._queues.items() for flow in queue
        )  # fmt: skip

    def copy(self) -> Channels:
        """A copy that continues independently."""
        channels = Channels(self._rates)
        channels._queues = {name: [flow.copy() for flow in queue] for name, queue in self._queues.items() if queue}
        channels._last_end_ps = self._last_end_ps
        channels.clock_ps, channels.num_flows = self.clock_ps, self.num_flows
        return channels

    def _finish(self, queue: list[Flow], time_ps: float) -> None:
        queue.pop(0).end_ps = time_ps
        self.num_flows -= 1
        if time_ps > self._last_end_ps:
            self._last_end_ps = time_ps
        if queue and queue[0].start_ps < time_ps:
            queue[0].start_ps = time_ps
