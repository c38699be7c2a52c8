"""A GPT on text whose processes are killed at random, next to one that nothing happens to; then on other plans."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.gpt import plan_in, text_in
from benchmarks.reliability.training import (
    agent_of,
    ended,
    figures,
    losses,
    make_job,
    pids_of,
    set_steps,
    started,
)

__all__ = ["interrupted"]

RANKS, EVERY, MORE_STEPS = 4, 20, 8
WITHIN = 2e-6
PLAN = {"dp": 2, "tp": 2, "zero": 1}
OTHERS = {
    "four data-parallel ranks, level 2": {"dp": 4, "zero": 2},
    "two stages of two ranks": {"dp": 2, "pp": 2, "micro_batch": 2},
    "one rank": {},
}
LIMIT_S = 3600.0


def interrupted(folder: Path, steps: int, kills: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train with and without kills, and resume from the end of the killed run on other plans.

    Args:
        folder: folder of all runs.
        steps: steps of a run.
        kills: of a random process each, at random steps.
        seed: of both.
        say: told how far it is.
    """
    whole, killed = (_job(folder / name, steps, PLAN) for name in ("whole", "killed"))
    expected = losses(whole, limit_s=LIMIT_S)
    say(f"{steps} steps, loss {expected[0]:.4f} to {expected[-1]:.4f}")
    draw = random.Random(seed)
    told = []
    for at in sorted(draw.sample(range(1, steps), kills)):
        told.append(_killed(killed, at, draw))
        say(told[-1])
    ran = losses(killed, resume=True, limit_s=LIMIT_S)
    weights = [np.load(job.parent / "out" / "weights.npz") for job in (whole, killed)]
    same = all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0].files)
    say(f"after {kills} kills: equal losses: {ran == expected}, equal weights: {same}")
    apart = {}
    shutil.copytree(killed.parent / "out" / "checkpoints", folder / "checkpoints")
    set_steps(whole, steps + MORE_STEPS)
    after = losses(whole, resume=True)[steps:]
    for name, degrees in OTHERS.items():
        other = _job(folder / name.replace(" ", "-"), steps + MORE_STEPS, degrees)
        shutil.copytree(folder / "checkpoints", other.parent / "out" / "checkpoints")
        found = losses(other, resume=True)
        apart[name] = max(abs(a - b) / b for a, b in zip(found[-MORE_STEPS:], after, strict=True))
        say(f"{name}: losses differ by {apart[name]:.1e} at most")
    met = ran == expected and same and max(apart.values()) <= WITHIN
    return {
        "met": met, "steps": steps, "kills": told, "equal_losses": ran == expected, "equal_weights": same,
        "first_loss": expected[0], "last_loss": expected[-1], "resharded_apart": apart, "within": WITHIN,
    }  # fmt: skip


def _job(folder: Path, steps: int, degrees: dict[str, int]) -> Path:
    plan_in(folder, **degrees)
    more = f"gather_weights = true\nprint_every = 1000\n[checkpoints]\nevery = {EVERY}\n"
    return make_job(folder, steps, text_in(folder.parent), more)  # the same data for all: a resume compares their names


def _killed(job: Path, at: int, draw: random.Random) -> str:
    """Start or resume the run and kill a process after the given step; return which one, and what the run said."""
    which, rank = draw.choice(("rank", "guard", "agent", "launcher")), draw.randrange(RANKS)
    checkpoints = job.parent / "out" / "checkpoints"
    run = started(job, resume=checkpoints.exists())
    before_s = time.time()
    lines = job.parent / "out" / "metrics.jsonl"
    while not lines.exists() or lines.stat().st_mtime < before_s or len(figures(job)) < at:
        if run.poll() is not None:
            raise RuntimeError(f"it ended by itself: {ended(job, run, LIMIT_S)}")
        time.sleep(0.02)
    pids = pids_of(job, rank)
    assert pids is not None
    pids |= {"agent": agent_of(pids["guard"]), "launcher": run.pid}
    os.kill(pids[which], signal.SIGKILL)
    code, said = ended(job, run, LIMIT_S)
    while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):  # after the launcher the kernel ends the others
        time.sleep(0.02)
    of = f" {rank}" if which in ("rank", "guard") else ""
    return (
        f"step {at}: {which}{of} killed, exit code {code}, {(said.splitlines() or [''])[-1].partition('; its log')[0]}"
    )
