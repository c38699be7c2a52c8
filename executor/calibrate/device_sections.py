"""The sections of a calibration of accelerators. Tests run the same sections on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from costmodels.fit.points import Point
from executor.calibrate.allocation import allocation_points, communicator_points
from executor.calibrate.attention import attention_jobs
from executor.calibrate.block_steps import block_points
from executor.calibrate.communication import (
    PING_PONG,
    communication_jobs,
    make_call,
    recorded_jobs,
    recorded_together,
    timed_together,
)
from executor.calibrate.dispatch import dispatch_points
from executor.calibrate.instructions import instruction_points
from executor.calibrate.kernels import kernel_jobs
from executor.calibrate.load import load_points
from executor.calibrate.matrix import matrix_jobs
from executor.calibrate.operands import Job
from executor.calibrate.overlap import overlap_jobs, overlap_points
from executor.calibrate.replay import replay_points
from executor.calibrate.requested_points import requested_points
from executor.calibrate.rules import rule_jobs
from executor.calibrate.sections import AloneSection, InStepSection, StreamSection
from executor.calibrate.session import Section, Session
from executor.calibrate.stack_steps import stack_step_points
from executor.calibrate.stacks import stack_points

__all__ = ["DEVICE_SECTIONS"]

RECORDED_BYTES = 2**24
"""Above that the host's time does not show."""


def control_points(session: Session) -> Iterator[Point]:
    """The same products on every device: one device at a time, then all at once."""
    device, sync = session.device, session.sync
    shapes = ((2048, 4096, 4096), (8192, 8192, 4096)) if device.is_async else ((64, 64, 64),)
    for together in (0, 1):
        for turn in range(1 if together else sync.size):
            sync.barrier()
            if not together and turn != sync.rank:
                continue
            for m, n, k in shapes:
                a, b = session.pool.tensor(m, k), session.pool.tensor(k, n)
                options: dict[str, Any] = {"together": together, "rank": sync.rank}
                point = Point(
                    kind="clock", call="control", shape=(m, n, k), form="nn", dtype="bfloat16", options=options,
                    seconds=0.0,
                )  # fmt: skip
                if session.missing(point):
                    sample = session.timer.device_time([lambda a=a, b=b: torch.mm(a, b)])  # type: ignore[misc]
                    yield msgspec.structs.replace(point, **sample.fields)
        sync.barrier()


def message_jobs(session: Session) -> list[Job]:
    """Collectives and transfers whose tensors fit; the others are counted as skipped."""
    groups, device = tuple(session.sync.groups), session.device
    jobs = [job for job in communication_jobs(groups, session.sync.size) if session.missing(job.point)]
    limit = device.memory_bytes()[0] // 16 if device.is_async else 2**18
    small = [job for job in jobs if job.point.size_bytes <= limit]
    session.skipped.memory += len(jobs) - len(small) if not session.options.quick else 0
    return small


def measured_message(session: Session, job: Job, budget_s: float) -> list[Point]:
    """Seconds of one call among its like, and how far apart the ranks began."""
    call = make_call(job.point, session.sync, session.device.torch_device)
    sample, skew_s = timed_together(session.timer, session.sync, call)
    return [msgspec.structs.replace(job.point, **sample.fields, figures={"skew_s": skew_s})]


def recorded_message_jobs(session: Session) -> list[Job]:
    """Messages without the host's time, where launches can be recorded."""
    if not session.device.is_async:
        return []
    limit = session.device.memory_bytes()[0] // 16
    jobs = recorded_jobs(tuple(session.sync.groups), session.sync.size, RECORDED_BYTES)
    return [job for job in jobs if job.point.size_bytes <= limit]


def measured_recording(session: Session, job: Job, budget_s: float) -> list[Point]:
    """Seconds of one message in a recorded launch of many; of a message there and back half of it."""
    call = make_call(job.point, session.sync, session.device.torch_device)
    sample = recorded_together(session.timer, session.sync, call)
    if sample is None:
        return []
    ways, fields = 2 if job.point.options.get("pattern") == PING_PONG else 1, sample.fields
    fields |= {name: fields[name] / ways for name in ("seconds", "low_s", "high_s")}
    return [msgspec.structs.replace(job.point, **fields)]


def pair_jobs(session: Session) -> list[Job]:
    """Every kind of compute next to every kind of communication, between two ranks and between all."""
    sizes = sorted(size for size in session.sync.groups if size in (2, session.sync.size))
    return overlap_jobs(sizes, small=not session.device.is_async)


def measured_pair(session: Session, job: Job, budget_s: float) -> Sequence[Point]:
    """Both orders of one pair."""
    return overlap_points(session.timer, session.sync, job)


DEVICE_SECTIONS: tuple[Section, ...] = (
    StreamSection(name="control", share=0.03, stream=control_points, ranks="every", required=True),
    StreamSection(name="allocation", share=0.005, stream=lambda session: allocation_points(session.device)),
    StreamSection(
        name="communicators", announced="allocation", share=0.005, ranks="together",
        stream=lambda session: communicator_points(session.device, session.sync),
    ),
    AloneSection(
        name="requested", share=0.12, fits="compute", all_tiers=True,
        jobs=lambda session: requested_points(session.options.requested),
    ),
    AloneSection(
        name="matrix", share=0.19, fits="compute",
        jobs=lambda session: matrix_jobs(session.device.num_processors, float8=session.device.multiplies_float8),
    ),
    AloneSection(name="kernels", share=0.1, fits="compute", jobs=lambda session: kernel_jobs(session.options.calls)),
    AloneSection(name="attention", share=0.12, fits="compute", jobs=lambda session: attention_jobs()),
    AloneSection(
        name="rules", share=0.2, fits="compute.rules",
        jobs=lambda session: rule_jobs(session.options.rule_plans, session.options.plans, session.options.calls),
    ),
    InStepSection(
        name="communication", share=0.2, fits="collectives", jobs=message_jobs, measure=measured_message
    ),
    InStepSection(name="overlap", share=0.14, fits="overlap", jobs=pair_jobs, measure=measured_pair),
    StreamSection(name="dispatch", share=0.07, stream=lambda session: dispatch_points(session.timer)),
    StreamSection(
        name="replay", share=0.01, fits="replay", stream=lambda session: replay_points(session.timer)
    ),
    StreamSection(
        name="instructions", share=0.05, fits="dispatch_s", ranks="together",
        stream=lambda session: instruction_points(session.timer, session.options.plans),
    ),
    StreamSection(
        name="stacks", share=0.08, min_ranks=2, ranks="together", stream=lambda session: stack_points(session.timer)
    ),
    StreamSection(
        name="stack_steps", share=0.04, min_ranks=2, ranks="together",
        stream=lambda session: stack_step_points(session.timer, session.sync),
    ),
    StreamSection(
        name="blocks", share=0.03,
        stream=lambda session: block_points(session.timer, small=not session.device.is_async),
    ),
    StreamSection(
        name="load", share=0.1, fits="compute.power", ranks="every",
        stream=lambda session: load_points(session.timer, 0.4 if session.options.quick else 1.3),
    ),
    # last, as recording messages asks most of the library
    InStepSection(
        name="latency", share=0.06, fits="collectives", all_tiers=True, jobs=recorded_message_jobs,
        measure=measured_recording,
    ),
)  # fmt: skip
"""In the order in which they are taken. A section that needs less than its share leaves the rest to those after it."""
