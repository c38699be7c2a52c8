"""Expert parallelism on accelerators gives what one process gives on a CPU.

    python -m benchmarks.experts_on_devices EXPECTED.json                                    one CPU process, float64
    torchrun --nproc-per-node N -m benchmarks.experts_on_devices EXPECTED.json --out R.json  plans of N ranks, float32

A few steps of a tiny mixture of experts: losses, and for every weight the norm of the difference over the norm; and
executed communication against planned.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from costmodels import Machine
from executor.device import pick_device
from executor.step.groups import connect
from executor.train.batches import random_batches
from executor.train.models import RandomParameters
from executor.train.run import run_rank
from plans.lower import lower
from plans.model.graph import Graph
from plans.model.transformer import Experts, TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan
from search import uniform_plan

CONFIG = TransformerConfig(
    name="experts", num_layers=3, hidden=64, num_heads=4, num_kv_heads=2, ffn=96, vocab=64, seq=32, dtype="float32",
    experts=Experts(num_experts=8, top_k=2, ffn=48, num_shared=1, num_dense_layers=1, capacity_factor=1.0),
)  # fmt: skip
STEPS = 4
BATCH = 8
DEGREES: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2},
    {"dp": 2, "ep": 2, "zero": 3},
    {"dp": 4, "ep": 4, "zero": 1},
    {"dp": 4, "ep": 2, "micro_batch": 1},
    {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    {"dp": 2, "ep": 2, "pp": 2, "micro_batch": 1, "recompute": "full"},
)


def _plan(dtype: str, **degrees: Any) -> Plan:
    graph = transformer(replace(CONFIG, dtype=dtype), batch_size=BATCH)
    return uniform_plan(graph, Machine.load("h200-x8"), optimizer=Optimizer(settings={"lr": 0.05}), **degrees)


def _trained(plan: Plan, weights: Graph, device: str, folder: Path) -> tuple[Any, Path]:
    """Losses and the file of weights; initial weights and data are those of `weights`, whatever the plan's dtype."""
    path = folder / "weights.npz"
    result = run_rank(
        lower(plan), plan, list(random_batches(weights, 0, STEPS)), RandomParameters(weights, 0), STEPS, device=device,
        weights_path=path,
    )  # fmt: skip
    return result, path


def main() -> int:
    """Write what is expected, or compare with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("expected")
    parser.add_argument("--out")
    options = parser.parse_args()
    weights, path = _plan("float32").graph, Path(options.expected)
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    with tempfile.TemporaryDirectory() as folder:
        if ranks == 1:
            result, file = _trained(_plan("float64"), weights, "cpu", Path(folder))
            path.write_text(json.dumps({"losses": [float(loss) for loss in result.losses]}))
            path.with_suffix(".npz").write_bytes(file.read_bytes())
            return 0
        losses, rows = json.loads(path.read_text())["losses"], []
        device = pick_device("auto")
        device.use()
        connect(device)  # once for all plans
        for degrees in DEGREES:
            plan = _plan("float32", **degrees)
            if plan.num_ranks != ranks:
                continue
            result, file = _trained(plan, weights, "auto", Path(folder))
            dist.barrier()
            if rank == 0:
                rows.append(_row(degrees, result, losses, file, path.with_suffix(".npz")))
                print(rows[-1], flush=True)
    dist.destroy_process_group()
    if options.out and rank == 0:
        said = {"date": datetime.date.today().isoformat(), "command": " ".join(sys.argv), "rows": rows}
        Path(options.out).write_text(json.dumps(said, indent=1) + "\n")
    return 0


def _row(degrees: dict[str, Any], result: Any, losses: list[float], file: Path, expected: Path) -> dict[str, Any]:
    found = np.asarray(result.losses, dtype=float)
    worst = 0.0
    with np.load(file) as ours, np.load(expected) as theirs:
        for name in theirs.files:
            gap = np.linalg.norm(ours[name].astype(float) - theirs[name]) / np.linalg.norm(theirs[name])
            worst = max(worst, float(gap))
    return degrees | {
        "loss_max_rel_diff": float(np.max(np.abs(found / np.asarray(losses) - 1))),
        "weights_max_rel_diff": worst,
        "differences": list(result.differences),
    }


if __name__ == "__main__":
    sys.exit(main())
