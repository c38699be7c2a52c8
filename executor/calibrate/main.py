"""The main module of every rank of a calibration: `python -m executor.calibrate.main POINTS.jsonl`.

It runs alone or under torchrun.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from costmodels.fit.points import Point, PointLog
from executor.calibrate.device_sections import DEVICE_SECTIONS
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.resume import resume
from executor.calibrate.session import Session, SessionOptions
from executor.calibrate.timing import Timer
from executor.device import Device, environment, pick_device
from executor.step.groups import connect
from plans.errors import TwofoldError

__all__ = ["main", "surroundings"]

MINUTES = 4.5
QUICK_MINUTES = 0.75
VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_NUM_THREADS")
SECTION_TITLES = ",".join(dict.fromkeys(section.title for section in DEVICE_SECTIONS))
PREFIXES = ("NCCL_", "TORCH_NCCL_", "HCCL_")


def main(arguments: list[str] | None = None) -> int:
    """Measure and append to the file of points; a second call with the same file skips existing points."""
    options = _options(arguments)
    device = pick_device(options.device)
    device.use()
    if not device.is_async:
        torch.set_num_threads(1)
    joined = int(os.environ.get("WORLD_SIZE", "1")) > 1 and connect(device, options.timeout)
    device.use_own_stream()
    sync = RankSync(device, options.timeout)
    try:
        return _measure(options, device, sync)
    except TwofoldError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        sync.close()
        if joined:
            dist.destroy_process_group()


def _measure(options: argparse.Namespace, device: Device, sync: RankSync) -> int:
    start = time.monotonic()
    path = Path(options.points)
    if path.suffix != ".jsonl":
        raise TwofoldError(f"the points go to a file of JSON lines, such as points.jsonl, not {path.name!r}")
    log = PointLog(path if sync.rank == 0 else path.with_suffix(f".rank{sync.rank}.jsonl"))
    resume(log, surroundings(device, sync.size))
    small = not device.is_async
    timer = Timer(device, repeats=3 if small else 5, window_s=5e-4 if small else 2e-3)
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    chosen = SessionOptions(
        minutes=minutes, quick=options.quick, sections=options.sections.split(",") if options.sections else (),
        plans=[Path(plan) for plan in options.plans], rule_plans=[Path(plan) for plan in options.rule_plans],
        requested=None if options.requested is None else Path(options.requested), order=options.order,
        calls=options.calls,
    )  # fmt: skip
    session = Session(timer, sync, log, chosen, say=lambda line: print(line, flush=True))
    session.run(DEVICE_SECTIONS)
    if sync.rank == 0:
        print(_table(log.points))
        for failure in session.failures:
            print(f"failed: {failure}")
        print(f"{len(log.points)} points in {path}, {time.monotonic() - start:.0f} s", flush=True)
    sync.barrier()
    if sync.rank:
        log.path.unlink(missing_ok=True)  # its points are in the file of rank 0
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="executor.calibrate.main", description=__doc__)
    parser.add_argument("points", help="file of JSON lines, appended to")
    parser.add_argument("--minutes", type=float, default=None, help=f"minutes of measuring; {MINUTES:g} by default")
    parser.add_argument("--quick", action="store_true", help="only the most informative points, in under a minute")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or npu")
    parser.add_argument("--sections", default="", help=f"some of {SECTION_TITLES}")
    parser.add_argument("--order", type=int, default=0, help="seed of the order of points")
    parser.add_argument("--plans", nargs="*", default=[], help="plan files whose instructions are timed on the host")
    parser.add_argument("--rule-plans", nargs="*", default=[], help="more of them, timed only alone")
    parser.add_argument("--calls", nargs="*", default=[], help="of the sections kernels and rules; all by default")
    parser.add_argument("--requested", default=None, help="file of points that are asked for beyond the grids")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a measurement counts as hung")
    return parser.parse_args(arguments)


def surroundings(device: Device, num_ranks: int) -> dict[str, str]:
    """Versions, machine, settings, date and command that belong to the points."""
    _, total = device.memory_bytes()
    names = sorted(name for name in os.environ if name in VARIABLES or name.startswith(PREFIXES))
    return {
        **environment(device),
        **device.limits(),
        "date": datetime.date.today().isoformat(),
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": "python -m executor.calibrate.main " + " ".join(sys.argv[1:]),
        "ranks": str(num_ranks),
        "memory_bytes": str(total),
        "processors": str(device.num_processors),
        "cache_bytes": str(device.cache_bytes),
        "CUDA_DEVICE_MAX_CONNECTIONS": "unset",
        "TORCH_NCCL_HIGH_PRIORITY": "unset",  # all streams have the priority that torch gives them
        **{name: os.environ[name] for name in names},
    }


def _table(points: list[Point]) -> str:
    """The number of points of each kind, and their spread."""
    lines = []
    for kind, count in sorted(Counter(point.kind for point in points).items()):
        own = [point for point in points if point.kind == kind]
        spread = sorted(point.high_s / point.low_s - 1 for point in own if point.low_s > 0)
        middle = f", median spread of repeats {spread[len(spread) // 2]:.1%}" if spread else ""
        flags = Counter(point.flag for point in own if point.flag)
        flagged = "".join(f", {number} {flag}" for flag, number in flags.items())
        lines.append(f"{kind:14s} {count:5d} points, {sum(point.held_out for point in own)} held out{middle}{flagged}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
