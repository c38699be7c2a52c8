"""How an all-reduce hides beside a product: with and without a head start, on all ranks at once.

    python -m benchmarks.devices.hidden_reductions --gpus 4 --out FILE

A segment is the backward pass of a split linear layer: the product that gives the gradient of the input, the all-reduce
of that gradient, and the product that gives the gradient of the weight, which does not need it. The next segment begins
when both are there. FILE is written after every row.

    apart       the all-reduce ends before the second product begins
    beside      the all-reduce is issued first, the second product right behind it
    start N     the second product begins N cycles later, so that the all-reduce begins first
    priority    the all-reduce runs on a stream of high priority
    16 blocks   the all-reduce takes at most 16 multiprocessors
    eager       without a recording
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.devices.in_a_row import in_a_row_s, settle
from benchmarks.devices.jobs import check_gpus, on_ranks
from benchmarks.devices.profiled import kernels_of
from benchmarks.kept import measured_with, write_results
from executor.calibrate.rank_sync import RankSync
from executor.device import Device, pick_device
from executor.step.groups import connect

__all__ = ["main"]

SEGMENTS, ROUNDS, WARM_S, LIMIT_S = 16, 10, 0.25, 60.0
SIZES = ((2048, 4096, 2752), (8192, 4096, 2752), (8192, 4096, 1024), (2048, 8192, 5504))
"""tokens, width, width of a rank's part."""
STARTS = (2000, 4000, 6000, 8000)
"""Cycles."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all rows; the exit code of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("hidden_reductions.json"))
    parser.add_argument("--budget-s", type=float, default=60.0, help="begin no row after this many seconds")
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)  # of the ranks
    options = parser.parse_args(arguments)
    if options.until:
        _rank(options)
        return 0
    check_gpus(parser, options.gpus)
    write_results(options.out, measured_with() | {"ranks": options.gpus, "rows": []})
    job = ["--gpus", str(options.gpus), "--out", str(options.out), "--until", str(time.time() + options.budget_s)]
    return on_ranks("benchmarks.devices.hidden_reductions", job, options.gpus, limit_s=options.budget_s + 2 * LIMIT_S)


def _rank(options: argparse.Namespace) -> None:
    device = pick_device("auto")
    device.use()
    device.use_own_stream()
    connect(device, LIMIT_S)
    sync = RankSync(device, LIMIT_S)
    groups = {"": dist.new_group(), "priority": _group(priority=True), "16 blocks": _group(max_ctas=16)}
    token = torch.zeros(1, device=device.torch_device)
    for group in groups.values():
        dist.all_reduce(token, group=group)
    content = json.loads(options.out.read_text())
    content["environment"] = measured_with(device)["environment"]
    for tokens, width, part in SIZES:
        segment = _Segment(device, groups, tokens, width, part)
        row: dict[str, Any] = {"tokens": tokens, "width": width, "part": part, "step_s": {}, "kernels": {}}
        content["rows"].append(row)
        for name, run in segment.variants().items():
            if sync.from_rank_0(time.time() > options.until):
                break
            with sync.watch(f"{name} of {row}", timeout_s=LIMIT_S):
                row["step_s"][name] = took = _taken_s(device, sync, run, records=not name.startswith("eager"))
                if name in ("beside", "start 6000"):
                    row["kernels"][name] = _kernels(device, sync, run)
            if sync.rank == 0:
                print(f"{tokens:6d} {width:6d} {part:6d} {name:28s} {took * 1e6:9.1f} us", flush=True)
        if sync.rank == 0:
            write_results(options.out, content)
    sync.barrier()
    sync.close()
    dist.destroy_process_group()


def _group(*, priority: bool = False, max_ctas: int | None = None) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return dist.new_group(pg_options=options)


class _Segment:
    """The tensors of a segment, and its variants."""

    def __init__(self, device: Device, groups: dict[str, Any], tokens: int, width: int, part: int) -> None:
        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device.torch_device).bfloat16()

        self.device, self.groups = device, groups
        self.gradient, self.weight, self.x = made(tokens, part), made(part, width), made(tokens, width)
        self.of_x, self.of_weight = torch.empty_like(self.x), torch.empty_like(self.weight)

    def first(self) -> None:
        """The gradient of the input."""
        torch.mm(self.gradient, self.weight, out=self.of_x)

    def second(self) -> None:
        """The gradient of the weight."""
        torch.mm(self.gradient.t(), self.x, out=self.of_weight)

    def reduced(self, group: str = "") -> Any:
        """The all-reduce, under way."""
        return dist.all_reduce(self.of_x, group=self.groups[group], async_op=True)

    def beside(self, group: str = "", *, start: int = 0) -> Callable[[], None]:
        """The all-reduce first, the second product during it, `start` cycles later."""

        def run() -> None:
            self.first()
            work = self.reduced(group)
            if start:
                self.device.spin(start)
            self.second()
            work.wait()

        return run

    def products(self) -> None:
        """Without the all-reduce."""
        self.first()
        self.second()

    def apart(self) -> None:
        """One after the other."""
        self.first()
        self.reduced().wait()
        self.second()

    def variants(self) -> dict[str, Callable[[], None]]:
        """Name -> a segment."""
        return {
            "products": self.products,
            "second alone": self.second,
            "reduction": lambda: self.reduced().wait(),
            "reduction, 16 blocks": lambda: self.reduced("16 blocks").wait(),
            "apart": self.apart,
            "beside": self.beside(),
            "priority": self.beside("priority"),
            **{f"start {cycles}": self.beside(start=cycles) for cycles in STARTS},
            "start 6000, priority": self.beside("priority", start=6000),
            "start 6000, 16 blocks": self.beside("16 blocks", start=6000),
            "eager, beside": self.beside(),
            "eager, start 6000": self.beside(start=6000),
        }


def _taken_s(device: Device, sync: RankSync, run: Callable[[], None], *, records: bool) -> float:
    """Seconds of a segment of the slowest rank, in a row."""
    repeat, release = _repeated(device, run, records=records)
    sync.barrier()
    settle(device, sync, repeat, WARM_S)
    taken_s = in_a_row_s(device, repeat, ROUNDS)
    release()
    return float(sync.maximum([taken_s / ROUNDS / SEGMENTS])[0])


def _repeated(
    device: Device, run: Callable[[], None], *, records: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Segments in a row, and what frees them."""

    def row() -> None:
        for _ in range(SEGMENTS):
            run()

    run()
    if not records:
        return row, lambda: None
    recording = device.capture(row)
    assert recording is not None
    return recording.replay, recording.release


def _kernels(device: Device, sync: RankSync, run: Callable[[], None]) -> list[tuple[str, float, float, Any]]:
    """Kernels in the middle of a replay: name, start and length in microseconds, grid."""
    repeat, release = _repeated(device, run, records=True)
    for _ in range(3):
        repeat()
    sync.barrier()
    kernels = kernels_of(device, repeat)
    release()
    middle = kernels[len(kernels) // 2 :][:10]
    return [
        (each.name[:60], (each.start_s - middle[0].start_s) * 1e6, each.seconds * 1e6, each.grid) for each in middle
    ]


if __name__ == "__main__":
    sys.exit(main())
