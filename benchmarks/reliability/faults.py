"""Random faults of training jobs, and what became of each.

Every case trains a small network on 4 gloo ranks with a checkpoint every 5 steps, as `twofold train` does, and lets
something go wrong at a random step: a process is killed or stopped, a disk is full, a checkpoint is damaged, a weight
or an input of one rank changes. A case is right if the run ends with the exit code and words that name the cause and
the rank, no process and no temporary file is left, checkpoints that were reported as written are whole, and a run that
resumes from them has the losses of the run that nothing happened to, bit for bit.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from benchmarks.reliability.training import (
    NotEnded,
    agent_of,
    ended,
    figures,
    losses,
    make_job,
    pids_of,
    set_steps,
    started,
)
from executor.train.checkpoints.files import check_checkpoint, written_checkpoints
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.mlp import mlp_graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy, load_plan, save_plan

__all__ = ["FAULTS", "Outcome", "cases"]

RANKS, STEPS, EVERY = 4, 24, 5
ENDS_S = 180.0

_DATA = """
import gc, os, resource, time
import numpy as np

RANK = int(os.environ.get("RANK", -1))

def fed():
    draw = np.random.default_rng(1)
    for step in range({steps}):
        batch = {{"x": draw.random((8, 6), dtype=np.float32), "labels": draw.random((8, 2), dtype=np.float32)}}
        if RANK >= 0 and step:
            time.sleep({pause_s})
        if RANK in {ranks} and step == {step}:
            happens(batch)
        yield batch

def happens(batch):
    {happens}
"""
_WEIGHT = """
    import torch
    from executor.step.interpreter import Interpreter
    own = [each for each in gc.get_objects() if type(each) is Interpreter][-1]
    with torch.inference_mode():  # not the last bit, which the update of a step may round away
        own.value(own.group.parameters[0].weight).view(torch.int32).view(-1)[3] ^= 1 << 8
"""
_DISK = "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))"
_MORE = f"""print_every = 1
[checkpoints]
every = {EVERY}
[replicas]
every = 1
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong.

    Args:
        says: what the error must say, of rank {rank}; "" where the run must end well.
        happens: Python that the rank runs before a step.
        process: "rank", "guard", "agent", "launcher" or "node" (the second launcher of two), which gets the signals.
        signals: that it gets, one every 2 s.
        damages: what is done to a file of the newest checkpoint once the run has ended well.
        code: the exit code.
        rank: the only one that it can happen to.
        everywhere: whether it happens to all ranks.
    """

    says: str
    happens: str = "pass"
    process: str = ""
    signals: tuple[signal.Signals, ...] = ()
    damages: Callable[[bytearray, random.Random], bytes] | None = None
    code: int = 1
    rank: int | None = None
    everywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a fault: its name and rank, how long the run took, and what was not right."""

    fault: str
    rank: int
    seconds: float
    wrong: tuple[str, ...]


def _flipped(data: bytearray, draw: random.Random) -> bytes:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def _cut(data: bytearray, draw: random.Random) -> bytes:
    return bytes(data[: draw.randrange(len(data))])


_DAMAGED = r"step-\d+.*(not as it was written|resume from another|not a whole|truncated|Expected|unknown field|JSON)"
FAULTS = {
    "kill rank": Fault(says=r"rank {rank} was killed by SIGKILL", process="rank", signals=(signal.SIGKILL,)),
    "kill guard": Fault(says=r"rank {rank} was killed", process="guard", signals=(signal.SIGKILL,)),
    "kill agent": Fault(says=r"torchrun|was killed", process="agent", signals=(signal.SIGKILL,)),
    "kill launcher": Fault(says="", process="launcher", signals=(signal.SIGKILL,), code=-9),
    "end launcher": Fault(says="", process="launcher", signals=(signal.SIGTERM,), code=143),
    "stop rank": Fault(says=r"rank {rank} stopped\b.*SIGSTOP", process="rank", signals=(signal.SIGSTOP,)),
    "stop guard": Fault(says=r"guard of rank {rank} stopped", process="guard", signals=(signal.SIGSTOP,)),
    "stop agent": Fault(says=r"torchrun's process has stopped", process="agent", signals=(signal.SIGSTOP,)),
    "pause rank": Fault(says="", process="rank", signals=(signal.SIGSTOP, signal.SIGCONT), code=0),
    "pause launcher": Fault(says="", process="launcher", signals=(signal.SIGSTOP, signal.SIGCONT), code=0),
    "rank hangs": Fault(says=r"rank {rank} stopped", happens="time.sleep(600)"),
    "all ranks hang": Fault(says=r"rank \d stopped", happens="time.sleep(600)", everywhere=True),
    "lost node": Fault(says=r"node 1 was lost", process="node", signals=(signal.SIGKILL,)),
    "rank raises": Fault(says=r"rank {rank} failed: .*Error: lost", happens='raise OSError("lost")'),
    "full disk": Fault(says=r"cannot be written: .*File too large", happens=_DISK, rank=0),
    "other input": Fault(says=r"input 'x' is another on rank {rank}", happens='batch["x"][3, 2] += 1e-6'),
    "not finite": Fault(says=r"diverged", happens='batch["x"][3, 2] = float("nan")'),
    "weight": Fault(says=r"weight of '\S+' is another on rank {rank}", happens=_WEIGHT.strip()),
    "bit of a checkpoint": Fault(says=_DAMAGED, damages=_flipped, code=2),
    "cut checkpoint": Fault(says=_DAMAGED, damages=_cut, code=2),
}  # fmt: skip


def cases(count: int, seed: int, names: Sequence[str] = tuple(FAULTS), *, at_once: int = 1) -> Iterator[Outcome]:
    """The outcomes of faults, each of `names` in turn, in the order in which they end.

    Args:
        count: of them.
        seed: of ranks and steps.
        names: among `FAULTS`.
        at_once: how many jobs run at a time.
    """
    with tempfile.TemporaryDirectory(prefix="twofold-faults-") as name, ThreadPoolExecutor(at_once) as pool:
        folder = Path(name)
        expected = losses(_prepared(folder / "whole", Fault(says=""), 0, -1))
        draws = [random.Random(f"{seed} {number}") for number in range(count)]
        begun = [
            pool.submit(_outcome, folder / str(number), names[number % len(names)], draw, expected)
            for number, draw in enumerate(draws)
        ]
        for each in as_completed(begun):
            yield each.result()


def _outcome(folder: Path, name: str, draw: random.Random, expected: list[float]) -> Outcome:
    fault, rank, step = FAULTS[name], draw.randrange(RANKS), draw.randrange(EVERY + 2, STEPS - 6)
    rank = rank if fault.rank is None else fault.rank
    job = _prepared(folder, fault, rank, step)
    begin_s = time.monotonic()
    wrong: list[str] = []
    runs = _on_two_nodes(job) if fault.process == "node" else [started(job)]
    try:
        if fault.process:
            _signalled(job, runs, fault, rank, step)
        code, said = ended(job, runs[0], ENDS_S)
        seconds = time.monotonic() - begin_s
        if fault.damages is not None:
            wrong += [f"the run before ended with {code}"] if code else []
            newest = written_checkpoints(folder / "out" / "checkpoints")[-1]
            file = draw.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
            file.write_bytes(fault.damages(bytearray(file.read_bytes()), draw))
            set_steps(job, STEPS + 4)
            runs.append(started(job, resume=True))
            code, said = ended(job, runs[-1], ENDS_S)
        if code != fault.code:
            wrong.append(f"exit code {code} for {fault.code}: {said[-300:]}")
        if not re.search(fault.says.replace("{rank}", str(rank)), said):
            wrong.append(f"it said: {said[-300:]}")
        if "Traceback" in said and name != "rank raises":
            wrong.append("a traceback")
        wrong += _left(folder)
        if fault.damages is None:
            wrong += _goes_on(job, said, expected, fault)
    except NotEnded as error:
        wrong.append(str(error))
    finally:
        for run in runs:
            run.kill()
            run.wait()
        shutil.rmtree(folder)
    return Outcome(fault=name, rank=rank, seconds=seconds, wrong=tuple(wrong))


def _prepared(folder: Path, fault: Fault, rank: int, step: int) -> Path:
    """Plan, data and job of a case."""
    job = make_job(folder, STEPS, f"{folder}/data.py:fed", _MORE)
    graph = mlp_graph([6, 64, 2], 8)
    stage = Stage(mesh=Layout((RANKS,), ("dp",)), operators=tuple(operator.name for operator in graph.operators))
    rows = {operator.name: Strategy(dims={str(graph.spec(operator).inputs[0][0]): ("dp",)})
            for operator in graph.operators}  # fmt: skip
    optimizer = Optimizer(kind="adamw", settings={"lr": 0.01})
    save_plan(Plan(graph=graph, stages=(stage,), strategies=rows, optimizer=optimizer), folder / "plan.json")
    names = [tensor.name for tensor in graph.inputs]
    ranks = tuple(range(RANKS)) if fault.everywhere else (rank,)
    data = _DATA.format(steps=10 * STEPS, pause_s=0.05, ranks=ranks, step=step, happens=fault.happens)
    (folder / "data.py").write_text(data.replace('"x"', f'"{names[0]}"').replace('"labels"', f'"{names[1]}"'))
    return job


def _on_two_nodes(job: Path) -> list[subprocess.Popen[bytes]]:
    """The job on two nodes of this host."""
    words = ["--nodes", "2", "--port", str(_free_ports()), "--node"]
    return [started(job, more=[*words, "0"]), started(job, more=[*words, "1"], said="said by the other node")]


def _free_ports() -> int:
    """A free port whose successor is free too: one for torchrun and one for the nodes."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


def _signalled(job: Path, runs: Sequence[subprocess.Popen[bytes]], fault: Fault, rank: int, step: int) -> None:
    """Wait until a step has been done and send the signals."""
    lines = job.parent / "out" / "metrics.jsonl"
    deadline_s = time.monotonic() + ENDS_S
    while not lines.exists() or lines.read_bytes().count(b"\n") < step:
        if runs[0].poll() is not None or time.monotonic() > deadline_s:
            return
        time.sleep(0.01)
    pids = pids_of(job, rank)
    assert pids is not None
    pids |= {"agent": agent_of(pids["guard"]), "launcher": runs[0].pid, "node": runs[-1].pid}
    for number, each in enumerate(fault.signals):
        time.sleep(2.0 * bool(number))
        os.kill(pids[fault.process], each)


def _left(folder: Path) -> list[str]:
    """Processes and temporary files of a case that are still there, some seconds after its end."""
    deadline_s, found = time.monotonic() + 5.0, [""]
    while found and time.monotonic() < deadline_s:
        found = [f"process {path.parent.name} is left" for path in Path("/proc").glob("[0-9]*/environ")
                 if _mentions(path, folder)]  # fmt: skip
        time.sleep(0.1 * bool(found))
    found += [
        f"{path.name} is left in the temporary folder"
        for path in (folder / "tmp").iterdir()
        if not path.name.startswith("torchinductor_")
    ]  # torch's cache, which stays
    return found + [f"{path.name} is left" for path in (folder / "out").glob(".*")]


def _mentions(path: Path, folder: Path) -> bool:
    try:
        if path.with_name("stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return False
        return f"TMPDIR={folder / 'tmp'}".encode() in path.read_bytes()
    except OSError:
        return False


def _goes_on(job: Path, said: str, expected: list[float], fault: Fault) -> list[str]:
    """What is wrong with the checkpoints, or with the losses of a run that resumes from them."""
    folder, plan = job.parent / "out" / "checkpoints", load_plan(job.parent / "plan.json")
    wrong = []
    for path in written_checkpoints(folder):
        try:
            check_checkpoint(path, plan)
        except TwofoldError as error:
            wrong.append(str(error))
    told = re.findall(r"checkpoint \S*(step-\d+)", said)
    if told and told[-1] not in {path.name for path in written_checkpoints(folder)}:
        wrong.append(f"{told[-1]} was reported as written and is lost")
    if fault.code == 0:
        return wrong + ["other losses"] * ([figure["loss"] for figure in figures(job)] != expected)
    data = job.parent / "data.py"
    data.write_text(data.read_text().replace("happens(batch)\n", "pass\n", 1))
    return wrong + ["other losses after resuming"] * (losses(job, resume=True, limit_s=ENDS_S) != expected)
