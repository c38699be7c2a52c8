"""What asynchronous checkpoints cost where ranks share all cores, and what the simulator predicts of it.

Ranks that share saturated cores are slowed down by whatever else these compute, so the cost of checkpoints is the
processor time of the threads that write them, and of the copies that they write from, over that of the steps. It does
not depend on what else runs on the machine. The prediction for the largest model takes the time of a checkpoint from
the two smaller ones: a fixed part (ranks meet and plan) and a part per byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.gpt import plan_in, text_in
from benchmarks.reliability.training import losses, make_job
from executor.train.checkpoints.files import written_checkpoints
from simulator import Checkpoints, goodput

__all__ = ["cost"]

RANKS, EVERY, CORES = 8, 20, 2
WIDTHS = (64, 128, 192)
MOST, WITHIN = 0.03, 0.2
_DATA = """
import atexit, json, os, time
import numpy as np
from executor.train.checkpoints.checkpoint import Saver

spent, marks = {{"checkpoints_s": 0.0, "count": 0}}, {{}}

def timed(name):
    call = getattr(Saver, name)
    def inner(*arguments):
        begin_s = time.thread_time()
        try:
            return call(*arguments)
        finally:
            spent["checkpoints_s"] += time.thread_time() - begin_s
            spent["count"] += name == "_try"
    setattr(Saver, name, inner)

def fed():
    rank, tokens = os.environ.get("RANK"), np.load("{text}", mmap_mode="r")
    if rank is not None and not marks:
        marks["first"] = True
        timed("after"), timed("_try"), timed("_remove")
    draw = np.random.default_rng(1)
    for step in range({steps}):
        if rank is not None and step == {warm}:
            spent.update(checkpoints_s=0.0, count=0)
            marks["cpu_s"] = time.process_time()
        starts = draw.integers(0, len(tokens) - 33, {batch})
        rows = np.stack([tokens[at : at + 33] for at in starts])
        yield rows[:, :-1], rows[:, 1:]
    if rank is not None:
        with open(f"{folder}/spent.{{rank}}.json", "w") as file:
            json.dump(spent | {{"cpu_s": time.process_time() - marks["cpu_s"]}}, file)
    while True:
        yield rows[:, :-1], rows[:, 1:]
"""


def cost(folder: Path, steps: int, batch: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Train three widths with a checkpoint every 20 steps, and predict the widest from the others.

    Args:
        folder: folder of the runs.
        steps: steps of a run, the first 20 of which are its warm-up.
        batch: sequences of 32 letters in a step.
        say: told what was found.
    """
    rows = [_measured(folder / str(width), width, steps, batch) for width in WIDTHS]
    for row in rows:
        say(str(row))
    small, middle, large = rows
    per_byte_s = (middle["checkpoint_s"] - small["checkpoint_s"]) / (middle["bytes"] - small["bytes"])
    fixed_s = small["checkpoint_s"] - per_byte_s * small["bytes"]
    stall_s = fixed_s + per_byte_s * large["bytes"]
    asked = Checkpoints(every_steps=EVERY, write_Bps=1e9, blocking=False, size_bytes=large["bytes"], stall_s=stall_s)
    predicted = 1 / goodput(large["step_s"], RANKS, checkpoints=asked, failures=None).fraction - 1
    off = predicted / large["cost"] - 1
    met = large["cost"] < MOST and abs(off) <= WITHIN
    return {
        "met": met, "cost": large["cost"], "most": MOST, "predicted_cost": predicted, "off": off, "within": WITHIN,
        "every": EVERY, "ranks": RANKS, "rows": rows,
    }  # fmt: skip


def _measured(folder: Path, width: int, steps: int, batch: int) -> dict[str, Any]:
    plan_in(folder, hidden=width, batch=batch, dp=2, tp=2, pp=2, micro_batch=batch // 4)
    data = _DATA.format(text=text_in(folder), steps=steps, warm=EVERY, batch=batch, folder=folder)
    (folder / "data.py").write_text(data)
    more = f"print_every = {steps}\n[checkpoints]\nevery = {EVERY}\n[replicas]\nevery = 1000000\n"
    losses(make_job(folder, steps + 1, f"{folder}/data.py:fed", more), limit_s=1800.0)
    spent = [json.loads((folder / f"spent.{rank}.json").read_text()) for rank in range(RANKS)]
    written_s, count = sum(each["checkpoints_s"] for each in spent), spent[0]["count"]
    trained_s = sum(each["cpu_s"] for each in spent) - written_s
    newest = written_checkpoints(folder / "out" / "checkpoints")[-1]
    return {
        "width": width, "bytes": sum(path.stat().st_size for path in newest.iterdir()), "checkpoints": count,
        "step_s": trained_s / (steps - EVERY) / CORES, "checkpoint_s": written_s / count / CORES,
        "cost": written_s / trained_s,
    }  # fmt: skip
