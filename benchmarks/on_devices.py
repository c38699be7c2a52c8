"""Plans of every kind on real accelerators (or CPU ranks), each against one process.

Loss, weights and executed communication are checked.

    python -m benchmarks.on_devices --machine h200-x4 --ranks 4 --out results.json

Each plan trains the digits network for some steps. The step time is reported next to the prediction of the shipped
machine file, whose dispatch costs were not calibrated for this executor: it informs, and proves nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch

from costmodels import Machine
from executor.reference.verification import verify
from plans.optimizer import Optimizer
from plans.plan import Plan
from search import search, uniform_plan
from simulator import simulate
from twofold.demo import CASES, captured

CASE = CASES["multiple_mix"]


def plans_for(machine: Machine, ranks: int) -> dict[str, Plan]:
    """The searched plan and the usual degrees, for 2 or 4 ranks."""
    graph, stages = captured(CASE)
    found = {
        "searched": search(
            graph, machine, num_devices=ranks, num_stages=2, stages=stages, num_micro_batches=4,
            optimizer=CASE.optimizer,
        ).best
    }  # fmt: skip
    half = ranks // 2
    degrees: dict[str, dict[str, Any]] = {
        f"dp{ranks} zero1": {"dp": ranks, "zero": 1},
        f"tp{ranks}": {"tp": ranks},
        f"pp2 dp{half} gpipe zero1": {"pp": 2, "dp": half, "zero": 1, "schedule": "gpipe"},
        f"pp2 tp{half}": {"pp": 2, "tp": half},
        f"pp2 tp{half} zb_h1": {"pp": 2, "tp": half, "schedule": "zb_h1"},
    }
    adamw, momentum = {"lr": 1e-3, "weight_decay": 0.1}, {"lr": 1e-2, "momentum": 0.9}
    levels = {
        f"dp{ranks} zero2 momentum clipped": Optimizer(kind="momentum", settings=momentum, clip_norm=0.5),
        f"dp{ranks} zero3 adamw": Optimizer(kind="adamw", settings=adamw, prefetch=2, bucket_bytes=2**20),
        f"pp2 dp{half} zero3 adamw clipped": Optimizer(kind="adamw", settings=adamw, clip_norm=0.5),
    }
    for name, optimizer in levels.items():
        pp = 2 if name.startswith("pp") else 1
        degrees[name] = {"dp": ranks // pp, "zero": int(name.split("zero")[1][0]), "optimizer": optimizer} | (
            {"pp": 2} if pp == 2 else {}
        )
    if ranks == 4:
        degrees["dp2 tp2 adamw zero1"] = {
            "dp": 2,
            "tp": 2,
            "zero": 1,
            "optimizer": Optimizer(kind="adamw", settings={"lr": 1e-3}),
        }
    for name, options in degrees.items():
        cut = {"stages": stages} if options.get("pp") else {}
        micro_batch = 8 // options.get("dp", 1)
        found[name] = uniform_plan(graph, machine, micro_batch=micro_batch, **cut, **options)
    return {name: msgspec.structs.replace(plan, prediction=None) for name, plan in found.items()}


def main() -> int:
    """Run every plan, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="h200-x4")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="plans whose name has this in it")
    parser.add_argument("--out", default="on_devices.json")
    options = parser.parse_args()
    machine, rows = Machine.load(options.machine), []
    for name, plan in plans_for(machine, options.ranks).items():
        if options.only not in name:
            continue
        row: dict[str, Any] = {"plan": name, "ranks": options.ranks}
        try:
            found = verify(
                plan, model=CASE.model, predicted=simulate(plan, machine), steps=options.steps, seed=1,
                device=options.device, log_dir="log_output", timeout_s=75,
            )  # fmt: skip
            row |= found.to_json() | {
                "environment": {key: str(value) for key, value in found.run.timeline.meta.items()}
            }
            print(
                f"{name:28s} {'ok  ' if found.passed else 'FAIL'} loss {row['loss_max_rel_diff']:.1e} weights "
                f"{row['weights_max_rel_diff']:.1e} communication {row['collectives_match']} step "
                f"{row['measured_step_s'] * 1e3:.2f} ms (predicted {row['predicted_step_s'] * 1e3:.2f})",
                flush=True,
            )
        except Exception as error:
            row |= {"passed": False, "error": "".join(traceback.format_exception(error))[-2000:]}
            print(f"{name:28s} ERROR {str(error)[:1500]}", flush=True)
        rows.append(row)
    environment = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.on_devices " + " ".join(sys.argv[1:]),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "variables": {name: os.environ.get(name) for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE")},
    }
    Path(options.out).write_text(json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")
    passed = sum(bool(row["passed"]) for row in rows)
    print(f"{passed} of {len(rows)} plans verified; saved {options.out}")
    return 0 if passed == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
