"""Starts a module of the benchmarks on several ranks by torchrun; its temporary folder goes with it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

__all__ = ["on_ranks"]

END_S = 60.0


def on_ranks(
    module: str, arguments: Sequence[str], ranks: int, *, limit_s: float, env: Mapping[str, str] | None = None
) -> int:
    """The exit code of `python -m module` on `ranks` processes of this host.

    Args:
        module: name.
        arguments: of it.
        ranks: processes.
        limit_s: a job that takes longer is told to end its ranks, and killed `END_S` later.
        env: the whole environment; None is this process's.
    """
    with tempfile.TemporaryDirectory(prefix="twofold-torchrun-") as logs:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--log-dir={logs}",
            f"--nproc-per-node={ranks}", "-m", module, *arguments,
        ]  # fmt: skip
        with subprocess.Popen(command, env=env) as job:
            try:
                return job.wait(limit_s)
            except subprocess.TimeoutExpired:
                job.terminate()
            try:
                return job.wait(END_S)
            except subprocess.TimeoutExpired:
                job.kill()
                return job.wait()
