"""What `twofold plan` takes on large models: `python -m benchmarks.search.times [--before TREE] [--runs N] [CASE ...]`.

`--gap SECONDS` prints instead the gap of a search that is stopped after these seconds of processor time, as
`--time-limit` would stop it on a quiet machine.

Processor seconds (user and system) of the complete command without simulating its plans, each run a separate process,
and the median of the runs. Modules are compiled before, as those of an installed package are.
With `--before` a second checkout of this repository takes turns with this one, so that other work on the machine slows
both alike; the command fails where the two do not say the same: best plan, its step time, and the lower bound.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import FOLDER
from costmodels import Machine
from plans.model.transformer import transformer_config
from search.devices import Problem, solve

HERE = FOLDER.parent

CASES = {
    "8B": ("llama-3-8b", "h100-sxm-x64", "512", 1.5),
    "70B": ("llama-3-70b", "h100-sxm-x1024", "1024", 4.0),
    "405B": ("llama-3.1-405b", "h100-sxm-x16384", "2048", 8.0),
    "DeepSeek": ("deepseek-v3", "h100-sxm-x2048", "15360", 10.0),
}
"""Name -> model, machine, sequences of a step, and the seconds that are needed on two quiet cores."""


def main() -> int:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.times", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--before", type=Path, metavar="TREE", help="another checkout, which takes turns with this one")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="of each case and tree (default: 3)")
    parser.add_argument("--gap", type=float, metavar="SECONDS", help="print the gap after these seconds, run once")
    given = parser.parse_args()
    if unknown := [case for case in given.cases if case not in CASES]:
        parser.error(f"no case {unknown[0]!r}; cases are {', '.join(CASES)}")
    if given.runs < 1:
        parser.error("--runs is at least 1")
    if given.before is not None and not (given.before / "twofold").is_dir():
        parser.error(f"--before {given.before}: no checkout of this repository")
    if given.gap is not None:
        time.monotonic = time.process_time  # a limit of processor time, whatever else the machine does
        for case in given.cases or CASES:
            print(_stopped(case, given.gap), flush=True)
        return 0
    trees = [HERE] if given.before is None else [given.before.resolve(), HERE]
    with tempfile.TemporaryDirectory() as folder:
        environments = [_compiled(tree, f"{folder}/{number}") for number, tree in enumerate(trees)]
        return 0 if _compared(given.cases or list(CASES), environments, given.runs) else 1


def _stopped(case: str, limit_s: float) -> str:
    """The best plan and its gap after a time limit."""
    model, machine, batch, _ = CASES[case]
    known = Machine.load(machine)
    problem = Problem(
        config=transformer_config(model), machine=known, num_devices=known.num_devices, global_batch=int(batch)
    )
    began_s = time.process_time()
    found = solve(problem, time_limit_s=limit_s)
    took_s = time.process_time() - began_s
    return (
        f"{case:9}{took_s:.2f} s: step {found.best.forecast.step_s:.3f} s, bound {found.lower_bound_s:.3f} s, "
        f"gap {found.gap:.1%} (wanted: 15 % after 2 s)"
    )


def _compared(cases: Sequence[str], environments: Sequence[Mapping[str, str]], num_runs: int) -> bool:
    """Print a line for each case; whether all trees answer the same."""
    same = True
    for case in cases:
        seconds: list[list[float]] = [[] for _ in environments]
        answers = set()
        for _ in range(num_runs):
            for own, environment in zip(seconds, environments, strict=True):
                took_s, answer = _run(case, environment)
                own.append(took_s)
                answers.add(answer)
        shown = " -> ".join(f"{statistics.median(own):.2f} s" for own in seconds)
        print(f"{case:9}{shown} (wanted {CASES[case][-1]})  {' != '.join(sorted(answers))}", flush=True)
        same = same and len(answers) == 1
    return same


def _compiled(tree: Path, folder: str) -> dict[str, str]:
    """The environment for a tree whose compiled modules are in a folder, written by a search of one second."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    _run("8B", environment, "--time-limit", "1")
    return environment


def _run(case: str, environment: Mapping[str, str], *options: str) -> tuple[float, str]:
    """Processor seconds of one command, and what it answers."""
    model, machine, batch, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "twofold", "plan", model, "--machine", machine, "--global-batch", batch,
            "--simulate", "0", "--top-k", "1", "--out", f"{folder}/plan", "--json", *options,
        ]  # fmt: skip
        before = os.times()
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        after = os.times()
    found = json.loads(ran.stdout)
    took_s = after.children_user + after.children_system - before.children_user - before.children_system
    best = hashlib.sha256(json.dumps(found["best"], sort_keys=True).encode()).hexdigest()[:8]
    return took_s, f"plan {best}: {found['best']['step_s']} s, bound {found['lower_bound_s']} s"


if __name__ == "__main__":
    sys.exit(main())
