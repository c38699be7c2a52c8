"""Slices of a batch on emulated links: the full batch, and two halves one after the other.

    python -m benchmarks.multiple_copy [--json] [--steps 2]          about 2 minutes

For each the step time is predicted, then emulated. A tensor-parallel perceptron on 4 emulated devices whose all-reduces
take about as long as the two products before them. The devices are made up for this purpose: their kernels last long
enough, stretched 1000 times, for 4 CPU processes to keep their times. Results go to
benchmarks/results/multiple_copy.json. Halves that take turns run on two streams, which are not emulated: they are
measured on GPUs (`benchmarks.interleaving`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from costmodels import Machine
from costmodels.machine.machine import Collective, Compute, Interval, Link, Provenance
from executor.launch.run_plan import run
from plans.layout import Layout
from plans.model.mlp import mlp_graph
from plans.plan import Plan, Stage, Strategy
from simulator import simulate

RESULTS = Path(__file__).with_name("results")
NUM_RANKS = 4
DILATE = 1000.0
TOLERANCE = 0.03

CASES = {
    "whole batch": {},
    "two blocking halves": {"interleave": 2, "interleave_order": "sequential"},
}


def machine() -> Machine:
    """Four devices on slow links: a product of [64, 64] x [64, 64] takes 0.45 ms, the all-reduce of its result 1.0."""
    base = Machine.load("h200-x4")
    return msgspec.structs.replace(
        base,
        name="made-up-x4",
        compute=Compute(
            matrix_flops_per_s={"float32": 1.3e9}, vector_flops_per_s={"float32": 2.6e9}, memory_Bps=1e9, kernel_s=50e-6
        ),
        links=(Link(name="slow", ranks=NUM_RANKS, latency_s=2e-6, bandwidth_Bps=2.5e7),),
        collectives=dict.fromkeys(base.collectives, Collective()),
        dispatch_s=dict.fromkeys(base.dispatch_s, 0.0),
        overlap=(),
        interval=Interval(low=1.0, high=1.0),
        provenance=dict.fromkeys(
            base.provenance, Provenance(status="assumed", source="made up for benchmarks/multiple_copy.py")
        ),
    )


def plan(**rest: Any) -> Plan:
    """Three pairs of layers, the first of each pair split by its outputs, the second by its inputs."""
    graph = mlp_graph([64, 256, 64, 256, 64, 256, 64], 64, bias=False, name="pairs")
    mesh = Layout((NUM_RANKS,), ("tp",))
    strategies = {}
    for number in (1, 3, 5):
        strategies |= {
            f"layer{number}.linear": Strategy(dims={"n": ("tp",)}),
            f"layer{number}.relu": Strategy(dims={"d1": ("tp",)}),
            f"layer{number + 1}.linear": Strategy(dims={"k": ("tp",)}, out=((), ())),
        }
    names = tuple(operator.name for operator in graph.operators)
    return Plan(graph=graph, stages=(Stage(mesh=mesh, operators=names),), strategies=strategies, **rest)


def measure(name: str, target: Machine, path: Path, steps: int) -> dict[str, Any]:
    """One row: predicted, then emulated."""
    chosen = plan(**CASES[name])
    predicted = simulate(chosen, target, num_steps=steps)
    result = run(chosen, steps=steps, data="random", emulate=str(path), dilate=DILATE, log_dir=path.parent)
    return {
        "case": name,
        "predicted_step_s": predicted.step_interval_s,
        "emulated_step_s": result.step_s,
        "difference": predicted.step_interval_s / result.step_s - 1,
        "exposed_comm_s": predicted.exposed_comm_s,
        "loss": float(result.losses[-1]),
    }


def environment(arguments: list[str]) -> dict[str, Any]:
    """Where and with what the numbers were made."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m benchmarks.multiple_copy", *arguments]),
        "machine": f"emulated, {NUM_RANKS} made-up devices, dilated {DILATE:g} times, on {platform.machine()} with "
        f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and save the table; 1 where a row is further off than 3 %."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(arguments)
    found = environment(arguments)
    with tempfile.TemporaryDirectory(prefix="twofold-copy-") as folder:
        target = machine()
        path = Path(folder) / "machine.json"
        target.save(path)
        rows = [measure(name, target, path, options.steps) for name in CASES]
    held = all(abs(row["difference"]) <= TOLERANCE for row in rows)
    whole = rows[0]["emulated_step_s"]
    result = {"environment": found, "wanted": "every row within 3 %", "held": held, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "multiple_copy.json").write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{found['date']}, {found['machine']}, Python {found['python']}, torch {found['torch']}")
        print(f"{'':<24}{'predicted':>12}{'emulated':>12}{'difference':>12}{'against whole':>15}")
        for row in rows:
            print(
                f"{row['case']:<24}{row['predicted_step_s'] * 1e3:>9.3f} ms{row['emulated_step_s'] * 1e3:>9.3f} ms"
                f"{row['difference']:>+12.2%}{row['emulated_step_s'] / whole - 1:>+15.1%}"
            )
        print(f"every row within 3 %: {'held' if held else 'MISSED'}")
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
