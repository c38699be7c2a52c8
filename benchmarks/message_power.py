"""The power of messages: alone, and beside compute on another stream, on all ranks at once.

    python -m benchmarks.message_power --gpus 2 --out FILE

Every row repeats rounds of compute and of messages, long enough that the driver's power reading, a mean over about a
second, is of that row alone. FILE has the mean power, the clock, and the share of the time that compute and messages
were under way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.jobs import check_gpus, on_ranks
from benchmarks.kept import measured_with, write_results
from executor.calibrate.communication import collective_call
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.timing import Call, Timer
from executor.device import Device, pick_device
from executor.step.groups import connect

__all__ = ["main"]

LIMIT_S = 60.0
SETTLE_S, ROUND_S = 2.4, 0.15
SIZE_BYTES = 2**27
ROWS = (
    ("spin", "", 0.0), ("product", "", 0.0), ("add", "", 0.0), ("", "all_reduce", 1.0), ("", "all_gather", 1.0),
    ("", "reduce_scatter", 1.0), ("product", "all_reduce", 1.0), ("product", "all_reduce", 0.3),
    ("product", "all_gather", 1.0), ("add", "all_reduce", 1.0), ("spin", "all_reduce", 1.0),
)  # fmt: skip
"""Compute, message, and the share of the compute's time that the messages take."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all rows; the exit code of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("message_power.json"))
    parser.add_argument("--ranks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ranks:
        _rank(options.out)
        return 0
    check_gpus(parser, options.gpus)
    job = ["--out", str(options.out), "--ranks"]
    code = on_ranks("benchmarks.message_power", job, options.gpus, limit_s=2 * LIMIT_S)
    if not code:
        print(table(json.loads(options.out.read_text())["rows"]))
    return code


def _rank(out: Path) -> None:
    device = pick_device("auto")
    device.use()
    device.use_own_stream()
    connect(device, LIMIT_S)
    sync, timer = RankSync(device, LIMIT_S), Timer(device)
    rows: list[dict[str, Any]] = []
    for compute, message, share in ROWS:
        with sync.watch(f"{compute} {message}", timeout_s=LIMIT_S):
            rows.append(_measured(timer, sync, compute, message, share))
        if sync.rank == 0:
            write_results(out, measured_with(device) | {"ranks": sync.size, "size_bytes": SIZE_BYTES, "rows": rows})
            print(table(rows).splitlines()[-1], flush=True)
    sync.barrier()
    sync.close()
    dist.destroy_process_group()


def _measured(timer: Timer, sync: RankSync, compute: str, message: str, share: float) -> dict[str, Any]:
    device = timer.device
    calls: dict[str, tuple[Call, int]] = {}
    if compute:
        call = _compute(compute, device)
        calls["compute"] = call, _count(timer, sync, call, ROUND_S)
    if message:
        call = collective_call(message, sync.groups[sync.size], sync.size, SIZE_BYTES // 2, device.torch_device)
        calls["message"] = call, _count(timer, sync, call, ROUND_S * share)
    stream = device.stream()
    assert stream is not None, "this device has no streams"
    busy: dict[str, list[float]] = {name: [] for name in calls}
    rounds_s: list[float] = []

    def one_round() -> None:
        first = timer.mark()
        ends = {}
        for name, (call, count) in calls.items():
            with stream if name == "message" else nullcontext():
                if name == "message":
                    stream.wait_event(first)
                for _ in range(count):
                    call()
                ends[name] = timer.mark()
        device.synchronize()
        for name, end in ends.items():
            busy[name].append(timer.between_s(first, end))
        rounds_s.append(max(busy[name][-1] for name in ends))

    def rounds() -> None:
        while sync.maximum([sum(rounds_s)])[0] < SETTLE_S:
            one_round()

    sync.barrier()
    sensed = timer.sensors_during(rounds)
    later = {name: statistics.median(times[len(times) // 2 :]) for name, times in busy.items()}
    whole_s = statistics.median(rounds_s[len(rounds_s) // 2 :])
    found = sync.gather({"sensors": sensed, "busy_s": later, "round_s": whole_s})
    return {
        "compute": compute, "message": message, "share": share,
        "counts": {name: count for name, (_, count) in calls.items()}, "by_rank": found,
    }  # fmt: skip


def _count(timer: Timer, sync: RankSync, call: Call, aim_s: float) -> int:
    """How many calls take about so long on the slowest rank; ranks agree on it."""
    call()
    first = timer.mark()
    for _ in range(5):
        call()
    last = timer.mark()
    timer.device.synchronize()
    return max(1, round(aim_s / sync.maximum([timer.between_s(first, last) / 5])[0]))


def _compute(kind: str, device: Device) -> Call:
    place = device.torch_device
    if kind == "spin":
        return lambda: device.spin(1_000_000)
    if kind == "add":
        x = torch.randn(2**26, device=place).bfloat16()
        y, made = x.flip(0), torch.empty_like(x)
        return lambda: torch.add(x, y, out=made)
    x = torch.randn(8192, 4096, device=place).bfloat16()
    y, made = torch.randn(4096, 4096, device=place).bfloat16(), torch.empty_like(x)
    return lambda: torch.mm(x, y, out=made)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Power, clock and busy shares by row, means over ranks."""
    lines = [f"{'compute':9}{'message':16}{'share':>6}{'W':>7}{'MHz':>7}{'computes':>10}{'sends':>7}{'round ms':>10}"]
    for row in rows:
        ranks = row["by_rank"]
        watts, clock = (statistics.fmean(r["sensors"].get(n, 0.0) for r in ranks) for n in ("power_W", "clock_MHz"))
        part = {
            name: statistics.fmean(r["busy_s"].get(name, 0.0) / r["round_s"] for r in ranks)
            for name in ("compute", "message")
        }
        lines.append(
            f"{row['compute'] or '-':9}{row['message'] or '-':16}{row['share']:6.1f}{watts:7.0f}{clock:7.0f}"
            f"{part['compute']:10.2f}{part['message']:7.2f}{statistics.fmean(r['round_s'] for r in ranks) * 1e3:10.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
