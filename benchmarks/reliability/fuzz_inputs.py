"""Good inputs of every reader and command, which `benchmarks.reliability.fuzz` changes."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import struct
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo

from benchmarks import FOLDER
from costmodels import Machine
from costmodels.fit.points import load_points
from costmodels.price.torch_hosts import KINDS as HOST_KINDS
from costmodels.price.torch_hosts import load_host
from executor.data.digits import IMAGES_NAME, LABELS_NAME, load_digits
from executor.data.sources import Source
from executor.launch import launch
from executor.launch.train_job import load_training_job
from executor.train.checkpoints.files import MANIFEST, check_checkpoint
from executor.weights.files import check_weights
from interop.accelerate import fsdp2_words
from interop.chrome_trace import read_trace, write_trace
from interop.link_traces import read_links
from interop.measurements.tables import read_table
from interop.megatron import megatron_words
from interop.profiler_trace import read_rank_traces
from interop.statement import read_statement, write_statement
from interop.torchtitan import torchtitan_toml
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.mlp import mlp_graph
from plans.model.transformer import transformer, transformer_config
from plans.optimizer import Optimizer
from plans.plan import load_plan, save_plan
from plans.reading import read_text
from plans.schedules import Schedule, ScheduleError, make_schedule
from search.uniform import uniform_plan
from simulator import simulate
from simulator.study.store import Store
from twofold import report_server
from twofold.cli import main
from twofold.studies import load_study

__all__ = ["BadOutput", "Kind", "kinds", "nothing_starts"]

_NOT_FINITE = re.compile(r"(?<![\w./'\"-])(nan|inf|infinity)(?![\w./'\"-])", re.IGNORECASE)  # not of a quoted input
_DATA = FOLDER.parent / "tests" / "data"


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


class BadOutput(Exception):
    """A command printed what it should not."""


@contextlib.contextmanager
def nothing_starts(folder: Path) -> Iterator[None]:
    """Commands work in a folder, and refuse where they would start ranks or wait for a browser."""

    def refuse(*_: object, **__: object) -> Any:
        raise TwofoldError("nothing is started here")

    kept = launch.start_agent, report_server.ThreadingHTTPServer.serve_forever
    launch.start_agent = refuse
    report_server.ThreadingHTTPServer.serve_forever = refuse  # type: ignore[method-assign]
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        launch.start_agent, report_server.ThreadingHTTPServer.serve_forever = kept  # type: ignore[method-assign]


def kinds(folder: Path) -> list[Kind]:
    """All kinds of input, with good files made in a folder."""
    machine, config = Machine.load("h100-sxm-x8"), transformer_config("gpt2", num_layers=2, seq=16, tied=False)
    graph = transformer("gpt2", num_layers=2, seq=16, tied=False).with_batch(4)
    plan = uniform_plan(graph, machine, dp=2, pp=2, micro_batch=1)
    plan_path, machine_path = save_plan(plan, folder / "plan.json"), machine.save(folder / "machine.json")
    degrees = Degrees(dp=2, tp=2, pp=2, micro_batch=1, global_batch=8)
    sharded = Degrees(dp=8, micro_batch=1, global_batch=8, optimizer=Optimizer(parallel_level=3))
    llama = transformer_config("llama-3-8b", num_layers=4)
    stated = write_statement(folder / "degrees.json", config, degrees, stack="twofold")
    few = uniform_plan(mlp_graph([6, 3], 8), machine, micro_batch=4)
    few_path = save_plan(few, folder / "few.json")
    trace = write_trace(folder / "trace.json.gz", [simulate(few, machine, num_steps=1)])
    np.savez(folder / "data.npz", x=np.ones((8, 6), np.float32), y=np.zeros((8, 3), np.float32))
    np.save(folder / "tokens.npy", np.arange(200))
    images, labels = struct.pack(">4I", 0x803, 2, 28, 28) + bytes(2 * 784), struct.pack(">2I", 0x801, 2) + bytes(2)
    (folder / LABELS_NAME).write_bytes(labels)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ2i5q", 1, 8, 2, 3, 3, 4, 0, 6, 0, 1, 2)  # two documents
    points = gzip.decompress((_DATA / "cpu-x4.points.jsonl.gz").read_bytes()).splitlines(keepends=True)
    small = mlp_graph([6, 3], 8)
    arrays = {parameter.name: torch.zeros(parameter.shape) for parameter in small.parameters}
    torch.save(arrays, folder / "weights.pt")
    np.savez(folder / "weights.npz", **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
    (folder / "job.toml").write_bytes(_JOB.replace(b"plan.json", str(few_path).encode()))
    (folder / "study.toml").write_bytes(_STUDY)
    (folder / "table.txt").write_bytes(_NCCL_TABLE)
    to_machine = ["--machine", "h100-sxm-x8", "--json"]
    manifest = {
        "twofold_checkpoint": 1, "step": 20, "optimizer": few.optimizer.kind, "files": {"x": [0, "ab"]}, "skipped": 0,
        "parameters": {parameter.name: parameter.shape for parameter in few.graph.parameters},
    }  # fmt: skip
    host_keys = {"name": "a", "source": "b", "blocks_s": dict.fromkeys(HOST_KINDS, (4e-4, 6e-4)), "spread": 0.1}
    placements = {"mesh": {"dp": 4}, "placements": {"norm.weight": ["Shard(dim=0)"], "layers.0.attention.wq.weight":
                  ["Shard(dim=0)"]}, "global_batch": 32, "micro_batch": 2}  # fmt: skip

    def digits(path: Path) -> object:
        (path.parent / IMAGES_NAME).write_bytes(path.read_bytes())
        return load_digits(path.parent)

    def rate(path: Path) -> None:
        job = load_training_job(path)
        if job.learning_rate is not None:
            job.learning_rate.check(job.steps)
        if job.optimizer is not None:
            job.optimizer.of(Optimizer())

    def schedule(path: Path) -> None:
        with contextlib.suppress(ScheduleError):  # its lines show the row and the cell
            Schedule.from_text(read_text(path, "the schedule"))

    def checkpoint(path: Path) -> None:
        (path.parent / MANIFEST).write_bytes(path.read_bytes())
        check_checkpoint(path.parent, few)

    def host(path: Path) -> object:
        load_host.cache_clear()
        return load_host(str(path))

    def words(path: Path) -> None:
        _command(path.read_bytes().decode(errors="surrogateescape").split(" "))

    inputs = {
        "plan": (few_path.read_bytes(), ".json"),
        "plan of a transformer": (plan_path.read_bytes(), ".json"),
        "machine of CPUs": (Machine.load("cpu-2core-x8").to_json(), ".json"),
        "machine": (machine_path.read_bytes(), ".json"),
        "degrees": (stated.read_bytes(), ".json"),
        "placements": (json.dumps(placements).encode(), ".json"),
        "launch of Megatron-LM": (" ".join(megatron_words(llama, degrees, 8)).encode(), ".sh"),
        "launch of accelerate": (" ".join(fsdp2_words(llama, sharded, 8)).encode(), ".sh"),
        "settings of torchtitan": (torchtitan_toml(llama, sharded).encode(), ".toml"),
        "config.json": ((_DATA / "configs" / "qwen2-7b.json").read_bytes(), ".json"),
        "points": (b"".join(points[:40]), ".jsonl"),
        "trace": (gzip.decompress(trace.read_bytes()), ".json"),
        "packed trace": (trace.read_bytes(), ".json.gz"),
        "torch's trace": ((_DATA / "rank0_torch_2.13_cpu.json").read_bytes(), ".json"),
        "execution trace": (json.dumps(_execution_trace()).encode(), ".json"),
        "log of NCCL": (_NCCL_LOG, ".log"),
        "table of nccl-tests": (_NCCL_TABLE, ".log"),
        "schedule": (make_schedule("1f1b", 2, 2).to_text().encode(), ".csv"),
        "job": (_JOB, ".toml"),
        "study": (_STUDY, ".toml"),
        "results of a study": (b'{"key": "ab", "settings": {"tp": 1}, "figures": {"step_s": 0.5}}\n' * 3, ".jsonl"),
        "table": (_TABLE, ".csv"),
        "host": (json.dumps(host_keys).encode(), ".json"),
        "checkpoint": (json.dumps(manifest).encode(), ".json"),
        "weights": ((folder / "weights.pt").read_bytes(), ".pt"),
        "weights of numpy": ((folder / "weights.npz").read_bytes(), ".npz"),
        "arrays": ((folder / "data.npz").read_bytes(), ".npz"),
        "tokens": ((folder / "tokens.npy").read_bytes(), ".npy"),
        "documents": (index, ".idx"),
        "images": (images, ".idx"),
    }
    lines = {
        "predict": "gpt2 --tp 2 --dp 4 --machine h100-sxm-x8 --json",
        "simulate": f"{plan_path} --machine h100-sxm-x8 --json",
        "plan": "gpt2 --layers 2 --machine h100-sxm-x8 --global-batch 8 --tp 2 --pp 1 --json",
        "compare": f"{plan_path} {few_path} --machine h100-sxm-x8 --steps 2 --json",
        "whatif": f"{plan_path} --machine h100-sxm-x8 --bandwidth 0.5 2 --json",
        "links": f"{folder}/table.txt --machine h100-sxm-x8 --top 3 --json",
        "study": f"{folder}/study.toml --top 3 --jobs 1 --json",
        "run": f"{few_path} --steps 2 --seed 1 --timeout 60 --json",
        "verify": f"{few_path} --model {folder}/m.py:build --machine h100-sxm-x8 --steps 2 --json",
        "train": f"{folder}/job.toml --max-restarts 1 --nodes 1 --timeout 60 --json",
        "calibrate": "--devices 2 --minutes 1 --quick --json",
        "export": f"{folder}/step-00000020 weights.pt --json",
        "serve": f"{folder} --port 0 --no-open --json",
    }
    readers: Mapping[str, Callable[[Path], object]] = {
        "plan": load_plan,
        "machine of CPUs": Machine.load,
        "degrees": read_statement,
        "placements": read_statement,
        "launch of Megatron-LM": read_statement,
        "launch of accelerate": read_statement,
        "settings of torchtitan": read_statement,
        "config.json": lambda path: transformer_config(str(path)),
        "points": load_points,
        "trace": read_trace,
        "packed trace": read_trace,
        "torch's trace": lambda path: read_rank_traces([path]),
        "execution trace": lambda path: read_links([path]),
        "log of NCCL": lambda path: read_links([path]),
        "table of nccl-tests": lambda path: read_links([path]),
        "schedule": schedule,
        "job": rate,
        "study": load_study,
        "results of a study": Store,
        "table": read_table,
        "host": host,
        "checkpoint": checkpoint,
        "weights": lambda path: check_weights(str(path), small),
        "weights of numpy": lambda path: check_weights(str(path), small),
        "arrays": lambda path: Source(data=str(path)).check(small),
        "tokens": lambda path: Source(data=str(path)).check(graph),
        "documents": lambda path: Source(data=str(path)).check(graph),
        "images": digits,
    }
    commands: Mapping[str, Callable[[Path], object]] = {
        "plan of a transformer": lambda path: _command(["simulate", str(path), *to_machine]),
        "machine": lambda path: _command(["simulate", str(plan_path), "--machine", str(path), "--json"]),
        "degrees": lambda path: _command(["simulate", str(path), *to_machine]),
        "config.json": lambda path: _command(["predict", str(path), *to_machine]),
        "schedule": lambda path: _command(["simulate", str(plan_path), "--schedule", str(path), *to_machine]),
        "table": lambda path: _command(["validate", str(path), "--json"]),
        "torch's trace": lambda path: _command(["links", str(path), *to_machine]),
        "study": lambda path: _command(["study", str(path), "--jobs", "1", "--json"]),
        "job": lambda path: _command(["train", str(path), "--json"]),
    }
    return [
        *(Kind(name=name, content=inputs[name][0], suffix=inputs[name][1], read=read)
          for name, read in readers.items()),
        *(Kind(name=f"{name}, in a command", content=inputs[name][0], suffix=inputs[name][1], read=read, commands=True)
          for name, read in commands.items()),
        *(Kind(name=f"line of {name}", content=f"{name} {line}".encode(), suffix=".txt", read=words, commands=True)
          for name, line in lines.items()),
    ]  # fmt: skip


def _command(arguments: Sequence[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as error:  # the usage of a command
            code = error.code if isinstance(error.code, int) else 2
    if code not in (0, 1, 2):
        raise BadOutput(f"exit code {code}")
    if "Traceback" in err.getvalue():
        raise BadOutput("a traceback")
    if "\x1b[2J" in err.getvalue() + out.getvalue() or "\x1b[31mred" in err.getvalue() + out.getvalue():
        raise BadOutput("terminal escapes of the input")
    if code != 2 and (found := _NOT_FINITE.search(out.getvalue())):
        raise BadOutput(f"prints {found[0]}")
    if code == 0 and "--json" in arguments and out.getvalue().startswith("{"):
        json.loads(out.getvalue(), parse_constant=_refuse)


def _refuse(word: str) -> object:
    raise BadOutput(f"{word} in JSON")


def _execution_trace() -> dict[str, Any]:
    """An all-reduce of two ranks as torch's ExecutionTraceObserver writes it, with its kernel's time."""
    facts = {"collective_name": "allreduce", "dtype": "BFloat16", "in_msg_nelems": 2000, "out_msg_nelems": 2000,
             "pg_name": "7", "pg_size": 2, "global_rank_start": 0, "global_rank_stride": 1}  # fmt: skip
    attributes = [{"name": name, "type": "uint64", "value": value} for name, value in facts.items()]
    groups = json.dumps([{"pg_name": "7", "ranks": [0, 1], "group_size": 2}])
    first = {"id": 3, "name": "## process_group:init ##", "ctrl_deps": 2, "attrs": [],
             "inputs": {"values": [groups], "shapes": [[]], "types": ["String"]}}  # fmt: skip
    call = {"id": 9, "name": "record_param_comms", "ctrl_deps": 2, "attrs": attributes, "cat": "kernel", "ts": 500,
            "inputs": {"values": [], "shapes": [], "types": []}, "inclusive_dur": 20, "stream": 7}  # fmt: skip
    return {"schema": "1.1.1-chakra.0.0.4", "nodes": [first, call]}


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
[spike]
factor = 10
[optimizer]
kind = "adamw"
weight_decay = 0.1
clip_norm = 1.0
[[optimizer.groups]]
parameters = ["*"]
lr_scale = 0.5
"""
_STUDY = b"""[base]
model = "llama-3-8b"
machine = "h200-x8"
global_batch = 8
[axes]
tp = [4, 8]
zero = [0, 1]
"""
_TABLE = b"""model,gpu_type,gpu_count,dp,tp,pp,micro_batch,global_batch,seq,precision,stack,metric,value
llama-3-8b,h100-sxm,8,2,2,2,1,16,4096,bf16,megatron,tflops_per_gpu,400
gpt3-175b,a100-sxm,64,1,8,8,1,64,2048,bf16,megatron,iteration_time_s,12.5
"""
_NCCL_TABLE = textwrap.dedent(
    """\
    # Collective test starting: all_gather_perf
    # nThread 1 nGpus 4 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
    #  Rank  0 Group  0 Pid  1 on  node device  0 [0000:07:00] NVIDIA H100
    #  Rank  1 Group  0 Pid  1 on  node device  1 [0000:0a:00] NVIDIA H100
    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
       100000000       6250000     float    none      -1   1000.0  100.00   75.00      0    990.0  101.01   75.76      0
    # Avg bus bandwidth    : 87.9
    """
).encode()
_NCCL_LOG = b"".join(
    b"node:1:2 [0] NCCL INFO %s sendbuff 0x7 recvbuff 0x7 %s op 0 root 0 comm 0x5 [nranks=4] stream 0x5\n" % line
    for line in (
        (b"AllReduce: opCount a", b"count 1000 datatype 9"),
        (b"ReduceScatter: opCount b", b"count 250 datatype 7"),
    )
)
