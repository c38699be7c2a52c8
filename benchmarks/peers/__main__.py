"""Steps of this executor beside torch's own parts: predict, measure, print a table.

    python -m benchmarks.peers --gpus 1 2 --budget-s 420 --out FOLDER      on a machine of 2 GPUs
    python -m benchmarks.peers --gpus 2 --first 12 --out FOLDER            from the 13th case of 2 devices on
    python -m benchmarks.peers --gpus 2 --sides graph apart --out FOLDER   fused runs against single instructions
    python -m benchmarks.peers --gpus 2 --resume --out FOLDER              what an earlier call did not reach
    python -m benchmarks.peers --set second --gpus 1 2 --sides torch graph --out FOLDER      shapes of no earlier step
    python -m benchmarks.peers --set third --gpus 1 2 --sides torch graph --out FOLDER       others again
    python -m benchmarks.peers --set fourth --gpus 1 2 --device h100-sxm --out FOLDER        small layers, on H100
    python -m benchmarks.peers --set megatron --gpus 4 --sides graph --out FOLDER            beside Megatron-Core
    python -m benchmarks.peers --set megatron --gpus 4 --sides megatron --resume --out FOLDER
                                   with CUDA_DEVICE_MAX_CONNECTIONS=1, as Megatron wants it for its own streams
    python -m benchmarks.peers --again benchmarks/results/peers_h200_third.json      today's scores on kept rows
    python -m benchmarks.peers --list                                      the cases, in their order
    python -m benchmarks.peers --smoke --gpus 2 --out FOLDER               tiny sizes on CPU ranks

FOLDER gets predictions.json before any step runs, found-N.json after every part, and peers.json at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import Case
from benchmarks.peers.launches import taken
from benchmarks.peers.predictions import predictions
from benchmarks.peers.scores import scores, scores_text
from benchmarks.peers.sets import CASES, SETS, SMOKE_CASES, case_named
from benchmarks.peers.table import SIDES, row_of, table
from plans.errors import TwofoldError
from plans.files import write_atomically

__all__ = ["main"]

BUDGET_S = 420.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a side that ran failed or losses differ, 2 if a case is not known, else 0."""
    options = _options(arguments)
    try:
        chosen = _chosen(options)
    except TwofoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        for ranks, cases in chosen.items():
            for number, case in enumerate(cases):
                print(f"{ranks} devices {number:3d} {case.name}{' (compiled too)' if case.compiles else ''}")
        return 0
    if options.again is not None:
        content = json.loads(options.again.read_bytes())
        rows = [*content["rows"], *content.get("printed_rows", ())]
        told = predictions((case_named(row["case"]) for row in rows), options.device, options.host)
        print(scores_text(scores([{**row, "predicted": told[row["case"]]} for row in rows])))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    every = [case for cases in chosen.values() for case in cases]
    told = _told(options.out / "predictions.json", every, options.device, resumes=options.resume)
    written, predicted = told["written"], told["predictions"]
    if options.predict:
        return 0
    start, done, found, rows = time.time(), 0, {}, []
    for ranks, cases in chosen.items():
        done += len(cases)
        found[ranks] = taken(
            ranks, cases, options.out / f"found-{ranks}.json", until=start + options.budget_s * done / len(every),
            compiles=options.compile, sides=options.sides, resumes=options.resume,
            device="cpu" if options.smoke else "auto",
        )  # fmt: skip
        measured = found[ranks]["rows"]
        rows += [row_of(case, measured[case.name], predicted[case.name]) for case in cases if case.name in measured]
        _write(options.out / "peers.json", _report(found, rows, written))
    print(table(rows))
    print(scores_text(scores(rows)))
    print(f"{len(rows)} of {len(every)} cases in {time.time() - start:.0f} s; {options.out / 'peers.json'}")
    failed = any("error" in figures for row in rows for figures in row["measured"].values())
    return int(failed or not rows or not all(row["losses_agree"] for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], choices=sorted(CASES))
    parser.add_argument("--set", choices=sorted(SETS), default="first", help="of cases")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="start no new case after this many seconds")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "peers")))
    parser.add_argument("--compile", choices=("none", "chosen", "all"), default=None, help="torch.compile of the peer")
    parser.add_argument("--sides", nargs="*", default=[], choices=SIDES)
    parser.add_argument("--only", nargs="*", default=[], help="cases of these names, or all whose names begin so")
    parser.add_argument("--resume", action="store_true", help="take predictions and figures that FOLDER holds")
    parser.add_argument("--first", type=int, default=0, help="skip this many cases for each number of devices")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on CPU ranks; compiles only where asked to")
    parser.add_argument("--predict", action="store_true", help="write predictions only")
    parser.add_argument("--device", default="h200", help="of the catalogue, that steps are predicted for")
    parser.add_argument("--again", type=Path, help="score forecasts made today of the rows of such a file")
    parser.add_argument("--host", default="quiet", help="with --again: file of the host that ran the peer's side")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    options.compile = options.compile or ("none" if options.smoke else "chosen")
    return options


def _chosen(options: argparse.Namespace) -> dict[int, list[Case]]:
    """Number of devices -> cases, the larger jobs first: they take the cases that tell most.

    Raises:
        TwofoldError: a name that no case on that many devices has or begins with.
    """
    tables: Mapping[int, Sequence[Case]] = SMOKE_CASES if options.smoke else SETS[options.set]
    if missing := sorted(set(options.gpus) - set(tables)):
        raise TwofoldError(f"--gpus {missing[0]}: the set {options.set!r} has no case on that many devices")
    names = [case.name for ranks in options.gpus for case in tables[ranks]]
    if unknown := [name for name in options.only if not any(case.startswith(name) for case in names)]:
        raise TwofoldError(
            f"--only {unknown[0]}: no case on {' or '.join(map(str, options.gpus))} devices has this name or begins "
            "with it; --list prints them"
        )
    found = {}
    for ranks in sorted(set(options.gpus), reverse=True):
        every = {case.name for case in tables[ranks]}
        starts = tuple(name for name in options.only if name not in every)
        cases = [
            case for case in tables[ranks]
            if not options.only or case.name in options.only or case.name.startswith(starts)
        ][options.first :]  # fmt: skip
        if cases:
            found[ranks] = cases
    return found


def _told(path: Path, cases: Sequence[Case], device: str, *, resumes: bool) -> dict[str, Any]:
    """The file of predictions: when they were written, and those of all cases."""
    told: dict[str, Any] = json.loads(path.read_bytes()) if resumes and path.exists() else {"predictions": {}}
    missing = [case for case in cases if case.name not in told["predictions"]]
    if missing:
        told = {"written": _now(), "predictions": told["predictions"] | predictions(missing, device)}
        _write(path, told)
    return told


def _report(found: Mapping[int, Mapping[str, Any]], rows: Sequence[Any], predicted: str) -> dict[str, Any]:
    environments = {str(ranks): told["environment"] for ranks, told in found.items()}
    return {
        "date": _now(), "command": " ".join(["python -m benchmarks.peers", *sys.argv[1:]]), "environment": environments,
        "nccl": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
        "predictions_written": predicted, "scores": scores(rows), "rows": list(rows),
    }  # fmt: skip


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
