"""Measures what the cost models of a CPU machine are fitted to; runs on every rank of a launched group.

Ranks that have no part in a measurement sleep in a barrier. A figure is a mean over many calls, taken several times;
the median is kept with the fastest and the slowest beside it. What several ranks do at once is timed from the first
start to the last end, since the operating system may let some ranks through first, and the processor seconds that the
ranks spent are kept as well: they tell work on the shared cores apart from waiting.

With a log every point is on disk as soon as it is taken, and what is there already is not taken again. A rank that does
not come to a measurement is named, and the others leave (`executor.calibrate.rank_sync`).
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from costmodels.fit.points import Point, PointLog
from executor.calibrate.rank_sync import Meeting
from executor.device import pick_device
from plans.errors import TwofoldError

__all__ = ["environment", "measure_rank"]

# 2.13 renames two functions and warns about the old names, which are the only ones in 2.11
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Report = Callable[[str], None]

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES_BYTES = (4, 4096, 524_288)
FEW_SIZES_BYTES = (4096,)
MORE_SIZES_BYTES = (4, 512, 4096, 32_768, 131_072, 524_288, 2_097_152)
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
MORE_MATRICES = (
    *MATRICES,
    (1, 256, 256),
    (4, 1024, 256),
    (16, 128, 512),
    (16, 1024, 1024),
    (64, 256, 256),
    (64, 64, 2048),
    (256, 256, 8),
    (1024, 128, 128),
)
MEMORY_ELEMENTS = (2**10, 2**14, 2**17, 2**20)
MORE_MEMORY_ELEMENTS = tuple(2**power for power in range(10, 23, 2))
BUDGET_S = 8.0
LEAST_MEMORY_BYTES = 2**28  # of one rank, below which the grid is made smaller
REPEATS = 5
COMM_REPEATS = 3
MORE_COMM_REPEATS = 5
BURST = 4
ISSUES = 40
ISSUE_PAUSE_S = 0.003  # longer than a burst of tiny collectives of two ranks takes


def measure_rank(
    report: Report = print,
    budget_s: float = BUDGET_S,
    *,
    log: PointLog | None = None,
    thorough: bool = False,
    timeout_s: float = 60.0,
) -> tuple[list[Point], dict[str, str]]:
    """Take all points on this rank; every rank of the default process group must call it.

    Args:
        report: takes one line of progress; called on rank 0 only.
        budget_s: about how long it may take; the repeats are cut to fit.
        log: of rank 0; points in it are not taken again, new ones are appended.
        thorough: more sizes and shapes, more repeats.
        timeout_s: after which a measurement counts as hung: the missing ranks are named, and this process ends.

    Returns:
        On rank 0 the points and the environment they were taken in; no points on the other ranks.

    Raises:
        TwofoldError: there is only one rank, or the clock jumps.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    session = _Session(report, budget_s, log, thorough, timeout_s)
    try:
        points = session.run()
    finally:
        session.meeting.close()
        torch.set_num_threads(threads)
    outside = [point.outside_cores for point in points if point.active_ranks > 1]
    around = {"ranks": str(session.num_ranks), "outside_cores": f"{statistics.fmean(outside or [0.0]):.2f}"}
    return points, environment() | around


def environment() -> dict[str, str]:
    """Versions, machine and date that belong to the points."""
    return {
        "date": datetime.date.today().isoformat(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        **({"processor": name} if (name := processor_name()) else {}),
        "cores": str(usable_cores()),
        "memory_bytes": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
    }


def processor_name() -> str:
    """What the processor calls itself; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    said = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {key.strip(): value.strip() for key, value in said.items()}
    names = ("model name",) if "model name" in fields else ("CPU implementer", "CPU part")  # the latter on ARM
    return " ".join(fields[name] for name in names if name in fields)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Session:
    """The state of one calibration on one rank: its groups, the time left, the points so far."""

    def __init__(self, report: Report, budget_s: float, log: PointLog | None, thorough: bool, timeout_s: float) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.report, self.budget_s = report if self.rank == 0 else (lambda line: None), budget_s
        if self.num_ranks < 2:
            raise TwofoldError("one rank has nobody to talk to; calibrate with at least 2")
        self.meeting = Meeting(pick_device("cpu"), timeout_s)
        self.groups: dict[int, Any] = self.meeting.groups
        self.log = log if self.rank == 0 else None
        self.points: list[Point] = [] if self.log is None else list(self.log)
        self.known: set[Any] = self.meeting.told({point.key for point in self.points})
        if self.known:
            self.report(f"{len(self.known)} points are there already")
        share_bytes = self.meeting.told(pick_device("cpu").memory_bytes()[0]) // self.num_ranks
        self.small = share_bytes < LEAST_MEMORY_BYTES
        if self.small:
            self.report(f"each rank has {share_bytes / 2**20:.0f} MiB: sizes above 512 KiB are left out")
        self.thorough = thorough
        self.repeats = MORE_COMM_REPEATS if thorough else COMM_REPEATS

    def run(self) -> list[Point]:
        start, sizes = time.perf_counter(), ", ".join(str(size) for size in self.groups)
        steps = [
            ("one rank alone: dispatch, matrix products, memory", 0.12, self.alone),
            ("all ranks at once: how the cores are shared", 0.12, self.sharing),
            *((f"{call} in groups of {sizes}", 0.17, _bound(self.collective, call)) for call in CALLS),
            ("transfers between pairs", 0.08, self.transfers),
        ]
        done = 0.0
        for number, (title, share, step) in enumerate(steps, 1):
            spent_s = time.perf_counter() - start
            left_s = max(0.0, spent_s * (1 - done) / done if done else self.budget_s)
            self.report(f"[{number}/{len(steps)}] {title} (about {left_s:.0f} s left of measuring)")
            dist.barrier()
            step(share * self.budget_s)
            done += share
        return self.points

    def missing(self, described: dict[str, Any]) -> bool:
        """Whether this point has not been taken yet; the same answer on every rank."""
        return Point(**described, seconds=0.0).key not in self.known

    # -- compute ------------------------------------------------------------------------------------------------------

    def alone(self, budget_s: float) -> None:
        """Rank 0 works, the others wait in the barrier that follows."""
        if self.rank == 0:
            jobs = [*_dispatch_jobs(), *_matrix_jobs(self.thorough), *_memory_jobs(self.thorough, self.small)]
            for fields, call in jobs:
                if self.missing(fields):
                    self.keep(Point(**fields, **_timed(call, budget_s / len(jobs))))
        dist.barrier()
        pair, token = min(self.groups), torch.zeros(1)
        common: dict[str, Any] = {"kind": "dispatch", "ranks": pair, "active_ranks": pair}
        with self.meeting.watch("issuing an all_reduce", range(pair)):
            if self.rank < pair and self.missing(common | {"call": "wait"}):
                issue_s, wait_s = _issue_and_wait(
                    lambda: dist.all_reduce(token, group=self.groups[pair], async_op=True)
                )
                self.keep(Point(**common, call="collective", **_summary(issue_s)))
                self.keep(Point(**common, call="wait", **_summary(wait_s)))
        dist.barrier()
        common |= {"call": "transfer", "ranks": 2, "active_ranks": 2}
        with self.meeting.watch("issuing a transfer", range(2)):
            if self.rank < 2 and self.missing(common):
                issue_s, _ = _issue_and_wait(lambda: self.message(token))
                self.keep(Point(**common, **_summary(issue_s)))

    def message(self, tensor: torch.Tensor) -> Any:
        """Start the send of an even rank to the next one, or the receive there."""
        return dist.isend(tensor, self.rank + 1) if self.rank % 2 == 0 else dist.irecv(tensor, self.rank - 1)

    def sharing(self, budget_s: float) -> None:
        """All ranks make the same calls."""
        jobs = [_matrix_jobs()[3], _matrix_jobs()[5], _memory_jobs()[1], _memory_jobs()[2]]
        for fields, call in jobs:
            described = fields | {"kind": "sharing", "call": fields["kind"], "active_ranks": self.num_ranks}
            if self.missing(described):
                self.keep(Point(**described, **self.together(call, described, budget_s / len(jobs), most=20_000)))

    # -- communication ------------------------------------------------------------------------------------------------

    def sizes(self) -> tuple[int, ...]:
        """Bytes of messages."""
        sizes = MORE_SIZES_BYTES if self.thorough else SIZES_BYTES
        return tuple(size for size in sizes if size <= SIZES_BYTES[-1] or not self.small)

    def collective(self, call: str, budget_s: float) -> None:
        cases = []
        for size in self.groups:
            cases += [(size, size_bytes, self.num_ranks) for size_bytes in self.sizes()]
            if size < self.num_ranks:
                few = self.sizes()[1:-1] if self.thorough else FEW_SIZES_BYTES
                cases += [(size, size_bytes, size) for size_bytes in few]
        for size, size_bytes, active in cases:
            run, real_bytes = _collective_call(call, size, size_bytes, self.groups[size])
            described: dict[str, Any] = {
                "kind": "collective", "call": call, "size_bytes": real_bytes, "ranks": size, "active_ranks": active
            }  # fmt: skip
            if self.missing(described):
                self.keep(Point(**described, **self.together(run, described, budget_s / len(cases))))

    def transfers(self, budget_s: float) -> None:
        """Rank 2i sends to rank 2i+1: bursts of messages under way at once, as in a pipeline, then a wait for all."""
        paired = self.num_ranks - self.num_ranks % 2
        cases = [(size_bytes, paired) for size_bytes in self.sizes()]
        cases += [(size_bytes, 2) for size_bytes in self.sizes()[1:] if paired > 2]
        for size_bytes, active in cases:
            tensors = [torch.zeros(size_bytes // 4) for _ in range(BURST)]
            described: dict[str, Any] = {
                "kind": "transfer", "call": "transfer", "size_bytes": size_bytes, "ranks": 2, "active_ranks": active
            }  # fmt: skip
            if self.missing(described):
                timing = self.together(_bound(self.exchange, tensors), described, budget_s / len(cases))
                one = {name: timing[name] / BURST for name in ("seconds", "cpu_s", "low_s", "high_s")}
                self.keep(Point(**described, **(timing | one)))

    def exchange(self, tensors: list[torch.Tensor]) -> None:
        """One message per tensor, then wait for all."""
        for work in [self.message(tensor) for tensor in tensors]:
            work.wait()

    def together(
        self, run: Callable[[], object], described: dict[str, Any], budget_s: float, most: int = 200
    ) -> dict[str, Any]:
        """Time `run` on the first active ranks at once; the same numbers come back on every rank."""
        what = f"{described['call']} of {described.get('size_bytes', 0)} bytes in groups of {described.get('ranks', 1)}"
        with self.meeting.watch(what):
            return self._together(run, described["active_ranks"], budget_s, most)

    def _together(self, run: Callable[[], object], active: int, budget_s: float, most: int) -> dict[str, Any]:
        takes_part = self.rank < active
        count = torch.zeros(1)
        if takes_part:
            run()
            start = time.perf_counter()
            run()
            count[0] = time.perf_counter() - start
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        calls = max(2, min(most, int(budget_s / self.repeats / max(1e-7, float(count[0])))))
        seconds, cpu, busy_s = [], [], 0.0
        for _ in range(self.repeats):
            dist.barrier()
            stamps = torch.tensor([-math.inf, -math.inf, 0.0], dtype=torch.float64)
            if takes_part:
                # perf_counter is the system-wide monotonic clock on Linux, so ranks of one host can be compared
                busy_before_s, cpu_before_s, start = _busy_s(), time.process_time(), time.perf_counter()
                for _ in range(calls):
                    run()
                stamps[1] = time.perf_counter()
                stamps[0] = -start
                stamps[2] = time.process_time() - cpu_before_s
                busy_s += _busy_s() - busy_before_s
            spans, spent = stamps[:2].clone(), stamps[2:].clone()
            dist.all_reduce(spans, op=dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            seconds.append(float(spans[0] + spans[1]) / calls)
            cpu.append(float(spent[0]) / calls / active)
        outside_s = max(0.0, busy_s - sum(cpu) * calls * active)
        summary = _summary(seconds) | {"cpu_s": statistics.median(cpu)}
        return summary | {"outside_cores": round(outside_s / (sum(seconds) * calls), 2)}

    def keep(self, point: Point) -> None:
        if self.rank == 0:
            self.points.append(point)
            if self.log is not None:
                self.log.add(point)


def _busy_s() -> float:
    """Processor seconds that this computer has worked since it started, 10 ms at a time; 0 where nobody counts them."""
    try:
        ticks = Path("/proc/stat").read_text().split()[1:9]  # user nice system idle iowait irq softirq steal
    except OSError:
        return 0.0
    busy = sum(int(field) for position, field in enumerate(ticks) if position not in (3, 4))
    return busy / os.sysconf("SC_CLK_TCK")


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return lambda *more: function(*arguments, *more)


def _summary(values: list[float]) -> dict[str, Any]:
    if not all(0 < value < math.inf for value in values):
        raise TwofoldError(f"the clock jumps: a call took {min(values):g} s; measure again on a steady machine")
    return {"seconds": statistics.median(values), "low_s": min(values), "high_s": max(values), "repeats": len(values)}


def _timed(call: Callable[[], object], budget_s: float) -> dict[str, Any]:
    """Seconds and processor seconds of one call with warm caches: medians over repeats of the mean of many calls."""
    for _ in range(3):
        call()
    start = time.perf_counter()
    call()
    once = max(1e-7, time.perf_counter() - start)
    count = max(1, min(20_000, int(budget_s / REPEATS / once)))
    means, cpu = [], []
    for _ in range(REPEATS):
        cpu_start, start = time.process_time(), time.perf_counter()
        for _ in range(count):
            call()
        means.append((time.perf_counter() - start) / count)
        cpu.append((time.process_time() - cpu_start) / count)
    return _summary(means) | {"cpu_s": statistics.median(cpu)}


def _issue_and_wait(issue: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Host times of issuing a tiny communication, mean of a burst, and of waiting for it when it is long through."""
    issue_s, wait_s = [], []
    for _ in range(ISSUES):
        start = time.perf_counter()
        works = [issue() for _ in range(BURST)]
        issue_s.append((time.perf_counter() - start) / BURST)
        time.sleep(ISSUE_PAUSE_S)
        start = time.perf_counter()
        for work in works:
            work.wait()
        wait_s.append((time.perf_counter() - start) / BURST)
    return issue_s, wait_s


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


def _matrix_jobs(thorough: bool = False) -> list[tuple[dict[str, Any], Callable[[], object]]]:
    def job(m: int, n: int, k: int) -> Callable[[], object]:
        x, weight = torch.rand(m, k), torch.rand(n, k)
        return lambda: torch.nn.functional.linear(x, weight)

    shapes = MORE_MATRICES if thorough else MATRICES
    return [({"kind": "matrix", "call": "linear", "shape": shape}, job(*shape)) for shape in shapes]


def _memory_jobs(thorough: bool = False, small: bool = False) -> list[tuple[dict[str, Any], Callable[[], object]]]:
    def job(elements: int) -> Callable[[], object]:
        x = torch.rand(elements)
        return lambda: torch.relu(x)

    counts = MORE_MEMORY_ELEMENTS if thorough else MEMORY_ELEMENTS
    counts = tuple(count for count in counts if not small or count <= 2**17)
    return [({"kind": "memory", "call": "relu", "size_bytes": 8 * count}, job(count)) for count in counts]


def _collective_call(call: str, size: int, size_bytes: int, group: Any) -> tuple[Callable[[], object], int]:
    """The call, blocking, and the bytes of the larger of its input and output."""
    part = max(1, size_bytes // 4 // size)
    whole, chunk = torch.zeros(part * size), torch.zeros(part)
    if call == "all_reduce":
        tensor = torch.zeros(max(1, size_bytes // 4))
        return lambda: dist.all_reduce(tensor, group=group), tensor.numel() * 4
    if call == "all_gather":
        return lambda: _all_gather(whole, chunk, group=group), whole.numel() * 4
    if call == "reduce_scatter":
        return lambda: _reduce_scatter(chunk, whole, group=group), whole.numel() * 4
    other = torch.zeros_like(whole)
    return lambda: dist.all_to_all_single(other, whole, group=group), whole.numel() * 4
