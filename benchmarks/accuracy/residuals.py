"""How much longer measured steps take than the prices of their parts: `python -m benchmarks.accuracy.residuals`.

For every kept set of `benchmarks.peers`: the median and the 5 % and 95 % quantiles of measured over predicted seconds.

- Replayed steps of twofold's executor. Most sets ran before AdamW and mixtures had their kernels in Triton, and are
  predicted with what torch's took then (`benchmarks.accuracy.former_kernels`).
- Steps of torch's parts, apart from those that a host may bind, which take 2 % longer on the slowest of the measured
  hosts.

Predictions are without `costmodels.widths.STEP_LONGER`, which is the median of the second to fifth set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import FOLDER
from benchmarks.accuracy.former_kernels import with_former_kernels
from benchmarks.peers.cases import Case
from benchmarks.peers.predictions import PEER_STACKS
from benchmarks.peers.sets import case_named
from costmodels import executing
from costmodels.price.torch_hosts import HOSTS_US
from costmodels.widths import STEP_LONGER
from plans.errors import TwofoldError
from simulator.forecast.predict import forecast

RESULTS = FOLDER / "results"

FILES = {
    "peers_h200_second.json": "h200", "peers_h200_third.json": "h200", "peers_h200_fifth.json": "h200",
    "peers_h100_fifth_in_a_row.json": "h100-sxm", "peers_h200_seventh.json": "h200", "peers_h200_eighth.json": "h200",
}  # fmt: skip
"""File of measured steps -> the device that ran them."""


def own_residuals(file: Path, device: str) -> Iterator[float]:
    """Measured over predicted seconds of the replayed steps of twofold's executor."""
    for row in json.loads(file.read_bytes())["rows"]:
        case: Case = case_named(row["case"])
        measured_s = row["measured"].get("graph", {}).get("step_s")
        if measured_s is None or case.products:
            continue
        machine = with_former_kernels(executing(case.machine(device), "graph"))
        machine = msgspec.structs.replace(
            machine, compute=msgspec.structs.replace(machine.compute, longer_in_steps=0.0)
        )
        yield measured_s / forecast(case.config, case.degrees_value(), machine).step_s


def residuals(file: Path, device: str) -> Iterator[tuple[bool, float]]:
    """Whether a host may bind a step, and its measured over its predicted seconds."""
    stack = PEER_STACKS["torch"]
    for row in json.loads(file.read_bytes())["rows"]:
        case: Case = case_named(row["case"])
        measured_s = row["measured"].get("torch", {}).get("step_s")
        if measured_s is None or case.products:
            continue
        try:
            found, *others = (
                forecast(
                    case.config, case.degrees_value(), case.machine(device), stack=replace(stack, host=host)
                ).step_s
                for host in (stack.host, *HOSTS_US)
            )
        except TwofoldError:
            continue
        yield max(others) > 1.02 * found, measured_s / found


def main() -> None:
    """Print the ratios of every file."""
    argparse.ArgumentParser(prog="python -m benchmarks.accuracy.residuals", description=__doc__).parse_args()
    for name, device in FILES.items():
        found = list(residuals(RESULTS / name, device))
        groups = {
            "own, replayed": list(own_residuals(RESULTS / name, device)),
            "device-bound": [(1 + STEP_LONGER) * ratio for binds, ratio in found if not binds],
            "a host may bind": [ratio for binds, ratio in found if binds],
        }
        for group, ratios in groups.items():
            if not ratios:
                continue
            low, middle, high = np.exp(np.quantile(np.log(ratios), [0.05, 0.5, 0.95])) - 1
            print(f"{name:34} {group:16} {len(ratios):3} steps  median {middle:+.1%}  90 % {low:+.1%} to {high:+.1%}")


if __name__ == "__main__":
    main()
