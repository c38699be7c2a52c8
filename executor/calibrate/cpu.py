"""Measurements for the cost models of a CPU machine; runs on every rank of a launched gloo group.

Every point is needed for the fit, so the sections are required, and the budget of time sets how often calls are
repeated. How calls are timed on shared cores is in `executor.calibrate.shared_cores`.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from costmodels.fit.points import Point, PointLog
from executor.calibrate.operands import Job
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.sections import AloneSection, InStepSection
from executor.calibrate.session import Section, Session, SessionOptions
from executor.calibrate.shared_cores import BURST, exchange, issue_and_wait, summary, timed_alone, timed_in_step
from executor.calibrate.timing import Call, Timer
from executor.device import pick_device
from plans.errors import TwofoldError

__all__ = ["cpu_sections", "environment", "measure_rank"]

# 2.13 renames two functions and warns about the old names, which are the only ones in 2.11
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

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
COMM_REPEATS = 3
MORE_COMM_REPEATS = 5
LEAST_MEMORY_BYTES = 2**28
"""Memory of one rank below which the grid is made smaller."""


def measure_rank(
    report: Callable[[str], None] = print,
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
        log: of rank 0; points in it are not taken again, new ones are appended. None on the other ranks.
        thorough: more sizes and shapes, more repeats.
        timeout_s: after which a measurement counts as hung: the missing ranks are named, and this process ends.

    Returns:
        On rank 0 the points and the environment they were taken in; no points on the other ranks.

    Raises:
        TwofoldError: there is only one rank, or the clock jumps.
    """
    if dist.get_world_size() < 2:
        raise TwofoldError("calibration needs at least 2 ranks, not 1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    device = pick_device("cpu")
    sync = RankSync(device, timeout_s)
    try:
        options = SessionOptions(minutes=budget_s / 60, quick=not thorough)
        session = Session(Timer(device), sync, log, options, say=report)
        share_bytes = sync.from_rank_0(device.memory_bytes()[0]) // sync.size
        is_small = share_bytes < LEAST_MEMORY_BYTES
        if is_small:
            session.say(f"each rank has {share_bytes / 2**20:.0f} MiB: sizes above 512 KiB are left out")
        session.run(cpu_sections(tuple(sync.groups), thorough=thorough, small=is_small))
        points = list(session.points)
    finally:
        sync.close()
        torch.set_num_threads(threads)
    outside = [point.outside_cores for point in points if point.active_ranks > 1]
    around = {"ranks": str(dist.get_world_size()), "outside_cores": f"{statistics.fmean(outside or [0.0]):.2f}"}
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
    """Name of the processor; empty if the system does not provide it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    last_lines = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {key.strip(): value.strip() for key, value in last_lines.items()}
    names = ("model name",) if "model name" in fields else ("CPU implementer", "CPU part")  # the latter on ARM
    return " ".join(fields[name] for name in names if name in fields)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_sections(group_sizes: Sequence[int], *, thorough: bool = False, small: bool = False) -> tuple[Section, ...]:
    """The table of a CPU's sections; shares of the time add up to 1.

    Args:
        group_sizes: of the groups that the ranks form.
        thorough: more sizes and shapes.
        small: without what takes much memory.
    """
    all_sizes: Sequence[int] = MORE_SIZES_BYTES if thorough else SIZES_BYTES
    sizes = [size for size in all_sizes if size <= SIZES_BYTES[-1] or not small]
    alone = "one rank alone: dispatch, matrix products, memory"
    groups = ", ".join(map(str, group_sizes))
    return (
        AloneSection(
            name="dispatch", announced=alone, share=0.028, fits="dispatch_s", required=True, measure=measured_alone,
            jobs=lambda session: dispatch_jobs(),
        ),
        AloneSection(
            name="matrix", announced=alone, share=0.064, fits="compute", required=True, measure=measured_alone,
            jobs=lambda session: matrix_jobs(MORE_MATRICES if thorough else MATRICES),
        ),
        AloneSection(
            name="memory", announced=alone, share=0.028, fits="compute", required=True, measure=measured_alone,
            jobs=lambda session: memory_jobs(MORE_MEMORY_ELEMENTS if thorough else MEMORY_ELEMENTS, small=small),
        ),
        InStepSection(
            name="issue", announced=alone, share=0.0, fits="dispatch_s", required=True, jobs=issue_jobs,
            measure=measured_issue,
        ),
        InStepSection(
            name="sharing", announced="all ranks at once: how the cores are shared", share=0.12, required=True,
            jobs=sharing_jobs, measure=measured_in_step,
        ),
        *(
            InStepSection(
                name=call, announced=f"{call} in groups of {groups}", share=0.17, fits="collectives", required=True,
                jobs=partial(collective_jobs, call, sizes, thorough), measure=measured_in_step,
            )
            for call in CALLS
        ),
        InStepSection(
            name="transfer", announced="transfers between pairs", share=0.08, fits="collectives", required=True,
            jobs=partial(transfer_jobs, sizes), measure=measured_in_step,
        ),
    )  # fmt: skip


# -- how points are measured -------------------------------------------------------------------------------------------


def measured_alone(session: Session, job: Job, budget_s: float) -> list[Point]:
    """The point of a job that rank 0 does while the others sleep."""
    (call,) = job.make(session.pool)
    return [msgspec.structs.replace(job.point, **timed_alone(call, budget_s))]


def measured_in_step(session: Session, job: Job, budget_s: float) -> list[Point]:
    """The point of a job that the first active ranks do at once; every rank gets the same."""
    point, most = job.point, 20_000 if job.point.kind == "sharing" else 200
    (call,) = job.make(session.pool)
    repeats = COMM_REPEATS if session.options.quick else MORE_COMM_REPEATS
    times = timed_in_step(call, point.active_ranks, budget_s, repeats=repeats, most=most)
    if point.kind == "transfer":
        times |= {name: times[name] / BURST for name in ("seconds", "cpu_s", "low_s", "high_s")}
    return [msgspec.structs.replace(point, **times)]


def measured_issue(session: Session, job: Job, budget_s: float) -> list[Point]:
    """Host times of issuing a tiny communication, and of waiting for a collective that is through."""
    if session.sync.rank >= job.point.active_ranks:
        return []
    (issue,) = job.make(session.pool)
    issue_s, wait_s = issue_and_wait(issue)
    if not job.others:
        return [msgspec.structs.replace(job.point, **summary(issue_s))]
    (collective,) = job.others
    return [
        msgspec.structs.replace(collective, **summary(issue_s)),
        msgspec.structs.replace(job.point, **summary(wait_s)),
    ]


# -- what is measured --------------------------------------------------------------------------------------------------


def cpu_job(make: Callable[[], Call], *others: Point, **described: Any) -> Job:
    """The job of a point with these fields. Its call and tensors are created when it runs."""
    return Job(point=Point(**described, seconds=0.0), others=others, make=lambda pool: [make()], tier=0)


def dispatch_jobs() -> list[Job]:
    """Calls on tensors so small that only issuing them takes time."""
    x, weight, bias = torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1)
    linear = torch.nn.functional.linear
    calls: dict[str, Call] = {
        "matrix": lambda: linear(x, weight, bias),
        "memory": lambda: torch.relu(x),
        "view": lambda: x.view(1),
        "update": lambda: weight.add_(x, alpha=-0.01),
    }
    return [cpu_job(partial(_same, call), kind="dispatch", call=name) for name, call in calls.items()]


def matrix_jobs(shapes: Sequence[tuple[int, int, int]]) -> list[Job]:
    """Products (m, n, k) as a linear's forward."""

    def product(m: int, n: int, k: int) -> Call:
        x, weight = torch.rand(m, k), torch.rand(n, k)
        return lambda: torch.nn.functional.linear(x, weight)

    return [cpu_job(partial(product, *shape), kind="matrix", call="linear", shape=shape) for shape in shapes]


def memory_jobs(counts: Sequence[int], *, small: bool = False) -> list[Job]:
    """relu of each number of elements."""

    def relu(elements: int) -> Call:
        x = torch.rand(elements)
        return lambda: torch.relu(x)

    some = [count for count in counts if not small or count <= 2**17]
    return [cpu_job(partial(relu, count), kind="memory", call="relu", size_bytes=8 * count) for count in some]


def issue_jobs(session: Session) -> list[Job]:
    """An all_reduce of the smallest groups with the wait for it, and a transfer."""
    groups, token = session.sync.groups, torch.zeros(1)
    pair = min(groups)
    common: dict[str, Any] = {"kind": "dispatch", "ranks": pair, "active_ranks": pair}
    issued = Point(**common, call="collective", seconds=0.0)
    reduce = partial(dist.all_reduce, token, group=groups[pair], async_op=True)
    send = partial(message, session, token)
    return [
        cpu_job(lambda: reduce, issued, **common, call="wait"),
        cpu_job(lambda: send, kind="dispatch", ranks=2, active_ranks=2, call="transfer"),
    ]


def sharing_jobs(session: Session) -> list[Job]:
    """Two products and two memory-bound kernels that all ranks do at once."""
    alone = [*matrix_jobs((MATRICES[3], MATRICES[5])), *memory_jobs(MEMORY_ELEMENTS[1:3])]
    fields = {"kind": "sharing", "active_ranks": session.sync.size}
    return [
        dataclasses.replace(job, point=msgspec.structs.replace(job.point, **fields, call=job.point.kind))
        for job in alone
    ]


def collective_jobs(call: str, sizes: Sequence[int], thorough: bool, session: Session) -> list[Job]:
    """A collective of every size in all groups at once, and of some sizes in one group."""
    groups, num_ranks, cases = session.sync.groups, session.sync.size, []
    for ranks in groups:
        cases += [(ranks, size_bytes, num_ranks) for size_bytes in sizes]
        if ranks < num_ranks:
            cases += [(ranks, size_bytes, ranks) for size_bytes in (sizes[1:-1] if thorough else FEW_SIZES_BYTES)]
    return [
        cpu_job(
            partial(collective_call, call, ranks, size_bytes, groups[ranks]),
            kind="collective", call=call, size_bytes=_whole_elements(call, ranks, size_bytes) * 4, ranks=ranks,
            active_ranks=active,
        )
        for ranks, size_bytes, active in cases
    ]  # fmt: skip


def _whole_elements(call: str, ranks: int, size_bytes: int) -> int:
    """Elements of the larger of input and output: of all but an all_reduce as many for each rank."""
    return max(1, size_bytes // 4) if call == "all_reduce" else ranks * max(1, size_bytes // 4 // ranks)


def collective_call(call: str, ranks: int, size_bytes: int, group: Any) -> Call:
    """The call, blocking, whose larger tensor has about `size_bytes`."""
    elements = _whole_elements(call, ranks, size_bytes)
    whole = torch.zeros(elements)
    if call == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if call == "all_to_all":
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    chunk = torch.zeros(elements // ranks)
    if call == "all_gather":
        return lambda: _all_gather(whole, chunk, group=group)
    return lambda: _reduce_scatter(chunk, whole, group=group)


def transfer_jobs(sizes: Sequence[int], session: Session) -> list[Job]:
    """Rank 2i sends to rank 2i+1: bursts of messages under way at once, as in a pipeline, then a wait for all."""
    paired = session.sync.size - session.sync.size % 2
    cases = [(size_bytes, paired) for size_bytes in sizes]
    cases += [(size_bytes, 2) for size_bytes in sizes[1:] if paired > 2]

    def burst(size_bytes: int) -> Call:
        starts = [partial(message, session, torch.zeros(size_bytes // 4)) for _ in range(BURST)]
        return lambda: exchange(starts)

    return [
        cpu_job(
            partial(burst, size_bytes), kind="transfer", call="transfer", size_bytes=size_bytes, ranks=2,
            active_ranks=active,
        )
        for size_bytes, active in cases
    ]  # fmt: skip


def _same(call: Call) -> Call:
    return call


def message(session: Session, tensor: torch.Tensor) -> Any:
    """Start the send of an even rank to the next one, or the receive there."""
    rank = session.sync.rank
    return dist.isend(tensor, rank + 1) if rank % 2 == 0 else dist.irecv(tensor, rank - 1)
