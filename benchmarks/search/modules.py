"""What `twofold plan` takes on whole modules: `python -m benchmarks.search.modules [--time-limit S] [CASE ...]`.

Each case is the complete command on a module of `benchmarks.field.full`, in a process of its own: processor seconds
(user and system), the largest memory, the gap that the command states, and its seconds for the search. A second command
stops the search after 2 s and states that gap. Limits count processor time, so that other work on the machine makes no
difference. Plans are not simulated (`--simulate 0`). A module whose library is not installed is skipped, and its line
says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import FOLDER

RESULTS = FOLDER / "results" / "search_modules.json"

CASES = {
    "seed MLP": ("seed_mlp", "h200-x8", None),
    "HF Llama 3 8B": ("hf_llama_3_8b", "h100-sxm-x64", 4.0),
    "ConvNeXt-T": ("convnext_tiny", "h200-x64", 30.0),
    "Swin-T": ("swin_t", "h200-x64", 30.0),
    "U-Net": ("unet_resnet34", "h200-x64", 30.0),
}
"""Name -> function, machine, and the processor seconds of the command that are wanted on two quiet cores."""


SHORT_S = 2.0
"""Time limit of the second command."""

_COMMAND = """
import sys, time
time.perf_counter = time.monotonic = time.process_time
from twofold.cli import main
sys.exit(main())
"""


def row(case: str, options: Sequence[str]) -> dict[str, Any]:
    """One command: its seconds, memory and gap, or the sentence that it ends with."""
    function, machine, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-c", _COMMAND, "plan", f"benchmarks.field.full:{function}", "--machine", machine,
            "--simulate", "0", "--top-k", "1", "--out", f"{folder}/plan", "--json", *options,
        ]  # fmt: skip
        with open(f"{folder}/said", "w+") as said, open(f"{folder}/errors", "w+") as errors:
            process = subprocess.Popen(command, stdout=said, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)
            said.seek(0)
            errors.seek(0)
            if code := os.waitstatus_to_exitcode(status):
                return {"failed": (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]}
            found = json.load(said)
    return {
        "step_s": found["best"]["step_s"], "gap": found["gap"], "complete": found["complete"],
        "search_s": found["search_s"], "processor_s": round(usage.ru_utime + usage.ru_stime, 2),
        "memory_bytes": usage.ru_maxrss * 1024,
    }  # fmt: skip


def main() -> None:
    """Run the cases, print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.modules", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--time-limit", metavar="S", help="of each search, in seconds")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    if unknown := [case for case in given.cases if case not in CASES]:
        parser.error(f"no case {unknown[0]!r}; cases are {', '.join(CASES)}")
    options = ["--time-limit", given.time_limit] if given.time_limit else []
    rows = {}
    for case in given.cases or CASES:
        rows[case] = own = row(case, options)
        short = row(case, ["--time-limit", str(SHORT_S)])
        own["gap_after_2_s"] = short.get("gap")
        wanted = CASES[case][2]
        print(f"{case:14}", own.get("failed") or (
            f"{own['processor_s']:.1f} s of processor time ({'no number is' if wanted is None else wanted} wanted), "
            f"{own['search_s']:.2f} s for the search, gap {own['gap']:.1%} (after {SHORT_S:g} s "
            f"{short.get('gap', float('nan')):.1%}), step {own['step_s']:.4g} s, "
            f"{own['memory_bytes'] / 2**30:.2f} GiB"
        ), flush=True)  # fmt: skip
    if given.save:
        head = {
            "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
            "command": " ".join(["python -m benchmarks.search.modules", *sys.argv[1:]]),
        }  # fmt: skip
        RESULTS.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
