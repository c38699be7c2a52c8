"""The grid of collectives and transfers: sizes, group sizes, one group or all groups at the same time."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.operands import Job
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.timing import Call, Sample, Timer, sampled
from executor.device import now_ns

__all__ = [
    "COLLECTIVES",
    "PING_PONG",
    "collective_call",
    "communication_jobs",
    "make_call",
    "recorded_jobs",
    "recorded_together",
    "timed_together",
]

# 2.13 renames two functions and warns about the old names, which are the only ones in 2.11
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
PATTERNS = ("one_way", "both_ways", "ring")
PING_PONG = "ping_pong"
"""There and back: half of it is one message from its start to its end, with nothing hidden behind another one."""

LEAST, MOST = 2**10, 2**30
HELD_OUT_EACH = 3
HELD_OUT_TRANSFERS = 15
FIRST_CALLS = 3
RECORDED_CALLS = 50
LEAST_RECORDED_CALLS = 4
RECORDED_S = 5e-3
"""About how long one recorded launch may last."""


def communication_jobs(group_sizes: tuple[int, ...], num_ranks: int, *, seed: int = 20_29) -> list[Job]:
    """All of them; held-out ones have odd sizes chosen by `seed`.

    Args:
        group_sizes: that divide the ranks.
        num_ranks: number of ranks of this job.
    """
    rng = random.Random(seed)
    jobs: list[Job] = []
    for call in (*COLLECTIVES, "transfer"):
        for size in (2,) if call == "transfer" else group_sizes:
            for groups in sorted({1, num_ranks // size}):
                options: list[dict[str, int | float | str]] = [{"groups": groups}]
                if call == "transfer":
                    options = [{"groups": groups, "pattern": pattern} for pattern in PATTERNS[:2]]
                    if groups == num_ranks // 2:
                        options.append({"groups": 1, "pattern": "ring"})
                for option in options:
                    jobs += _sizes(call, size, num_ranks, option, rng)
    return jobs


def recorded_jobs(group_sizes: tuple[int, ...], num_ranks: int, most_bytes: int, *, seed: int = 20_31) -> list[Job]:
    """Calls that are also measured from recorded launches, without the host: small collectives and all transfers.

    Args:
        group_sizes: that divide the ranks.
        num_ranks: number of ranks of this job.
        most_bytes: of a collective; above that the host's time does not show.
        seed: seed of the sizes of transfers that are held out.
    """
    rng = random.Random(seed)
    jobs = [
        job for job in communication_jobs(group_sizes, num_ranks)
        if job.point.kind == "collective" and job.point.size_bytes <= most_bytes
        and job.point.active_ranks == job.point.ranks
    ]  # fmt: skip
    held_out = []  # odd multiples of 256 bytes, evenly over the powers of two
    for number in range(HELD_OUT_TRANSFERS):
        share = (number + rng.random()) / HELD_OUT_TRANSFERS
        held_out.append(round(LEAST * (MOST / LEAST) ** share) // 512 * 512 + 256)
    sizes = [(2**power, False) for power in range(10, 31)] + [(size, True) for size in held_out]
    for pattern, (size, is_held_out) in itertools.product((PING_PONG, *PATTERNS[:2]), sizes):
        point = Point(
            kind="transfer", call="transfer", size_bytes=size, ranks=2, active_ranks=2, dtype="bfloat16",
            options={"groups": 1, "pattern": pattern}, held_out=is_held_out, seconds=0.0,
        )  # fmt: skip
        jobs.append(Job(point=point, tier=0 if pattern != PATTERNS[1] else 1))
    return [
        Job(point=msgspec.structs.replace(job.point, options=job.point.options | {"recorded": 1}), tier=job.tier)
        for job in sorted(jobs, key=lambda job: job.tier)
    ]


def _sizes(
    call: str, ranks: int, num_ranks: int, options: dict[str, int | float | str], rng: random.Random
) -> Iterator[Job]:
    ring = options.get("pattern") == "ring"
    active = num_ranks if ring else ranks * int(options["groups"])
    alone = active == ranks or ring

    def job(size_bytes: int, tier: int, held_out: bool = False) -> Job:
        point = Point(
            kind="transfer" if call == "transfer" else "collective", call=call, size_bytes=size_bytes, ranks=ranks,
            active_ranks=active, dtype="bfloat16", options=options, held_out=held_out, seconds=0.0,
        )  # fmt: skip
        return Job(point=point, tier=tier)

    for number in range(HELD_OUT_EACH):
        size = round(LEAST * (MOST / LEAST) ** rng.uniform(0.15, 0.95)) // 256 * 256
        yield job(size, tier=number, held_out=True)
    for power in range(10, 31):
        if power >= 16 or power % 2 == 0:
            yield job(2**power, tier=(power % 3 != 1) + (power % 2) + (0 if alone else 1) + (call == "broadcast"))


def make_call(point: Point, sync: RankSync, place: Any) -> Call | None:
    """The call of this rank for the point; None if it takes no part.

    Args:
        point: of kind collective or transfer.
        sync: whose groups are used.
        place: where tensors live.
    """
    if sync.rank >= point.active_ranks:
        return None
    elements = max(point.ranks, point.size_bytes // 2)
    if point.kind == "transfer":
        return _transfer(point, sync, torch.randn(elements, device=place).bfloat16())
    return collective_call(point.call, sync.groups[point.ranks], point.ranks, elements, place)


def collective_call(call: str, group: Any, ranks: int, elements: int, place: Any) -> Call:
    """A collective over `group` on bfloat16, issued and waited for as the executor does it."""
    part = max(1, elements // ranks)
    whole, chunk = (torch.randn(count, device=place).bfloat16() for count in (part * ranks, part))
    other = torch.empty_like(whole)

    def all_reduce() -> Any:  # the greatest, not the sum, which would grow out of range
        return dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group, async_op=True)

    first = dist.get_process_group_ranks(group)[0]
    issue: dict[str, Callable[[], Any]] = {
        "all_reduce": all_reduce,
        "all_gather": lambda: _all_gather(whole, chunk, group=group, async_op=True),
        "reduce_scatter": lambda: _reduce_scatter(chunk, whole, group=group, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group, async_op=True),
        "broadcast": lambda: dist.broadcast(whole, first, group=group, async_op=True),
    }
    start = issue[call]
    return lambda: start().wait()


def _transfer(point: Point, sync: RankSync, tensor: Tensor) -> Call:
    rank, peer, other = sync.rank, sync.rank ^ 1, torch.empty_like(tensor)
    pattern = point.options["pattern"]
    if pattern == "one_way":
        group = sync.groups[2]
        send = rank % 2 == 0

        def one_way() -> None:
            work = dist.isend(tensor, peer, group=group) if send else dist.irecv(other, peer, group=group)
            assert work is not None
            work.wait()

        return one_way
    if pattern == PING_PONG:
        pair, begins = sync.groups[2], rank % 2 == 0

        def there_and_back() -> None:
            for sends in (begins, not begins):
                work = dist.isend(tensor, peer, group=pair) if sends else dist.irecv(other, peer, group=pair)
                assert work is not None
                work.wait()

        return there_and_back
    to, source = (peer, peer) if pattern == "both_ways" else ((rank + 1) % sync.size, (rank - 1) % sync.size)
    ring = None if pattern == "ring" else sync.groups[2]

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, tensor, to, ring), dist.P2POp(dist.irecv, other, source, ring)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return exchange


def recorded_together(timer: Timer, sync: RankSync, call: Call | None) -> Sample | None:
    """Seconds of one call in one recorded launch of many, of the slowest rank: no host time is in it.

    None where calls cannot be recorded.
    """
    count, replay = RECORDED_CALLS, None
    if call is not None:
        call()
        timer.device.synchronize()
        first = timer.mark()
        call()
        last = timer.mark()
        timer.device.synchronize()
        count = round(RECORDED_S / max(1e-7, timer.between_s(first, last)))
    count = int(-sync.maximum([-float(max(LEAST_RECORDED_CALLS, min(RECORDED_CALLS, count)))])[0])
    if call is not None:
        with contextlib.suppress(RuntimeError):
            recording = timer.device.capture(lambda: [call() for _ in range(count)])
            replay = None if recording is None else recording.replay
    if not sync.all_agree(call is None or replay is not None):
        return None
    if call is not None:
        timer.keep_busy(0.003)
    times = []
    for _ in range(timer.repeats + 1):
        timer.device.synchronize()
        sync.barrier()
        taken = 0.0
        if replay is not None:
            first = timer.mark()
            replay()
            last = timer.mark()
            timer.device.synchronize()
            taken = timer.between_s(first, last)
        times.append(sync.maximum([taken])[0])
    return sampled([max(time, 1e-9) for time in times[1:]], count)


def timed_together(
    timer: Timer, sync: RankSync, call: Call | None, *, window_s: float | None = None
) -> tuple[Sample, float]:
    """Seconds of one call, of the slowest rank in each repeat, and the median start skew between ranks, apart.

    A call before the first mark lets the ranks begin together; calls then follow each other.
    """
    device, window_s = timer.device, window_s or timer.window_s

    def run(count: int) -> float:
        if call is None:
            return 0.0
        call()
        first = timer.mark()
        for _ in range(count):
            call()
        last = timer.mark()
        device.synchronize()
        return timer.between_s(first, last)

    sync.barrier()
    run(1)
    once_s = max(1e-7, *sync.maximum([run(FIRST_CALLS) / FIRST_CALLS]))
    count = max(2, min(500, round(window_s / once_s)))
    if call is not None:
        timer.keep_busy(0.003)
    times, skews = [], []
    for _ in range(timer.repeats):
        device.synchronize()
        sync.barrier()
        start = now_ns() / 1e9
        taken = run(count)
        end, latest, earliest = sync.maximum([taken, start if call else -1e30, -start if call else -1e30])
        times.append(end)
        skews.append(latest + earliest)
    return sampled([max(time, 1e-9) for time in times], count), statistics.median(skews)
