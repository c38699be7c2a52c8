"""Measures what the cost models of a CPU machine are fitted to; runs on every rank of a launched group.

Ranks that have no part in a measurement sleep in a barrier. A figure is a mean over many calls, taken several times; the
median is kept with the fastest and the slowest beside it. Communication is timed from the first start to the last end
over all groups, since the operating system may let one group through first, and the processor seconds that the ranks
spent are kept as well: they tell work on the shared cores apart from waiting.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from costmodels.points import Point

__all__ = ["GROUP_SIZES", "environment", "measure_rank"]

Report = Callable[[str], None]

GROUP_SIZES = (2, 4, 8)
SIZES_BYTES = (4, 4096, 65_536, 1_048_576)
FEW_SIZES_BYTES = (4096, 1_048_576)
MATRICES = (  # (m, n, k): the skinny products of small micro-batches and shards, then larger ones
    (2, 512, 512),
    (8, 128, 784),
    (8, 512, 196),
    (8, 512, 784),
    (8, 784, 512),
    (32, 512, 784),
    (512, 784, 8),
    (128, 512, 512),
    (256, 1024, 1024),
)
MEMORY_ELEMENTS = (2**10, 2**14, 2**17, 2**20)
REPEATS = 5
COMM_REPEATS = 3


def measure_rank(report: Report = print, budget_s: float = 13.0) -> list[Point]:
    """Take all points on this rank; every rank of the default process group must call it.

    Args:
        report: takes one line of progress; called on rank 0 only.
        budget_s: about how long it may take; the repeats are cut to fit.

    Returns:
        The points on rank 0, an empty list on the others.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _Session(report, budget_s).run()
    finally:
        torch.set_num_threads(threads)


def environment() -> dict[str, str]:
    """Versions, machine and date that belong to the points."""
    return {
        "date": datetime.date.today().isoformat(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "cores": str(usable_cores()),
        "load_average": f"{os.getloadavg()[0]:.2f}",
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Session:
    """The state of one calibration on one rank: its groups, the time left, the points so far."""

    def __init__(self, report: Report, budget_s: float) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.report, self.budget_s = report if self.rank == 0 else (lambda line: None), budget_s
        self.points: list[Point] = []
        self.groups: dict[int, Any] = {}
        for size in GROUP_SIZES:
            if self.num_ranks % size == 0:
                made = [dist.new_group(list(range(i, i + size))) for i in range(0, self.num_ranks, size)]
                self.groups[size] = made[self.rank // size]

    def run(self) -> list[Point]:
        start = time.perf_counter()
        steps = [
            ("one rank alone: dispatch, matrix products, memory", 0.12, self.alone),
            ("all ranks at once: how the cores are shared", 0.12, self.sharing),
            *(
                (f"{call} in groups of {', '.join(str(size) for size in self.groups)}", 0.17, _bound(self.collective, call))
                for call in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
            ),
            ("transfers between pairs", 0.08, self.transfers),
        ]
        for number, (title, share, step) in enumerate(steps, 1):
            self.report(f"[{number}/{len(steps)}] {title} ({time.perf_counter() - start:.0f} s so far)")
            dist.barrier()
            step(share * self.budget_s)
        return self.points

    # -- compute ------------------------------------------------------------------------------------------------------

    def alone(self, budget_s: float) -> None:
        """Rank 0 works, the others wait in the barrier that follows."""
        if self.rank == 0:
            jobs = [*_dispatch_jobs(), *_matrix_jobs(), *_memory_jobs()]
            for fields, call in jobs:
                self.points.append(Point(**fields, **_timed(call, budget_s / len(jobs))))

    def sharing(self, budget_s: float) -> None:
        """All ranks repeat the same call for the same stretch of time; the mean pace is what counts."""
        jobs = [_matrix_jobs()[3], _matrix_jobs()[-2], _memory_jobs()[1], _memory_jobs()[-1]]
        for fields, call in jobs:
            call()
            paces, stretch_s = [], budget_s / len(jobs) / REPEATS
            for _ in range(REPEATS):
                dist.barrier()
                start, count = time.perf_counter(), 0
                while (elapsed := time.perf_counter() - start) < stretch_s:
                    call()
                    count += 1
                calls_per_s = torch.tensor([count / elapsed], dtype=torch.float64)
                dist.all_reduce(calls_per_s)
                paces.append(self.num_ranks / float(calls_per_s))
            described = fields | {"kind": "sharing", "call": fields["kind"], "active_ranks": self.num_ranks}
            self.keep(Point(**described, **_summary(paces)))

    # -- communication ------------------------------------------------------------------------------------------------

    def collective(self, call: str, budget_s: float) -> None:
        cases = []
        for size in self.groups:
            cases += [(size, size_bytes, self.num_ranks) for size_bytes in SIZES_BYTES]
            if size < self.num_ranks:
                cases += [(size, size_bytes, size) for size_bytes in FEW_SIZES_BYTES]
        for size, size_bytes, active in cases:
            run, real_bytes = _collective_call(call, size, size_bytes, self.groups[size])
            timing = self.together(run, active, budget_s / len(cases))
            self.keep(
                Point(kind="collective", call=call, size_bytes=real_bytes, ranks=size, active_ranks=active, **timing)
            )

    def transfers(self, budget_s: float) -> None:
        """Rank 2i sends to rank 2i+1."""
        cases = [(size_bytes, self.num_ranks) for size_bytes in SIZES_BYTES] + [(b, 2) for b in FEW_SIZES_BYTES]
        for size_bytes, active in cases:
            tensor = torch.zeros(size_bytes // 4)
            peer = self.rank + 1 if self.rank % 2 == 0 else self.rank - 1
            run = _bound(dist.send if self.rank % 2 == 0 else dist.recv, tensor, peer)
            timing = self.together(run, active, budget_s / len(cases))
            self.keep(Point(kind="transfer", call="transfer", size_bytes=size_bytes, ranks=2, active_ranks=active, **timing))

    def together(self, run: Callable[[], object], active: int, budget_s: float) -> dict[str, Any]:
        """Time `run` on the first `active` ranks at once; the same numbers come back on every rank."""
        takes_part = self.rank < active
        count = torch.zeros(1)
        if takes_part:
            run()
            start = time.perf_counter()
            for _ in range(2):
                run()
            count[0] = (time.perf_counter() - start) / 2
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        calls = max(3, min(200, int(budget_s / COMM_REPEATS / float(count[0]))))
        seconds, cpu = [], []
        for _ in range(COMM_REPEATS):
            dist.barrier()
            stamps = torch.zeros(3, dtype=torch.float64)
            stamps[0] = -1e18
            stamps[1] = -1e18
            if takes_part:
                # perf_counter is the system-wide monotonic clock on Linux, so ranks of one host can be compared
                cpu_start, start = time.process_time(), time.perf_counter()
                for _ in range(calls):
                    run()
                stamps[1] = time.perf_counter()
                stamps[0] = -start
                stamps[2] = time.process_time() - cpu_start
            spans, spent = stamps[:2].clone(), stamps[2:].clone()
            dist.all_reduce(spans, op=dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            seconds.append(float(spans[0] + spans[1]) / calls)
            cpu.append(float(spent[0]) / calls / active)
        return _summary(seconds) | {"cpu_s": statistics.median(cpu)}

    def keep(self, point: Point) -> None:
        if self.rank == 0:
            self.points.append(point)


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return lambda *more: function(*arguments, *more)


def _summary(values: list[float]) -> dict[str, Any]:
    return {"seconds": statistics.median(values), "low_s": min(values), "high_s": max(values), "repeats": len(values)}


def _timed(call: Callable[[], object], budget_s: float) -> dict[str, Any]:
    """Seconds of one call, its caches warm: median over repeats of the mean of many calls."""
    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    once = max(1e-7, time.perf_counter() - start)
    count = max(1, min(20_000, int(budget_s / REPEATS / once)))
    means = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(count):
            call()
        means.append((time.perf_counter() - start) / count)
    return _summary(means)


def _dispatch_jobs() -> list[tuple[dict[str, Any], Callable[[], object]]]:
    """Calls on tensors so small that only issuing them takes time."""
    x, weight, bias = torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1)
    linear = torch.nn.functional.linear
    jobs: dict[str, Callable[[], object]] = {
        "matrix": lambda: linear(x, weight, bias),
        "memory": lambda: torch.relu(x),
        "view": lambda: x.view(1),
        "update": lambda: weight.add_(x, alpha=-0.01),
    }
    return [({"kind": "dispatch", "call": name}, call) for name, call in jobs.items()]


def _matrix_jobs() -> list[tuple[dict[str, Any], Callable[[], object]]]:
    def job(m: int, n: int, k: int) -> Callable[[], object]:
        x, weight = torch.rand(m, k), torch.rand(n, k)
        return lambda: torch.nn.functional.linear(x, weight)

    return [({"kind": "matrix", "call": "linear", "shape": shape}, job(*shape)) for shape in MATRICES]


def _memory_jobs() -> list[tuple[dict[str, Any], Callable[[], object]]]:
    def job(elements: int) -> Callable[[], object]:
        x = torch.rand(elements)
        return lambda: torch.relu(x)

    return [({"kind": "memory", "call": "relu", "size_bytes": 8 * count}, job(count)) for count in MEMORY_ELEMENTS]


def _collective_call(call: str, size: int, size_bytes: int, group: Any) -> tuple[Callable[[], object], int]:
    """The call, blocking, and the bytes of the larger of its input and output."""
    part = max(1, size_bytes // 4 // size)
    whole, chunk = torch.zeros(part * size), torch.zeros(part)
    if call == "all_reduce":
        tensor = torch.zeros(max(1, size_bytes // 4))
        return lambda: dist.all_reduce(tensor, group=group), tensor.numel() * 4
    if call == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, chunk, group=group), whole.numel() * 4
    if call == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(chunk, whole, group=group), whole.numel() * 4
    other = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(other, whole, group=group), whole.numel() * 4
