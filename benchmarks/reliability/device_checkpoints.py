"""What asynchronous checkpoints of a model of 2 billion parameters cost on GPUs, and what the simulator predicts.

    python -m benchmarks.reliability.device_checkpoints --gpus 4 --out FILE
    python -m benchmarks.reliability.device_checkpoints --gpus 2 --smoke --out FILE     tiny, on CPU ranks

The disk and the copies to the host are measured alone first. The predicted cost follows from them, the bytes of a rank
and the time of a step. In the run, steps during which no checkpoint is copied or written are the comparison: they
alternate with the others, so a clock that drifts changes both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import measured_with, write_results
from benchmarks.reliability.training import NotEnded, ended, figures, make_job, started
from costmodels import Machine
from executor.device import Device, pick_device
from executor.train.checkpoints.files import written_checkpoints
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import save_plan
from search.uniform import uniform_plan
from simulator import Checkpoints, goodput

__all__ = ["main"]

EVERY, STEPS, WARM = 20, 60, 8
MOST, WITHIN = 0.03, 0.2
PROBE_BYTES = 2**31
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
    print(", ".join(f"{name} {value}" for name, value in found.items() if name != "step_s"))
    return 0 if found["met"] else 1


def cost(folder: Path, ranks: int, batch: int, device: Device, *, smoke: bool) -> dict[str, Any]:
    """Train with a checkpoint every 20 steps.

    Args:
        folder: folder of the run.
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
    path = save_plan(plan, folder / "plan.json")
    (folder / "weights.py").write_text(_WEIGHTS.format(plan=path))
    probe_bytes = 2**24 if smoke else PROBE_BYTES
    disk_Bps, copy_Bps = _disk_Bps(folder, ranks, probe_bytes), _copy_Bps(device, ranks, probe_bytes)
    probed_s = time.monotonic() - began_s
    lines = f"model = '{folder}/weights.py:build'\nprint_every = {STEPS}\ndevice = '{device.kind}'\n"
    job = make_job(folder, STEPS, "random", f"{lines}[checkpoints]\nevery = {EVERY}\n[replicas]\nevery = 1000000\n")
    ends_s, names_s = _watched(job)
    steps = [figure["step_s"] for figure in figures(job)]
    spans = _spans(names_s)
    written = written_checkpoints(folder / "out" / "checkpoints")[-1]
    sizes = [path.stat().st_size for path in written.glob("__*")]
    # what a checkpoint takes shows in the steps after it; the last checkpoint has none
    free, busy = [], []
    for number in range(WARM, STEPS):
        begin_s, end_s = ends_s[number] - steps[number], ends_s[number]
        copies = number % EVERY == 0
        if not copies and not any(begin_s < last and first < end_s for first, last in spans.values()):
            free.append(steps[number])
        elif not copies and number > EVERY:
            busy.append(steps[number])
    alone_s = statistics.fmean(free)
    later = steps[EVERY:STEPS]
    measured = statistics.fmean(later) / alone_s - 1
    asked = Checkpoints(
        every_steps=EVERY, write_Bps=disk_Bps / ranks, blocking=False, size_bytes=max(sizes),
        stall_s=max(sizes) / copy_Bps,
    )  # fmt: skip
    predicted = 1 / goodput(alone_s, ranks, checkpoints=asked, failures=None).fraction - 1
    off = predicted / measured - 1
    writes_s = [last - first for first, last in spans.values()]
    return {
        "met": measured < MOST and abs(off) <= WITHIN, "cost": measured, "most": MOST, "predicted_cost": predicted,
        "off": off, "within": WITHIN, "every": EVERY, "ranks": ranks, "parameters": config.num_parameters,
        "bytes": sum(sizes), "bytes_of_a_rank": max(sizes), "disk_Bps": disk_Bps, "copy_Bps": copy_Bps,
        "write_Bps": sum(sizes) / statistics.median(writes_s), "write_s": [round(each, 2) for each in writes_s],
        "alone_s": alone_s, "steps_alone": len(free), "step_while_writing_s": statistics.fmean(busy) if busy else None,
        "stall_s": [steps[at] - alone_s for at in range(EVERY, STEPS, EVERY)], "predicted_stall_s": asked.stall_s,
        "probed_s": probed_s, "all_s": time.monotonic() - began_s, "step_s": steps,
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


def _disk_Bps(folder: Path, files: int, size_bytes: int) -> float:
    """Bytes per second of as many files written and brought to the disk at the same time as there are ranks."""
    block = os.urandom(2**24)

    def write(number: int) -> None:
        with (folder / f"probe-{number}").open("wb") as file:
            for _ in range(max(1, size_bytes // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    start = time.monotonic()
    with ThreadPoolExecutor(files) as pool:
        list(pool.map(write, range(files)))
    taken_s = time.monotonic() - start
    total = sum(path.stat().st_size for path in folder.glob("probe-*"))
    for path in folder.glob("probe-*"):
        path.unlink()
    return total / taken_s


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
