"""Fluid sharing: work that proceeds at a rate which changes with the concurrent work.

An `Activity` has an amount of work, its time in picoseconds when it runs alone. Its rate is a rational number and
constant between two changes, so the remaining work is exact: everything is integer arithmetic over a common
denominator. An activity ends at the first whole picosecond at which its work is done, so each loses less than one
picosecond.

`Cores` shares the processor cores of a node evenly. `Fabric` slows the compute and the communication of one device by
measured pairwise rates, and shares links among communication max-min fairly.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import simpy

from costmodels.price.sharing import Claims, max_min_rates

__all__ = ["Activity", "Claims", "Clock", "Cores", "Fabric", "Now", "Rates"]

Rates = Callable[[Any, int, Any, int], tuple[Fraction, Fraction]]
"""(kind of compute, its picoseconds alone, kind of communication, its picoseconds alone) -> the rates of both while
they run on one device, above 0."""

_ONE, _NONE = Fraction(1), Fraction(0)
_FINEST, _COARSE = 2**192, 2**64
"""Work is counted in parts of a picosecond no smaller than one divided by this number."""


class Clock(simpy.Environment):
    """A SimPy environment that starts at 0 picoseconds and does not refer to itself.

    An `Environment` keeps `timeout` and others as methods bound to itself. Those of a subclass are bound at each call
    instead, so reference counting frees a simulation as soon as it is over.
    """


class Now(simpy.Event):
    """An event that happens within the one that causes it, not behind all others of its time."""

    def happen(self) -> None:
        """Wake up the processes that wait for this event."""
        callbacks = self.callbacks
        self.callbacks = None  # type: ignore[assignment]  # so SimPy marks what was processed
        self._ok, self._value = True, None
        for callback in callbacks:
            callback(self)


class Activity:
    """Work in progress; it makes no progress until it is given a rate.

    Args:
        env: the environment whose time is whole picoseconds.
        work_ps: how long it lasts at rate 1.
        done: called once, at the end.
        marks: amounts of work, ascending, whose times of completion are needed; they are found in `times`.

    >>> env, ended = Clock(), []
    >>> activity = Activity(env, 9, lambda: ended.append(env.now), marks=(3, 9))
    >>> activity.run_at(Fraction(1, 2))
    >>> env.run()
    >>> ended, activity.times
    ([18], [6, 18])
    """

    __slots__ = ("_done", "_env", "_left", "_marks", "_rate", "_since", "_unit", "_version", "times", "work_ps")

    def __init__(self, env: Clock, work_ps: int, done: Callable[[], object], marks: Sequence[int] = ()) -> None:
        self.work_ps = work_ps
        self.times: list[int] = []
        self._env = env
        self._done = done
        self._marks = marks
        self._unit = 1  # work is counted in 1 / _unit picoseconds
        self._left = work_ps
        self._rate: Fraction | None = None
        self._since = int(env.now)
        self._version = 0

    def run_at(self, rate: Fraction) -> None:
        """Continue at this rate (above 0) and schedule the end."""
        if _equal(rate, self._rate):
            return
        ends_ps = self.ends_at(rate)
        self._version += 1
        delay = max(0, ends_ps - int(self._env.now))
        self._env.timeout(delay).callbacks.append(partial(self._end, self._version))

    def ends_at(self, rate: Fraction) -> int:
        """Proceed at this rate (above 0) from now on. Returns the end if the rate does not change; call `end` then."""
        if not _equal(rate, self._rate):
            self._settle()
            self._rate = rate
            if rate is _ONE:  # any unit will do
                return self._since - (-self._left // self._unit)
            if self._unit > _FINEST:  # after ever new rates: what is left, rounded up to a coarser unit
                self._left, self._unit = -(-self._left * _COARSE // self._unit), _COARSE
            if self._unit % rate.denominator:
                grow = rate.denominator // math.gcd(self._unit, rate.denominator)
                self._unit *= grow
                self._left *= grow
        return self._since - (-self._left // self._per_ps())

    def end(self) -> None:
        """End the activity."""
        self._settle()
        self._done()

    def _per_ps(self) -> int:
        assert self._rate is not None
        return self._rate.numerator * (self._unit // self._rate.denominator)

    def _settle(self) -> None:
        now = int(self._env.now)
        if self._rate is not None:
            per_ps = self._per_ps()
            had = self.work_ps * self._unit - self._left
            has = had + (now - self._since) * per_ps
            while len(self.times) < len(self._marks) and self._marks[len(self.times)] * self._unit <= has:
                missing = self._marks[len(self.times)] * self._unit - had
                self.times.append(self._since + max(0, -(-missing // per_ps)))
            self._left = self.work_ps * self._unit - has
        self._since = now

    def _end(self, version: int, _event: simpy.Event) -> None:
        if version == self._version:
            self._version += 1
            self.end()


def _equal(one: Fraction, other: Fraction | None) -> bool:
    """Like ==, but without first determining the kinds of numbers, which takes ten times as long."""
    if one is other:
        return True
    return other is not None and one.numerator == other.numerator and one.denominator == other.denominator


def _less(one: Fraction, other: Fraction) -> bool:
    """Like <, without first determining the kinds of numbers."""
    return one.numerator * other.denominator < other.numerator * one.denominator


class Share:
    """Work on `Cores`; `times` are those at which its `marks` were reached, once it is done."""

    __slots__ = ("done", "ends", "first", "marks", "starts", "times")

    def __init__(self, starts: int, ends: int, first: int, done: Callable[[], object], marks: Sequence[int]) -> None:
        self.starts = starts
        self.ends = ends
        self.first = first
        self.done = done
        self.marks = marks
        self.times: list[int] = []


class Cores:
    """The processor cores of one node: n busy activities on c cores proceed at rate min(1, c / n) each.

    All activities have the same rate, so one clock of finished work gives the progress of each: it starts at one
    reading and ends at another. The clock counts in integer fractions of a picosecond, so that it is exact.

    >>> env, ended = Clock(), []
    >>> cores = Cores(env, 2)
    >>> for name in "abc":
    ...     _ = cores.add(10, lambda name=name: ended.append((name, env.now)))
    >>> env.run()
    >>> ended
    [('a', 15), ('b', 15), ('c', 15)]
    """

    def __init__(self, env: Clock, num_cores: int) -> None:
        self._env = env
        self._num_cores = num_cores
        self._busy: dict[Share, int] = {}  # the earliest started first, with the reading at which it ends
        self._unit = 1  # the clock counts 1 / _unit picoseconds of work
        self._changes: list[tuple[int, int, int]] = []  # reading, time, and readings per picosecond from there on
        self._version = 0

    def add(self, work_ps: int, done: Callable[[], object], marks: Sequence[int] = ()) -> Share:
        """Start an activity now. `done` is called at its end, and the times at which it reaches `marks` are recorded.

        Args:
            work_ps: how long it lasts on a separate core.
            done: called once, at the end.
            marks: amounts of work, ascending.
        """
        if not self._busy:
            self._changes.clear()
        self._change(len(self._busy) + 1)
        now = self._changes[-1][0]
        share = Share(now, now + work_ps * self._unit, len(self._changes) - 1, done, marks)
        self._busy[share] = share.ends
        self._wake_at_end()
        return share

    def _change(self, num_busy: int) -> None:
        """From now on `num_busy` processes share the cores."""
        now = int(self._env.now)
        reading = 0
        if self._changes:
            before, since, per_ps = self._changes[-1]
            reading = before + (now - since) * per_ps
        rate = Fraction(min(self._num_cores, num_busy), num_busy)
        if self._unit % rate.denominator:
            grow = rate.denominator // math.gcd(self._unit, rate.denominator)
            reading *= grow
            self._refine(grow)
        self._changes.append((reading, now, self._unit * rate.numerator // rate.denominator))

    def _refine(self, grow: int) -> None:
        self._unit *= grow
        self._changes = [(reading * grow, time, per_ps * grow) for reading, time, per_ps in self._changes]
        for share in self._busy:
            share.starts, share.ends = share.starts * grow, share.ends * grow
            self._busy[share] = share.ends

    def _wake_at_end(self) -> None:
        """Wake up when the first activity is done, with one event for all of them."""
        self._version += 1
        reading, _now, per_ps = self._changes[-1]
        delay = max(0, -((reading - min(self._busy.values())) // per_ps))
        self._env.timeout(delay).callbacks.append(partial(self._wake, self._version, reading + delay * per_ps))

    def _wake(self, version: int, reading: int, _event: simpy.Event) -> None:
        if version != self._version:
            return
        share = next(share for share, ends in self._busy.items() if ends <= reading)  # the earliest started, of equals
        del self._busy[share]
        if self._busy:
            self._change(len(self._busy))
            self._wake_at_end()
        share.times = [self._time_of(share.starts + mark * self._unit, share.first) for mark in share.marks]
        share.done()

    def _time_of(self, reading: int, first: int) -> int:
        """The first picosecond at which the clock has reached a reading since change `first`."""
        at = max(first, bisect.bisect_left(self._changes, (reading,)) - 1)
        before, since, per_ps = self._changes[at]
        return since - ((before - reading) // per_ps)


class _Load:
    """An activity and its devices.

    Attributes:
        limit: its rate if links have room.
        rates: of a communication, device -> its rate beside the compute there.
        least, num_least: the least of these, and how many devices have it.
    """

    __slots__ = (
        "activity", "claims", "devices", "is_compute", "kind", "least", "limit", "num_least", "rates", "share",
        "work_ps",
    )  # fmt: skip

    def __init__(
        self, kind: Any, work_ps: int, *, is_compute: bool, devices: Sequence[int], claims: Claims,
        share: Fraction = _ONE,
    ) -> None:  # fmt: skip
        self.kind = kind
        self.work_ps = work_ps
        self.is_compute = is_compute
        self.devices = devices
        self.claims = claims
        self.share = share
        self.limit = _NONE
        self.rates: dict[int, Fraction] = {}
        self.least, self.num_least = _ONE, 0
        self.activity: Activity | None = None

    def run_at(self, rate: Fraction) -> None:
        """Proceed at this rate from the current time on."""
        assert self.activity is not None
        self.activity.run_at(rate)


class _Link:
    """The loads on a link, each with the share that it needs at rate 1, and what all of them need at their limits."""

    __slots__ = ("demand", "loads")

    def __init__(self) -> None:
        self.loads: dict[_Load, Fraction] = {}
        self.demand = _NONE


class Fabric:
    """Devices and their links.

    Kernels that compute on one device at a time, on several streams, share it. Each keeps a share of it busy when
    alone; if the shares add up to more than 1, all slow down by the same factor (processor sharing). While compute and
    communication run on one device, neither exceeds its rate of the pair. A collective proceeds as its slowest member
    does; compute beside several communications proceeds at the lowest of the pairs' rates (an assumption: only pairs
    are measured). Communications that together need more of a link than all of it share it max-min fairly
    (`costmodels.price.sharing`): capacity that one cannot use because of its device or another link goes to the others.

    Args:
        env: the environment.
        rates: of the pairs, or None where overlap costs nothing.
    """

    def __init__(self, env: Clock, rates: Rates | None) -> None:
        self._env = env
        self._rates = rates
        self._on_device: dict[int, dict[_Load, None]] = {}
        self._links: dict[Hashable, _Link] = {}
        self._ahead: dict[int, Now] = {}

    def is_quiet(self, device: int) -> bool:
        """Whether nothing runs on a device."""
        return not self._on_device.get(device)

    def run_ahead(self, device: int, end_ps: int) -> Now:
        """Compute that nothing slows runs on a quiet device. The event happens at its end, or earlier if a
        communication is about to begin there; the rest must then be started with `compute`.
        """
        stopped = self._ahead[device] = Now(self._env)

        def reached(_event: simpy.Event) -> None:
            if self._ahead.get(device) is stopped:
                del self._ahead[device]
                stopped.happen()

        self._env.timeout(end_ps - int(self._env.now)).callbacks.append(reached)
        return stopped

    def compute(
        self, device: int, kind: Any, work_ps: int, done: Callable[[], object], *, left_ps: int | None = None,
        share: Fraction = _ONE,
    ) -> None:  # fmt: skip
        """Start a kind of compute, or its rest, on a device now; it occupies the share `share` of the device."""
        self._add(_Load(kind, work_ps, is_compute=True, devices=(device,), claims=(), share=share), done, left_ps)

    def communicate(
        self,
        devices: Sequence[int],
        kind: Any,
        work_ps: int,
        done: Callable[[], object],
        links: Claims = (),
    ) -> None:
        """Start a communication of a kind between devices now, with its claims on shared links."""
        self._add(_Load(kind, work_ps, is_compute=False, devices=devices, claims=links), done)

    def _add(self, load: _Load, done: Callable[[], object], left_ps: int | None = None) -> None:
        left_ps = load.work_ps if left_ps is None else left_ps
        load.activity = Activity(self._env, left_ps, lambda: self._end(load, done))
        if self._rates is not None:
            for device in load.devices:
                self._on_device.setdefault(device, {})[load] = None
        for link, share in load.claims:
            self._links.setdefault(link, _Link()).loads[load] = share
        self._update((load, *self._beside(load)), (), load.devices)
        for device in load.devices if self._ahead else ():  # last: what goes on there may begin a communication itself
            if (stopped := self._ahead.pop(device, None)) is not None:
                stopped.happen()

    def _end(self, load: _Load, done: Callable[[], object]) -> None:
        load.activity = None  # they refer to each other
        if self._rates is not None:
            for device in load.devices:
                del self._on_device[device][load]
        freed = []
        for link, share in load.claims:
            shared = self._links[link]
            del shared.loads[load]
            if shared.demand > 1:
                freed.append(shared)
            shared.demand -= share * load.limit
        self._update(self._beside(load), freed, load.devices)
        done()

    def _beside(self, load: _Load) -> Sequence[_Load]:
        """The activities whose limits depend on `load`: all but communication for communication."""
        if self._rates is None:
            return ()
        return [
            other
            for device in load.devices
            for other in self._on_device[device]
            if other is not load and (other.is_compute or load.is_compute)
        ]

    def _update(self, loads: Sequence[_Load], freed: Sequence[_Link], devices: Sequence[int]) -> None:
        """Compute the rates again.

        Args:
            loads: whose limits may have changed.
            freed: links that were full and lost a load.
            devices: on which an activity has begun or ended.
        """
        touched: dict[_Load, None] = {}
        for link in freed:
            touched.update(dict.fromkeys(link.loads))
        for load in loads:
            before, load.limit = load.limit, self._limit(load, devices)
            if not load.claims:
                load.run_at(load.limit)
                continue
            touched[load] = None
            if _equal(load.limit, before):
                continue
            for name, share in load.claims:
                link = self._links[name]
                was_full = link.demand > 1
                link.demand += share * (load.limit - before)
                if was_full or link.demand > 1:
                    touched.update(dict.fromkeys(link.loads))
        if touched:
            self._share(touched)

    def _share(self, touched: dict[_Load, None]) -> None:
        """The rates of loads, and of all loads that share full links with them directly or indirectly."""
        todo, seen = list(touched), set[_Link]()
        for load in todo:
            for name, _ in load.claims:
                link = self._links[name]
                if link in seen or link.demand <= 1:
                    continue
                seen.add(link)
                for other in link.loads:
                    if other not in touched:
                        touched[other] = None
                        todo.append(other)
        if not seen:
            for load in touched:
                load.run_at(load.limit)
            return
        claims = [[(name, share) for name, share in load.claims if self._links[name] in seen] for load in touched]
        for load, rate in zip(touched, max_min_rates([load.limit for load in touched], claims), strict=True):
            load.run_at(rate)

    def _limit(self, load: _Load, devices: Sequence[int]) -> Fraction:
        """The rate of an activity beside the others on its devices, without links; `devices` have changed."""
        if self._rates is None:
            return _ONE
        if not load.is_compute:
            for device in devices if load.rates else load.devices:
                self._beside_compute(load, device)
            return load.least
        rate, shares = _ONE, load.share
        for other in self._on_device[load.devices[0]]:
            if other.is_compute:
                if other is not load:
                    shares += other.share
                continue
            pair = self._rates(load.kind, load.work_ps, other.kind, other.work_ps)[0]
            if pair is not rate and _less(pair, rate):
                rate = pair
        return rate / shares if _less(_ONE, shares) else rate

    def _beside_compute(self, load: _Load, device: int) -> None:
        """Compute the rate of a communication on one device again, and the least on all of them."""
        assert self._rates is not None
        rate, before = _ONE, load.rates.get(device)
        for other in self._on_device[device]:
            if other.is_compute:
                pair = self._rates(other.kind, other.work_ps, load.kind, load.work_ps)[1]
                if pair is not rate and _less(pair, rate):
                    rate = pair
        load.rates[device] = rate
        had_least = before is not None and _equal(before, load.least)
        if _less(rate, load.least):
            load.least, load.num_least = rate, 1
        elif _equal(rate, load.least):
            load.num_least += not had_least
        elif had_least:
            load.num_least -= 1
            if not load.num_least:
                load.least = min(load.rates.values())
                load.num_least = sum(_equal(each, load.least) for each in load.rates.values())
