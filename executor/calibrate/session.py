"""One calibration on one rank: its sections in order, inside a budget of time, every point on disk at once.

What one device does alone is divided among the ranks of accelerators, which do it at the same time (control points tell
whether that disturbs); what devices do together is done by all in step, and rank 0 keeps the points. A second run with
the same file skips what is there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from costmodels.fit.points import Point, PointLog
from executor.calibrate.allocation import allocation_points, communicator_points
from executor.calibrate.attention import attention_jobs
from executor.calibrate.communication import (
    PING_PONG,
    CommJob,
    communication_jobs,
    make_call,
    recorded_jobs,
    recorded_together,
    timed_together,
)
from executor.calibrate.dispatch import dispatch_points
from executor.calibrate.instructions import instruction_points
from executor.calibrate.kernels import kernel_jobs
from executor.calibrate.load import block_points, load_points
from executor.calibrate.matrix import matrix_jobs
from executor.calibrate.operands import Bench, Job, in_order
from executor.calibrate.overlap import OverlapJob, overlap_jobs, overlap_point
from executor.calibrate.rank_sync import Meeting
from executor.calibrate.requested_points import wanted_jobs
from executor.calibrate.rules import rule_jobs
from executor.calibrate.stack_steps import stack_step_points
from executor.calibrate.stacks import stack_points
from executor.calibrate.timing import Timer
from plans.errors import TwofoldError

__all__ = ["SECTIONS", "Session"]

SECTIONS = {
    "control": 0.03,
    "allocation": 0.01,
    "wanted": 0.12,
    "matrix": 0.19,
    "kernels": 0.1,
    "attention": 0.12,
    "rules": 0.09,
    "communication": 0.2,
    "overlap": 0.14,
    "dispatch": 0.07,
    "instructions": 0.05,
    "stacks": 0.08,
    "stack_steps": 0.04,
    "blocks": 0.03,
    "load": 0.03,
    "latency": 0.06,
}
"""Name -> share of the time. A section that needs less leaves the rest to those after it."""

TOGETHER = ("communication", "overlap", "stacks", "stack_steps", "latency")
"""Sections that take several devices."""

MEMORY_SHARE = 0.5
"""Of free memory that one point may use."""

RECORDED_BYTES = 2**24
"""Above that the host's time does not show."""

TELL_S = 5.0
SENSE_S = 0.3


@dataclass(slots=True)
class _Left:
    """What was not measured, and why."""

    time: int = 0
    memory: int = 0
    work: int = 0
    failed: int = 0

    def __str__(self) -> str:
        reasons = {
            "for lack of time": self.time,
            "too large for its memory": self.memory,
            "too much work for it": self.work,
            "failed": self.failed,
        }
        return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)


class Session:
    """The measurements of one rank.

    Args:
        timer: of this rank's device.
        meeting: of all ranks.
        log: this rank's file; that of rank 0 gets everything in the end.
        minutes: of time there is.
        quick: only what tells most.
        plans: programs for the section "instructions"; its and those of `rule_plans` for the section "rules".
        rule_plans: programs that are not run.
        wanted: a file of points that are asked for beyond the grids.
        sections: of `SECTIONS`, those to take; all when empty.
        order: seed of the order inside a section; another one takes the same points at other times.
        say: takes a line of progress; called on rank 0 only.
        max_call_s: a point whose single call would take longer is left out.
        clock_s: the time of day, in seconds.
    """

    def __init__(
        self,
        timer: Timer,
        meeting: Meeting,
        log: PointLog,
        *,
        minutes: float,
        quick: bool = False,
        plans: Sequence[Path] = (),
        rule_plans: Sequence[Path] = (),
        wanted: Path | None = None,
        sections: Sequence[str] = (),
        order: int = 0,
        say: Callable[[str], None] = print,
        max_call_s: float | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timer, self.device, self.meeting, self.log = timer, timer.device, meeting, log
        if unknown := [name for name in sections if name not in SECTIONS]:
            raise TwofoldError(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
        self.sections = [name for name in SECTIONS if name in (sections or SECTIONS)]
        without = (*(TOGETHER if meeting.size == 1 else ()), *(("wanted",) if wanted is None else ()))
        self.sections = [name for name in self.sections if name not in without]
        self.quick, self.plans, self.wanted, self.order = quick, plans, wanted, order
        self.rule_plans = (*plans, *rule_plans)
        self.say = say if meeting.rank == 0 else (lambda line: None)
        self.clock_s, self.end_s = clock_s, clock_s() + 60 * minutes
        self.max_call_s = max_call_s or (0.3 if self.device.is_async else 0.02)
        free, _ = self.device.memory_bytes()
        self.bench = Bench(
            device=self.device, block_bytes=min(4 * 2**30 if self.device.is_async else 2**25, free // 16)
        )
        self.left = _Left()
        self.failures: list[str] = []
        self.known: set[Any] = set()
        self.title = ""
        self._told_s = self._sensed_s = -1e30
        self._sensed: dict[str, float] = {}

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All sections.

        Raises:
            TwofoldError: the device stopped working, another rank stopped answering, the clock jumps. What was measured
                until then is in the log.
        """
        self.known = self._shared_keys()
        if self.known:
            self.say(f"{len(self.known)} points are there already")
        steps: dict[str, Callable[[float], None]] = {
            "control": self._control,
            "allocation": self._allocation,
            "wanted": lambda end: self._alone(wanted_jobs(self.wanted), end, everything=True),
            "matrix": lambda end: self._alone(matrix_jobs(self.device.num_processors), end),
            "kernels": lambda end: self._alone(kernel_jobs(), end),
            "attention": lambda end: self._alone(attention_jobs(), end),
            "rules": lambda end: self._alone(rule_jobs(self.rule_plans), end),
            "communication": self._communication,
            "overlap": self._overlap,
            "dispatch": lambda end: self._rank_0(dispatch_points(self.timer), end),
            "instructions": lambda end: self._together(instruction_points(self.timer, self.plans), end),
            "stacks": self._stacks,
            "stack_steps": self._stack_steps,
            "blocks": lambda end: self._rank_0(block_points(self.timer, small=not self.device.is_async), end),
            "latency": self._latency,
            "load": lambda end: self._everywhere(load_points(self.timer, 0.4 if self.quick else 1.5), end),
        }
        for number, name in enumerate(self.sections, 1):
            share = SECTIONS[name] / sum(SECTIONS[other] for other in self.sections[number - 1 :])
            left_s = max(0.0, self.end_s - self.clock_s())
            before, self.left = len(self.known), _Left()
            self.title = f"[{number}/{len(self.sections)}] {name}"
            self.say(f"{self.title} ({left_s:.0f} s left, {share * left_s:.0f} s for it)")
            self.meeting.barrier()
            steps[name](self.clock_s() + share * left_s)
            self.device.release_memory()
            self.known = self._shared_keys()
            without = f"; left out: {self.left}" if str(self.left) else ""
            self.say(f"{self.title}: {len(self.known) - before} points{without}")
        self.bench.clear()

    def keep(self, point: Point) -> None:
        """Write a point to this rank's file, with the device's sensors beside it."""
        now = self.clock_s()
        if now - self._sensed_s > SENSE_S:
            self._sensed = {name: value for name, value in self.device.sensors().items() if name != "clock_MHz"}
            self._sensed_s = now
        empty = {name: value for name, value in self._sensed.items() if not getattr(point, name)}
        self.log.add(msgspec.structs.replace(point, **empty))

    def _tell(self, done: int, of: int) -> None:
        now = self.clock_s()
        if now - self._told_s > TELL_S:
            self._told_s = now
            self.say(f"{self.title}: {done} of {of}, {max(0.0, self.end_s - now):.0f} s left in all")

    def _shared_keys(self) -> set[Any]:
        """Rank 0 gets the points of all ranks into its file; everybody learns what is there."""
        mine = [msgspec.json.encode(point) for point in self.log] if self.meeting.rank else []
        for line in itertools.chain(*self.meeting.gather(mine)):
            if (point := msgspec.json.decode(line, type=Point)) not in self.log:
                self.log.add(point)
        known: set[Any] = self.meeting.told({point.key for point in self.log})
        return known

    # -- one device alone ----------------------------------------------------------------------------------------------

    def _alone(self, jobs: Sequence[Job], end_s: float, *, everything: bool = False) -> None:
        """Jobs of single devices, divided among the ranks where each has a device of its own.

        Args:
            jobs: to take.
            end_s: when to stop.
            everything: also what is not for a quick run.
        """
        wanted = [job for job in in_order(jobs, self.order) if job.point.key not in self.known]
        if self.quick and not everything:
            wanted = [job for job in wanted if job.tier == 0]
        rank, size = self.meeting.rank, self.meeting.size
        mine = wanted[rank::size] if self.device.is_async else wanted if rank == 0 else []
        flops_per_s, bytes_per_s = self._rates()
        free, _ = self.device.memory_bytes()
        free += self.device.memory_reserved() - self.device.memory_allocated()
        for number, job in enumerate(mine):
            if self.clock_s() > end_s:
                self.left.time += len(mine) - number
                break
            rate = bytes_per_s if job.point.kind == "memory" else flops_per_s
            if job.needs_bytes > MEMORY_SHARE * free:
                self.left.memory += 1
            elif job.work / rate > self.max_call_s:
                self.left.work += 1
            else:
                self._take(job)
            self._tell(number + 1, len(mine))
        self.bench.clear()
        self.meeting.barrier_until(end_s - self.clock_s())

    def _take(self, job: Job) -> None:
        point = job.point
        try:
            calls = job.make(self.bench)
            sample = self.timer.device_time(calls)
            self.keep(msgspec.structs.replace(point, **sample.fields, figures={"recorded": float(sample.recorded)}))
        except torch.OutOfMemoryError:
            self.device.release_memory()
            self.left.memory += 1
        except RuntimeError as error:
            self._check_device(error, f"{point.kind} {point.call} {point.shape}")
        if self.device.memory_reserved() > MEMORY_SHARE * self.device.memory_bytes()[1]:
            self.device.release_memory()

    def _check_device(self, error: RuntimeError, what: str) -> None:
        """Go on after an error that leaves the device usable; otherwise say so and stop."""
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        try:
            self.device.synchronize()
            torch.ones(1, device=self.device.torch_device).sum().item()
        except RuntimeError as gone:
            raise TwofoldError(
                f"device {self.device.name} of rank {self.meeting.rank} stopped working in {what}: {said}; "
                f"{len(self.log.points)} points are kept in {self.log.path}: run the same command again to go on"
            ) from gone
        self.left.failed += 1
        self.failures.append(f"{what}: {said}")
        self.say(f"{what} failed: {said}")

    def _rates(self) -> tuple[float, float]:
        """About how many operations and bytes per second this device does."""
        product = self.timer.reference_product()
        size = 4096 if self.device.is_async else 256
        x = self.bench.tensor(2**22 if self.device.is_async else 2**18, dtype="float32")
        product_s = self.timer.device_time([product]).seconds
        copy_s = self.timer.device_time([x.clone]).seconds
        # a norm or a random number takes a CPU longer than moving it
        return 2 * size**3 / product_s, 2 * x.nbytes / copy_s / (1 if self.device.is_async else 10)

    def _control(self, end_s: float) -> None:
        """The same products on every device: one device at a time, then all at once."""
        shapes = ((2048, 4096, 4096), (8192, 8192, 4096)) if self.device.is_async else ((64, 64, 64),)
        for together in (0, 1):
            for turn in range(1 if together else self.meeting.size):
                self.meeting.barrier()
                if not together and turn != self.meeting.rank:
                    continue
                for m, n, k in shapes:
                    a, b = self.bench.tensor(m, k), self.bench.tensor(k, n)
                    options: dict[str, Any] = {"together": together, "rank": self.meeting.rank}
                    point = Point(
                        kind="clock", call="control", shape=(m, n, k), form="nn", dtype="bfloat16", options=options,
                        seconds=0.0,
                    )  # fmt: skip
                    if point.key not in self.known:
                        sample = self.timer.device_time([lambda a=a, b=b: torch.mm(a, b)])  # type: ignore[misc]
                        self.keep(msgspec.structs.replace(point, **sample.fields))
            self.meeting.barrier()

    # -- several devices -----------------------------------------------------------------------------------------------

    def _allocation(self, end_s: float) -> None:
        self._rank_0(allocation_points(self.device), end_s)
        self._together(communicator_points(self.device, self.meeting), end_s)

    def _communication(self, end_s: float) -> None:
        if self.meeting.size == 1:
            return
        jobs = communication_jobs(tuple(self.meeting.groups), self.meeting.size)
        jobs = [job for job in jobs if job.point.key not in self.known]
        limit = self.device.memory_bytes()[0] // 16 if self.device.is_async else 2**18
        small = [job for job in sorted(jobs, key=lambda job: job.tier) if job.point.size_bytes <= limit]
        small = [job for job in small if job.tier == 0 or not self.quick]
        self.left.memory += len(jobs) - len(small) if not self.quick else 0
        for number, job in enumerate(small):
            if not self.meeting.all_say(self.clock_s() < end_s):
                self.left.time += len(small) - number
                break
            self._tell(number, len(small))
            self._communicate(job)

    def _communicate(self, job: CommJob) -> None:
        point = job.point
        what = f"{point.call} of {point.size_bytes} bytes in groups of {point.ranks}"
        with self._in_step(what, range(point.active_ranks)):
            call = make_call(point, self.meeting, self.device.torch_device)
            sample, skew_s = timed_together(self.timer, self.meeting, call)
            if self.meeting.rank == 0:
                self.keep(msgspec.structs.replace(point, **sample.fields, figures={"skew_s": skew_s}))

    def _latency(self, end_s: float) -> None:
        """Messages without the host's time; last, as recording them asks most of the library."""
        if self.meeting.size == 1 or not self.device.is_async:
            return
        limit = self.device.memory_bytes()[0] // 16
        jobs = recorded_jobs(tuple(self.meeting.groups), self.meeting.size, RECORDED_BYTES)
        jobs = [job for job in jobs if job.point.key not in self.known and job.point.size_bytes <= limit]
        for number, job in enumerate(jobs):
            if not self.meeting.all_say(self.clock_s() < end_s):
                self.left.time += len(jobs) - number
                break
            self._tell(number, len(jobs))
            point = job.point
            with self._in_step(f"recording {point.call} of {point.size_bytes} bytes", range(point.active_ranks)):
                call = make_call(point, self.meeting, self.device.torch_device)
                sample = recorded_together(self.timer, self.meeting, call)
            if sample is None:
                self.left.failed += 1
            elif self.meeting.rank == 0:
                ways = 2 if point.options.get("pattern") == PING_PONG else 1
                fields = sample.fields
                fields |= {name: fields[name] / ways for name in ("seconds", "low_s", "high_s")}
                self.keep(msgspec.structs.replace(point, **fields))

    def _overlap(self, end_s: float) -> None:
        if self.meeting.size == 1:
            return
        sizes = sorted(size for size in self.meeting.groups if size in (2, self.meeting.size))
        jobs = overlap_jobs(sizes, small=not self.device.is_async)
        jobs = [job for job in sorted(jobs, key=lambda job: job.tier) if job.points[0].key not in self.known]
        if self.quick:
            jobs = [job for job in jobs if job.tier == 0]
        for number, job in enumerate(jobs):
            if not self.meeting.all_say(self.clock_s() < end_s):
                self.left.time += len(jobs) - number
                break
            self._tell(number, len(jobs))
            self._beside(job)

    def _beside(self, job: OverlapJob) -> None:
        point = job.points[0]
        with self._in_step(f"{point.call} beside {point.beside}", range(point.ranks)):
            for taken in overlap_point(self.timer, self.meeting, job):
                if self.meeting.rank == 0:
                    self.keep(taken)

    def _stacks(self, end_s: float) -> None:
        if self.meeting.size > 1:
            self._together(stack_points(self.timer), end_s)

    def _stack_steps(self, end_s: float) -> None:
        if self.meeting.size > 1:
            self._together(stack_step_points(self.timer, self.meeting), end_s)

    def _rank_0(self, points: Iterator[Point], end_s: float) -> None:
        """Points that rank 0 takes while the others wait."""
        if self.meeting.rank == 0:
            self._consume(points, end_s, keep=True, ask=False)
        self.meeting.barrier_until(end_s - self.clock_s())

    def _everywhere(self, points: Iterator[Point], end_s: float) -> None:
        """Points that every rank takes and keeps, each for its own device."""
        rank = {"rank": self.meeting.rank}
        mine = (msgspec.structs.replace(point, options=point.options | rank) for point in points)
        self._consume(mine, end_s, keep=True, ask=False)
        self.meeting.barrier_until(end_s - self.clock_s())

    def _together(self, points: Iterator[Point], end_s: float) -> None:
        """Points that need every rank; rank 0 keeps them."""
        with self._in_step(self.title, range(self.meeting.size), timeout_s=max(60.0, 2 * (end_s - self.clock_s()))):
            self._consume(points, end_s, keep=self.meeting.rank == 0, ask=True)

    def _consume(self, points: Iterator[Point], end_s: float, *, keep: bool, ask: bool) -> None:
        """Take points until there are no more, time is up, or taking one fails (on any rank, where all take them)."""
        say = self.meeting.most if ask else list
        for number in itertools.count():
            point, failed = None, 0.0
            try:
                point = next(points, None)
            except RuntimeError as error:
                self._check_device(error, self.title)
                failed = 1.0
            if point is not None and keep and point.key not in self.known and point not in self.log:
                self.keep(point)
            self._tell(number, number)
            late, failed = say([float(self.clock_s() > end_s), failed])
            if point is None or failed:
                break
            if late:
                self.left.time += 1
                break

    def _in_step(self, what: str, ranks: Sequence[int], timeout_s: float | None = None) -> Any:
        return self.meeting.watch(what, ranks, timeout_s)
