"""The hybrid-parallel case in numbers: emulated against simulated, and real runs against their intervals.

    python -m benchmarks.devices.hybrid_case emulated              about 3 minutes
    python -m benchmarks.devices.hybrid_case real --runs 10        about a minute a run, on an otherwise quiet machine

Each real run calibrates again, writes its prediction down, and only then runs the program. Results go to
benchmarks/results/*.json with machine, versions, date and command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from benchmarks import FOLDER
from costmodels import Machine
from executor.launch.run_plan import run
from executor.reference.verification import check_run
from plans.plan import Plan
from search import search
from simulator import simulate
from twofold.calibration.calibrate import calibrate
from twofold.demo import CASES, NUM_RANKS, captured

RESULTS = FOLDER / "results"
CASE = CASES["multiple_mix"]


def best_plan(machine: Machine) -> Plan:
    graph, stages = captured(CASE)
    return search(
        graph, machine, num_devices=NUM_RANKS, num_stages=CASE.num_stages, stages=stages,
        num_micro_batches=CASE.num_micro_batches, schedule=CASE.schedule, optimizer=CASE.optimizer,
    ).best  # fmt: skip


def emulated(machine_name: str, steps: int) -> dict[str, Any]:
    """One plan on emulated devices; the prediction is made first."""
    machine = Machine.load(machine_name)
    plan = best_plan(machine)
    predicted = simulate(plan, machine, num_steps=steps)
    result = run(plan, steps=steps, data="digits", model=CASE.model, seed=1, emulate=machine_name, out=None)
    ratio = predicted.step_interval_s / result.step_s
    row = {
        "machine": machine_name,
        "steps": steps,
        "predicted_step_s": predicted.step_interval_s,
        "emulated_step_s": result.step_s,
        "predicted_over_emulated": ratio,
        "within_3_percent": abs(ratio - 1) <= 0.03,
    }
    print(
        f"{machine_name}: predicted {predicted.step_interval_s * 1e3:.4f} ms, emulated {result.step_s * 1e3:.4f} ms, "
        f"{ratio - 1:+.2%}",
        flush=True,
    )
    return row


def real(number: int, steps: int) -> dict[str, Any]:
    """Calibrate, predict, run, compare."""
    calibrated = calibrate(NUM_RANKS, quick=True)
    assert calibrated is not None
    machine = calibrated.machine
    plan = best_plan(machine)
    predicted = simulate(plan, machine)
    low, high = predicted.low_s or 0.0, predicted.high_s or 0.0
    result = run(plan, steps=steps, data="digits", model=CASE.model, seed=1)
    checked = check_run(result, model=CASE.model, seed=1, predicted=predicted)
    row = {
        "predicted_step_s": predicted.step_interval_s,
        "low_s": low,
        "high_s": high,
        "measured_step_s": result.step_s,
        "inside": low <= result.step_s <= high,
        "half_width": (high - low) / 2 / predicted.step_interval_s,
        "host_scale": machine.host_scale,
        "probes": [[probe.predicted_s, probe.measured_s] for probe in calibrated.probes],
        "loss_first_rel_diff": checked.loss_first_rel_diff,
        "loss_max_rel_diff": checked.loss_max_rel_diff,
        "weights_max_rel_diff": checked.weights_max_rel_diff,
        "collectives_match": result.collectives_match,
        "load_average": os.getloadavg()[0],
    }
    print(
        f"run {number}: predicted {row['predicted_step_s'] * 1e3:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}, "
        f"half-width {row['half_width']:.0%}), measured {result.step_s * 1e3:.1f} ms: "
        f"{'inside' if row['inside'] else 'OUTSIDE'}",
        flush=True,
    )
    return row


def environment() -> dict[str, Any]:
    """Where and with what the numbers were made."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.devices.hybrid_case " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def main() -> None:
    """Run one part and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("emulated", "real"))
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=None, help="3 emulated, 120 real")
    parser.add_argument("--machines", nargs="+", default=["h200-x8", "ascend-910b2-x8"])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.part == "emulated":
        wanted = "every row within 3 %"
        for machine in options.machines:
            rows.append(emulated(machine, options.steps or 3))
            held = all(row["within_3_percent"] for row in rows)
            path = save(options.part, rows, wanted, held)
    else:
        wanted = "8 of 10 inside, half-widths under 35 %"
        for number in range(1, options.runs + 1):
            rows.append(real(number, options.steps or 120))
            inside, widest = sum(row["inside"] for row in rows), max(row["half_width"] for row in rows)
            held = inside >= 0.8 * len(rows) and widest < 0.35
            path = save(options.part, rows, wanted, held)
        print(
            f"inside: {inside} of {len(rows)}; widest half-width {widest:.0%}; worst loss difference over all steps "
            f"{max(row['loss_max_rel_diff'] for row in rows):.1e}, first 8 steps "
            f"{max(row['loss_first_rel_diff'] for row in rows):.1e}, weights "
            f"{max(row['weights_max_rel_diff'] for row in rows):.1e}"
        )
    print(f"{wanted}: {'held' if held else 'MISSED'}; saved {path}")


def save(part: str, rows: list[dict[str, Any]], wanted: str, held: bool) -> Path:
    """Write what is known so far."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"hybrid_case_{part}.json"
    content = {"environment": environment(), "wanted": wanted, "held": held, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main()
