"""Jobs of `twofold train` in separate folders, as processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import FOLDER
from executor.launch.rank_logs import JobFolder

__all__ = [
    "NotEnded", "agent_of", "ended", "environment", "figures", "losses", "make_job", "pids_of", "set_steps", "started",
]  # fmt: skip

_ROOT = FOLDER.parent


class NotEnded(RuntimeError):
    """A run that nothing happens to failed."""


def make_job(folder: Path, steps: int, data: str, more: str = "") -> Path:
    """Write `job.toml`, whose plan is `plan.json`, outputs `out` and logs `logs` of the same folder.

    Args:
        folder: made where it is not there, with a folder for temporary files.
        steps: steps of the run.
        data: as the job has it.
        more: lines of the job.
    """
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    words = {"plan": f"{folder}/plan.json", "out": f"{folder}/out", "log_dir": f"{folder}/logs", "data": data}
    job = folder / "job.toml"
    job.write_text("".join(f'{name} = "{value}"\n' for name, value in words.items()) + f"steps = {steps}\n{more}")
    return job


def set_steps(job: Path, steps: int) -> None:
    """Let the job continue for longer."""
    job.write_text(re.sub(r"^steps = \d+$", f"steps = {steps}", job.read_text(), flags=re.MULTILINE))


def environment(job: Path) -> dict[str, str]:
    """Of the processes of a job, which are known by it. All jobs of a run share their compiled modules."""
    paths = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {
        "PYTHONPATH": paths, "PYTHONPYCACHEPREFIX": str(job.parents[1] / "compiled"),
        "TMPDIR": str(job.parent / "tmp"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def started(
    job: Path, *, resume: bool = False, more: Sequence[str] = (), said: str = "said"
) -> subprocess.Popen[bytes]:
    """`twofold train`, with more options, which writes what it says into a file beside the job."""
    command = [sys.executable, "-m", "twofold", "train", str(job), *["--resume"] * resume, *more]
    with (job.parent / said).open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(job), cwd=job.parent)


def ended(job: Path, run: subprocess.Popen[bytes], limit_s: float) -> tuple[int, str]:
    """Exit code and output of a run; code 1000 if it does not end in time."""
    try:
        code = run.wait(limit_s)
    except subprocess.TimeoutExpired:
        return 1000, "it did not end"
    return code, (job.parent / "said").read_text(errors="replace")


def losses(job: Path, *, resume: bool = False, limit_s: float = 90.0) -> list[float]:
    """The losses of a run that nothing happens to.

    Raises:
        NotEnded: it failed.
    """
    code, said = ended(job, started(job, resume=resume), limit_s)
    if code:
        raise NotEnded(f"a run without a fault ended with {code}: {said[-500:]}")
    return [figure["loss"] for figure in figures(job)]


def figures(job: Path) -> list[dict[str, float]]:
    """The complete lines of `metrics.jsonl`, to which a run may be adding one."""
    lines = (job.parent / "out" / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def pids_of(job: Path, rank: int) -> dict[str, int] | None:
    """The processes "rank" and "guard" of a rank; None while it has none."""
    return JobFolder(log_dir=job.parent / "logs").read(rank, "pids.json")


def agent_of(guard: int) -> int:
    """The process that started a guard."""
    return int(Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[1])
