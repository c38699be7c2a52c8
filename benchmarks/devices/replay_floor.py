"""The host's part of a replayed step: steps of small modules, their replays alone, and the parts of the host's time.

    python -m benchmarks.devices.replay_floor --out FILE       on one GPU

Layers add nodes to the recording, and rows add bytes that the host copies into its pinned buffers. `step_s` is of steps
in a row, `replay_s` of the recording in a row without a batch; the other figures are the host's, while the device has
nothing else to do: a batch that is fed (`feed_s`), the numbers that change from step to step (`begin_s`), the launch
(`launch_s`).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.devices.in_a_row import in_a_row_s
from benchmarks.devices.replay_marks import warmed
from benchmarks.devices.small_modules import WIDTH, Stack
from benchmarks.kept import measured_with, write_results
from benchmarks.peers.own import with_execution
from costmodels import Machine
from executor.capture.capture import capture
from executor.device import Device, pick_device
from plans.optimizer import Optimizer
from plans.plan import Plan
from search import uniform_plan

__all__ = ["main"]

LAYERS, ROWS = (1, 4, 16), (2, 64, 2048)
WARM, STEPS, BURST = 6, 300, 30


def plan_of(layers: int, rows: int) -> Plan:
    """Linear layers with tanh between them, on one device; two inputs [rows, WIDTH] in single precision."""
    module: nn.Module = Stack(torch.tanh, layers)
    graph = capture(module, ((rows, WIDTH), (rows, WIDTH)), name=f"{layers} layers")
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-3})
    plan = uniform_plan(graph, Machine.load("h100-sxm-x1"), optimizer=optimizer, micro_batch=rows)
    return with_execution(plan, "graph")


def measured(device: Device, layers: int, rows: int) -> dict[str, Any]:
    """One row of the table."""
    interpreter, compiled, feed = warmed(device, plan_of(layers, rows), WARM)
    replay = compiled._whole
    assert replay is not None, compiled.fallback
    found: dict[str, Any] = {
        "layers": layers,
        "rows": rows,
        "batch_bytes": 2 * 4 * rows * WIDTH,
        "instructions": len(interpreter.codes),
    }
    found["step_s"] = _device_s(device, lambda: compiled.step(next(feed)), STEPS)
    found["replay_s"] = _device_s(device, replay.run, STEPS)
    batch = interpreter.checked(next(feed))
    with torch.inference_mode():
        fed = compiled._feeds.fill(batch)
        found["host_s"] = _host_s(device, lambda: compiled.step(next(feed)))
        found["check_s"] = _host_s(device, lambda: interpreter.checked(next(feed)))
        found["feed_s"] = _host_s(device, functools.partial(compiled._feeds.fill, batch))
        found["begin_s"] = _host_s(device, functools.partial(interpreter.begin, fed, None))
        found["launch_s"] = _host_s(device, replay.run)
    compiled.close()
    return found


def _device_s(device: Device, call: Callable[[], object], count: int) -> float:
    """Seconds of one call of many in a row; the second half of them."""
    for _ in range(count // 2):
        call()
    return in_a_row_s(device, call, count) / count


def _host_s(device: Device, call: Callable[[], object]) -> float:
    """Seconds that the host takes for one call; the median of short bursts, behind each of which the device ends."""
    times = []
    for _ in range(9):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        times.append((time.perf_counter() - start) / BURST)
    device.synchronize()
    return statistics.median(times)


def main() -> int:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = pick_device("auto")
    device.use()
    device.use_own_stream()
    torch.set_num_threads(1)  # as torchrun does
    rows = []
    for layers, count in itertools.product(LAYERS, ROWS):
        rows.append(measured(device, layers, count))
        device.release_memory()
        print({name: f"{each * 1e6:.1f} us" if isinstance(each, float) else each for name, each in rows[-1].items()},
              flush=True)  # fmt: skip
    write_results(options.out, measured_with(device) | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
