"""How much longer steps of torch's parts take than predicted: `python -m benchmarks.peers_residuals`.

For every kept set of `benchmarks.peers`, with the prices of a step's parts alone (without
`costmodels.widths.TORCH_LONGER`, which is the median of the second to fifth set): the median and the 5 % and 95 %
quantiles of measured over predicted seconds, of steps that the device binds and of those that a host may bind, which
take 2 % longer on the slowest of the measured hosts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.peers.cases import Case
from benchmarks.peers.predictions import PEER_STACKS
from benchmarks.peers.sets import case_named
from costmodels.price.torch_hosts import HOSTS_US
from costmodels.widths import TORCH_LONGER
from plans.errors import TwofoldError
from simulator.forecast.predict import forecast

RESULTS = Path(__file__).parent / "results"

FILES = {
    "peers_h200_second.json": "h200", "peers_h200_third.json": "h200", "peers_h200_fifth.json": "h200",
    "peers_h100_fifth_in_a_row.json": "h100-sxm", "peers_h200_seventh.json": "h200", "peers_h200_eighth.json": "h200",
}  # fmt: skip
"""File of measured steps -> the device that ran them."""


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
    argparse.ArgumentParser(prog="python -m benchmarks.peers_residuals", description=__doc__).parse_args()
    for name, device in FILES.items():
        found = list(residuals(RESULTS / name, device))
        for host_binds in (False, True):
            ratios = [math.log(ratio) for binds, ratio in found if binds is host_binds]
            if not ratios:
                continue
            low, middle, high = np.exp(np.quantile(ratios, [0.05, 0.5, 0.95]))
            longer = 1 + TORCH_LONGER * (not host_binds)
            print(
                f"{name:34} {'a host may bind' if host_binds else 'device-bound':16} {len(ratios):3} steps  "
                f"median {longer * middle - 1:+.1%}  90 % {longer * low - 1:+.1%} to {longer * high - 1:+.1%}"
            )


if __name__ == "__main__":
    main()
