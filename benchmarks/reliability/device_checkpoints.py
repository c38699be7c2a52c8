"""What asynchronous checkpoints of a model of 2 billion parameters cost on GPUs, and what the simulator predicts.

    python -m benchmarks.reliability.device_checkpoints --gpus 4 --out FILE
    python -m benchmarks.reliability.device_checkpoints --gpus 2 --smoke --out FILE     tiny, on CPU ranks

A run with a checkpoint every 20 steps is followed by one with an interval in which the disk can write a checkpoint. The
disk and the copies to the host are measured alone between them: as many files of the same size as a checkpoint has,
written as the ranks write theirs, and in two plain ways for comparison. The predicted cost follows from the first, the
copies, the bytes of a rank and the time of a step. The measured cost is that of the intervals from the second
checkpoint on, which may have to wait for the one before. Steps during which nothing is copied or written are the
comparison.
"""

from __future__ import annotations

import argparse
import itertools
import math
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import measured_with, write_results
from benchmarks.reliability.training import NotEnded, ended, figures, make_job, started
from costmodels import Machine
from executor.device import Device, pick_device
from executor.train.checkpoints.files import written_checkpoints
from executor.train.checkpoints.writing import HashedFile
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan, save_plan
from search.uniform import uniform_plan
from simulator import Checkpoints, goodput

__all__ = ["main"]

EVERY, INTERVALS, WARM = 20, 5, 8
MOST, WITHIN = 0.03, 0.2
COPY_BYTES = 2**31
BLOCK_BYTES = 2**24
MODELS = {
    False: TransformerConfig(
        name="2b", num_layers=24, hidden=2560, num_heads=20, ffn=6912, vocab=32000, seq=2048, dtype="bfloat16"
    ),
    True: TransformerConfig(
        name="tiny", num_layers=4, hidden=64, num_heads=4, ffn=128, vocab=128, seq=16, dtype="float32"
    ),
}
# torch draws two billion numbers in a third of numpy's time
_WEIGHTS = """
import torch
from torch import nn
from executor.weights.initial import no_init_parameters
from plans.plan import load_plan

def build():
    root = nn.Module()
    with no_init_parameters():
        for tensor in load_plan("{plan}").graph.parameters:
            *owners, name = tensor.name.split(".")
            module = root
            for owner in owners:
                if not hasattr(module, owner):
                    module.add_module(owner, nn.Module())
                module = getattr(module, owner)
            weight = nn.Parameter(torch.empty(tensor.shape))
            nn.init.normal_(weight, std=0.02)
            module.register_parameter(name, weight)
    return root, ()
"""


def main() -> int:
    """Measure, predict and compare; 1 if the cost or its prediction misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on CPU ranks")
    options = parser.parse_args()
    device = pick_device("cpu" if options.smoke else "auto")
    device.use()
    with tempfile.TemporaryDirectory(prefix="twofold-checkpoints-") as folder:
        found = cost(Path(folder), options.gpus, options.batch, device, smoke=options.smoke)
    write_results(options.out, measured_with(device) | found)
    for name, value in found.items():
        if name != "runs":
            print(f"{name}: {value}")
    for run in found["runs"]:
        print(", ".join(f"{name} {value}" for name, value in run.items() if name != "step_s"))
    return 0 if found["met"] else 1


def cost(folder: Path, ranks: int, batch: int, device: Device, *, smoke: bool) -> dict[str, Any]:
    """Train with a checkpoint every 20 steps, and with one at an interval that the disk can sustain.

    Args:
        folder: folder of the runs.
        ranks: number of devices, all data parallel.
        batch: sequences of a step.
        device: device of this process, for the probes.
        smoke: tiny sizes on CPUs.
    """
    began_s = time.monotonic()
    config = MODELS[smoke]
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=2)
    graph = transformer(config, batch_size=batch)
    plan = uniform_plan(
        graph, Machine.load(f"h200-x{ranks}"), optimizer=optimizer, dp=ranks, micro_batch=batch // ranks // 2
    )
    first = _run(folder / "first", plan, device, EVERY)
    size_bytes = first["bytes_of_a_rank"]
    disk_Bps = {name: _disk_Bps(folder, ranks, size_bytes, write) for name, write in _WRITES.items()}
    copy_Bps = _copy_Bps(device, ranks, 2**24 if smoke else COPY_BYTES)
    write_s = size_bytes * ranks / disk_Bps["as a checkpoint"]
    enough = 10 * math.ceil(1.2 * write_s / first["alone_s"] / 10)
    runs = [first, *([_run(folder / "second", plan, device, enough)] if enough > EVERY else [])]
    for run in runs:
        asked = Checkpoints(
            every_steps=run["every"], write_Bps=size_bytes / write_s, blocking=False, size_bytes=size_bytes,
            stall_s=size_bytes / copy_Bps,
        )  # fmt: skip
        run["predicted_cost"] = 1 / goodput(run["alone_s"], ranks, checkpoints=asked, failures=None).fraction - 1
        run["off"] = run["predicted_cost"] / run["cost"] - 1
        run["met"] = run["cost"] < MOST and abs(run["off"]) <= WITHIN
    return {
        "met": first["met"], "most": MOST, "within": WITHIN, "ranks": ranks, "parameters": config.num_parameters,
        "disk_Bps": disk_Bps, "copy_Bps": copy_Bps, "predicted_write_s": write_s,
        "predicted_stall_s": size_bytes / copy_Bps, "all_s": time.monotonic() - began_s, "runs": runs,
    }  # fmt: skip


def _run(folder: Path, plan: Plan, device: Device, every: int) -> dict[str, Any]:
    """Train with a checkpoint at each interval of steps; returns what it took."""
    path, steps = save_plan(plan, folder / "plan.json"), INTERVALS * every
    (folder / "weights.py").write_text(_WEIGHTS.format(plan=path))
    lines = f"model = '{folder}/weights.py:build'\nprint_every = {steps}\ndevice = '{device.kind}'\n"
    job = make_job(folder, steps, "random", f"{lines}[checkpoints]\nevery = {every}\n[replicas]\nevery = 1000000\n")
    ends_s, names_s = _watched(job)
    steps_s = [figure["step_s"] for figure in figures(job)]
    spans = _spans(names_s)
    written = written_checkpoints(folder / "out" / "checkpoints")[-1]
    sizes = [file.stat().st_size for file in written.glob("__*")]
    shutil.rmtree(folder / "out" / "checkpoints")
    # what a checkpoint takes shows in the steps after it; the last checkpoint has none
    free, busy = list[float](), list[float]()
    for number in range(WARM, steps):
        begin_s, end_s = ends_s[number] - steps_s[number], ends_s[number]
        if number % every == 0:  # copies
            continue
        writes = any(begin_s < last and first < end_s for first, last in spans.values())
        (busy if writes else free).append(steps_s[number])
    alone_s, writes_s = statistics.fmean(free), [last - first for first, last in spans.values()]
    return {
        "every": every, "cost": statistics.fmean(steps_s[2 * every :]) / alone_s - 1, "bytes": sum(sizes),
        "bytes_of_a_rank": max(sizes), "write_Bps": sum(sizes) / statistics.median(writes_s),
        "write_s": [round(each, 2) for each in writes_s], "alone_s": alone_s, "steps_alone": len(free),
        "step_while_writing_s": statistics.fmean(busy) if busy else None,
        "stall_s": [round(steps_s[at] - alone_s, 3) for at in range(every, steps, every)], "step_s": steps_s,
    }  # fmt: skip


def _watched(job: Path) -> tuple[list[float], dict[str, float]]:
    """Run a job; returns when each step ended and when each file of a checkpoint first existed, by the monotonic clock.

    Raises:
        NotEnded: the run failed.
    """
    run, is_over = started(job), threading.Event()
    ends_s, names_s = list[float](), dict[str, float]()
    watcher = threading.Thread(target=_watch, args=(job.parent / "out", ends_s, names_s, is_over.is_set))
    watcher.start()
    code, said = ended(job, run, limit_s=400.0)
    is_over.set()
    watcher.join()
    if code:
        raise NotEnded(f"the run ended with {code}: {said[-1500:]}")
    return ends_s, names_s


def _watch(out: Path, ends_s: list[float], names_s: dict[str, float], is_over: Callable[[], bool]) -> None:
    """Note times until the run is over."""
    figures_file, checkpoints = out / "metrics.jsonl", out / "checkpoints"
    while True:
        last = is_over()
        now_s = time.monotonic()
        if figures_file.exists():
            ends_s += [now_s] * (figures_file.read_bytes().count(b"\n") - len(ends_s))
        for pattern in (".step-*.writing", "step-*"):
            for path in checkpoints.glob(pattern) if checkpoints.exists() else ():
                names_s.setdefault(path.name, now_s)
        if last:
            return
        time.sleep(0.02)


def _spans(names_s: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """From the first file of each checkpoint to its final name."""
    ends = {name: at for name, at in names_s.items() if not name.startswith(".")}
    firsts = {name: names_s.get(f".{name}.writing") for name in ends}
    return {name: (first, ends[name]) for name, first in sorted(firsts.items()) if first is not None}


def _disk_Bps(folder: Path, files: int, size_bytes: int, write: Callable[[Path, int], None]) -> float:
    """Bytes per second of as many files written and brought to the disk at the same time as there are ranks."""
    paths = [folder / f"probe-{number}" for number in range(files)]
    os.sync()
    start = time.monotonic()
    with ThreadPoolExecutor(files) as pool:
        list(pool.map(write, paths, [size_bytes] * files))
    taken_s = time.monotonic() - start
    total = sum(path.stat().st_size for path in paths)
    for path in paths:
        path.unlink()
    return total / taken_s


def _blocks(size_bytes: int) -> Iterator[mmap.mmap]:
    """A block of random bytes, aligned to pages, as often as `size_bytes` needs it."""
    block = mmap.mmap(-1, BLOCK_BYTES)
    block.write(os.urandom(BLOCK_BYTES))
    yield from itertools.repeat(block, math.ceil(size_bytes / BLOCK_BYTES))


def _as_a_checkpoint(path: Path, size_bytes: int) -> None:
    with HashedFile(path) as file:
        for block in _blocks(size_bytes):
            file.write(block)


def _synced_at_the_end(path: Path, size_bytes: int) -> None:
    with path.open("wb", buffering=0) as file:
        for block in _blocks(size_bytes):
            file.write(block)
        os.fsync(file.fileno())


def _past_the_cache(path: Path, size_bytes: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        for block in _blocks(size_bytes):
            os.write(handle, block)
        os.fsync(handle)
    finally:
        os.close(handle)


_WRITES = {
    "as a checkpoint": _as_a_checkpoint,
    "plain, synced at the end": _synced_at_the_end,
    "plain, O_DIRECT": _past_the_cache,
}


def _copy_Bps(device: Device, devices: int, size_bytes: int) -> float:
    """Bytes per second from each of several devices to pinned memory of the host, all at the same time."""
    places = [torch.device(device.kind, index) for index in range(devices)] if device.is_async else ["cpu"]
    sources = [torch.ones(size_bytes, dtype=torch.uint8, device=place) for place in places]
    targets = [device.host_buffer((size_bytes,), torch.uint8) for _ in places]
    for _ in range(2):
        start = time.monotonic()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        for place in places if device.is_async else ():
            torch.accelerator.synchronize(place)
        taken_s = time.monotonic() - start
    del sources, source
    device.release_memory()
    return size_bytes / taken_s


if __name__ == "__main__":
    sys.exit(main())
