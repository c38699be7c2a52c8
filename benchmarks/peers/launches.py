"""One job of ranks per number of devices, and another where a job died: its case is marked, the rest continues."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.devices.jobs import on_ranks
from benchmarks.peers.cases import Case
from benchmarks.peers.worker import PART_S, Found

__all__ = ["taken"]

_MOST_JOBS = 6
_START_S = 40.0
"""That a job may take to start, next to the last part of a case."""


def taken(
    ranks: int, cases: Sequence[Case], path: Path, *, until: float, compiles: str, sides: Sequence[str], resumes: bool,
    device: str,
) -> dict[str, Any]:  # fmt: skip
    """Measure cases on a number of ranks.

    Args:
        ranks: ranks of every case.
        cases: in this order.
        path: file of what was found, kept after every part.
        until: seconds since 1970; nothing begins after it.
        compiles: "none", "chosen" or "all", as in `worker`.
        sides: of `table.SIDES`; all but "apart" where there are none.
        resumes: what the file holds is not measured again.
        device: "auto", "cpu" or "cuda".

    Returns:
        What is in the file.
    """
    if not resumes:
        path.unlink(missing_ok=True)
    for number in range(_MOST_JOBS):
        if number and time.time() > until:
            break
        arguments = [
            "--cases", *(case.name for case in cases), "--found", str(path), "--until", str(until),
            "--compile", compiles, "--device", device, "--sides", *sides,
        ]  # fmt: skip
        print(f"{ranks} ranks, {len(cases)} cases, {until - time.time():.0f} s left", flush=True)
        limit_s = max(0.0, until - time.time()) + PART_S + _START_S
        code = on_ranks("benchmarks.peers.worker", arguments, ranks, limit_s=limit_s, env=_surroundings(ranks))
        found = Found.at(path)
        if code == 0:
            break
        told = _errors(path, ranks)
        if found.content["doing"] is None:
            print(f"the ranks ended with code {code} outside of a case; {told}", flush=True)
            break
        case, side = found.content["doing"]
        found.keep(case, side, {"error": f"the ranks ended with code {code}; {told or 'nothing was said'}"})
    return Found.at(path).content


def _errors(path: Path, ranks: int) -> str:
    """What single ranks said before the job ended, the first to fail first."""
    files = [path.with_suffix(f".rank{rank}.error") for rank in range(ranks)]
    told = []
    for file in sorted((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime_ns):
        told.append(f"{file.suffixes[-2][1:]}: {file.read_text()}")
        file.unlink()
    return "; ".join(told)


def _surroundings(ranks: int) -> dict[str, str]:
    """Threads for the host work of a rank and a cache of compiled kernels, where the environment states none."""
    threads = max(1, min(8, (os.cpu_count() or 1) // ranks))
    cache = Path(tempfile.gettempdir()) / f"twofold-peers-{os.getuid()}"
    own = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return {name: value for name, value in own.items() if name not in os.environ}
