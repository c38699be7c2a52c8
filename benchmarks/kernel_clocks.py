"""How kernels that are bound by memory depend on the clock of the chip: at rest, in short load and in long load.

    python -m benchmarks.kernel_clocks --out FILE                       on one GPU
    python -m benchmarks.kernel_clocks --points POINTS.jsonl            only points of rotary positions, to calibrate by
    python -m benchmarks.kernel_clocks --smoke --out FILE               two kernels on a CPU

A training step runs at a lower clock than a chip that does nothing else, since its products draw power. What is bound
by bandwidth does not notice. What is bound by its arithmetic takes longer in proportion. `exponent` is the slope of
log(seconds) over log(1 / clock): 0 for the former, 1 for the latter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.kept import measured_with, write_results
from costmodels.fit.points import Point, save_points
from executor.calibrate.kernels import kernel_jobs
from executor.calibrate.operands import Job, OperandPool
from executor.calibrate.timing import Timer
from executor.device import Device, environment, pick_device

__all__ = ["chosen", "exponent", "main"]

BUSY_S = {"rest": 0.0, "short": 0.012, "long": 0.6}
"""Load -> seconds of matrix products before the first repeat; a third of it before each."""

LARGE_BYTES = 100e6
CALLS = ("rope_by_hand", "rope_by_hand_backward", "rope_by_complex", "rope_by_complex_backward")
"""Of `--points`."""
SMOKE_CALLS, SMOKE_BYTES = ("add", "rope_by_hand"), 1e7


def exponent(clocks_MHz: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Slope of log(seconds) over log(1 / clock); None where clocks differ by less than 2 % or are not known.

    >>> round(exponent([2000.0, 1500.0], [3.0, 4.0]), 6)
    1.0
    """
    if not all(clocks_MHz) or max(clocks_MHz) < 1.02 * min(clocks_MHz):
        return None
    return float(np.polyfit(-np.log(clocks_MHz), np.log(seconds), 1)[0])


def chosen(jobs: Sequence[Job]) -> list[Job]:
    """Of every call and dtype the job that moves most below 2 GB, so that the start of a kernel does not matter."""
    largest: dict[tuple[str, str], Job] = {}
    for job in jobs:
        point = job.point
        if point.held_out or not LARGE_BYTES < point.size_bytes < 2e9:
            continue
        key = point.call, point.dtype
        if key not in largest or point.size_bytes > largest[key].point.size_bytes:
            largest[key] = job
    return list(largest.values())


def _measured(job: Job, pool: OperandPool, device: Device) -> dict[str, Any]:
    calls = job.make(pool)
    found = {}
    for load, busy_s in BUSY_S.items():
        sample = Timer(device, repeats=7, busy_s=busy_s).device_time(calls)
        found[load] = {"seconds": sample.seconds, "clock_MHz": sample.clock_MHz}
    point = job.point
    read = [of["clock_MHz"] for of in found.values()]
    row = {
        "call": point.call, "dtype": point.dtype, "shape": list(point.shape), "size_bytes": point.size_bytes, **found,
        "exponent": exponent(read, [of["seconds"] for of in found.values()]),
    }  # fmt: skip
    clocks, times = (" ".join(f"{of[key] * by:9.3f}" for of in found.values())
                     for key, by in (("clock_MHz", 1.0), ("seconds", 1e3)))  # fmt: skip
    rate = point.size_bytes / found["long"]["seconds"] / 1e12
    told = "-" if row["exponent"] is None else f"{row['exponent']:.2f}"
    print(f"{point.call:26s} {point.dtype:9s} {times} ms {clocks} MHz {rate:6.2f} TB/s {told:>6}", flush=True)
    return row


def _points(device: Device) -> list[Point]:
    """Points of `CALLS` as calibration takes them."""
    timer, points = Timer(device), []
    for job in kernel_jobs():
        if job.point.call in CALLS:
            sample = timer.device_time(job.make(_pool(device)))
            figures = {"recorded": float(sample.recorded)}
            points.append(msgspec.structs.replace(job.point, **sample.fields, figures=figures))
            rate = job.point.size_bytes / sample.seconds / 1e12
            print(
                f"{job.point.call:26s} {job.point.shape!s:20s} {sample.seconds * 1e3:9.3f} ms {rate:6.2f} TB/s",
                flush=True,
            )
    return points


def _pool(device: Device) -> OperandPool:
    return OperandPool(device=device, block_bytes=2**32 if device.is_async else 2**22)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every kernel under three loads; print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for what was found")
    parser.add_argument("--points", type=Path, help="file for points of " + " and ".join(CALLS))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    device = pick_device("cpu" if options.smoke else "auto")
    device.use()
    device.use_own_stream()
    jobs = kernel_jobs()
    if options.smoke:
        jobs = [job for job in jobs if job.point.call in SMOKE_CALLS and job.point.size_bytes < SMOKE_BYTES]
    else:
        jobs = chosen(jobs)
    if options.points:
        save_points(options.points, _points(device), environment(device))
    if not options.out:
        return 0
    rows = [_measured(job, _pool(device), device) for job in jobs]
    known = [row["exponent"] for row in rows if row["exponent"] is not None]
    if known:
        print(f"median exponent {statistics.median(known):.2f} of {len(known)} kernels")
    write_results(options.out, {**measured_with(device), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
