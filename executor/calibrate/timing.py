"""Times of calls: device time alone, or the host time to issue them.

Device time is measured by events around recorded launches (CUDA graphs) where the device supports them, which excludes
host time. Operands rotate through more memory than the cache holds. The device is kept busy before every repeat: a chip
that was idle runs faster than in the middle of a training step, and its clock rises within milliseconds of light work.
A kernel that spins for a known number of cycles reads the clock on the device before every repeat and after the last.
Short calls are repeated more often, in shorter windows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from executor.device import Device, Mark, now_ns
from plans.errors import TwofoldError

__all__ = ["Call", "Sample", "Timer", "sampled"]

Call = Callable[[], object]

STEADY = 1.15
"""Slowest over fastest repeat beyond which a point is flagged."""

CLOCK_MOVED = 0.05
"""Relative change of the clock within the repeats beyond which a point is flagged."""

SPIN_CYCLES = (20_000, 220_000)
SHORT_S = 5e-5
"""Calls below that are repeated more often."""

SHORT_REPEATS = 4
"""By how many."""

BUSY_EACH = 1 / 3
"""Share of the initial busy time that is repeated before every repeat."""

SENSED_EVERY_S = 0.005
"""Between two readings of the sensors."""

MAX_RETAKES = 3
MAX_NODES = 256
"""Calls in one recorded launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one call: median, fastest and slowest of `repeats` means over `calls` calls."""

    seconds: float
    low_s: float
    high_s: float
    repeats: int
    calls: int
    clock_MHz: float = 0.0
    flag: str = ""
    recorded: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """As fields of a `Point`."""
        return {
            "seconds": self.seconds, "low_s": self.low_s, "high_s": self.high_s, "repeats": self.repeats,
            "clock_MHz": round(self.clock_MHz, 1), "flag": self.flag,
        }  # fmt: skip


def sampled(times_s: Sequence[float], calls: int, *, clocks: Sequence[float] = (), **more: Any) -> Sample:
    """The sample of repeats that took `times_s`, each of `calls` calls, with readings of the clock in MHz around them.

    >>> sampled([2.0, 2.1, 3.0], 1).flag, sampled([2.0, 2.1], 1, clocks=[1500.0, 1600.0]).flag
    ('unsteady', 'clock')
    """
    each, read = [time_s / calls for time_s in times_s], [clock for clock in clocks if clock]
    flag = "unsteady" if max(each) > STEADY * min(each) else ""
    if read and max(read) > (1 + CLOCK_MOVED) * min(read):
        flag = "clock"
    return Sample(
        seconds=statistics.median(each), low_s=min(each), high_s=max(each), repeats=len(each), calls=calls,
        clock_MHz=statistics.median(read) if read else 0.0, flag=flag, **more,
    )  # fmt: skip


class Timer:
    """Takes times on one device.

    Args:
        device: which one; its current stream must not be the default one for launches to be recorded.
        repeats: how many means are taken.
        window_s: about how long one repeat lasts, unless a single call lasts longer.
        busy_s: how long the device works before the first repeat, and a third of it before each; 0 for not at all.
        clock_ns: the host's clock.
    """

    def __init__(
        self,
        device: Device,
        *,
        repeats: int = 5,
        window_s: float = 2e-3,
        busy_s: float = 0.012,
        clock_ns: Callable[[], int] = now_ns,
    ) -> None:
        self.device, self.repeats, self.window_s = device, repeats, window_s
        self.clock_ns = clock_ns
        self._busy_s = busy_s if device.is_async else 0.0
        self._product: tuple[torch.Tensor, torch.Tensor] | None = None
        self._product_s = 0.0

    # -- device --------------------------------------------------------------------------------------------------------

    def device_time(self, calls: Sequence[Call]) -> Sample:
        """Seconds of one of `calls`, which do the same on different operands; their results live for one round."""
        once_s = self._once(calls)
        if not self.device.is_async:
            rounds = max(1, min(20_000, round(self.window_s / max(once_s, 1e-7) / len(calls))))
            return self._repeated(lambda: _rounds(calls, rounds), rounds * len(calls))
        rounds = max(1, min(MAX_NODES // len(calls), math.ceil(self.window_s / once_s / len(calls))))
        replay = None
        with contextlib.suppress(RuntimeError):
            recording = self.device.capture(lambda: _rounds(calls, rounds))
            replay = None if recording is None else recording.replay
        if replay is None:
            self.device.synchronize()
            rounds = max(1, min(20_000, math.ceil(self.window_s / once_s / len(calls))))
            return self._repeated(lambda: _rounds(calls, rounds), rounds * len(calls))
        replay()
        recorded_s = max(1e-7, self._marked(replay))
        short = recorded_s < SHORT_S * rounds * len(calls)
        times = max(1, min(200, math.ceil((self.window_s / 2 if short else self.window_s) / recorded_s)))

        def again() -> None:
            for _ in range(times):
                replay()

        repeats = self.repeats + (SHORT_REPEATS if short else 0)
        return self._repeated(again, times * rounds * len(calls), repeats, recorded=True)

    def issued_time(self, call: Call) -> Sample:
        """Seconds of one `call` of many in a row, as the host issues them."""
        count = max(1, min(1000, math.ceil(self.window_s / self._once([call]))))
        return self._repeated(lambda: _rounds([call], count), count)

    def _once(self, calls: Sequence[Call]) -> float:
        """Seconds of one call, from the second round."""
        _rounds(calls, 1)
        self.device.synchronize()
        return max(1e-7, self._marked(lambda: _rounds(calls, 1)) / len(calls))

    def _marked(self, run: Call) -> float:
        first = self.mark()
        run()
        last = self.mark()
        self.device.synchronize()
        return self.between_s(first, last)

    def _repeated(self, run: Call, calls: int, repeats: int | None = None, **more: Any) -> Sample:
        for _ in range(MAX_RETAKES):
            self.keep_busy()
            spun, marks = [], []
            for number in range(repeats or self.repeats):
                if number:
                    self.keep_busy(BUSY_EACH * self._busy_s)
                spun.append(self.spin_marks())
                first = self.mark()
                run()
                marks.append((first, self.mark()))
            spun.append(self.spin_marks())
            self.device.synchronize()
            times = [self.between_s(first, last) for first, last in marks]
            if all(math.isfinite(time) and time > 0 for time in times):
                return sampled(times, calls, clocks=[self.clock_of(spin) for spin in spun], **more)
        raise TwofoldError(
            f"the clock of {self.device.name} jumps: {MAX_RETAKES} times in a row a repeat took {min(times):g} s; "
            "is this machine being suspended or moved? Measure again later"
        )

    def keep_busy(self, seconds: float | None = None) -> None:
        """Issue matrix products that keep the device working for a while; returns at once."""
        wanted_s = self._busy_s if seconds is None else seconds
        if not wanted_s or not self.device.is_async:
            return
        left, right = self._operands()
        for _ in range(max(1, round(wanted_s / self._product_s))):
            torch.mm(left, right)

    def reference_product(self) -> Call:
        """A product that is the same all the time, to watch the chip by."""
        left, right = self._operands()
        return lambda: torch.mm(left, right)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._product is None:
            size, dtype = (4096, torch.bfloat16) if self.device.is_async else (256, torch.float32)
            one = torch.randn(size, size, device=self.device.torch_device).to(dtype)
            self._product = (one, one.flip(0).contiguous())
            torch.mm(*self._product)
            self.device.synchronize()
            left, right = self._product
            self._product_s = max(1e-7, self._marked(lambda: [torch.mm(left, right) for _ in range(10)]) / 10)
        return self._product

    # -- clocks --------------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """A point on the device's time line (on a CPU of `clock_ns`)."""
        return self.device.mark() if self.device.is_async else self.clock_ns()

    def between_s(self, first: Mark, last: Mark) -> float:
        """Seconds between two marks that were reached."""
        return self.device.between_ns(first, last) / 1e9

    def clock_MHz(self) -> float:
        """The device's clock now; 0 where it cannot be read."""
        spun = self.spin_marks()
        self.device.synchronize()
        return self.clock_of(spun)

    def sensors_during(self, run: Call) -> dict[str, float]:
        """The driver's readings of the device while `run` runs: the median of the later half.

        A kernel that counts cycles next to it would not do: replays on another stream hold back the mark behind it.
        """
        readings: list[dict[str, float]] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(SENSED_EVERY_S):
                readings.append(self.device.sensors())

        watcher = threading.Thread(target=watch, daemon=True)
        self.device.synchronize()
        watcher.start()
        try:
            run()
            self.device.synchronize()
        finally:
            ended.set()
            watcher.join()
        later = readings[len(readings) // 2 :]
        names = {name for reading in later for name in reading}
        return {
            name: round(statistics.median(reading[name] for reading in later if name in reading), 1) for name in names
        }

    def spin_marks(self) -> list[Mark]:
        """Issue the kernel from which `clock_of` reads the device's clock; nothing on devices without it."""
        self.device.spin(SPIN_CYCLES[1])  # the host gets ahead, so that no launch is waited for between the marks
        marks = [self.mark()]
        for cycles in SPIN_CYCLES:
            if not self.device.spin(cycles):
                return []
            marks.append(self.mark())
        return marks

    def clock_of(self, marks: list[Mark]) -> float:
        """The clock in MHz while `spin_marks` ran; 0 where it cannot be read."""
        if not marks:
            return 0.0
        short, long = (self.between_s(first, last) for first, last in itertools.pairwise(marks))
        return (SPIN_CYCLES[1] - SPIN_CYCLES[0]) / (long - short) / 1e6 if long > short else 0.0

    # -- host ----------------------------------------------------------------------------------------------------------

    def host_time(
        self, call: Call, *, burst: int = 100, repeats: int | None = None, before: Call | None = None
    ) -> Sample:
        """Seconds that the host takes to issue `call`, while the device has nothing else to do.

        Args:
            call: of so little work that the device is through before the host.
            burst: calls in one repeat, after which the device may catch up.
            repeats: how many; twice as many as device times have when None.
            before: called before each repeat, outside the time.
        """
        times, count = [], 2 * self.repeats if repeats is None else repeats
        for repeat in range(count + 1):
            if before is not None:
                before()
            self.device.synchronize()
            start = self.clock_ns()
            for _ in range(burst):
                call()
            times.append((self.clock_ns() - start) / 1e9)
            if repeat == 0:
                times.clear()
        self.device.synchronize()
        if not all(time > 0 for time in times):
            raise TwofoldError(
                f"the host's clock jumps: {burst} calls took {min(times):g} s; measure again on a steady machine"
            )
        return sampled(times, burst)


def _rounds(calls: Sequence[Call], rounds: int) -> None:
    for _ in range(rounds):
        kept = [call() for call in calls]
        del kept
