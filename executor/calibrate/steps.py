"""Whole steps of plans, to compare predictions with: `python -m executor.calibrate.steps POINTS.jsonl PLAN.json...`.

Weights are random numbers that cost the host little to make, since only time and memory matter here.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from costmodels.fit.points import Point, PointLog
from executor.calibrate.main import surroundings
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.resume import resume
from executor.calibrate.timing import Timer, sampled
from executor.device import now_ns, pick_device
from executor.step.groups import Groups, connect
from executor.step.interpreter import Interpreter, RecordedStep
from executor.train.batches import random_batches, rows_of_rank
from plans.lower import lower
from plans.model.graph import Graph
from plans.plan import Plan, load_plan

__all__ = ["CheapParameters", "main", "step_points"]

WARM_STEPS = 3
STEPS = 10


class CheapParameters(Mapping[str, npt.NDArray[Any]]):
    """Random parameters as windows into one row of random numbers: distinct rows, made in no time."""

    def __init__(self, graph: Graph, seed: int = 0) -> None:
        self._tensors = {tensor.name: tensor for tensor in (*graph.parameters, *graph.constants)}
        self._row = np.random.default_rng(seed).standard_normal(2**20).astype(np.float32)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        tensor = self._tensors[name]
        if not tensor.differentiable or not tensor.shape:
            return np.zeros(tensor.shape, tensor.dtype)
        *leading, last = tensor.shape
        step = max(1, min(97, (len(self._row) - last) // max(1, sum(leading))))
        row = self._row / np.float32(math.sqrt(last if leading else 1.0))
        return np.lib.stride_tricks.as_strided(row, tensor.shape, [*(4 * step for _ in leading), 4])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def step_points(timer: Timer, sync: RankSync, plan: Plan, name: str) -> list[Point]:
    """Train a plan for a few steps; every rank of the job must call it.

    Returns:
        The step (seconds between barriers, of the slowest rank) with its peak bytes, and for rank 0 the time of every
        kind of instruction in a recorded step.
    """
    device, program = timer.device, lower(plan)
    alone = program.num_ranks == 1
    with contextlib.ExitStack() as stack:
        groups = None if alone else Groups(program, device)
        if groups is not None:
            stack.callback(groups.close)
        interpreter = Interpreter(program, sync.rank, device, groups)
        interpreter.set_parameters(CheapParameters(plan.graph))
        batches = list(rows_of_rank(plan, sync.rank, random_batches(plan.graph, 0, 2)))
        device.release_memory()
        device.reset_peak_memory()
        times, on_device = [], []
        for step in range(WARM_STEPS + STEPS):
            sync.barrier()
            first, start = timer.mark(), now_ns()
            interpreter.step(batches[step % 2])
            end, last = now_ns(), timer.mark()
            device.synchronize()
            wall_s, device_s = sync.maximum([(end - start) / 1e9, timer.between_s(first, last)])
            if step >= WARM_STEPS:
                times.append(wall_s)
                on_device.append(device_s)
        sync.barrier()
        clock_MHz = timer.clock_during(lambda: interpreter.step(batches[0]), times[-1])
        peaks = [float(device.max_memory_allocated()), float(device.memory_reserved())]
        planned = float(interpreter.peak.peak_bytes)
        peak, reserved, planned = sync.maximum([*peaks, planned])
        sync.barrier()
        _, recorded = interpreter.record(batches[0])
        parts = _parts(interpreter, recorded)
        if groups is not None:
            dist.barrier()
    sample = sampled(times, 1)
    figures = {
        "device_s": sorted(on_device)[len(on_device) // 2], "peak_bytes": peak, "reserved_bytes": reserved,
        "planned_peak_bytes": planned,
    }  # fmt: skip
    common: dict[str, Any] = {
        "kind": "step", "stack": "twofold", "ranks": program.num_ranks, "active_ranks": program.num_ranks,
        "clock_MHz": round(clock_MHz, 1),
    }  # fmt: skip
    fields = {key: value for key, value in sample.fields.items() if key != "clock_MHz"}
    points = [Point(call=name, figures=figures, **common, **fields)]
    for call, (count, host_s, device_s) in parts.items():
        measured: dict[str, Any] = {"seconds": device_s, "figures": {"count": count, "host_s": host_s}}
        points.append(Point(call=name, options={"part": call}, **common, **measured))
    return points


def _parts(interpreter: Interpreter, recorded: RecordedStep) -> dict[str, tuple[float, float, float]]:
    """Call -> how often, host seconds and seconds on the compute stream, all together."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    device_ns = recorded.device_ns or recorded.host_ns
    for code, host, spent in zip(interpreter.codes, recorded.host_ns, device_ns, strict=True):
        total = totals[code.instruction.call or str(code.instruction.kind)]
        total[0] += 1
        total[1] += (host[1] - host[0]) / 1e9
        total[2] += (spent[1] - spent[0]) / 1e9
    return {call: (count, host_s, device_s) for call, (count, host_s, device_s) in sorted(totals.items())}


def main(arguments: list[str] | None = None) -> int:
    """Run the plans for as many ranks as there are, one after the other; a plan that fails does not stop the others."""
    path, *plans = sys.argv[1:] if arguments is None else arguments
    device = pick_device("auto")
    device.use()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        connect(device)
    device.use_own_stream()
    sync = RankSync(device, 60.0)
    log = PointLog(path) if sync.rank == 0 else None
    if log is not None:
        resume(log, surroundings(device, sync.size))
    timer, failed = Timer(device), 0
    for file in plans:
        plan, name = load_plan(file), Path(file).stem
        if plan.num_ranks != sync.size:
            continue
        if not sync.from_rank_0(log is not None and all(point.call != name for point in log)):
            continue
        try:
            with sync.watch(f"the plan {name}"):
                points = step_points(timer, sync, plan, name)
        except torch.OutOfMemoryError as error:
            failed += 1
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
            break  # the other ranks cannot go on either
        except Exception:
            failed += 1
            traceback.print_exc()
            break
        if log is not None:
            for point in points:
                log.add(point)
            first = points[0]
            print(
                f"{name:36s} {first.seconds * 1e3:9.2f} ms ({first.low_s * 1e3:.2f} to {first.high_s * 1e3:.2f}) peak "
                f"{first.figures['peak_bytes'] / 2**30:.2f} GiB (planned "
                f"{first.figures['planned_peak_bytes'] / 2**30:.2f}) {first.clock_MHz:.0f} MHz",
                flush=True,
            )
        device.release_memory()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
