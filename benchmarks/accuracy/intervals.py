"""Whether 90 % intervals hold 90 % of what was measured: `python -m benchmarks.accuracy.intervals TABLE.csv ...`.

Per group of rows: how many are inside, how wide the intervals are, and by how much all of them would have to be scaled
to hold 90 %: below 1 they are too wide, above 1 too narrow. A few rows say little: `chance` is the probability that
intervals that hold 90 % hold a share that is no likelier. A step that was repeated in several sessions is one row with
its median time, since repetitions say nothing new about a prediction. Groups are the rows of a table by software, the
steps of torch's parallel parts, and our own executor's steps by set and by execution, predicted with today's machines
and the kernels that ran (`benchmarks.accuracy.former_kernels`). The widths are those of `costmodels.widths`, which come
from what was left out (`benchmarks.accuracy.leave_one_out`). Written to benchmarks/results/intervals.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import FOLDER
from benchmarks.accuracy.calibration import DATA, files_of
from benchmarks.accuracy.former_kernels import with_former_kernels
from benchmarks.accuracy.leave_one_out import torch_plans
from benchmarks.accuracy.stack_steps import predicted
from benchmarks.accuracy.step_plans import SETS
from benchmarks.accuracy.step_truth import compared, predictions
from costmodels import Machine
from costmodels.fit.points import Point, load_points
from costmodels.machine.catalogue import load_device
from interop.measurements.validation import validate
from plans.files import write_atomically

__all__ = ["Row", "coverage", "main"]

RESULTS = FOLDER / "results" / "intervals.json"

HOLDS = (0.85, 0.95)
"""Share of rows that a 90 % interval should hold."""

OWN_SETS = ("fourth", "fifth", "sixth")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured time or size and its interval, in one unit."""

    group: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def scale(self) -> float:
        """How many times as wide (in logarithms) the interval would have to be to just hold what was measured."""
        edge = self.high if self.measured > self.predicted else self.low
        return math.log(self.measured / self.predicted) / math.log(edge / self.predicted)


def table_rows(tables: Sequence[str]) -> Iterator[Row]:
    """Rows of published tables by software; rates as the times they stand for."""
    for table in tables:
        for row in validate(table).rows:
            memory = row["metric"].startswith("peak_memory")
            values = [row[name] for name in ("value", "predicted", "low", "high")]
            if not memory and row["metric"] != "iteration_time_s":
                measured, said, low, high = (1 / value for value in values)
                values = [measured, said, high, low]
            group = f"{_software(row['stack'])}: {'memory' if memory else 'time'}"
            yield Row(group=group, measured=values[0], predicted=values[1], low=values[2], high=values[3])


def _software(stack: str) -> str:
    """A software without its switches, which few rows of a table share."""
    name, *switches = stack.replace("megatron-2022", "megatron 2022").split("-")
    if name == "zero":
        return stack
    return " ".join([name, *(switch for switch in switches if switch not in ("compile", "async"))])


def stack_rows() -> Iterator[Row]:
    """Steps of torch's parallel parts: small ones, and those of plans in new shapes."""
    repeated: dict[tuple[str, str], list[Point]] = {}
    for device in ("h200", "h100-sxm"):
        for file in files_of(device):
            for point in load_points(file)[0]:
                if point.call == "decoder_step" and int(point.options.get("hidden", 0)) >= 1024:
                    which = repr((point.stack, point.ranks, point.dtype, sorted(point.options.items())))
                    repeated.setdefault((device, which), []).append(point)
    for (device, _), points in repeated.items():
        found = predicted(points[0], Machine.load(f"{device}-x{points[0].ranks}"))
        yield Row(
            group=f"small steps, {points[0].stack or 'plain torch'}: time",
            measured=statistics.median(point.seconds for point in points), predicted=found.step_s, low=found.low_s,
            high=found.high_s,
        )  # fmt: skip
    for plan in torch_plans():
        found = plan.forecast
        group = f"new shapes, torch{', host-bound' * plan.parts.endswith('host-bound')}: time"
        yield Row(group=group, measured=plan.measured_s, predicted=found.step_s, low=found.low_s, high=found.high_s)


def executor_rows() -> Iterator[Row]:
    """Our own executor's steps on H200, replayed, and eager by whether the host is predicted to bind them."""
    for name in OWN_SETS:
        files = [
            *DATA.glob(f"h200-{name}-scored-*"), *DATA.glob(f"h200-{name}-steps-*"),
        ]  # fmt: skip
        plans = SETS[name]()
        for row in compared(predictions(plans, with_former_kernels(load_device("h200"))), files):
            how = "replayed" if row["execution"] == "graph" else "eager"
            how += ", host-bound" if row["host_bound"] else ""
            yield Row(
                group=f"own steps, {name} set, {how}: time", measured=row["measured_s"], predicted=row["step_s"],
                low=row["low_s"], high=row["high_s"],
            )  # fmt: skip


def coverage(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Per group the rows, the share inside, the median half width, the scale at which 90 % would be inside, and chance.

    >>> row = Row(group="steps", measured=1.1, predicted=1.0, low=1 / 1.1, high=1.21)
    >>> [(each["inside"], round(each["scale"], 2), each["chance"]) for each in coverage([row])]
    [(1.0, 0.5, 1.0)]
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    result = []
    for group, own in groups.items():
        scales = sorted(row.scale for row in own)
        inside = sum(scale <= 1 for scale in scales) / len(scales)
        result.append({
            "group": group, "rows": len(own), "inside": inside,
            "half_width": statistics.median(0.5 * math.log(row.high / row.low) for row in own),
            "scale": scales[math.ceil(0.9 * len(scales)) - 1], "holds": HOLDS[0] <= inside <= HOLDS[1],
            "chance": round(_chance(sum(scale <= 1 for scale in scales), len(scales)), 4),
        })  # fmt: skip
    return result


def _chance(inside: int, rows: int) -> float:
    """The probability that of `rows` intervals that hold 90 % a number is inside that is no likelier than `inside`.

    >>> round(_chance(21, 28), 2), round(_chance(8, 8), 2)
    (0.02, 1.0)
    """
    likely = [math.comb(rows, count) * 0.9**count * 0.1 ** (rows - count) for count in range(rows + 1)]
    return min(1.0, math.fsum(each for each in likely if each <= likely[inside] * (1 + 1e-9)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*")
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args(arguments)
    found = coverage([*table_rows(options.tables), *stack_rows(), *executor_rows()])
    for row in found:
        print(
            f"{row['group']:62s} {row['rows']:4d}  inside {row['inside']:4.0%}  +-{row['half_width']:5.1%}  "
            f"scale {row['scale']:5.2f}  chance {row['chance']:4.0%}{'' if row['holds'] else '  *'}"
        )
    total = sum(row["rows"] for row in found)
    print(f"all: {sum(row['inside'] * row['rows'] for row in found) / total:.0%} of {total}")
    document = {
        "date": time.strftime("%Y-%m-%d"), "groups": found,
        "command": " ".join(["python -m benchmarks.accuracy.intervals", *(Path(name).name for name in options.tables)]),
    }  # fmt: skip
    write_atomically(Path(options.out), (json.dumps(document, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
