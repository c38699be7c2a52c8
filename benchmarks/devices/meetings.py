"""What ranks lose where they meet: compute and an all-reduce in turn, in one recording, on all ranks at once.

    python -m benchmarks.devices.meetings --gpus 2 --out FILE
    python -m benchmarks.devices.meetings --gpus 4 --out FILE
    python -m benchmarks.devices.meetings --share     of kept results: how much of a reduction depends on the clock
    python -m benchmarks.devices.meetings --wander    of kept results: by how much clocks differ between two meetings

Every rank computes for about a given time, then all of them reduce, `SEGMENTS` times. Events inside the recording say
on every rank when it had computed and when it had reduced, so that the parts of a meeting can be told apart:

    later       the slowest rank's compute over the mean of all, which the others wait for
    begins      the reduction on the last rank that comes, over a reduction in a row of such
    computes    compute between reductions over compute alone, at the clock of either

Spins take a fixed number of cycles and little power; products take what a training step takes. FILE is written after
every row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import FOLDER
from benchmarks.devices.in_a_row import in_a_row_s, settle
from benchmarks.devices.jobs import check_gpus, on_ranks
from benchmarks.kept import measured_with, write_results
from costmodels.price.power import slowest_of
from executor.calibrate.communication import collective_call, recorded_together
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.timing import Timer
from executor.device import Device, pick_device
from executor.step.groups import connect

__all__ = ["main"]

SEGMENTS = 24
WARM_S, ROUNDS = 0.4, 8
LIMIT_S = 60.0
COMPUTES = {"product": (4e-4, 1.5e-3), "add": (4e-4,), "spin": (1e-4, 4e-4, 1.5e-3)}
"""Kind of compute -> about how many seconds lie between two meetings."""
SIZES = (2**26, 2**23, 2**14)
"""Bytes of the all-reduce."""
KEPT = FOLDER / "results" / "meetings_h200.json"
_Rows = list[list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all rows; the exit code of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("meetings.json"))
    parser.add_argument("--share", action="store_true", help="print the share of time that depends on the clock")
    parser.add_argument("--wander", action="store_true", help="print the spread of clocks between two meetings")
    parser.add_argument("--computes", nargs="*", choices=COMPUTES, default=list(COMPUTES))
    parser.add_argument("--budget-s", type=float, default=60.0, help="begin no row after this many seconds")
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)  # of the ranks
    options = parser.parse_args(arguments)
    if options.until:
        _rank(options)
        return 0
    if options.share:
        shares = [share for each in json.loads(KEPT.read_text()).values() for share in clock_shares(each["rows"])]
        print(f"{statistics.median(shares):.2f} of {', '.join(f'{share:.2f}' for share in sorted(shares))}")
        return 0
    if options.wander:
        for between_s, spreads in sorted(wanders(json.loads(KEPT.read_text()).values()).items()):
            each = ", ".join(f"{spread:.1%}" for spread in spreads)
            print(f"{between_s * 1e3:.1f} ms: {statistics.median(spreads):.1%} of {each}")
        return 0
    check_gpus(parser, options.gpus)
    write_results(options.out, measured_with() | {"ranks": options.gpus, "rows": []})
    job = [
        "--gpus", str(options.gpus), "--out", str(options.out), "--until", str(time.time() + options.budget_s),
        "--computes", *options.computes,
    ]  # fmt: skip
    code = on_ranks("benchmarks.devices.meetings", job, options.gpus, limit_s=options.budget_s + 2 * LIMIT_S)
    print(table(json.loads(options.out.read_text())["rows"]))
    return code


def _rank(options: argparse.Namespace) -> None:
    device = pick_device("auto")
    device.use()
    device.use_own_stream()
    connect(device, LIMIT_S)
    sync, timer = RankSync(device, LIMIT_S), Timer(device)
    content = json.loads(options.out.read_text())
    content["environment"] = measured_with(device)["environment"]
    alone = {size: _reduction_alone_s(timer, sync, size) for size in SIZES}
    spaced = [(kind, aim) for kind in options.computes for aim in COMPUTES[kind]]
    for (kind, aim), size in itertools.product(spaced, SIZES):
        if sync.from_rank_0(time.time() > options.until):
            break
        with sync.watch(f"{kind} for {aim} s, {size} bytes", timeout_s=LIMIT_S):
            row = _measured(device, sync, timer, kind, aim, size, alone[size])
        content["rows"].append(row)
        if sync.rank == 0:
            write_results(options.out, content)
            print(table([row]).splitlines()[1], flush=True)
        device.release_memory()
    sync.barrier()
    sync.close()
    dist.destroy_process_group()


def _reduction_alone_s(timer: Timer, sync: RankSync, size: int) -> float:
    """Of reductions in a row in one recording, as calibration takes it."""
    call = collective_call("all_reduce", sync.groups[sync.size], sync.size, size // 2, timer.device.torch_device)
    sample = recorded_together(timer, sync, call)
    assert sample is not None, "this device cannot record reductions"
    return sample.seconds


def _measured(
    device: Device, sync: RankSync, timer: Timer, kind: str, aim_s: float, size: int, alone_s: float
) -> dict[str, Any]:
    compute = _compute(kind, aim_s, device, timer, sync)
    reduce = collective_call("all_reduce", sync.groups[sync.size], sync.size, size // 2, device.torch_device)
    row: dict[str, Any] = {"compute": kind, "aim_s": aim_s, "size_bytes": size, "reduction_alone_s": alone_s}
    row["alone"] = _series(device, sync, timer, [compute])
    row["together"] = together = _series(device, sync, timer, [compute, reduce])
    row["whole_s"] = _whole_s(device, sync, timer, [compute, reduce])
    found = sync.gather([row["alone"], together])
    if sync.rank:
        return row
    apart = np.array([each[0]["parts_s"] for each in found])[:, :, 0]  # [ranks, segments]
    parts = np.array([each[1]["parts_s"] for each in found])  # [ranks, segments, 2]
    clocks = [[each[at]["clock_MHz"] for each in found] for at in (0, 1)]
    computed, reduced = parts[:, 1:, 0], parts[:, 1:, 1]
    at_its_clock = apart.mean() * np.mean(clocks[0]) / np.mean(clocks[1]) if kind != "add" else apart.mean()
    row |= {
        "alone": {"compute_s": apart.mean(axis=1).tolist(), "clock_MHz": clocks[0]},
        "together": {
            "compute_s": computed.mean(axis=1).tolist(), "reduction_s": reduced.mean(axis=1).tolist(),
            "clock_MHz": clocks[1],
        },
        "later_s": float((computed.max(axis=0) - computed.mean(axis=0)).mean()),
        "slower_s": float(computed.mean(axis=1).max() - computed.mean()),
        "begins_s": float(reduced.min(axis=0).mean() - alone_s),
        "computes_s": float(computed.mean() - at_its_clock),
        "extra_s": row["whole_s"] - float(at_its_clock) - alone_s,
    }  # fmt: skip
    return row


def clock_shares(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Of each row with the largest reductions between products: the share of their time that depends on the clock.

    The reduction of the rank that comes last is compared with one between additions, which do not lower the clock.
    """
    large = [row for row in rows if row["size_bytes"] == max(SIZES)]
    free = {name: [row for row in large if row["compute"] == name] for name in ("add", "product")}
    return [
        (min(row["together"]["reduction_s"]) / min(quick["together"]["reduction_s"]) - 1)
        / (_mean(quick["together"]["clock_MHz"]) / _mean(row["together"]["clock_MHz"]) - 1)
        for quick in free["add"]
        for row in free["product"]
    ]


def wanders(results: Iterable[dict[str, Any]]) -> dict[float, list[float]]:
    """Seconds between meetings -> of each row of products and small reductions: the standard deviation of the clocks.

    A segment of n ranks takes longer than their mean compute and a reduction alone by as much as the slowest of n of a
    normal sample differs from its mean.
    """
    found: dict[float, list[float]] = {}
    for each in results:
        for row in each["rows"]:
            if row["compute"] != "product" or row["size_bytes"] == max(SIZES):
                continue
            compute_s = row["together"]["compute_s"]
            later = 1 - (_mean(compute_s) + row["reduction_alone_s"]) / row["whole_s"]
            found.setdefault(row["aim_s"], []).append(later / slowest_of(len(compute_s)))
    return found


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _compute(kind: str, aim_s: float, device: Device, timer: Timer, sync: RankSync) -> Callable[[], object]:
    """Compute that lasts about so long, of equal calls on every rank."""
    place = device.torch_device
    if kind == "spin":
        cycles = round(aim_s * 1.7e9)
        return lambda: device.spin(cycles)
    if kind == "add":
        x = torch.randn(2**24, device=place).bfloat16()
        y, made = x.flip(0), torch.empty_like(x)
        once: Callable[[], object] = lambda: torch.add(x, y, out=made)  # noqa: E731
    else:
        x = torch.randn(2048, 4096, device=place).bfloat16()
        y, made = torch.randn(4096, 4096, device=place).bfloat16(), torch.empty_like(x)
        once = lambda: torch.mm(x, y, out=made)  # noqa: E731
    count = int(max(1.0, round(aim_s / sync.maximum([timer.device_time([once]).seconds])[0])))
    return lambda: [once() for _ in range(count)]


def _series(device: Device, sync: RankSync, timer: Timer, calls: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Seconds of every part of every segment on this rank, means over rounds, and the clock behind them."""
    marks: list[Any] = []

    def run() -> None:
        marks.append(device.recorded_mark())
        for _ in range(SEGMENTS):
            for call in calls:
                call()
                marks.append(device.recorded_mark())

    for call in calls:
        call()
    recording = device.capture(run)
    assert recording is not None, "this device cannot record launches"
    sync.barrier()
    settle(device, sync, recording.replay, WARM_S)
    times: list[_Rows] = []
    clocks = []
    for _ in range(ROUNDS):
        recording.replay()
        recording.replay()
        spun = timer.spin_marks()
        device.synchronize()
        clocks.append(timer.clock_of(spun))
        taken = [device.between_ns(first, last) / 1e9 for first, last in itertools.pairwise(marks)]
        times.append([list(each) for each in zip(*[iter(taken)] * len(calls), strict=True)])
    recording.release()
    return {"parts_s": np.mean(times, axis=0).tolist(), "clock_MHz": float(np.median(clocks))}


def _whole_s(device: Device, sync: RankSync, timer: Timer, calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of a segment of the slowest rank, without events between its parts."""
    recording = device.capture(lambda: [call() for _ in range(SEGMENTS) for call in calls])
    assert recording is not None
    sync.barrier()
    settle(device, sync, recording.replay, WARM_S)
    taken_s = in_a_row_s(device, recording.replay, ROUNDS)
    recording.release()
    return sync.maximum([taken_s / ROUNDS / SEGMENTS])[0]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Microseconds by row."""
    lines = [
        f"{'compute':9}{'us':>7}{'KiB':>8}{'reduce':>9}{'extra':>9}{'later':>9}{'slower':>9}{'begins':>9}{'computes':>9}"
    ]
    for row in rows:
        own = [
            row[name] * 1e6
            for name in ("reduction_alone_s", "extra_s", "later_s", "slower_s", "begins_s", "computes_s")
        ]
        lines.append(
            f"{row['compute']:9}{row['aim_s'] * 1e6:7.0f}{row['size_bytes'] / 1024:8.0f}"
            + "".join(f"{each:9.1f}" for each in own)
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
