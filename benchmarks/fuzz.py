"""Changed files and command lines for every reader: `python -m benchmarks.fuzz --count 10000 --seed 1`.

`--readers` leaves out the commands, of which one takes as long as a hundred files.

Every case takes a good file, changes some of its bytes or one value, and hands it to a reader or a command, in this
process. It is found bad if an exception other than a refusal comes out, if it takes more than 5 s of processor time or
a minute, fills more than 1 GB, or prints a number that is not finite. A case follows from the seed and its number:
`--only NUMBER` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept import keep
from costmodels import Machine
from costmodels.fit.points import load_points
from executor.launch.train_job import load_training_job
from executor.train.data import IMAGES_NAME, LABELS_NAME, load_digits
from executor.train.sources import Source
from interop.chrome_trace import read_trace, write_trace
from interop.measurements.tables import read_table
from interop.profiler_trace import read_rank_traces
from interop.statement import read_statement, write_statement
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.mlp import mlp_graph
from plans.model.transformer import transformer, transformer_config
from plans.plan import load_plan, save_plan
from plans.reading import read_text
from plans.schedules import Schedule, ScheduleError, make_schedule
from search.uniform import uniform_plan
from simulator import simulate
from twofold.cli import main
from twofold.studies import load_study

__all__ = ["Finding", "Kind", "fuzz", "kinds"]

LIMIT_S = 5.0
LIMIT_BYTES = 1 << 30
_NOT_FINITE = re.compile(r"(?<![\w./'\"-])(nan|inf|infinity)(?![\w./'\"-])", re.IGNORECASE)  # not of a quoted input

VALUES: tuple[Any, ...] = (
    0, -1, 1, 3, 2**31, 2**63 - 1, 2**63, 10**30, 0.0, -0.0, 0.5, 1e-308, 1e308, -1e300, "", "x", "8k", "nan", "-1",
    "\u0663", "\x1b[31mred", "a\0b", "x" * 10_000, None, True, [], {}, [[]], [0], {"a": 1},
)  # fmt: skip
WORDS = (
    "0", "-1", "1", "2", "3", "8", "1e9", "10" * 20, "nan", "inf", "-inf", "", " ", "x", "\u0662", "a\0b", "\x1b[2J",
    "none", "full", "1f1b", "interleaved", "zb_v", "--json", "--machine", "--tp", "--batch", "h100-sxm-x8", "1,2,3",
    "h100-sxm-x1000000000000", "/dev/null", "/", "../..", "4.5", "true", "llama-3-8b", "selective", "=", "--", "-h",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of input.

    Args:
        name: of it.
        content: of a good file, or the words of a good command.
        suffix: of the file's name.
        read: what is done with the file.
        commands: whether that runs a command, rather than only reads the file.
    """

    name: str
    content: bytes
    suffix: str
    read: Callable[[Path], object]
    commands: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A case that was not refused as it should be: its number, kind, what came out, and the input."""

    number: int
    kind: str
    what: str
    content: bytes


class _TooSlow(BaseException):
    """The time of a case is over."""


class _Prints(Exception):
    """A command printed what it should not."""


def kinds(folder: Path) -> list[Kind]:
    """All kinds of input, with good files made in a folder."""
    machine, config = Machine.load("h100-sxm-x8"), transformer_config("gpt2", num_layers=2, seq=16, tied=False)
    graph = transformer("gpt2", num_layers=2, seq=16, tied=False).with_batch(4)
    plan = uniform_plan(graph, machine, dp=2, pp=2, micro_batch=1)
    plan_path, machine_path = save_plan(plan, folder / "plan.json"), machine.save(folder / "machine.json")
    degrees = Degrees(dp=2, tp=2, pp=2, micro_batch=1, global_batch=8)
    stated = write_statement(folder / "degrees.json", config, degrees, stack="twofold")
    few = uniform_plan(mlp_graph([6, 3], 8), machine, micro_batch=4)
    trace = write_trace(folder / "trace.json.gz", [simulate(few, machine, num_steps=1)])
    data = Path(__file__).parents[1] / "tests" / "data"
    np.savez(folder / "data.npz", x=np.ones((8, 6), np.float32), y=np.zeros((8, 3), np.float32))
    np.save(folder / "tokens.npy", np.arange(200))
    images, labels = struct.pack(">4I", 0x803, 2, 28, 28) + bytes(2 * 784), struct.pack(">2I", 0x801, 2) + bytes(2)
    (folder / LABELS_NAME).write_bytes(labels)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ2i5q", 1, 8, 2, 3, 3, 4, 0, 6, 0, 1, 2)  # two documents
    points = gzip.decompress((data / "cpu-x4.points.jsonl.gz").read_bytes()).splitlines(keepends=True)
    small = mlp_graph([6, 3], 8)
    to_machine = ["--machine", "h100-sxm-x8", "--json"]

    def digits(path: Path) -> object:
        (path.parent / IMAGES_NAME).write_bytes(path.read_bytes())
        return load_digits(path.parent)

    def rate(path: Path) -> None:
        job = load_training_job(path)
        if job.learning_rate is not None:
            job.learning_rate.check(job.steps)

    def schedule(path: Path) -> None:
        with contextlib.suppress(ScheduleError):  # its lines show the row and the cell
            Schedule.from_text(read_text(path, "the schedule"))

    def words(path: Path) -> None:
        _command(path.read_bytes().decode(errors="surrogateescape").split(" "))

    inputs = {
        "plan": (save_plan(few, folder / "few.json").read_bytes(), ".json"),
        "plan of a transformer": (plan_path.read_bytes(), ".json"),
        "machine of CPUs": (Machine.load("cpu-2core-x8").to_json(), ".json"),
        "machine": (machine_path.read_bytes(), ".json"),
        "degrees": (stated.read_bytes(), ".json"),
        "config.json": ((data / "configs" / "qwen2-7b.json").read_bytes(), ".json"),
        "points": (b"".join(points[:40]), ".jsonl"),
        "trace": (gzip.decompress(trace.read_bytes()), ".json"),
        "packed trace": (trace.read_bytes(), ".json.gz"),
        "torch's trace": ((data / "rank0_torch_2.13_cpu.json").read_bytes(), ".json"),
        "schedule": (make_schedule("1f1b", 2, 2).to_text().encode(), ".csv"),
        "job": (_JOB, ".toml"),
        "study": (_STUDY, ".toml"),
        "table": (_TABLE, ".csv"),
        "arrays": ((folder / "data.npz").read_bytes(), ".npz"),
        "tokens": ((folder / "tokens.npy").read_bytes(), ".npy"),
        "documents": (index, ".idx"),
        "images": (images, ".idx"),
        "line of predict": (b"predict --model gpt2 --tp 2 --dp 4 --machine h100-sxm-x8 --json", ".txt"),
        "line of simulate": (f"simulate {plan_path} --machine h100-sxm-x8 --json".encode(), ".txt"),
    }
    readers: Mapping[str, Callable[[Path], object]] = {
        "plan": load_plan,
        "machine of CPUs": Machine.load,
        "degrees": read_statement,
        "config.json": lambda path: transformer_config(str(path)),
        "points": load_points,
        "trace": read_trace,
        "packed trace": read_trace,
        "torch's trace": lambda path: read_rank_traces([path]),
        "schedule": schedule,
        "job": rate,
        "study": load_study,
        "table": read_table,
        "arrays": lambda path: Source(data=str(path)).check(small),
        "tokens": lambda path: Source(data=str(path)).check(graph),
        "documents": lambda path: Source(data=str(path)).check(graph),
        "images": digits,
    }
    commands: Mapping[str, Callable[[Path], object]] = {
        "plan of a transformer": lambda path: _command(["simulate", str(path), *to_machine]),
        "machine": lambda path: _command(["simulate", str(plan_path), "--machine", str(path), "--json"]),
        "degrees": lambda path: _command(["simulate", str(path), *to_machine]),
        "config.json": lambda path: _command(["predict", "--model", str(path), *to_machine]),
        "schedule": lambda path: _command(["simulate", str(plan_path), "--schedule", str(path), *to_machine]),
        "table": lambda path: _command(["validate", str(path), "--json"]),
        "line of predict": words,
        "line of simulate": words,
    }
    return [
        Kind(name=f"{name}, in a command" if runs else name, content=inputs[name][0], suffix=inputs[name][1],
             read=read, commands=runs)
        for reads, runs in ((readers, False), (commands, True)) for name, read in reads.items()
    ]  # fmt: skip


_JOB = b"""plan = "plan.json"
steps = 100
out = "runs"
seed = 1
timeout_s = 36.5
metrics = ["csv"]
[learning_rate]
kind = "wsd"
peak = 3e-4
final = 3e-5
warmup = 10
decay = 20
[checkpoints]
every = 10
keep = 2
"""
_STUDY = b"""[base]
model = "llama-3-8b"
machine = "h200-x8"
global_batch = 8
[axes]
tp = [1, 2, 4, 8]
zero = [0, 1]
"""
_TABLE = b"""model,gpu_type,gpu_count,dp,tp,pp,micro_batch,global_batch,seq,precision,stack,metric,value
llama-3-8b,h100-sxm,8,2,2,2,1,16,4096,bf16,megatron,tflops_per_gpu,400
gpt3-175b,a100-sxm,64,1,8,8,1,64,2048,bf16,megatron,iteration_time_s,12.5
"""


def fuzz(count: int, seed: int, *, only: int | None = None, commands: bool = True) -> Iterator[Finding | None]:
    """Run cases, and give what each of them found.

    Args:
        count: of cases, of all kinds in turn.
        seed: seed of the changes.
        only: the one case to run.
        commands: whether inputs are given to commands, too, and not only to their readers.
    """
    with tempfile.TemporaryDirectory(prefix="twofold-fuzz-") as name:
        folder = Path(name)
        known = [kind for kind in kinds(folder) if commands or not kind.commands]
        for number in range(count) if only is None else [only]:
            draw, kind = random.Random(f"{seed} {number}"), known[number % len(known)]
            content = changed(kind, draw)
            path = folder / f"changed{kind.suffix}"
            path.write_bytes(content)
            what = _outcome(kind, path)
            yield None if what is None else Finding(number=number, kind=kind.name, what=what, content=content)


def changed(kind: Kind, draw: random.Random) -> bytes:
    """A good input with some of its bytes, words or values changed."""
    if kind.suffix == ".txt":
        words = kind.content.split(b" ")
        for _ in range(draw.randint(1, 3)):
            at, word = draw.randrange(1, len(words) + 1), draw.choice(WORDS).encode()
            words[at : at + draw.randint(0, 1)] = [word]
        return b" ".join(words)
    if kind.suffix == ".json" and draw.random() < 0.7:
        return _with_value(kind.content, draw)
    if kind.suffix in (".toml", ".csv", ".jsonl") and draw.random() < 0.7:
        numbers = [*re.finditer(rb"-?\d+(\.\d+)?(e-?\d+)?", kind.content)]
        at = draw.choice(numbers)
        value = draw.choice(VALUES)
        text = (value if isinstance(value, str) else json.dumps(value)).encode()
        return kind.content[: at.start()] + text + kind.content[at.end() :]
    return _with_bytes(bytearray(kind.content), draw)


def _with_value(content: bytes, draw: random.Random) -> bytes:
    document = json.loads(content)
    for _ in range(draw.randint(1, 2)):
        holder: Any = document
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw.choice(keys)
            inner = holder[key]
            if isinstance(inner, dict | list) and inner and draw.random() < 0.9:
                holder = inner
                continue
            if draw.random() < 0.1:
                del holder[key]
            elif isinstance(inner, int | float) and draw.random() < 0.3:
                holder[key] = inner * draw.choice((-1, 10, 1000, 10**9, 0.5))
            else:
                holder[key] = draw.choice(VALUES)
            break
    return json.dumps(document).encode()


def _with_bytes(content: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content) + 1)
        piece = content[at : at + draw.randint(1, 40)]
        match draw.randrange(5):
            case 0 if at < len(content):
                content[at] ^= 1 << draw.randrange(8)
            case 1:
                del content[at : at + len(piece)]
            case 2:
                content[at:at] = piece * draw.choice((1, 2, 50))
            case 3:
                content[at:at] = draw.choice((b"\xff", b"\0", b"[" * 5000, b'"', b"}", b"9" * 400, b"-", b"\n", b","))
            case _ if draw.random() < 0.2:
                del content[at:]
    return bytes(content)


def _outcome(kind: Kind, path: Path) -> str | None:
    """What is bad about a case; None where nothing is."""

    runs = [True]

    def over(*_: object) -> None:
        if runs.pop() if runs else False:  # once, and not while the case is put away
            raise _TooSlow

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = (signal.SIGPROF, signal.ITIMER_PROF, LIMIT_S), (signal.SIGALRM, signal.ITIMER_REAL, 12 * LIMIT_S)
    before = [signal.signal(number, over) for number, _, _ in limits]
    for _, timer, limit_s in limits:
        signal.setitimer(timer, limit_s)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            kind.read(path)
    except TwofoldError as error:
        return "a refusal of several lines" if "\n" in str(error).strip() else None
    except _TooSlow:
        return f"more than {LIMIT_S:g} s"
    except _Prints as error:
        return str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = [each for each in traceback.extract_tb(error.__traceback__) if "site-packages" not in each.filename]
        where = own[-1] if own else place
        return f"{type(error).__name__}: {str(error)[:120]} ({Path(where.filename).name} line {where.lineno})"
    finally:
        runs.clear()
        for (number, timer, _), earlier in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, earlier)
    filled = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024
    return f"{filled / 1e9:.1f} GB of memory" if filled > LIMIT_BYTES else None


def _command(arguments: Sequence[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:  # the usage of a command
            code = error.code if isinstance(error.code, int) else 2
    if code not in (0, 1, 2):
        raise _Prints(f"exit code {code}")
    if "Traceback" in err.getvalue():
        raise _Prints("a traceback")
    if "\x1b[2J" in err.getvalue() + out.getvalue() or "\x1b[31mred" in err.getvalue() + out.getvalue():
        raise _Prints("terminal escapes of the input")
    if code != 2 and (found := _NOT_FINITE.search(out.getvalue())):
        raise _Prints(f"prints {found[0]}")
    if code == 0 and "--json" in arguments and out.getvalue().startswith("{"):
        json.loads(out.getvalue(), parse_constant=_refuse)


def _refuse(word: str) -> object:
    raise _Prints(f"{word} in JSON")


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--readers", action="store_true", help="only read files, run no command")
    parser.add_argument("--out", type=Path, help="JSON file that keeps the figures")
    options = parser.parse_args()
    begin_s, places, done = time.monotonic(), Counter[str](), 0
    for found in fuzz(options.count, options.seed, only=options.only, commands=not options.readers):
        done += 1
        if found is not None:
            place = re.sub(r"\d{3,}", "N", f"{found.kind}: {found.what}")
            if not places[place]:
                print(f"{found.number:6} {found.kind}: {found.what}", flush=True)
            places[place] += 1
            if options.only is not None:
                sys.stdout.buffer.write(found.content[:2000] + b"\n")
    spent_s = time.monotonic() - begin_s
    bad = sum(places.values())
    print(f"{done} cases in {spent_s:.0f} s: {bad} bad, at {len(places)} places")
    if options.out is not None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {"cases": done, "bad": bad, "places": dict(places), "cpu_s": time.process_time(), "most_bytes": most}
        keep(options.out, "fuzz", figures)
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(_main())
