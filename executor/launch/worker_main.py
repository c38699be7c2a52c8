"""The processes that `executor.launch.launch` starts: torchrun's own process, and two processes per rank.

    launcher -> agent (torchrun) -> guard of rank 0 -> rank 0: the user's script or module
                                 -> guard of rank 1 -> rank 1
                                 ...

The **agent** is torchrun unchanged, in a process that dies with the launcher. A **guard** opens the rank's log, forks
the rank, waits for it and writes down how it ended. It never computes, so it answers at once when the rank hangs inside
a collective, where Python runs no signal handler; and it sees the exit code or signal of its child for certain. The
rank dies with its guard, and the guard (with every process of its group) with the agent.

On a machine without an accelerator the agent forks the guards, so that torch and the module of the target are imported
once and not by every rank: eight ranks on two cores start in 3 s instead of 11. The driver of an accelerator does not
survive a fork; there torchrun starts every guard as a new process.

A rank begins when the guards of all ranks of its machine have started, or after 30 s. The agent has the store through
which the ranks meet, and the thread of that store takes a lock of glibc's resolver for every rank that connects. A rank
that is forked at that moment inherits the lock as taken and hangs in its own connection forever.

What a rank leaves in its folder `rank.N`, next to `stdout` and `stderr`:

| file | written by | says |
| --- | --- | --- |
| `pids.json` | guard | the two process ids |
| `error.json` | rank | the exception that ended it and its traceback, as soon as it is known |
| `heartbeat`, `heartbeat.json` | rank | where it is in its program (`executor.train.heartbeat`), while it trains |
| `end.json` | guard | exit code (minus the number of a signal), and whether the guard was told to end the rank |

This file is run by its path and imports nothing of twofold: a rank must not pay for what its target does not need. The
standard library is imported inside the functions, after the folder of this file has left `sys.path`. That processes die
with a parent killed by SIGKILL needs Linux (`prctl`); elsewhere only the launcher's own clean-up remains.
"""

import os
import sys
from types import FrameType
from typing import Any, NoReturn

AGENT_PID = "TWOFOLD_AGENT_PID"
RANK_FOLDER = "TWOFOLD_RANK_FOLDER"
LOST_PEER_WAIT_S = 1.0  # a rank whose peer went away lets that peer tell its own story before torchrun ends them all
START_POLL_S = 0.005
START_WAIT_S = 30.0  # a guard that was stopped, or cannot write, must not keep the others forever
PIDS = "pids.json"
PR_SET_PDEATHSIG = 1  # linux/prctl.h

# What gloo, NCCL, the TCP store and the kernel say to the ranks that were only talking to the one that failed.
LOST_PEER = (
    r"closed by peer|connection (was )?(closed|reset|refused|aborted|timed out)|broken pipe|pair closure"
    r"|timed out waiting \d+ ?ms|(wait|barrier) timeout after \d+ ?ms|(read|write|connect|socket) timeout"
    r"|failed to (recv|send)|(recv|send)\w* failed|client socket has (timed out|failed to connect)"
    r"|no route to host|network is (down|unreachable)|host is (down|unreachable)"
    r"|nccl(Remote|System)Error|remote process exited|communicator was aborted"
)


def die_with_parent(parent_pid: int, signum: int) -> None:
    """Ask the kernel for `signum` when the parent dies; exit at once if it already has.

    The signal comes when the *thread* that started this process ends, which is what we want: `launch` blocks in it.
    """
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def write_json(path: str, content: dict[str, Any]) -> bool:
    """Write a file atomically, and report whether it was written. A folder that was removed meanwhile is no error."""
    import json

    try:
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(path + ".new", path)
    except OSError as error:
        print(f"twofold: cannot write {path}: {error}", file=sys.stderr)
        return False
    return True


def run_agent(parent_pid: int, exits_path: str, module: str, torchrun_args: list[str]) -> None:
    """Be torchrun; if ranks failed, leave `{global rank: exit code}` in `exits_path`.

    Ranks that are forked find `module` imported; "" is none. If that fails, each of them fails in the same way and
    reports its own error.
    """
    import contextlib
    import gc
    import importlib
    import signal

    die_with_parent(parent_pid, signal.SIGKILL)
    os.environ[AGENT_PID] = str(os.getpid())
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    forked = not torch.accelerator.is_available()
    if forked and module:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # else every rank's first collection would look through all modules, and copy their pages
    try:
        torchrun([*(["--start-method=fork", "--run-path"] if forked else []), *torchrun_args])
    except ChildFailedError as error:
        write_json(exits_path, {str(rank): failure.exitcode for rank, failure in error.failures.items()})
        raise


def run_guard(job_dir: str, kind: str, target: str, args: list[str]) -> None:
    """Be the guard of the rank that the environment names. Returns when the rank has ended well."""
    import signal

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a forked guard has torchrun's handlers
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    folder = os.path.join(job_dir, f"rank.{os.environ['RANK']}")
    if os.getpgrp() != os.getpid():
        os.setsid()  # what the rank starts can then be ended with it, as one group
    die_with_parent(int(os.environ.pop(AGENT_PID)), signal.SIGTERM)
    os.makedirs(folder, exist_ok=True)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        log = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, fd)
        os.close(log)
    guard_pid = os.getpid()
    ready, watching = os.pipe()
    rank_pid = os.fork()
    if rank_pid == 0:
        # A group of its own: torchrun sends SIGTERM to the guard's, and only the guard is to answer it. A rank that
        # died of it, or ran a separate handler, would look as if it had failed by itself.
        os.setpgid(0, 0)
        die_with_parent(guard_pid, signal.SIGKILL)
        os.close(watching)
        os.read(ready, 1)  # ends when the guard watches: a rank that kills its guard finds it written down
        os.close(ready)
        os.environ[RANK_FOLDER] = folder
        be_rank(folder, kind, target, args)
    else:
        os.close(ready)
        watch(folder, rank_pid, watching)


def watch(folder: str, rank_pid: int, watching: int) -> None:
    """Let the rank begin, wait for it, write `end.json`; unless it ended well, exit like it.

    On SIGTERM: kill it and its children.
    """
    import contextlib
    import signal
    import time

    told_to_end, agent_pid = False, os.getppid()

    def end_rank(signum: int, frame: FrameType | None) -> None:
        nonlocal told_to_end
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(rank_pid, signal.SIGKILL)
            told_to_end = True

    with contextlib.suppress(PermissionError, ProcessLookupError):  # whoever comes first
        os.setpgid(rank_pid, rank_pid)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_rank)
    if not write_json(os.path.join(folder, PIDS), {"guard": os.getpid(), "rank": rank_pid}):
        os.kill(rank_pid, signal.SIGKILL)  # before it begins: nobody could find it
        os._exit(1)
    others = [os.path.join(other, PIDS) for other in folders_of_this_machine(folder)]
    deadline_s = time.monotonic() + START_WAIT_S
    while not told_to_end and time.monotonic() < deadline_s and not all(map(os.path.exists, others)):
        time.sleep(START_POLL_S)
    os.close(watching)
    code = os.waitstatus_to_exitcode(os.waitpid(rank_pid, 0)[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end = {"code": code, "told_to_end": told_to_end, "time_ns": time.monotonic_ns()}
    write_json(os.path.join(folder, "end.json"), end)
    if told_to_end:
        with contextlib.suppress(ProcessLookupError):  # the rank had started nothing
            os.killpg(rank_pid, signal.SIGKILL)
    if code != 0:
        os._exit(code if code > 0 else 128 - code)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun may let a guard wait for those of the other ranks
    if os.getppid() != agent_pid:  # it died while SIGTERM was ignored, and nobody would end that wait
        os._exit(1)


def folders_of_this_machine(folder: str) -> list[str]:
    """The folders of the ranks on this machine, of which `folder` is one."""
    first = int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"])
    ranks = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    return [os.path.join(os.path.dirname(folder), f"rank.{rank}") for rank in ranks]


def be_rank(folder: str, kind: str, target: str, args: list[str]) -> NoReturn:
    """Be the rank, in the process that the guard forked, and exit as the interpreter does.

    The process cannot return: above it stand the frames of the guard and, where it was forked, of torchrun.
    """
    import atexit
    import threading

    atexit._clear()  # what torchrun registered is not the rank's
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else ranks that are forked would draw the same numbers
    code = run_rank(folder, kind, target, args)
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing does: waits for threads and executors
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def run_rank(folder: str, kind: str, target: str, args: list[str]) -> int:
    """Run the script or module as `python` would, or call the function; return the exit code.

    If it fails, `error.json` has the reason.
    """
    import faulthandler
    import signal

    faulthandler.enable()  # a segmentation fault leaves its Python stack in the log
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # and a rank that hangs can be asked where
    if kind == "script":
        target = os.path.abspath(target)
    sys.argv = [target, *args]
    sys.path.insert(0, os.path.dirname(os.path.realpath(target)) if kind == "script" else os.getcwd())
    try:
        code = ended_with(kind, target)
        if code is None or code == 0:
            leave_process_groups()
            return 0
    except BaseException as error:
        return report_exception(folder, error)
    text = ""
    if not isinstance(code, int):
        text, code = str(code), 1
        print(text, file=sys.stderr)
    report_error(folder, {"error": text, "code": code, "traceback": "", "lost_peer": False})
    return code


def ended_with(kind: str, target: str) -> Any:
    """Run the target; return its argument of `sys.exit`, or None."""
    import importlib
    import runpy

    try:
        if kind == "script":
            runpy.run_path(target, run_name="__main__")
        elif kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            module, _, function = target.partition(":")
            return getattr(importlib.import_module(module), function)()
    except SystemExit as stop:
        return stop.code
    return None


def leave_process_groups() -> None:
    """Destroy process groups that a script may have left open.

    With torch 2.13 a process that exits with gloo groups open may die of "terminate called without an active exception"
    (in 4 of 6 runs of 4 ranks under plain torchrun). Groups that garbage still holds are open, too.
    """
    import gc

    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return
    if distributed.is_initialized():
        distributed.destroy_process_group()
    gc.collect()


def report_exception(folder: str, error: BaseException) -> int:
    """Print the traceback without our own frames, write `error.json` and return the exit code."""
    import runpy
    import time
    import traceback

    is_of_user = is_a("UserCodeError", error)  # no refusal: a restart may help
    ours: tuple[str, ...] = (__file__, runpy.run_path.__code__.co_filename)
    told = error
    if is_of_user and error.__cause__ is not None:  # the frames of the user's code only
        told, ours = error.__cause__, (*ours, os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)
    frames = told.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(ours):
        frames = frames.tb_next
    told.with_traceback(frames)
    story = "".join(traceback.format_exception(told))
    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()
    lost_peer = is_lost_peer(error)
    is_refusal = is_a("TwofoldError", error) and not is_of_user and not lost_peer  # such as a checkpoint left unwritten
    if is_of_user:
        summary = [str(error)]
    content = {
        "error": summary[-1] if isinstance(error, SyntaxError) else summary[0],
        "code": getattr(error, "exit_code", 2) if is_refusal else 1,
        "refusal": str(error) if is_refusal else "",
    }
    report_error(folder, content | {"traceback": story, "lost_peer": lost_peer})
    sys.excepthook(type(told), told, frames)
    if lost_peer:
        time.sleep(LOST_PEER_WAIT_S)
    return 1


def report_error(folder: str, content: dict[str, Any]) -> None:
    """Write `error.json` with the time, which decides which failure was the first."""
    import time

    write_json(os.path.join(folder, "error.json"), content | {"time_ns": time.monotonic_ns()})


def is_a(kind: str, error: BaseException) -> bool:
    """Whether an error is of a kind of ours, known by its name since nothing of ours is imported here."""
    return any(each.__name__ == kind for each in type(error).__mro__)


def is_lost_peer(error: BaseException) -> bool:
    """Whether the first error of the chain only reports that another rank disappeared."""
    import re

    is_of_user = is_a("UserCodeError", error)
    first: BaseException | None = error
    while first is not None:
        error, first = first, first.__cause__
        if first is None and not error.__suppress_context__:
            first = error.__context__
    if isinstance(error, ConnectionError):
        return not is_of_user  # such as a server that data come from
    return isinstance(error, RuntimeError) and re.search(LOST_PEER, str(error), re.IGNORECASE) is not None


if __name__ == "__main__":
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]  # Python put it there; no file of this folder may hide one of the standard library
    if sys.argv[1] == "agent":
        run_agent(int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        try:
            run_guard(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
        except Exception:  # torch's wrapper of a forked process would leave a file of it
            sys.excepthook(*sys.exc_info())
            os._exit(1)
