"""Times of calls of CPU ranks that share the cores of a computer.

Ranks that do not take part in a measurement sleep in a barrier. A value is the mean over many calls. It is measured
several times; the median is stored with the fastest and the slowest. Concurrent work of several ranks is timed from the
first start to the last end, because the operating system may run some ranks first. Processor seconds are stored too,
because they separate work on the shared cores from waiting.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.calibrate.timing import Call
from plans.errors import TwofoldError

__all__ = ["BURST", "exchange", "issue_and_wait", "summary", "timed_alone", "timed_in_step"]

REPEATS = 5
BURST = 4
"""Messages that are under way at once."""

ISSUES = 40
ISSUE_PAUSE_S = 0.003
"""Longer than a burst of tiny collectives of two ranks takes."""


def summary(times_s: Sequence[float]) -> dict[str, Any]:
    """Seconds of repeats as fields of a `Point`.

    Raises:
        TwofoldError: a time that is not above 0.

    >>> summary([1.0, 3.0, 2.0])
    {'seconds': 2.0, 'low_s': 1.0, 'high_s': 3.0, 'repeats': 3}
    """
    if not all(0 < time_s < math.inf for time_s in times_s):
        raise TwofoldError(f"the clock jumps: a call took {min(times_s):g} s; measure again on a steady machine")
    return {
        "seconds": statistics.median(times_s), "low_s": min(times_s), "high_s": max(times_s), "repeats": len(times_s),
    }  # fmt: skip


def timed_alone(call: Call, budget_s: float) -> dict[str, Any]:
    """Seconds and processor seconds of one call with warm caches: medians over repeats of the mean of many calls."""
    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    once_s = max(1e-7, time.perf_counter() - start)
    count = max(1, min(20_000, int(budget_s / REPEATS / once_s)))
    means_s, cpu_s = [], []
    for _ in range(REPEATS):
        cpu_start, start = time.process_time(), time.perf_counter()
        for _ in range(count):
            call()
        means_s.append((time.perf_counter() - start) / count)
        cpu_s.append((time.process_time() - cpu_start) / count)
    return summary(means_s) | {"cpu_s": statistics.median(cpu_s)}


def timed_in_step(call: Call, active: int, budget_s: float, *, repeats: int, most: int) -> dict[str, Any]:
    """Seconds and processor seconds of one call of the first `active` ranks at once; every rank calls it.

    Args:
        call: the work of each.
        active: ranks that take part; the others only keep in step.
        budget_s: about how long it may take.
        repeats: means that are taken.
        most: calls in one mean.

    Returns:
        Fields of a `Point`, the same on every rank.
    """
    takes_part = dist.get_rank() < active
    slowest = torch.zeros(1)
    if takes_part:
        call()
        start = time.perf_counter()
        call()
        slowest[0] = time.perf_counter() - start
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    calls = max(2, min(most, int(budget_s / repeats / max(1e-7, float(slowest[0])))))
    times_s, cpu_s, busy_s = [], [], 0.0
    for _ in range(repeats):
        dist.barrier()
        stamps = torch.tensor([-math.inf, -math.inf, 0.0], dtype=torch.float64)
        if takes_part:
            # perf_counter is the system-wide monotonic clock on Linux, so ranks of one host can be compared
            busy_before_s, cpu_before_s, start = processors_busy_s(), time.process_time(), time.perf_counter()
            for _ in range(calls):
                call()
            stamps[1] = time.perf_counter()
            stamps[0] = -start
            stamps[2] = time.process_time() - cpu_before_s
            busy_s += processors_busy_s() - busy_before_s
        spans, spent = stamps[:2].clone(), stamps[2:].clone()
        dist.all_reduce(spans, op=dist.ReduceOp.MAX)
        dist.all_reduce(spent)
        times_s.append(float(spans[0] + spans[1]) / calls)
        cpu_s.append(float(spent[0]) / calls / active)
    outside_s = max(0.0, busy_s - sum(cpu_s) * calls * active)
    fields = summary(times_s) | {"cpu_s": statistics.median(cpu_s)}
    return fields | {"outside_cores": round(outside_s / (sum(times_s) * calls), 2)}


def issue_and_wait(issue: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Host times of issuing a tiny communication, mean of a burst, and of waiting for it when it is long through."""
    issue_s, wait_s = [], []
    for _ in range(ISSUES):
        start = time.perf_counter()
        works = [issue() for _ in range(BURST)]
        issue_s.append((time.perf_counter() - start) / BURST)
        time.sleep(ISSUE_PAUSE_S)
        start = time.perf_counter()
        for work in works:
            work.wait()
        wait_s.append((time.perf_counter() - start) / BURST)
    return issue_s, wait_s


def exchange(messages: Sequence[Callable[[], Any]]) -> None:
    """Start every message, then wait for all."""
    for work in [start() for start in messages]:
        work.wait()


def processors_busy_s() -> float:
    """Processor seconds that this computer has worked since it started, in units of 10 ms; 0 if they are not
    counted."""
    try:
        ticks = Path("/proc/stat").read_text().split()[1:9]  # user nice system idle iowait irq softirq steal
    except OSError:
        return 0.0
    busy = sum(int(field) for position, field in enumerate(ticks) if position not in (3, 4))
    return busy / os.sysconf("SC_CLK_TCK")
