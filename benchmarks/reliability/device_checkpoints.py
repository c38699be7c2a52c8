"""What asynchronous checkpoints of a model of 2 billion parameters cost on GPUs, and what the simulator predicts.

    python -m benchmarks.reliability.device_checkpoints --gpus 4 --out FILE
    python -m benchmarks.reliability.device_checkpoints --gpus 2 --smoke --out FILE     tiny, on CPU ranks

The disk and the copy to the host are measured alone first. From them, the bytes of a rank and the time of steps without
a checkpoint follows the predicted cost. Then the run: the steps before the first checkpoint are the comparison, all
behind it pay for what is copied and written next to them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import measured_with, write_results
from benchmarks.reliability.training import NotEnded, ended, figures, make_job, started
from costmodels import Machine
from executor.device import Device, pick_device
from executor.train.checkpoint_files import written_checkpoints
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


def main() -> int:
    """Measure, predict and compare; 1 if the cost or its prediction is outside of what is asked."""
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
        folder: of the run.
        ranks: devices, all data parallel.
        batch: sequences of a step.
        device: of this process, for the probes.
        smoke: tiny sizes on CPUs.
    """
    config = MODELS[smoke]
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=2)
    machine = Machine.load(f"h200-x{ranks}")
    graph = transformer(config, batch_size=batch)
    plan = uniform_plan(graph, machine, optimizer=optimizer, dp=ranks, micro_batch=batch // ranks // 2)
    save_plan(plan, folder / "plan.json")
    probe_bytes = 2**24 if smoke else PROBE_BYTES
    disk_Bps, copy_Bps = _disk_Bps(folder, ranks, probe_bytes), _copy_Bps(device, probe_bytes)
    tables = f"[checkpoints]\nevery = {EVERY}\n[replicas]\nevery = 1000000\n"
    more = f"print_every = {STEPS}\ndevice = '{device.kind}'\n{tables}"
    job = make_job(folder, STEPS + 1, "random", more)
    run, seen, is_over = started(job), dict[str, float](), threading.Event()
    watcher = threading.Thread(target=_note_names, args=(folder / "out" / "checkpoints", seen, is_over.is_set))
    watcher.start()
    code, said = ended(job, run, limit_s=400.0)
    is_over.set()
    watcher.join()
    if code:
        raise NotEnded(f"the run ended with {code}: {said[-1500:]}")
    steps = [figure["step_s"] for figure in figures(job)]
    alone_s = statistics.median(steps[WARM : EVERY - 1])
    later = steps[EVERY:STEPS]  # what a checkpoint takes shows in the step behind it
    written = written_checkpoints(folder / "out" / "checkpoints")[-1]
    sizes = [path.stat().st_size for path in written.glob("__*")]
    asked = Checkpoints(
        every_steps=EVERY, write_Bps=disk_Bps / ranks, blocking=False, size_bytes=max(sizes),
        stall_s=max(sizes) / copy_Bps,
    )  # fmt: skip
    measured = sum(later) / len(later) / alone_s - 1
    predicted = 1 / goodput(alone_s, ranks, checkpoints=asked, failures=None).fraction - 1
    off = predicted / measured - 1
    return {
        "met": measured < MOST and abs(off) <= WITHIN, "cost": measured, "most": MOST, "predicted_cost": predicted,
        "off": off, "within": WITHIN, "every": EVERY, "ranks": ranks, "parameters": config.num_parameters,
        "bytes": sum(sizes), "bytes_of_a_rank": max(sizes), "disk_Bps": disk_Bps, "copy_Bps": copy_Bps,
        "alone_s": alone_s, "write_s": _spans(seen), "step_s": steps,
    }  # fmt: skip


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


def _copy_Bps(device: Device, size_bytes: int) -> float:
    """Bytes per second from the device to pinned memory of the host."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device.torch_device)
    target = device.host_buffer((size_bytes,), torch.uint8)
    for _ in range(2):
        device.synchronize()
        start = time.monotonic()
        target.copy_(source, non_blocking=True)
        device.synchronize()
        taken_s = time.monotonic() - start
    del source
    device.release_memory()
    return size_bytes / taken_s


def _note_names(folder: Path, seen: dict[str, float], is_over: Callable[[], bool]) -> None:
    """When every name was there for the first time."""
    while not is_over():
        for path in folder.glob(".step-*.writing") if folder.exists() else ():
            seen.setdefault(path.name, time.monotonic())
        for path in folder.glob("step-*") if folder.exists() else ():
            seen.setdefault(path.name, time.monotonic())
        time.sleep(0.02)


def _spans(seen: dict[str, float]) -> list[float]:
    """Seconds of every checkpoint from its first file to its own name."""
    ends = {name: at for name, at in seen.items() if not name.startswith(".")}
    return [round(at - seen[f".{name}.writing"], 2) for name, at in sorted(ends.items()) if f".{name}.writing" in seen]


if __name__ == "__main__":
    sys.exit(main())
