"""Memory, files and threads of a long run on many ranks, and of many forecasts in one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.training import ended, make_job, pids_of, started
from costmodels import Machine
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.mlp import mlp_graph
from plans.model.transformer import transformer, transformer_config
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy, save_plan
from simulator import simulate
from simulator.forecast import forecast

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


def grown(samples: Sequence[Held], warm: float = WARM) -> dict[str, Any]:
    """How the last quarter of the samples after the warm-up differs from their first, each by its median."""
    after = samples[int(len(samples) * warm) :]
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
    """Forecasts of `count` different configurations, of which every 50th is also lowered and simulated.

    The first half is the warm-up, in which caches fill up to their limits.
    """
    samples, done = [], 0
    for number, (model, machine, degrees) in enumerate(_configurations(count)):
        config = transformer_config(model, num_layers=8, seq=int(degrees.pop("seq")))
        asked = Degrees(**degrees)
        with suppress(TwofoldError):  # some degrees do not divide some models
            forecast(config, asked, machine)
            done += 1
            if number % 50 == 0:
                simulate(lower(plan_of(asked, transformer(config, batch_size=asked.global_batch))), machine)
        if number % max(1, count // 100) == 0:
            samples.append(held())
    found = grown(samples, warm=0.5)
    say(f"{done} forecasts of {count} configurations: {found}")
    return {"forecasts": done, "samples": len(samples), **found}


def _configurations(count: int) -> Iterator[tuple[str, Machine, dict[str, Any]]]:
    """Models, machines and degrees, none of them twice."""
    draw, seen = random.Random(1), set[str]()
    machines = {name: Machine.load(name) for name in ("h200-x8", "h100-sxm-x8", "h100-sxm-x16", "a100-80gb-x8")}
    while len(seen) < count:
        model, name = draw.choice(("llama-3-8b", "llama-2-7b", "llama-3-70b", "mixtral-8x7b")), draw.choice([*machines])
        dp, tp, pp, cp = (draw.choice((1, 2, 4)) for _ in range(4))
        degrees = {
            "dp": dp, "tp": tp, "pp": pp, "cp": cp, "seq": draw.randrange(256, 4097, 256),
            "micro_batch": draw.choice((1, 2)), "global_batch": 16 * draw.randrange(1, 9),
            "recompute": draw.choice(("none", "selective", "full")), "sequence_parallel": tp > 1,
            "schedule": draw.choice(("1f1b", "gpipe", "zb_h1")), "optimizer": Optimizer(
                kind="adamw", settings={"lr": 1e-4}, parallel_level=draw.randrange(4) if dp > 1 else 0
            ),
        }  # fmt: skip
        what = f"{model} {name} {degrees}"
        if dp * tp * pp * cp <= machines[name].num_devices and what not in seen:
            seen.add(what)
            yield model, machines[name], degrees
