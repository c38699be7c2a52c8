"""Cost of timing every instruction of a replayed step: a recording with an event after each, and one without.

python -m benchmarks.devices.replay_marks PLAN.json... --out FILE       on one GPU, plans of one device
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.kept import measured_with, write_results
from executor.calibrate.steps import CheapParameters
from executor.data.batches import Batch, random_batches
from executor.device import Device, pick_device
from executor.step.compiled import CompiledStep
from executor.step.interpreter import Interpreter
from plans.lower import lower
from plans.plan import Plan, load_plan

WARM_STEPS, REPEATS = 4, 15


def warmed(device: Device, plan: Plan, steps: int) -> tuple[Interpreter, CompiledStep, Iterator[Batch]]:
    """A plan of one rank after some steps on random batches: its interpreter, its compiled step, further batches."""
    interpreter = Interpreter(lower(plan), 0, device, None)
    interpreter.set_parameters(CheapParameters(plan.graph))
    feed = itertools.cycle(list(random_batches(plan.graph, 0, 2)))
    compiled = CompiledStep(interpreter, None)
    for _ in range(steps):
        compiled.step(next(feed))
    return interpreter, compiled, feed


def measured(device: Device, path: Path) -> dict[str, Any]:
    """Milliseconds of two replays of either recording in a row, in turn; the medians."""
    interpreter, compiled, feed = warmed(device, load_plan(path), WARM_STEPS)
    compiled.record(next(feed))
    replays = {"whole": compiled._whole, "marked": compiled._marked}
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for _, (name, replay) in itertools.product(range(REPEATS), replays.items()):
        assert replay is not None, f"{path} is not recorded whole: {compiled.fallback}"
        device.synchronize()
        first = device.mark()
        replay.run()
        replay.run()
        last = device.mark()
        device.synchronize()
        taken[name].append(device.between_ns(first, last) / 2e6)
    compiled.close()
    whole_ms, marked_ms = (statistics.median(taken[name]) for name in replays)
    count = len(interpreter.codes)
    return {
        "plan": path.stem, "instructions": count, "whole_ms": whole_ms, "marked_ms": marked_ms,
        "cost": marked_ms / whole_ms - 1, "a_mark_us": (marked_ms - whole_ms) * 1e3 / count,
    }  # fmt: skip


def main() -> int:
    """Measure the plans one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = pick_device("auto")
    device.use()
    device.use_own_stream()
    rows = []
    for path in options.plans:
        rows.append(measured(device, path))
        device.release_memory()
        print(rows[-1], flush=True)
    if options.out:
        write_results(options.out, measured_with(device) | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
