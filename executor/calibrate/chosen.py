"""The kernels that a library chooses: `python -m executor.calibrate.chosen OUT.jsonl POINTS...`.

Names of kernels contain tile sizes, stages and splits of the sums. Every distinct matrix product and attention of the
files of points is run once more under torch's profiler. Each line of the result lists the kernels of one of them, in
order, with their grids.
"""

from __future__ import annotations

import gzip
import itertools
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from costmodels.fit.points import Point, load_points
from executor.calibrate.main import surroundings
from executor.calibrate.operands import Job, OperandPool
from executor.calibrate.requested_points import job_of
from executor.calibrate.session import MEMORY_SHARE
from executor.device import Device, pick_device
from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.reading import read_json

__all__ = ["chosen_kernels", "main", "split_at_markers"]

MARKER = "spin_kernel"
"""Name of the kernel that a `Device.spin` launches."""

TOGETHER = 300
"""Calls in one profile."""


def chosen_kernels(device: Device, jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """One record per job: the call, and its kernels with name, seconds, grid, block and shared bytes.

    Jobs that do not fit into memory or fail are left out.
    """
    pool = OperandPool(device=device, block_bytes=2**30)
    for number in range(0, len(jobs), TOGETHER):
        some = jobs[number : number + TOGETHER]
        issued: list[Job] = []
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profile.start()
        for job in some:
            try:
                call = job.make(pool)[0]
                call()  # the library loads its kernels
                device.spin(1000)
                call()
            except RuntimeError:
                device.release_memory()
                continue
            device.spin(1000)
            issued.append(job)
        device.synchronize()
        profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(trace))
            events = read_json(trace, "the trace")["traceEvents"]
        for job, kernels in zip(issued, split_at_markers(events), strict=False):
            record = msgspec.to_builtins(msgspec.structs.replace(job.point, held_out=False))
            record.pop("seconds")
            yield record | {"kernels": kernels}


def split_at_markers(events: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Kernels of a trace between the first and second marker, the third and fourth, and so on.

    Args:
        events: of a trace in Chrome's format.
    """
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    parts: list[list[dict[str, Any]]] = [[]]
    for event in kernels:
        if MARKER in event["name"]:
            parts.append([])
            continue
        arguments = event.get("args", {})
        parts[-1].append({
            "name": event["name"], "seconds": event["dur"] / 1e6, "grid": arguments.get("grid"),
            "block": arguments.get("block"), "shared_bytes": arguments.get("shared memory"),
        })  # fmt: skip
    yield from itertools.islice(parts, 1, None, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the records of all products and attention of files of points."""
    out, *files = sys.argv[1:] if arguments is None else arguments
    device = pick_device("auto")
    if device.kind != "cuda":
        raise TwofoldError(f"device {device.kind!r} does not report the names of its kernels; use cuda")
    device.use()
    points: dict[Any, Point] = {}
    for file in files:
        points |= {point.key: point for point in load_points(file)[0] if point.kind in ("matrix", "attention")}
    room = MEMORY_SHARE * device.memory_bytes()[0]
    jobs = [job for number, point in enumerate(points.values()) if (job := job_of(point, number)).needs_bytes < room]
    lines = [json.dumps({"environment": surroundings(device, 1)})]
    lines += [json.dumps(record) for record in chosen_kernels(device, jobs)]
    data = "\n".join([*lines, ""]).encode()
    write_atomically(out, gzip.compress(data, mtime=0) if out.endswith(".gz") else data)
    print(f"kernels of {len(lines) - 1} of {len(points)} calls in {out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
