"""How far off measured steps are when they are predicted as other software than ran them.

`python -m benchmarks.accuracy.other_stacks TABLE...` prints, for every table and every other stack of its kind, the
mean logarithm of measured over predicted step times, and their 5 % and 95 % quantiles: the interval of software of
which no step was measured (`costmodels.widths.OTHER_SOFTWARE`). Rows of float8 with a scale a row are left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator

import numpy as np

from interop.measurements.cells import ROW, Skip
from interop.measurements.forecasts import measured_as
from interop.measurements.machines import machine_of
from interop.measurements.readings import needed_fillings
from interop.measurements.rows import case_of
from interop.measurements.tables import read_table
from plans.errors import TwofoldError
from simulator.forecast import forecast
from simulator.stacks import on_host, stack_named

OTHERS = {
    "torch": ("torch-2024", "torch-compile", "megatron"),
    "torchtitan": ("torch-2024-compile", "torch-compile", "megatron"),
    "megatron-2022": ("megatron", "megatron-deepspeed-2022", "zero-bubble"),
    "zero-bubble": ("megatron", "megatron-2022", "megatron-deepspeed-2022"),
}
"""The first words of a stack -> others of which somebody could think that they ran its steps."""


def residuals(row: dict[str, str], number: int) -> Iterator[tuple[str, str, float]]:
    """The stack of a row, every other one, and the logarithm of measured over predicted step times with it."""
    own = case_of(row, number)
    kind = next(kind for kind in sorted(OTHERS, key=len, reverse=True) if own.stack.startswith(kind))
    products = stack_named(own.stack).products
    for other in OTHERS[kind]:
        if ("compile" in other) != ("compile" in own.stack or "async" in own.stack) and other.startswith("torch"):
            continue
        narrow = {"megatron": "float8-current"}.get(other, products) if products else ""
        case = case_of(row, number, f"{other}-{narrow}" if narrow else other)
        machine, stack = on_host(machine_of(case.machine, case.network), stack_named(case.stack), None)
        found = forecast(case.config, case.degrees, machine, stack=stack)
        ratio = math.log(case.value / measured_as(case, found, found.step_s))
        yield kind, other, ratio if case.metric == "iteration_time_s" else -ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", help="tables of measurements")
    groups: dict[tuple[str, str, str], list[float]] = {}
    for table in parser.parse_args().tables:
        for number, row in enumerate(read_table(table), start=1):
            row.pop(ROW)
            if row["metric"].startswith("peak") or "rowwise" in row.get("precision", ""):
                continue
            try:
                fillings = needed_fillings(row)
                for kind, other, ratio in residuals({**row, **fillings[(len(fillings) - 1) // 2]}, number):
                    groups.setdefault((table.rpartition("/")[2], kind, other), []).append(ratio)
            except (Skip, TwofoldError) as error:
                print(f"{table} row {number}: {error}")
    means = []
    for (table, kind, other), found in groups.items():
        means.append(statistics.fmean(found))
        print(f"{table:28} {kind:14} as {other:24} {len(found):3} rows  mean {means[-1]:+.3f}")
    low, high = np.exp(np.quantile(means, [0.05, 0.95]))
    print(f"5 % and 95 % quantiles of measured over predicted: {low:.3f} and {high:.3f}")


if __name__ == "__main__":
    main()
