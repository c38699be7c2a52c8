"""Whole steps of this executor on accelerators: predicted first, then measured.

    python -m benchmarks.accuracy.step_truth predict PREDICTIONS.json              before the plans are run
    python -m benchmarks.accuracy.step_plans FOLDER                                the plans, as files
    torchrun --nproc-per-node N -m executor.calibrate.steps POINTS.jsonl FOLDER/*.json
    python -m benchmarks.accuracy.step_truth compare PREDICTIONS.json POINTS...    how good the predictions were

`--set` names the plans (benchmarks/accuracy/step_plans.py) and `--device` the device of the catalogue; with `--measured
POINTS...` the device is fitted again, to points of instructions alone that were taken just before as well.

Machine files are fitted to kernels, collectives and instructions measured alone, never to steps.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.accuracy.calibration import DATA, fitted
from benchmarks.accuracy.step_plans import SETS
from costmodels import Machine
from costmodels.fit.points import load_points
from costmodels.machine.catalogue import Device, load_device
from interop.measurements.scores import ranking
from plans.files import write_atomically
from plans.plan import EXECUTIONS, Plan
from simulator import simulate

__all__ = ["compared", "main", "predictions"]

DEVICE = "h200"

HOST_BOUND = 0.1
"""Share of the step that devices wait for the host, as predicted, from which a step counts as host-bound."""


def predictions(plans: dict[str, Plan], device: Device | Machine) -> list[dict[str, Any]]:
    """One row per plan and execution: step time with its interval, and peak memory."""
    rows, first = [], SETS["first"]()
    for (name, plan), execution in itertools.product(plans.items(), EXECUTIONS):
        machine = device if isinstance(device, Machine) else Machine.of_device(device, plan.num_ranks)
        timeline = simulate(msgspec.structs.replace(plan, execution=execution), machine)
        rows.append({
            "plan": name, "execution": execution, "ranks": plan.num_ranks, "new": name not in first,
            "step_s": timeline.step_interval_s, "low_s": timeline.low_s, "high_s": timeline.high_s,
            "peak_bytes": timeline.peak_bytes,
            "host_bound": timeline.host_wait_s > HOST_BOUND * timeline.step_interval_s,
        })  # fmt: skip
    return rows


def compared(predicted: Sequence[dict[str, Any]], points: Sequence[str | Path]) -> list[dict[str, Any]]:
    """The predicted rows that were measured, with what was measured."""
    measured = {
        (point.call, point.options.get("execution", "eager")): point
        for file in points for point in load_points(file)[0]
        if point.kind == "step" and point.stack == "twofold" and "part" not in point.options
    }  # fmt: skip
    rows = []
    for row in predicted:
        row = {"execution": "eager"} | row  # files from before there were two
        if (point := measured.get((row["plan"], row["execution"]))) is not None:
            peak = point.figures["peak_bytes"]
            rows.append(row | {
                "measured_s": point.seconds, "measured_peak_bytes": peak, "error": row["step_s"] / point.seconds - 1,
                "peak_error": row["peak_bytes"] / peak - 1 if peak else 0.0,
                "within_interval": row["low_s"] <= point.seconds <= row["high_s"], "clock_MHz": point.clock_MHz,
            })  # fmt: skip
    return rows


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    errors, peaks = np.array([row["error"] for row in rows]), np.array([row["peak_error"] for row in rows])
    order, regrets = ranking(_alternatives(rows))
    return {
        "plans": len(rows), "mape": round(float(np.mean(np.abs(errors))), 4),
        "bias": round(float(np.mean(errors)), 4), "worst": round(float(np.max(np.abs(errors))), 4),
        "within_interval": round(float(np.mean([row["within_interval"] for row in rows])), 4),
        "interval_width": round(float(np.mean([row["high_s"] / row["low_s"] for row in rows])) - 1, 4),
        "peak_mape": round(float(np.mean(np.abs(peaks))), 4),
        "pair_order": round(order, 4) if order is not None else None,
        "regret": round(float(np.mean(regrets)), 4) if regrets else None,
    }  # fmt: skip


def _alternatives(rows: Sequence[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Predicted and measured times by model, batch, devices and execution."""
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        model_and_batch = re.match(r".*?-b\d+", row["plan"])
        assert model_and_batch is not None
        key = (model_and_batch[0], row["ranks"], row["execution"])
        groups[key].append((row["step_s"], row["measured_s"]))
    return list(groups.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the predictions, or print and save how they compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("predict", "compare"))
    parser.add_argument("predictions")
    parser.add_argument("points", nargs="*")
    parser.add_argument("--out", help="JSON of the comparison")
    parser.add_argument(
        "--set", choices=SETS, action="append", dest="sets", help="of plans; first and new unless stated"
    )
    parser.add_argument("--device", default=DEVICE, help="of the catalogue")
    parser.add_argument("--machine", help="machine file to take instead, of as many devices as the plans")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="only plans of these numbers of devices")
    parser.add_argument("--measured", nargs="*", default=[], help="points to fit beside the shipped ones")
    options = parser.parse_args(arguments)
    if options.action == "predict":
        device: Device | Machine = load_device(options.device)
        if options.machine:
            device = Machine.load(options.machine)
        elif options.measured:
            fit = fitted(options.device, [*sorted(DATA.glob(f"{options.device}-*.jsonl*")), *options.measured])
            assert fit is not None
            device = fit.device
        plans = {name: plan for chosen in options.sets or ("first", "new") for name, plan in SETS[chosen]().items()}
        plans = {name: plan for name, plan in plans.items() if not options.ranks or plan.num_ranks in options.ranks}
        said: dict[str, Any] = {"written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        said |= {"device": device.name, "rows": predictions(plans, device)}
        write_atomically(options.predictions, json.dumps(said, indent=1).encode() + b"\n")
        return 0
    written = json.loads(Path(options.predictions).read_bytes())
    rows = compared(written["rows"], options.points)
    if not rows:
        print("none of the predicted plans is among these points", file=sys.stderr)
        return 1
    for row in rows:
        print(
            f"{row['plan']:44s} {row['execution']:5s} predicted {row['step_s'] * 1e3:8.2f} ms, "
            f"measured {row['measured_s'] * 1e3:8.2f} ({row['error']:+.1%})"
            f"{'' if row['within_interval'] else ' outside'}, memory {row['peak_error']:+.1%}"
        )
    parts = {"all": rows, "new": [row for row in rows if row["new"]]}
    for execution in EXECUTIONS:
        own = [row for row in rows if row["execution"] == execution]
        parts |= {execution: own, f"{execution}, host-bound": [row for row in own if row.get("host_bound")]}
        parts[f"{execution}, device-bound"] = [row for row in own if not row.get("host_bound")]
    for ranks in sorted({row["ranks"] for row in rows}):
        parts[f"{ranks} devices"] = [row for row in rows if row["ranks"] == ranks]
    summary = {name: _summary(some) for name, some in parts.items() if some}
    for name, figures in summary.items():
        print(f"{name}: {figures}")
    if options.out:
        said = {"predicted": written["written"], "points": [Path(path).name for path in options.points]}
        write_atomically(options.out, json.dumps(said | {"summary": summary, "rows": rows}, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
