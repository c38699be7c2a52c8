"""Processes that start with torch and the executor imported: forks of one server.

Importing them again in every process would take longer than what most tests run. The server computes nothing, so it has
no threads that a fork would lose.

`start_agent` stands for `executor.launch.launch.start_agent` in nearly all tests (see `conftest.py`): the agent, the
guards, the ranks and their logs are the real ones, but the agent is a fork of this server instead of a new interpreter.
`Command` is a command of `twofold` in a process of its own, which forks its agent from itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from multiprocessing import forkserver
from pathlib import Path

__all__ = ["Command", "ensure_running", "run_command", "start_agent"]

IMPORTED_ONCE = [
    "torch.distributed", "torch.distributed.run", "torch._dynamo", "executor.launch.checkpointed_main",
    "executor.capture.capture", "search", "scipy.sparse", "pytest", "twofold.cli", "tyro",
]  # fmt: skip
"""What is imported at first, and what some of the processes import later."""

forkserver.set_forkserver_preload(IMPORTED_ONCE)


@cache
def ensure_running() -> None:
    """Start the server, whose own temporary folder goes with this process, and wait until all is imported."""
    forkserver.ensure_running()
    first = multiprocessing.get_context("forkserver").Process()  # does nothing
    first.start()
    first.join()


class Process:
    """A process with the methods of `subprocess.Popen` that the launcher and tests use.

    Args:
        work: function of a module, called with `args` in the process.
        env: the whole environment.
        folder: where it starts.
        out: file of what it prints.
        err: file of what it prints as errors; None is `out`.
        method: "forkserver", or "fork" from this process itself.
    """

    def __init__(
        self, work: Callable[..., None], args: Sequence[str], env: Mapping[str, str], folder: str | Path, out: Path,
        *, err: Path | None = None, method: str = "forkserver",
    ) -> None:  # fmt: skip
        start = (work, tuple(args), dict(env), str(folder), str(out), str(err or out))
        self._process = multiprocessing.get_context(method).Process(target=_as_asked, args=start)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def start_agent(arguments: Sequence[str], env: Mapping[str, str], log: Path, *, method: str = "forkserver") -> Process:
    """As `executor.launch.launch.start_agent`."""
    if method == "forkserver":
        ensure_running()
    return Process(_agent, arguments, env, os.getcwd(), log, method=method)


def run_command(*words: str) -> None:
    """`twofold` with these words, in this process."""
    from executor.launch import launch
    from twofold.cli import main

    launch.start_agent = partial(start_agent, method="fork")
    sys.exit(main(list(words)))


class Command(Process):
    """`twofold` with these words, in a folder; what it prints is in files until it has ended.

    Args:
        words: of the command line.
        env: the whole environment.
        folder: where it runs.
        files: of what it prints, and of what it prints as errors.
        work: function of a module that runs the command.
    """

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], folder: Path, files: tuple[Path, Path], *,
        work: Callable[..., None] = run_command,
    ) -> None:  # fmt: skip
        ensure_running()
        self._files = files
        super().__init__(work, words, env, folder, files[0], err=files[1])

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """As of `subprocess.Popen`."""
        self.wait(timeout)
        return self._files[0].read_text(), self._files[1].read_text()


def _as_asked(
    work: Callable[..., None], args: Sequence[str], env: Mapping[str, str], folder: str, out: str, err: str
) -> None:
    """Be like a new process, and do the work."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    os.closerange(3, 256)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    work(*args)


def _agent(_parent: str, exits: str, module: str, *arguments: str) -> None:
    from executor.launch.worker_main import run_agent

    run_agent(os.getppid(), exits, module, list(arguments))
