"""How far off predictions are, on tables of measurements: `python -m benchmarks.accuracy TABLE.csv ...`.

Machines are those of the catalogue, made from micro-benchmarks and cited figures; nothing is fitted to these rows. The
table is printed, and written with date and versions to benchmarks/results/accuracy.json; `--picture FILE.svg` draws the
errors of all rows, and those of this executor's own steps (`OWN_STEPS`).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import FOLDER
from benchmarks.accuracy.choices import time_cases, time_error
from benchmarks.accuracy.picture import Scored, accuracy_picture
from costmodels.price.torch_hosts import HOSTS_US
from interop.measurements.machines import machine_of
from interop.measurements.validation import Validation, validate
from simulator.forecast import forecast
from simulator.stacks import TorchNative, stack_named

RESULTS = FOLDER / "results" / "accuracy.json"
OWN_STEPS = ("step_truth.json", "step_truth_experts.json", "step_truth_third.json", "step_truth_third_x4.json",
             "step_truth_third_h100_measured.json", "step_truth_fourth.json", "step_truth_fifth.json",
             "step_truth_sixth.json")  # fmt: skip
"""Steps of this executor that were predicted before they ran (not those that were predicted again)."""

NAMES = {
    "h200x2_torch.csv": ("torch's own parts", "1.9B decoder, 21 layouts, 2 H200"),
    "korthikanti2022_a100.csv": ("Megatron-LM", "22B to 1T, 8 to 512 A100"),
    "zerobubble2024_a100.csv": ("Zero-bubble pipelines", "1.5B to 28B, 8 to 32 A100"),
    "torchtitan_h100_h200.csv": ("torchtitan", "Llama 8B to 405B, 8 to 512 H100, H200"),
}
"""Table -> its name and a line of detail in the picture."""


def main() -> None:
    """Validate every table, print one line per source and metric, and the interval's share over all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--picture", help="SVG file of the errors of all rows")
    arguments = parser.parse_args()
    found, inside, rows, drawn = [], 0.0, 0, [_own_steps()]
    for table in arguments.tables:
        start = time.perf_counter()
        scores = validate(table)
        took_s = time.perf_counter() - start
        drawn.append(_scored(Path(table).name, scores))
        reasons: dict[str, int] = {}
        for skipped in scores.skipped:
            reasons[skipped["reason"]] = reasons.get(skipped["reason"], 0) + 1
        assumed = sorted({text for row in scores.rows for text in row["assumed"]})
        found.append(
            {"table": Path(table).name, "sources": [_named(score) for score in scores.sources], "skipped": reasons,
             "assumed": assumed}
        )  # fmt: skip
        print(f"{Path(table).name}: {len(scores.rows)} rows in {took_s:.2f} s, {len(scores.skipped)} skipped")
        for score in scores.sources:
            inside += score["within_interval"] * score["rows"]
            rows += score["rows"]
            order = "-" if score["pair_order"] is None else f"{score['pair_order']:.0%}"
            print(
                f"  {score['metric']:24s} {score['rows']:3d} rows  mean {score['mape']:6.1%}  median "
                f"{score['median_ape']:6.1%}  bias {score['bias']:+6.1%}  inside {score['within_interval']:4.0%}  "
                f"order {order}"
            )
    print(f"inside the interval, all tables: {inside / rows:.0%}")
    hosts = under_hosts(arguments.tables)
    for row in hosts:
        print(
            f"{row['table']}: with the times of the {row['host']} host alone: {row['rows']} times  "
            f"mean {row['mean']:6.1%}  bias {row['bias']:+6.1%}"
        )
    document = {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
        "command": "python -m benchmarks.accuracy " + " ".join(Path(table).name for table in arguments.tables),
        "machine": platform.machine(), "within_interval": inside / rows, "tables": found, "hosts": hosts,
    }  # fmt: skip
    Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")
    print(f"saved {arguments.out}", file=sys.stderr)
    if arguments.picture:
        picture = accuracy_picture(drawn, title="Predicted against measured, a dot for every run")
        print(f"saved {picture.save(arguments.picture)}", file=sys.stderr)


def under_hosts(tables: Sequence[str]) -> list[dict[str, Any]]:
    """Errors of the times of torch's parts, with the host times of each measured host alone, and of the median one that
    predictions take."""
    found = []
    for table, cases in time_cases(tables).items():
        for host in (*HOSTS_US, "quiet"):
            errors = []
            for case in cases:
                stack = stack_named(case.stack)
                if isinstance(stack, TorchNative) and not stack.compiled:
                    machine = machine_of(case.machine, case.network)
                    step = forecast(case.config, case.degrees, machine, stack=replace(stack, host=host))
                    errors.append(time_error(case, step))
            if errors:
                found.append({
                    "table": table, "host": host, "rows": len(errors),
                    "mean": statistics.fmean(map(abs, errors)), "bias": statistics.fmean(errors),
                })  # fmt: skip
    return found


def _scored(table: str, scores: Validation) -> Scored:
    """The errors of a table; those of a throughput as errors of the step time."""
    errors: dict[str, list[float]] = {"step time": [], "peak memory": []}
    for row in scores.rows:
        quantity = "peak memory" if row["metric"].startswith("peak_memory") else "step time"
        ratio = row["predicted"] / row["value"]
        errors[quantity].append(
            (ratio if row["metric"].startswith(("iteration_time", "peak_memory")) else 1 / ratio) - 1
        )
    name, detail = NAMES.get(table, (table, ""))
    return Scored(name=name, detail=detail, errors=errors)


def _own_steps() -> Scored:
    rows = [row for name in OWN_STEPS for row in json.loads(RESULTS.with_name(name).read_bytes())["rows"]]
    most = max(row["ranks"] for row in rows)
    return Scored(
        name="twofold's own executor", detail=f"{len(rows)} steps on 1 to {most} H200, H100",
        errors={"step time": [row["error"] for row in rows], "peak memory": [row["peak_error"] for row in rows]},
    )  # fmt: skip


def _named(score: dict[str, Any]) -> dict[str, Any]:
    """A score whose source does not read as a document of this project."""
    return score | {"source": score["source"].replace(".md", "")}


if __name__ == "__main__":
    main()
