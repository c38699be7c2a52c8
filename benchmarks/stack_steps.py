"""How far off predictions of torch's own parallel parts are on our own steps: `python -m benchmarks.stack_steps`.

`twofold calibrate` runs a few steps of small decoders under plain torch, DistributedDataParallel, FSDP2 and DTensor,
for comparison and never for fitting (kind step, call decoder_step in benchmarks/data). They are in none of the
published tables, so their errors say what a prediction of somebody else's run is worth on a device whose kernels are
known. The residual of peak memory is what `simulator.scale.memory.memory_interval` takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from costmodels import Machine
from costmodels.points import Point, load_points
from plans.files import write_atomically
from plans.plan import Optimizer
from plans.scale import Degrees
from plans.transformer import TransformerConfig
from simulator.scale import Forecast, forecast
from simulator.scale.stacks import TorchNative

__all__ = ["main", "predicted", "stack_rows"]

FOLDER = Path(__file__).parent
_NOT_RELEASED = "h200-x4."
RESULTS = FOLDER / "results" / "stack_steps.json"


def predicted(point: Point, machine: Machine) -> Forecast:
    """The forecast of one measured step; `point.stack` is "" for plain torch on one device."""
    sizes, ranks = point.options, point.ranks
    tp = ranks if point.stack == "dtensor" else 1
    level = 0 if point.stack != "fsdp2" else 3 if sizes.get("reshard") else 2
    count = int(sizes.get("micro_batches", 1))
    config = TransformerConfig(
        name="decoder", num_layers=int(sizes["blocks"]), hidden=int(sizes["hidden"]), num_heads=int(sizes["heads"]),
        ffn=int(sizes["ffn"]), vocab=int(sizes["vocab"]), seq=int(sizes["sequence"]),
    )  # fmt: skip
    batch = int(sizes["batch"])
    degrees = Degrees(
        dp=ranks // tp, tp=tp, micro_batch=batch, global_batch=batch * count * (ranks // tp),
        optimizer=Optimizer(
            kind="adamw", settings={"lr": 1e-5}, parallel_level=level,
            reduce_every="step" if count > 1 else "micro_batch",
        ),
    )  # fmt: skip
    # plain steps drop their logits before the backward, the others hold them (executor/calibrate)
    return forecast(config, degrees, machine, stack=replace(TorchNative(), holds_logits=bool(point.stack)))


def stack_rows(files: Sequence[Path], device: str) -> list[dict[str, Any]]:
    """Per measured step both predictions over what was measured, less 1.

    Of steps that were measured in several sessions every time is a row; of their peaks the least counts. Those of the
    session h200-x4 are left out: 0.9 GiB of what had been measured before was still alive in it (equal programs took
    that much less in every other session).
    """
    points = [
        msgspec.structs.replace(point, figures={}) if file.name.startswith(_NOT_RELEASED) else point
        for file in files for point in load_points(file)[0]
        if point.kind == "step" and point.call == "decoder_step" and int(point.options.get("hidden", 0)) >= 1024
    ]  # fmt: skip
    peaks: dict[Any, float] = {}
    for point in points:
        if "peak_bytes" in point.figures:
            key = (point.stack, point.ranks, str(sorted(point.options.items())))
            peaks[key] = min(peaks.get(key, float("inf")), point.figures["peak_bytes"])
    rows, seen = [], set()
    for point in points:
        found = predicted(point, Machine.load(f"{device}-x{point.ranks}"))
        key = (point.stack, point.ranks, str(sorted(point.options.items())))
        row: dict[str, Any] = {
            "stack": point.stack or "torch", "ranks": point.ranks, "options": dict(point.options),
            "measured_s": point.seconds, "error": found.step_s / point.seconds - 1,
            "inside": found.low_s <= point.seconds <= found.high_s,
        }  # fmt: skip
        if key in peaks and key not in seen:
            seen.add(key)
            row["memory_error"] = found.peak_bytes / peaks[key] - 1
        rows.append(row)
    return rows


def main() -> None:
    """Predict all of them, print the errors by device and stack, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(RESULTS))
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "command": "python -m benchmarks.stack_steps", "devices": {},
    }  # fmt: skip
    for device in ("h200", "h100-sxm"):
        files = sorted(FOLDER.glob(f"data/*{device}-*x[124]*.jsonl.gz"))
        rows = stack_rows(files, device)
        if not rows:
            continue
        memory = [row["memory_error"] for row in rows if "memory_error" in row]
        score = {
            "steps": len(rows), "mean_absolute": statistics.fmean(abs(row["error"]) for row in rows),
            "bias": statistics.fmean(row["error"] for row in rows),
            "inside": statistics.fmean(row["inside"] for row in rows),
            "memory_root_mean_square": statistics.fmean(each**2 for each in memory) ** 0.5 if memory else None,
        }  # fmt: skip
        document["devices"][device] = score | {"files": [file.name for file in files], "rows": rows}
        print(device, {name: round(value, 4) if value is not None else None for name, value in score.items()})
        for stack in sorted({row["stack"] for row in rows}):
            own = [row for row in rows if row["stack"] == stack]
            print(
                f"  {stack:8s} {len(own):3d} steps  mean {statistics.fmean(abs(row['error']) for row in own):6.1%}  "
                f"bias {statistics.fmean(row['error'] for row in own):+6.1%}"
            )
    write_atomically(Path(arguments.out), (json.dumps(document, indent=1) + "\n").encode())
    print(f"saved {arguments.out}")


if __name__ == "__main__":
    main()
