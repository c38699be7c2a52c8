"""Collectives during compute: how fast each proceeds while both run.

Compute alone, communication alone, and both together, with either one started first, are taken in turn in one loop,
because chips warm: only neighbours are compared. Each runs on a separate stream, behind a common start that both
streams and all ranks wait for, so that the host issues everything ahead; a short spin on one of the streams decides
which is first on the device. The end times of both are stored and determine both rates.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.communication import collective_call
from executor.calibrate.operands import Job
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.timing import Call, Timer, sampled
from executor.device import Mark

__all__ = ["overlap_jobs", "overlap_points"]

AHEAD_CYCLES = 3_000_000
"""Long enough that the host has issued everything before the start (1.6 ms at 1.9 GHz)."""

LEAD_CYCLES = 20_000
"""By how much the first of the two starts before the other (10 us)."""

SIZES = (2**24, 2**26, 2**28)
COMPUTES: dict[str, dict[str, tuple[int, ...]]] = {
    # kind -> name -> (m, n, k), (batch, heads, kv heads, sequence, sequence, head dim), or (elements,)
    "matrix": {"large": (8192, 8192, 8192), "small": (2048, 4096, 4096)},
    "attention": {"large": (2, 32, 32, 2048, 2048, 128)},
    "memory": {"large": (2**27,), "small": (2**23,)},
}
BESIDE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")
HELD_OUT_SHARE = 0.15
ROUNDS = 5
MAX_CALLS = 100


def overlap_jobs(group_sizes: Sequence[int], *, seed: int = 20_30, small: bool = False) -> list[Job]:
    """Every kind of compute next to every kind of communication; a share is held out, chosen by `seed`.

    Args:
        group_sizes: of the communication.
        small: tiny shapes, for ranks that compute on a CPU.
    """
    rng, jobs = random.Random(seed), []
    for (kind, shapes), ranks in itertools.product(COMPUTES.items(), group_sizes):
        for (name, shape), beside, size in itertools.product(shapes.items(), BESIDE, SIZES):
            if beside == "transfer" and ranks != 2:
                continue
            points = tuple(
                Point(
                    kind="overlap", call=kind, beside=beside, shape=_small(shape) if small else shape, dtype="bfloat16",
                    size_bytes=2**16 if small else size, ranks=ranks, active_ranks=ranks, seconds=0.0,
                    options={"first": first, "compute": name}, held_out=False,
                )
                for first in ("compute", "collective")
            )  # fmt: skip
            is_held_out = rng.random() < HELD_OUT_SHARE
            points = tuple(Point(**{**_fields(point), "held_out": is_held_out}) for point in points)
            tier = (0 if size == SIZES[1] else 1) + (name == "small") + (beside in ("transfer", "all_to_all"))
            jobs.append(Job(point=points[0], others=points[1:], tier=tier))
    unique: dict[Any, Job] = {}
    for job in sorted(jobs, key=lambda job: job.tier):
        unique.setdefault(job.point.key, job)
    return list(unique.values())


def _fields(point: Point) -> dict[str, Any]:
    return {name: getattr(point, name) for name in point.__struct_fields__}


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(size, 64) if len(shape) > 1 else 2**14 for size in shape)


def overlap_points(timer: Timer, sync: RankSync, job: Job) -> list[Point]:
    """Take the points of a pair; every rank calls it, ranks outside the first group only keep in step."""
    first = job.point
    taking_part = sync.rank < first.ranks
    pair = _Pair(timer, sync, first) if taking_part else None
    once = [0.0, 0.0] if pair is None else [pair.once_s("compute"), pair.once_s("comm")]
    slowest = sync.maximum(once)
    if pair is not None:
        pair.balance(*slowest)
    rows: dict[str, list[list[float]]] = {}
    for _ in range(ROUNDS):
        for variant in ("compute_alone", "comm_alone", "collective", "compute"):
            sync.barrier()
            taken = [0.0, 0.0] if pair is None else pair.run(variant)
            rows.setdefault(variant, []).append(sync.maximum(taken))
    compute_s = statistics.median(row[0] for row in rows["compute_alone"])
    comm_s = statistics.median(row[1] for row in rows["comm_alone"])
    measured = []
    for point in (job.point, *job.others):
        both = rows[str(point.options["first"])]
        figures = {
            "compute_s": compute_s,
            "comm_s": comm_s,
            "compute_both_s": statistics.median(row[0] for row in both),
            "comm_both_s": statistics.median(row[1] for row in both),
        }
        sample = sampled([max(1e-9, *row) for row in both], 1)
        measured.append(Point(**{**_fields(point), **sample.fields, "figures": figures}))
    return measured


class _Pair:
    """The two activities on this rank."""

    def __init__(self, timer: Timer, sync: RankSync, point: Point) -> None:
        self.timer, self.device = timer, timer.device
        place = self.device.torch_device
        self.compute = _compute(point, place)
        self.communicate = _communication(point, sync, place)
        self.streams = (self.device.stream(), self.device.stream())
        self.group, self.token = sync.groups[point.ranks], torch.zeros(1, device=place)
        self.calls = self.messages = 1
        self.compute()
        self.communicate()
        self.device.synchronize()

    def once_s(self, which: str) -> float:
        """Seconds of one call alone."""
        call = self.compute if which == "compute" else self.communicate
        count = 5
        first = self.timer.mark()
        for _ in range(count):
            call()
        last = self.timer.mark()
        self.device.synchronize()
        return self.timer.between_s(first, last) / count

    def balance(self, compute_s: float, comm_s: float) -> None:
        """Let both last about as long, and at least a window."""
        aim_s = max(compute_s, comm_s, self.timer.window_s / 2)
        self.calls = max(1, min(MAX_CALLS, round(aim_s / compute_s)))
        self.messages = max(1, min(MAX_CALLS, round(aim_s / comm_s)))

    def run(self, variant: str) -> list[float]:
        """Seconds from the common start to the end of compute and of communication; 0 for a part that does not run."""
        if not self.device.is_async:
            return self._run_on_host(variant)
        self.timer.keep_busy(0.004)
        self.device.spin(AHEAD_CYCLES)
        dist.all_reduce(self.token, group=self.group)  # ranks begin when the last of them is there
        start = self.timer.mark()
        ends: dict[str, Mark] = {}
        order = ("comm", "compute") if variant == "collective" else ("compute", "comm")
        for name in order:
            if variant == f"{name}_alone" or not variant.endswith("_alone"):
                lead = 0 if name == order[0] or variant.endswith("_alone") else LEAD_CYCLES
                ends[name] = self._issue(name, start, lead)
        self.device.synchronize()
        return [self.timer.between_s(start, ends[name]) if name in ends else 0.0 for name in ("compute", "comm")]

    def _issue(self, name: str, start: Mark, lead: int) -> Mark:
        stream = self.streams[0 if name == "compute" else 1]
        assert stream is not None
        call, count = (self.compute, self.calls) if name == "compute" else (self.communicate, self.messages)
        with stream:
            stream.wait_event(start)
            if lead:
                self.device.spin(lead)
            for _ in range(count):
                call()
            return self.timer.mark()

    def _run_on_host(self, variant: str) -> list[float]:
        """On a CPU: the collective under way while the host computes."""
        start = self.timer.mark()
        ends = [start, start]
        for name in ("comm", "compute"):
            if variant == f"{name}_alone" or not variant.endswith("_alone"):
                count, call = (self.calls, self.compute) if name == "compute" else (self.messages, self.communicate)
                for _ in range(count):
                    call()
                ends[0 if name == "compute" else 1] = self.timer.mark()
        return [self.timer.between_s(start, end) for end in ends]


def _compute(point: Point, place: Any) -> Call:
    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device=place).bfloat16()

    if point.call == "matrix":
        m, n, k = point.shape
        a, b, made = random_tensor(m, k), random_tensor(n, k), random_tensor(m, n)
        return lambda: torch.mm(a, b.t(), out=made)
    if point.call == "attention":
        batch, heads, kv_heads, queries, keys, dim = point.shape
        q = random_tensor(batch, heads, queries, dim)
        key, value = (random_tensor(batch, kv_heads, keys, dim) for _ in range(2))
        return lambda: F.scaled_dot_product_attention(q, key, value, is_causal=True)
    x, y = random_tensor(*point.shape), random_tensor(*point.shape)
    made = torch.empty_like(x)
    return lambda: torch.add(x, y, out=made)


def _communication(point: Point, sync: RankSync, place: Any) -> Call:
    elements, group = point.size_bytes // 2, sync.groups[point.ranks]
    if point.beside != "transfer":
        return collective_call(point.beside, group, point.ranks, elements, place)
    tensor, peer = torch.randn(elements, device=place).bfloat16(), sync.rank ^ 1
    start: Callable[..., Any] = dist.isend if sync.rank % 2 == 0 else dist.irecv
    return lambda: start(tensor, peer, group=group).wait()
