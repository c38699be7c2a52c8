"""What predictions without the host's time are off by, against the width of models: `python -m benchmarks.host_term`.

Small models are bound by the host that issues their kernels. A prediction that only counts what devices do is far too
fast for them, however good its kernels are. Here the measured steps of our own plans on H200 (benchmarks/data, never
fitted to) are predicted with dispatch as measured and with dispatch for nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.step_plans import SETS
from costmodels import Machine
from costmodels.fit.points import load_points
from plans.files import write_atomically
from plans.lower import lower
from plans.plan import Plan
from simulator import simulate

__all__ = ["host_rows", "main", "without_host"]

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "host_term.json"


def without_host(machine: Machine) -> Machine:
    """The machine with hosts that take no time.

    >>> max(without_host(Machine.load("h200-x2")).dispatch_s.values())
    0.0
    """
    rules = {call: msgspec.structs.replace(rule, dispatch_s=0.0) for call, rule in machine.compute.rules.items()}
    return msgspec.structs.replace(
        machine, dispatch_s=dict.fromkeys(machine.dispatch_s, 0.0),
        compute=msgspec.structs.replace(machine.compute, rules=rules),
    )  # fmt: skip


def hidden_of(plan: Plan) -> int:
    """The width of a plan's transformer: features of its embedding."""
    return next(tensor.shape[-1] for tensor in plan.graph.parameters if tensor.name.startswith("tok_embeddings"))


def host_rows(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Per measured plan its width, and both predictions over the measured time less 1; of several hosts the fastest."""
    measured: dict[str, list[float]] = {}
    for file in files:
        for point in load_points(file)[0]:
            if point.kind == "step" and point.stack == "twofold" and "part" not in point.options:
                measured.setdefault(point.call, []).append(point.seconds)
    rows = []
    for name, plan in SETS["third"]().items():
        if name in measured:
            machine = Machine.load(f"h200-x{plan.num_ranks}")
            truth = min(measured[name])
            both = [
                simulate(lower(plan), each).step_interval_s / truth - 1 for each in (machine, without_host(machine))
            ]
            rows.append({
                "plan": name, "ranks": plan.num_ranks, "hidden": hidden_of(plan), "measured_s": truth,
                "error": both[0], "error_without_host": both[1],
            })  # fmt: skip
    return rows


def main() -> None:
    """Predict all of them, print the errors by width, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(RESULTS))
    arguments = parser.parse_args()
    files = sorted(FOLDER.glob("data/h200-third-steps-*.jsonl.gz"))  # older ones are of slower kernels
    rows = host_rows(files)
    table = []
    for hidden in sorted({row["hidden"] for row in rows}):
        own = [row for row in rows if row["hidden"] == hidden]
        line = {"hidden": hidden, "plans": len(own)}
        for name in ("error", "error_without_host"):
            line[f"{name}_mean"] = statistics.fmean(row[name] for row in own)
            line[f"{name}_mean_absolute"] = statistics.fmean(abs(row[name]) for row in own)
        table.append(line)
        print(
            f"hidden {hidden:5d}  {len(own):2d} plans  with the host {line['error_mean']:+6.1%} (mean absolute "
            f"{line['error_mean_absolute']:5.1%})  without {line['error_without_host_mean']:+6.1%} "
            f"({line['error_without_host_mean_absolute']:5.1%})"
        )
    document = {
        "date": time.strftime("%Y-%m-%d"), "command": "python -m benchmarks.host_term", "device": "H200, 1 to 4",
        "data": [file.name for file in files], "by_hidden": table, "plans": rows,
    }  # fmt: skip
    write_atomically(Path(arguments.out), (json.dumps(document, indent=1) + "\n").encode())
    print(f"saved {arguments.out}")


if __name__ == "__main__":
    main()
