"""`python -m benchmarks.reliability PART... --out FILE` measures the parts that are named, or all."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept import keep
from benchmarks.reliability import checkpoints, faults, leaks
from benchmarks.reliability.interrupted import interrupted

__all__ = ["main"]


def _faults(options: argparse.Namespace) -> dict[str, Any]:
    found = []
    for outcome in faults.cases(options.count, options.seed, options.only, at_once=options.at_once):
        found.append(asdict(outcome))
        print(f"{outcome.fault:20} rank {outcome.rank} {outcome.seconds:5.1f} s  {'; '.join(outcome.wrong) or 'right'}",
              flush=True)  # fmt: skip
        right = sum(not each["wrong"] for each in found)
        figures = {"right": right, "cases": len(found), "met": right == options.count, "outcomes": found}
        if options.out is not None:  # an interrupted run keeps what is known
            keep(options.out, "faults", figures)
    return figures


def _interrupted(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="twofold-interrupted-") as folder:
        return interrupted(Path(folder), options.steps, options.kills, options.seed, partial(print, flush=True))


def _steps(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="twofold-leaks-") as folder:
        return leaks.of_steps(Path(folder) / "job", options.long, options.ranks, partial(print, flush=True))


def _forecasts(options: argparse.Namespace) -> dict[str, Any]:
    return leaks.of_forecasts(options.long, partial(print, flush=True))


def _checkpoints(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="twofold-checkpoints-") as folder:
        return checkpoints.cost(Path(folder), 100, 64, partial(print, flush=True))


PARTS = {
    "faults": _faults,
    "interrupted": _interrupted,
    "checkpoints": _checkpoints,
    "steps": _steps,
    "forecasts": _forecasts,
}


def main(arguments: list[str] | None = None) -> int:
    """Measure parts; 1 if one of them is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all where none is named")
    parser.add_argument("--out", type=Path, help="JSON file that keeps the figures; those of other parts stay")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="faults")
    parser.add_argument("--steps", type=int, default=1000, help="of the run that is interrupted")
    parser.add_argument("--kills", type=int, default=20, help="of one of its processes each")
    parser.add_argument("--long", type=int, default=10_000, help="steps, and forecasts, whose process must not grow")
    parser.add_argument("--ranks", type=int, default=8, help="of those steps")
    parser.add_argument("--only", nargs="*", choices=list(faults.FAULTS), default=list(faults.FAULTS))
    parser.add_argument("--at-once", type=int, default=1, help="jobs with faults at a time")
    options = parser.parse_args(arguments)
    if odd := [name for name in options.parts if name not in PARTS]:
        parser.error(f"there is no part {odd[0]!r}")
    bad = 0
    for name in options.parts or PARTS:
        found = PARTS[name](options)
        bad += not found["met"]
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in found.items() if not isinstance(value, list))}")
        if options.out is not None:
            keep(options.out, name, found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
