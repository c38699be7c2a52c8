"""Starts the ranks of a job with torchrun and ends all of them when one fails.

torchrun alone asks the other ranks to stop and waits 30 s for them; a rank inside a collective does not react when its
script handles SIGTERM. It also reports the failure that it *saw* first, often a rank that merely lost its connection to
the one that failed. So every rank runs under a guard (`executor.launch.worker_main`) that can kill it and that writes
down how and when it ended. The launcher reads those reports, tells the cause from its consequences and ends all ranks.

On several nodes the launchers stay connected (`executor.launch.nodes`).

Nothing here knows about plans or programs, and torch is imported only in the processes that are started. Launches on
several machines were tested only as several launches on one host.
"""

import contextlib
import errno
import importlib.metadata
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from executor.launch.nodes import LOOPBACK, ONE_NODE, NodeConnections, Nodes, refusing
from executor.launch.rank_failures import NUM_LOG_LINES, RunFailed, Weight, first_failure, timed_out
from executor.launch.rank_logs import JobFolder, LineReader, fresh_folders, tail
from executor.launch.stalls import StallWatch
from plans.errors import TwofoldError
from plans.reading import read_json

WORKER_MAIN = Path(__file__).with_name("worker_main.py")
_MOST_LOCAL_RANKS = 1024  # each is a process that imports torch
POLL_S = 0.05
SETTLE_S = 0.8  # below LOST_PEER_WAIT_S: how long a rank that lost a peer waits for the cause to be told
GRACE_S = 2.0  # for guards and torchrun, which answer at once unless the machine is very busy
AGENT_S = 30.0  # torchrun knows which rank it ended the others for, and says so when it ends itself
GONE_S = 5.0  # a killed process may first have to return a lot of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """A job that ended well: every rank with exit code 0."""

    job: JobFolder
    ranks: range
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Follow:
    """Whose output the launcher passes on.

    Args:
        on_line: called with (rank, line), in the thread of the caller of `launch`, for every line printed to stdout.
        rank: whose lines; None is the last rank of this machine, which has the loss in a pipeline.
    """

    on_line: Callable[[int, str], None]
    rank: int | None = None


def launch(
    target: str | os.PathLike[str],
    *,
    num_ranks: int,
    args: Sequence[str] = (),
    log_dir: str | os.PathLike[str] = "log_output",
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    follow: Follow | None = None,
    nodes: Nodes | NodeConnections = ONE_NODE,
) -> LaunchResult:
    """Run `target` on `num_ranks` ranks and wait for the end of all of them.

    `target` is the path of a Python script, the name of a module (run as by `python -m`), or `module:function`, whose
    return value is the exit code (None is 0) and whose module is imported once where ranks are forked; `args` are its
    arguments, `sys.argv[1:]`.
    Every rank finds torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, ...) in its
    environment, and what it prints goes to `<log_dir>/1/rank.N/stdout` and `stderr`, which replace those of the run
    before. `follow` passes on the lines of one rank while it runs. `timeout_s` counts from the call, the start of the
    processes included.

    On several machines call it on each with the same arguments except `nodes.node_rank`; `num_ranks` counts the ranks
    of all machines. The launchers wait for each other (see `meet`), unless they have met: then `nodes` is the result of
    `meet`, which is closed at the end. When one of them fails, all end with the same error.

    OMP_NUM_THREADS=1, TORCH_DEVICE_BACKEND_AUTOLOAD=0, PYTHONUNBUFFERED=1 and, on one machine, GLOO_SOCKET_IFNAME=lo
    are set where the environment does not set them, TWOFOLD_LOG_DIR to `log_dir`; `env` goes over everything.

    When it returns or raises, the ranks and everything they started (their process groups) have ended, also after
    KeyboardInterrupt, SIGTERM, SIGHUP and exceptions of `follow.on_line`, which pass through. If this process is killed
    by SIGKILL, the kernel ends them (on Linux).

    Raises
    ------
    TwofoldError
        Before anything starts, the logs of the last run still in place: a target that is not there, counts that do not
        fit, a port in use, a log directory that cannot be written or in which another run still writes. Also before
        ranks start: nodes that do not join, or start another job.
    RankFailed
        A rank raised, called `sys.exit` with a code other than 0, or was killed. The message names the first such rank,
        with its traceback or signal and its log.
    RunTimedOut
        Time was up. The message names the ranks that still ran, their position and their last output.
    RunFailed
        torchrun itself failed.

    >>> result = launch("train.py", num_ranks=8, follow=Follow(lambda rank, line: print(line)))  # doctest: +SKIP
    >>> result.job.stdout(7).as_posix()  # doctest: +SKIP
    'log_output/1/rank.7/stdout'
    """
    start_s = time.monotonic()
    with refusing(nodes) if isinstance(nodes, Nodes) else contextlib.nullcontext():
        kind, name = _target(target)
        if timeout_s is not None and not timeout_s > 0:
            raise TwofoldError(f"timeout_s must be above 0, or None for no limit, not {timeout_s:g}")
    job, error = JobFolder(log_dir=Path(log_dir)), None
    with contextlib.closing(meet(nodes, num_ranks) if isinstance(nodes, Nodes) else nodes) as others:
        here = others.nodes
        try:
            ranks = local_ranks(num_ranks, here)
            rendezvous, followed = _rendezvous(here), _followed_rank(follow, ranks)
            with (
                fresh_folders(job, ranks, keep_others=here.num_nodes > 1),
                _ending_on_signals(),
                _passing_lines(follow, followed, job) as pass_lines,
            ):
                torchrun_args = [f"--nproc-per-node={len(ranks)}", "--max-restarts=0", "--monitor-interval=0.1"]
                torchrun_args += [*rendezvous, str(WORKER_MAIN), "rank"]
                torchrun_args += _escaped([str(job.path.absolute()), kind, name, *args])
                own = {"TWOFOLD_LOG_DIR": str(job.log_dir.absolute())}
                preloaded = name.partition(":")[0] if kind == "function" else ""
                environment = _environment(own | dict(env or {}), here.num_nodes)
                torchrun = _Torchrun(job, ranks, preloaded, torchrun_args, environment)
                try:
                    error = torchrun.watch(pass_lines, start_s, timeout_s, others)
                    others.tell(error)
                finally:
                    torchrun.end()
                pass_lines(last=True)
        except TwofoldError as refused:  # before ranks started: the other nodes have to know
            error = refused
        error = others.agreed(error)
    if error is not None:
        raise error
    return LaunchResult(job=job, ranks=ranks, elapsed_s=time.monotonic() - start_s)


class _PassLines(Protocol):
    """Passes on the lines printed since the last call; `last` also a line without an end."""

    def __call__(self, *, last: bool = False) -> None: ...


@contextlib.contextmanager
def _passing_lines(follow: Follow | None, rank: int, job: JobFolder) -> Iterator[_PassLines]:
    with contextlib.closing(LineReader(job.stdout(rank))) as lines:

        def pass_lines(*, last: bool = False) -> None:
            if follow is not None:
                for line in lines.lines(last=last):
                    follow.on_line(rank, line)

        yield pass_lines


def _followed_rank(follow: Follow | None, ranks: range) -> int:
    if follow is None or follow.rank is None:
        return ranks[-1]
    if follow.rank not in ranks:
        raise TwofoldError(f"rank {follow.rank} to follow is not a rank of this machine: {ranks[0]} to {ranks[-1]}")
    return follow.rank


def start_agent(arguments: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start torchrun's own process.

    Args:
        arguments: arguments of `worker_main.run_agent`.
        env: the whole environment.
        log: file of its output.
    """
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, str(WORKER_MAIN), "agent", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to the launcher alone, which then ends everything
        )


class _Torchrun:
    """The started processes of one job on this machine.

    Args:
        job: whose ranks they are.
        ranks: ranks of this machine.
        preloaded: module that is imported before ranks are forked; "" for none.
        torchrun_args: what they run.
        env: the whole environment.
    """

    def __init__(
        self, job: JobFolder, ranks: range, preloaded: str, torchrun_args: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.job = job
        self.ranks = ranks
        # The first rank is in the names because machines may share the folder.
        self.log = job.path / f"torchrun.{ranks[0]}.log"
        self.exits = job.path / f"torchrun.{ranks[0]}.json"
        self.exits.unlink(missing_ok=True)
        self.own = job.path / f"torchrun.{ranks[0]}.own"  # not among the temporary folders, where it would stay
        shutil.rmtree(self.own, ignore_errors=True)
        agent_args = [str(os.getpid()), str(self.exits), preloaded, f"--log-dir={self.own}", *torchrun_args]
        self.process = start_agent(agent_args, env, self.log)

    def watch(
        self, pass_lines: _PassLines, start_s: float, timeout_s: float | None, others: NodeConnections
    ) -> TwofoldError | None:
        """Wait for the end; return None on success, else the error, with processes perhaps still running."""
        first_seen_s: float | None = None
        stalls = StallWatch(self.job, self.ranks, self.process.pid)
        while True:
            code = self.process.poll()
            pass_lines()
            failure = first_failure(self.job, self.ranks)
            if failure is not None:
                first_seen_s = first_seen_s or time.monotonic()
                settle_s = AGENT_S if failure.weight is Weight.TOLD_TO_END else SETTLE_S
                settled = failure.weight is Weight.OWN_ERROR or time.monotonic() - first_seen_s > settle_s
                if settled or code == 0:
                    return failure.error(self.job)
            if code is not None:
                return None if code == 0 else self._why_it_ended(code)
            if timeout_s is not None and time.monotonic() - start_s > timeout_s:
                return timed_out(self.job, self.ranks, timeout_s)
            if failure is None and (stopped := stalls.look()) is not None:
                return stopped
            if failure is None and (elsewhere := others.failure()) is not None:
                return elsewhere
            time.sleep(POLL_S)

    def _why_it_ended(self, code: int) -> TwofoldError:
        exit_codes: dict[int, int] = {}
        if self.exits.exists():
            exit_codes = read_json(self.exits, "torchrun's exit codes", dict[int, int])
        failure = first_failure(self.job, self.ranks, exit_codes)
        least = Weight.OWN_ERROR if code < 0 else Weight.PERHAPS_A_CONSEQUENCE  # of its end, if a signal killed it
        if failure is not None and (exit_codes or failure.weight <= least):
            return failure.error(self.job)
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        last = "\n".join(tail(self.log, num_lines=NUM_LOG_LINES))
        return RunFailed(f"torchrun, which runs the ranks, ended with {how}; its log: {self.log}\n{last}".rstrip())

    def end(self) -> None:
        """End every process: guards kill their ranks, torchrun notices and exits, and the rest is killed."""
        reported: set[int] = set()
        try:
            deadline_s = time.monotonic() + GRACE_S
            while self.process.poll() is None and time.monotonic() < deadline_s:
                for rank, pids in self._pids():
                    if rank not in reported and self.job.read(rank, "end.json") is None:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pids["guard"], signal.SIGTERM)
                    reported.add(rank)
                if not reported:
                    break  # torchrun is still starting
                time.sleep(POLL_S / 2)
        finally:
            started = _descendants(self.process.pid)  # among them a guard that was stopped before it said its number
            self.process.kill()
            self.process.wait()
            for pid in started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self.exits.unlink(missing_ok=True)
            shutil.rmtree(self.own, ignore_errors=True)
            deadline_s = time.monotonic() + GONE_S
            while self._kill_groups() and time.monotonic() < deadline_s:
                time.sleep(POLL_S / 2)

    def _pids(self) -> Iterator[tuple[int, dict[str, int]]]:
        for rank in self.ranks:
            if (pids := self.job.read(rank, "pids.json")) is not None:
                yield rank, pids

    def _kill_groups(self) -> bool:
        """Kill the guards, their ranks and processes started by these; return whether any of them still runs."""
        groups = {pid for _, pids in self._pids() for pid in (pids["guard"], pids["rank"])}
        for group in tuple(groups):
            try:
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # empty, or its number is somebody else's by now
                groups.remove(group)
        return bool(groups) and _is_running(groups)


def _is_running(groups: set[int]) -> bool:
    """Whether a process group has a member that is not a zombie; orphans stay zombies until init reaps them."""
    stats = list(Path("/proc").glob("[0-9]*/stat"))
    for path in stats:
        with contextlib.suppress(OSError):  # it has just ended
            state, _, group, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(group) in groups and state not in "ZX":
                return True
    return not stats  # without /proc (not Linux) there is no telling: wait for the zombies too


def _descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that these did; none without /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            _, parent, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = list(children.get(pid, ()))
    for each in found:
        found += children.get(each, ())
    return found


def meet(nodes: Nodes, num_ranks: int) -> NodeConnections:
    """Wait for the launchers of the other nodes; all must have the same number of ranks, versions and facts.

    Args:
        nodes: nodes of the job, this one included.
        num_ranks: ranks of all nodes.

    Raises:
        TwofoldError: ranks that the nodes do not share evenly, a node that does not join, or that starts another job.
    """
    with refusing(nodes):
        local_ranks(num_ranks, nodes)
    if nodes.num_nodes > 1 and nodes.port is None:
        raise TwofoldError(
            f"num_nodes is {nodes.num_nodes}: state the port that node 0 ({nodes.master_addr}) listens on"
        )
    versions = {name: _version(name) for name in ("twofold", "torch")} | {"Python": platform.python_version()}
    facts = {"num_nodes": str(nodes.num_nodes), "num_ranks": str(num_ranks), **versions, **nodes.facts}
    return NodeConnections(replace(nodes, facts=facts))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _target(target: str | os.PathLike[str]) -> tuple[str, str]:
    name = os.fspath(target)
    if os.path.isfile(name):
        return "script", name
    if not name.endswith(".py") and all(part.isidentifier() for part in name.replace(":", ".", 1).split(".")):
        return ("function" if ":" in name else "module"), name
    raise TwofoldError(f"script {name!r} does not exist (searched from {os.getcwd()}); give the path of a Python file")


def local_ranks(num_ranks: int, nodes: Nodes) -> range:
    """The ranks of this node.

    Raises:
        TwofoldError: ranks that the nodes cannot share evenly, or too many of them; no such node.
    """
    num_nodes, node_rank = nodes.num_nodes, nodes.node_rank
    if num_ranks < 1 or num_nodes < 1 or num_ranks % num_nodes != 0:
        raise TwofoldError(
            f"{num_ranks} ranks cannot be shared evenly by {num_nodes} nodes; use a number of nodes that divides the "
            "number of ranks"
        )
    if not 0 <= node_rank < num_nodes:
        raise TwofoldError(f"node_rank {node_rank} must be in 0 to {num_nodes - 1} (num_nodes is {num_nodes})")
    num_local = num_ranks // num_nodes
    if num_local > _MOST_LOCAL_RANKS:
        raise TwofoldError(f"{num_local} ranks on one machine; at most {_MOST_LOCAL_RANKS:,} can be started")
    return range(node_rank * num_local, (node_rank + 1) * num_local)


def _rendezvous(nodes: Nodes) -> list[str]:
    """torchrun's arguments for how the ranks find each other; refuses a port that is not available."""
    if nodes.port is None:
        # The address is stated because looking up the machine's own name can fail or take seconds.
        return ["--nnodes=1", "--standalone", f"--local-addr={LOOPBACK}"]
    if nodes.node_rank == 0:
        check_port(nodes.port)
    where = [f"--master-addr={nodes.master_addr}", f"--master-port={nodes.port}"]
    return [f"--nnodes={nodes.num_nodes}", f"--node-rank={nodes.node_rank}", "--rdzv-backend=static", *where]


def check_port(port: int | None) -> None:
    """Refuse a port that is not available on this machine; None (a free port is picked) is always accepted.

    Raises:
        TwofoldError: out of range, in use, or not allowed for this user.
    """
    if port is None:
        return
    if not 0 < port < 65536:
        raise TwofoldError(f"port {port} must be in 1 to 65535")
    way_out = "choose another port, or omit it on one machine to have a free one chosen"
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # as the server will: a closed one may linger
                probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TwofoldError(f"port {port} is in use; {way_out}") from None
            if error.errno == errno.EACCES:
                raise TwofoldError(f"port {port} is not allowed for this user; {way_out}") from None


def _environment(stated: Mapping[str, str], num_nodes: int) -> dict[str, str]:
    # PET_* variables would override torchrun's defaults behind our back.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    here = str(Path(__file__).resolve().parents[2])  # ranks find these packages also where they are not installed
    env["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [env.get("PYTHONPATH")])])
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if num_nodes == 1 and loopback:
        env.setdefault("GLOO_SOCKET_IFNAME", loopback[0])  # else gloo looks up the machine's own name
    return env | dict(stated)


def _escaped(args: Sequence[str]) -> list[str]:
    """Arguments that survive torchrun's own expansion of ${local_rank}."""
    return [arg.replace("$", "$$") for arg in args]


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Within this context SIGTERM and SIGHUP raise SystemExit instead of ending this process at once."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
