"""Complete steps of plans, to compare predictions with: `python -m executor.calibrate.steps POINTS.jsonl PLAN.json...`.

With `--replayed`, steps are not measured eagerly if the device can record them. Weights are random numbers that are
cheap to generate, because only time and memory matter here.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from executor.data.batches import random_batches, rows_of_rank
from executor.device import pick_device
from executor.step.code import RecordedStep
from executor.step.compiled import CompiledStep, Stepper
from executor.step.groups import Groups, connect
from executor.step.interpreter import Batch, Interpreter
from plans.lower import lower
from plans.model.graph import Graph
from plans.plan import Plan, load_plan

__all__ = ["CheapParameters", "main", "step_points"]

WARM_STEPS = 4
REPEATS = 5
STEPS = 4
"""In a row, of one repeat."""
SENSED_S = 0.5
"""Number of consecutive steps while the sensors are read."""


class CheapParameters(Mapping[str, npt.NDArray[Any]]):
    """Random parameters as windows into one row of random numbers: distinct values at almost no cost."""

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


def step_points(
    timer: Timer, sync: RankSync, plan: Plan, name: str, *, only_replayed: bool = False
) -> list[Point]:  # fmt: skip
    """Train a plan for a few steps, eagerly and then replayed where that can be; every rank of the job must call it.

    Args:
        timer: of this rank's device.
        sync: of all ranks.
        plan: for as many ranks as there are.
        name: name of the points.
        only_replayed: not eagerly where the device can record steps.

    Returns:
        For each execution (option "execution") the pace of steps in a row, of the slowest rank, with the peak bytes,
        and for every rank the time of each kind of instruction in a recorded step.
    """
    device, program = timer.device, lower(plan)
    alone, points = program.num_ranks == 1, list[Point]()
    with contextlib.ExitStack() as stack:
        groups = None if alone else Groups(program, device)
        if groups is not None:
            stack.callback(groups.close)
        interpreter = Interpreter(program, sync.rank, device, groups)
        interpreter.set_parameters(CheapParameters(plan.graph))
        batches = list(rows_of_rank(plan, sync.rank, random_batches(plan.graph, 0, 2)))
        if not (only_replayed and device.can_record):
            points += _execution_points(timer, sync, interpreter, interpreter, batches, name)
        if device.can_record:
            compiled = CompiledStep(interpreter, None if groups is None else groups.all_agree)
            try:
                points += _execution_points(timer, sync, interpreter, compiled, batches, name)
            finally:
                compiled.close()
        if groups is not None:
            dist.barrier()
    return points


def _execution_points(
    timer: Timer, sync: RankSync, interpreter: Interpreter, stepper: Stepper, batches: Sequence[Batch], name: str
) -> list[Point]:
    """Points of one way to execute the steps; none where they ran another way after all."""
    device = timer.device
    device.release_memory()
    device.reset_peak_memory()
    feed = itertools.cycle(batches)
    for _ in range(WARM_STEPS):
        stepper.step(next(feed))
    times = [_pace_s(timer, sync, stepper, feed) for _ in range(REPEATS)]
    execution = "graph" if stepper is not interpreter else "eager"
    if isinstance(stepper, CompiledStep) and not sync.all_agree(stepper.execution == execution):
        return []
    sync.barrier()
    more = int(sync.maximum([math.ceil(SENSED_S / times[-1])])[0])
    sensors = timer.sensors_during(lambda: [stepper.step(next(feed)) for _ in range(more)])
    peaks = [float(device.max_memory_allocated()), float(device.memory_reserved())]
    peak, reserved, planned = sync.maximum([*peaks, float(interpreter.peak.peak_bytes)])
    sync.barrier()
    stepper.record(next(feed))  # makes the recording with marks, where there is one
    for _ in range(STEPS):
        stepper.step(next(feed))  # to the clock of steps in a row
    _, recorded = stepper.record(next(feed))
    fields = sampled(times, 1).fields | sensors
    common: dict[str, Any] = {
        "kind": "step", "call": name, "stack": "twofold", "ranks": sync.size, "active_ranks": sync.size,
    }  # fmt: skip
    figures = {"peak_bytes": peak, "reserved_bytes": reserved, "planned_peak_bytes": planned}
    for rank, sensed in enumerate(sync.gather(sensors)):
        figures |= {f"{sensor}_{rank}": value for sensor, value in sensed.items()}
    points = [Point(figures=figures, options={"execution": execution}, **common, **fields)]
    for rank, parts in enumerate(sync.gather(_parts(interpreter, recorded))):
        for call, (count, host_s, device_s) in parts.items():
            figures = {"count": count, "host_s": host_s}
            options: dict[str, Any] = {"execution": execution, "part": call, "rank": rank}
            points.append(Point(options=options, seconds=device_s, figures=figures, **common))
    return points


def _pace_s(timer: Timer, sync: RankSync, stepper: Stepper, feed: Iterator[Batch]) -> float:
    """Mean seconds from the end of a step to the end of the next on the compute stream, of the slowest rank."""
    sync.barrier()
    stepper.step(next(feed))  # fills the pipeline, and lets the host get ahead
    first = timer.mark()
    for _ in range(STEPS):
        stepper.step(next(feed))
    last = timer.mark()
    timer.device.synchronize()
    return sync.maximum([timer.between_s(first, last) / STEPS])[0]


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


def _line(name: str, point: Point) -> str:
    peak, planned = (point.figures[each] / 2**30 for each in ("peak_bytes", "planned_peak_bytes"))
    return (
        f"{name:40s} {point.options['execution']:5s} {point.seconds * 1e3:9.2f} ms ({point.low_s * 1e3:.2f} to "
        f"{point.high_s * 1e3:.2f}) peak {peak:.2f} GiB (planned {planned:.2f}) {point.clock_MHz:.0f} MHz"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the plans for as many ranks as there are, one after the other; a plan that fails does not stop the others."""
    parser = argparse.ArgumentParser(prog="executor.calibrate.steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("points", help="file of JSON lines, appended to")
    parser.add_argument("plans", nargs="+", help="plan files")
    parser.add_argument("--replayed", action="store_true", help="not eagerly where steps can be recorded")
    options = parser.parse_args(arguments)
    device = pick_device("auto")
    device.use()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        connect(device)
    device.use_own_stream()
    sync = RankSync(device, 60.0)
    log = PointLog(options.points) if sync.rank == 0 else None
    if log is not None:
        resume(log, surroundings(device, sync.size))
    timer, failed = Timer(device), 0
    for file in options.plans:
        plan, name = load_plan(file), Path(file).stem
        if plan.num_ranks != sync.size:
            continue
        if not sync.from_rank_0(log is not None and all(point.call != name for point in log)):
            continue
        try:
            with sync.watch(f"the plan {name}"):
                points = step_points(timer, sync, plan, name, only_replayed=options.replayed)
        except torch.OutOfMemoryError as error:
            failed += 1
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
            break  # the other ranks cannot continue either
        except Exception:
            failed += 1
            traceback.print_exc()
            break
        if log is not None:
            for point in points:
                log.add(point)
            for point in points:
                if "part" not in point.options:
                    print(_line(name, point), flush=True)
        device.release_memory()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
