"""Processes that start with torch and the executor imported: forks of one server.

Importing them again in every process would take longer than what most tests run. The server computes nothing, so it has
no threads that a fork would lose.

`start_agent` stands for `executor.launch.launch.start_agent` in nearly all tests (see `conftest.py`): the agent, the
guards, the ranks and their logs are the real ones, but the agent is a fork of this server instead of a new interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path

__all__ = ["ensure_running", "start_agent"]

IMPORTED_ONCE = [
    "torch.distributed", "torch.distributed.run", "torch._dynamo", "executor.launch.checkpointed_main",
    "executor.capture", "search", "scipy.sparse", "pytest",
]  # fmt: skip
"""What is imported at first, and what some of the processes import later."""

forkserver.set_forkserver_preload(IMPORTED_ONCE)


def ensure_running() -> None:
    """Start the server, whose own temporary folder goes with this process, unless it runs."""
    forkserver.ensure_running()


def start_agent(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Agent:
    """As `executor.launch.launch.start_agent`."""
    ensure_running()
    process = multiprocessing.get_context("forkserver").Process(
        target=_agent, args=(list(arguments), dict(env), log, os.getcwd())
    )
    process.start()
    return Agent(process)


class Agent:
    """What the launcher needs of `subprocess.Popen`."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _agent(arguments: list[str], env: dict[str, str], log: Path, folder: str) -> None:
    """What a new interpreter and `worker_main` would do."""
    from executor.launch.worker_main import run_agent

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    _, exits, module, *more = arguments
    run_agent(os.getppid(), exits, module, more)
