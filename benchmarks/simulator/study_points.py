"""Seconds of a study of 1,000 points, and whether every way to compute it agrees.

The points are drawn from a grid of Llama 3 70B on 1,024 H100 over degrees, schedules, batches, sequences, links and
slow ranks. A part of it is computed in one process, and killed and continued.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from simulator.study.sweep import Workers
from twofold.studies import Study, study

BASE = {"model": "llama-3-70b", "machine": "h100-sxm-x1024", "devices": 1024, "zero": 1}
AXES = {
    "seq": [4096, 8192], "tp": [2, 4, 8], "pp": [2, 4, 8, 16], "micro_batch": [1, 2], "recompute": ["none", "full"],
    "schedule": ["1f1b", "zb_h1"], "global_batch": [512, 1024, 2048], "bandwidth.NVLink": [0.5, 1.0],
    "bandwidth.1": [0.25, 0.5, 1.0, 2.0], "slow": ["none", "1/1000=1.1"],
}  # fmt: skip


def computed(count: int, results: Path | None, workers: Workers) -> Study:
    """The study with the given number of points."""
    return study(BASE, AXES, sample=count, results=results, workers=workers)


def main() -> None:
    """Print seconds, and whether all ways agree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--backend", default="loky")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    workers = Workers(backend=options.backend, jobs=options.jobs)
    if options.results is not None:
        computed(options.points, options.results, workers)
        return
    begun_s = time.perf_counter()
    whole = computed(options.points, None, workers)
    passed_s = time.perf_counter() - begun_s
    refused = sum("refused" in figure for figure in whole.figures)
    print(
        f"{len(whole):,} points ({refused} refused) on {options.jobs} processes by {options.backend}: {passed_s:.1f} s"
    )
    few = options.points // 5
    print(f"the same in one process: {computed(few, None, Workers(backend='sequential')).rows == _few(few, workers)}")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        killed = _killed_in_the_middle(few, results, options)
        again = computed(few, results, workers)
        lines = results.read_text().splitlines()
        print(
            f"killed after {killed} points and resumed: the same: {again.rows == _few(few, workers)}, computed "
            f"twice: {len(lines) - len(set(lines))}"
        )


def _few(count: int, workers: Workers) -> list[dict[str, object]]:
    return computed(count, None, workers).rows


def _killed_in_the_middle(count: int, results: Path, options: argparse.Namespace) -> int:
    """Results that were there when a study was killed."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.simulator.study_points",
        "--points",
        str(count),
        "--results",
        str(results),
    ]
    with subprocess.Popen([*command, "--jobs", str(options.jobs)], start_new_session=True) as process:
        while not results.exists() or len(results.read_text().splitlines()) < count // 3:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    return len(results.read_text().splitlines())


if __name__ == "__main__":
    main()
