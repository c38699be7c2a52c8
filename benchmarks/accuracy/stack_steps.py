"""How far off predictions of torch's own parallel parts are on our own steps.

`twofold calibrate` runs a few steps of small decoders under plain torch, DistributedDataParallel, FSDP2 and DTensor,
for comparison and never for fitting (kind step, call decoder_step in benchmarks/data). They are in none of the
published tables, so their errors say what a prediction of somebody else's run is worth on a device whose kernels are
known. The residual of peak memory is what `simulator.estimate.memory.memory_interval` takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import FOLDER
from costmodels import Machine
from costmodels.fit.points import Point, load_points
from plans.degrees import Degrees
from plans.files import write_atomically
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from simulator.forecast import Forecast, forecast
from simulator.stacks import TorchNative

__all__ = ["main", "predicted", "stack_rows"]

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


_Key = tuple[str, int, str]


def _key(point: Point) -> _Key:
    return point.stack, point.ranks, str(sorted(point.options.items()))


def _least(points: Iterable[Point]) -> dict[_Key, float]:
    """The least peak of equal steps."""
    found: dict[_Key, float] = {}
    for point in points:
        if (size := point.figures.get("peak_bytes")) is not None:
            found[_key(point)] = min(found.get(_key(point), float("inf")), size)
    return found


def stack_rows(files: Sequence[Path], device: str) -> list[dict[str, Any]]:
    """Per measured step both predictions over what was measured, less 1.

    Of steps that were measured in several sessions every time is a row; of their peaks the least counts. Sessions in
    which a plain step took over 1 % more than in another one had not released all that was measured before: their peaks
    are left out.
    """
    sessions = [
        [point for point in load_points(file)[0] if point.kind == "step" and point.call == "decoder_step"
         and int(point.options.get("hidden", 0)) >= 1024]
        for file in files
    ]  # fmt: skip
    peaks = _least(point for points in sessions for point in points)
    clean = [
        points for points in sessions
        if all(size < 1.01 * peaks[key] for key, size in _least(points).items() if not key[0])
    ]  # fmt: skip
    peaks = _least(point for points in clean for point in points)
    points = [point for points in sessions for point in points]
    rows: list[dict[str, Any]] = []
    seen: set[_Key] = set()
    for point in points:
        found = predicted(point, Machine.load(f"{device}-x{point.ranks}"))
        key = _key(point)
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
        "date": time.strftime("%Y-%m-%d"), "command": "python -m benchmarks.accuracy.stack_steps", "devices": {},
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
