"""The kinds of sections of a calibration: points of a single device, points of several ranks in step, and streams of
points.

A section is a small object: its name, its points (as jobs, or generated one by one), how a point is measured, and the
part of the machine file that is fitted to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from costmodels.fit.points import Point
from executor.calibrate.operands import Job, in_order
from executor.calibrate.session import MEMORY_SHARE, Session

__all__ = ["AloneSection", "CallLimits", "InStepSection", "StreamSection", "device_time"]

Measure = Callable[[Session, Job, float], Sequence[Point]]
"""Measures a job in about the given number of seconds; returns its points."""


def device_time(session: Session, job: Job, budget_s: float) -> list[Point]:
    """The point of a job by the session's timer."""
    sample = session.timer.device_time(job.make(session.pool))
    figures = {"recorded": float(sample.recorded)}
    return [msgspec.structs.replace(job.point, **sample.fields, figures=figures)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The common part of all sections (see `executor.calibrate.session.Section`)."""

    name: str
    share: float
    fits: str = ""
    min_ranks: int = 1
    required: bool = False
    all_tiers: bool = False  # a quick run takes every job, whatever its tier
    announced: str = ""

    @property
    def title(self) -> str:
        """The title in progress messages."""
        return self.announced or self.name

    def missing(self, session: Session, jobs: Sequence[Job]) -> list[Job]:
        """The jobs that a session is still to take."""
        first_tier = session.options.quick and not (self.required or self.all_tiers)
        return [job for job in jobs if session.missing(job.point) and not (first_tier and job.tier)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneSection(_Row):
    """Points that one device takes alone.

    Accelerators divide the jobs among their ranks, which take them at the same time (the points of "control" show
    whether that disturbs); ranks that share the cores of a CPU wait while rank 0 takes all.

    Args:
        jobs: the points that are needed.
        measure: how one is measured.
    """

    jobs: Callable[[Session], Sequence[Job]]
    measure: Measure = device_time

    def take(self, session: Session, budget_s: float) -> None:
        """Measure the jobs that are not there yet; every rank calls it."""
        end_s = session.clock_s() + budget_s
        self.take_jobs(session, self.jobs(session), budget_s)
        session.pool.clear()
        session.sync.barrier_until(end_s - session.clock_s())

    def take_jobs(self, session: Session, jobs: Sequence[Job], budget_s: float) -> None:
        """Measure this rank's part of `jobs` that are not there yet, within `budget_s` seconds."""
        end_s, each_s = session.clock_s() + budget_s, budget_s / max(1, len(jobs))
        missing = self.missing(session, in_order(jobs, session.options.order))
        rank, size = session.sync.rank, session.sync.size
        own = missing[rank::size] if session.device.is_async else missing if rank == 0 else []
        limits = None if self.required or not own else CallLimits.of(session)
        for number, job in enumerate(own):
            if limits is not None and session.clock_s() > end_s:
                session.skipped.time += len(own) - number
                break
            if limits is None or limits.allow(session, job):
                self._measure(session, job, each_s)
            session.report_progress(number + 1, len(own))

    def _measure(self, session: Session, job: Job, budget_s: float) -> None:
        device, point = session.device, job.point
        try:
            for measured in self.measure(session, job, budget_s):
                session.keep(measured)
        except torch.OutOfMemoryError:
            device.release_memory()
            session.skipped.memory += 1
        except RuntimeError as error:
            session.check_device(error, f"{point.kind} {point.call} {point.shape}")
        if device.memory_reserved() > MEMORY_SHARE * device.memory_bytes()[1]:
            device.release_memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The calls that fit on a device.

    Args:
        free_bytes: of memory.
        flops_per_s: about its rate of products.
        bytes_per_s: about its rate of copies.
    """

    free_bytes: int
    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, session: Session) -> CallLimits:
        """The rates of the session's device."""
        device, timer = session.device, session.timer
        free, _ = device.memory_bytes()
        size = 4096 if device.is_async else 256
        x = session.pool.tensor(2**22 if device.is_async else 2**18, dtype="float32")
        product_s = timer.device_time([timer.reference_product()]).seconds
        copy_s = timer.device_time([x.clone]).seconds
        return cls(
            free_bytes=free + device.memory_reserved() - device.memory_allocated(),
            flops_per_s=2 * size**3 / product_s,
            # a norm or a random number takes a CPU longer than moving it
            bytes_per_s=2 * x.nbytes / copy_s / (1 if device.is_async else 10),
        )

    def allow(self, session: Session, job: Job) -> bool:
        """Whether a job fits; one that does not is counted as skipped."""
        rate = self.bytes_per_s if job.point.kind == "memory" else self.flops_per_s
        if job.needs_bytes > MEMORY_SHARE * self.free_bytes:
            session.skipped.memory += 1
        elif job.work / rate > session.max_call_s:
            session.skipped.work += 1
        else:
            return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class InStepSection(_Row):
    """Points that all ranks take in step; rank 0 keeps them.

    Args:
        jobs: the points that are needed, the same on every rank.
        measure: how one is measured; every rank calls it. No points: they cannot be measured here.
    """

    jobs: Callable[[Session], Sequence[Job]]
    measure: Measure
    min_ranks: int = 2

    def take(self, session: Session, budget_s: float) -> None:
        """Measure the jobs that are not there yet; every rank calls it."""
        end_s, jobs = session.clock_s() + budget_s, self.jobs(session)
        each_s = budget_s / max(1, len(jobs))
        missing = self.missing(session, sorted(jobs, key=lambda job: job.tier))
        for number, job in enumerate(missing):
            if not self.required and not session.sync.all_agree(session.clock_s() < end_s):
                session.skipped.time += len(missing) - number
                break
            session.report_progress(number, len(missing))
            with session.sync.watch(_described(job.point)):
                measured = self.measure(session, job, each_s)
                if session.sync.rank == 0:
                    for point in measured:
                        session.keep(point)
            session.skipped.failed += not measured
        session.sync.barrier()


def _described(point: Point) -> str:
    """The call, for the message about missing ranks."""
    beside = f" beside {point.beside}" if point.beside else ""
    recording = "recording " if point.options.get("recorded") else ""
    return f"{recording}{point.call}{beside} of {point.size_bytes} bytes in groups of {point.ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSection(_Row):
    """Points that a generator measures and yields one by one.

    Args:
        stream: the generator.
        ranks: "first": rank 0 takes them while the others wait; "every": each rank takes and keeps its own, which have
            its number in their options; "together": they need every rank, and rank 0 keeps them.
    """

    stream: Callable[[Session], Iterator[Point]]
    ranks: Literal["first", "every", "together"] = "first"

    def take(self, session: Session, budget_s: float) -> None:
        """Take points until there are no more or time is up; every rank calls it."""
        end_s = session.clock_s() + budget_s
        if self.ranks == "together":
            with session.sync.watch(session.title, timeout_s=max(60.0, 2 * budget_s)):
                self._consume(session, end_s)
            return
        if self.ranks == "every" or session.sync.rank == 0:
            self._consume(session, end_s)
        session.sync.barrier_until(end_s - session.clock_s())

    def _consume(self, session: Session, end_s: float) -> None:
        """Until there are no more points, time is up, or taking one fails (on any rank, where all take them)."""
        stream, is_together = self.stream(session), self.ranks == "together"
        for number in itertools.count():
            point, failed = None, 0.0
            try:
                point = next(stream, None)
            except RuntimeError as error:
                if self.required:
                    raise
                session.check_device(error, session.title)
                failed = 1.0
            if point is not None and (session.sync.rank == 0 or self.ranks == "every"):
                self._keep(session, point)
            if not self.required:
                session.report_progress(number, number)
            ended = [float(session.clock_s() > end_s and not self.required), failed]
            late, failed = session.sync.maximum(ended) if is_together else ended
            if point is None or failed:
                break
            if late:
                session.skipped.time += 1
                break

    def _keep(self, session: Session, point: Point) -> None:
        if self.ranks == "every":
            point = msgspec.structs.replace(point, options=point.options | {"rank": session.sync.rank})
        if session.missing(point) and (session.log is None or point not in session.log):
            session.keep(point)
