"""Memory, files and threads of a long run on many ranks, and of many forecasts in one process."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.training import ended, make_job, pids_of, started
from plans.layout import Layout
from plans.model.mlp import mlp_graph
from plans.plan import Optimizer, Plan, Stage, Strategy, save_plan

__all__ = ["Held", "grown", "held", "of_forecasts", "of_steps"]

WARM = 0.25
"""The part of a run that is its warm-up."""
GROWTH = 0.01
"""Of memory, from the first quarter after the warm-up to the last: pages that the allocator holds come and go."""
LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Resources of a process: resident bytes, open files, threads."""

    memory_bytes: int
    files: int
    threads: int


def held(pid: int | str = "self") -> Held:
    """Current resources of a process (Linux)."""
    folder = Path(f"/proc/{pid}")
    said = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    memory = 1024 * int(said["VmRSS"].split()[0])
    return Held(memory_bytes=memory, files=len(list((folder / "fd").iterdir())), threads=int(said["Threads"]))


def grown(samples: Sequence[Held]) -> dict[str, Any]:
    """How the last quarter of the samples after the warm-up differs from their first, each by its median."""
    after = samples[int(len(samples) * WARM) :]
    part = max(1, len(after) // 4)
    found: dict[str, Any] = {}
    for name in ("memory_bytes", "files", "threads"):
        found[name] = [int(np.median([getattr(each, name) for each in some])) for some in (after[:part], after[-part:])]
    first, last = found["memory_bytes"]
    met = last <= first * (1 + GROWTH) and all(found[name][0] >= found[name][1] for name in ("files", "threads"))
    return {"met": met, **found}


def of_steps(folder: Path, steps: int, ranks: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Steps of a small network on ranks that share its batch, with 10 checkpoints; the worst rank counts."""
    job = make_job(folder, steps, "random", f"print_every = {steps}\n[checkpoints]\nevery = {steps // 10}\n")
    graph = mlp_graph([6, 64, 2], ranks)
    stage = Stage(mesh=Layout((ranks,), ("dp",)), operators=tuple(operator.name for operator in graph.operators))
    rows = {
        operator.name: Strategy(dims={str(graph.spec(operator).inputs[0][0]): ("dp",)}) for operator in graph.operators
    }
    optimizer = Optimizer(kind="adamw", settings={"lr": 0.001})
    save_plan(Plan(graph=graph, stages=(stage,), strategies=rows, optimizer=optimizer), folder / "plan.json")
    run = started(job)
    samples: dict[int, list[Held]] = {rank: [] for rank in range(ranks)}
    lines, seen = folder / "out" / "metrics.jsonl", 0
    while run.poll() is None:
        time.sleep(0.2)
        done = lines.read_bytes().count(b"\n") if lines.exists() else 0
        if done >= steps or done - seen < steps // 100:
            continue
        seen = done
        for rank in samples:
            pids = pids_of(job, rank)
            assert pids is not None
            samples[rank].append(held(pids["rank"]))
    code, said = ended(job, run, LIMIT_S)
    if code:
        raise RuntimeError(said[-500:])
    found = {rank: grown(sample) for rank, sample in samples.items()}
    worst = max(found, key=lambda rank: found[rank]["memory_bytes"][1] / found[rank]["memory_bytes"][0])
    say(f"{steps} steps on {ranks} ranks, {len(samples[worst])} samples: rank {worst} {found[worst]}")
    met = all(each["met"] for each in found.values())
    return {"steps": steps, "ranks": ranks, "samples": len(samples[worst]), "worst_rank": worst, **found[worst],
            "met": met}  # fmt: skip


def of_forecasts(count: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Forecasts of a transformer in 672 degrees, batches and lengths in turn."""
    import twofold as tf

    samples = []
    degrees = ({"tp": 8}, {"tp": 4, "dp": 2}, {"tp": 2, "dp": 2, "pp": 2})
    kinds = itertools.product(range(512, 8193, 512), degrees, range(8, 120, 8))
    for number, (seq, degree, batch) in enumerate(itertools.islice(itertools.cycle(kinds), count)):
        tf.predict("llama-3-8b", "h200-x8", seq=seq, global_batch=batch, **degree)
        if number % max(1, count // 100) == 0:
            gc.collect()
            samples.append(held())
    found = grown(samples)
    say(f"{count} forecasts: {found}")
    return {"forecasts": count, "samples": len(samples), **found}
