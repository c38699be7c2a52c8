"""A machine file for this computer: CPU ranks that communicate over gloo and share the cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from costmodels.fit.forms import Residuals, crowding, fit_collective, fit_compute, residuals, worked_s
from costmodels.fit.points import Point
from costmodels.fit.section import Draft, FitSection, SectionFit, fit_sections
from costmodels.machine.machine import COLLECTIVES, DISPATCH_CLASSES, Interval, Link, Machine, Provenance
from plans.errors import TwofoldError

__all__ = ["SECTIONS", "Calibration", "fit_cpu_machine"]

START_INTERVAL = Interval(low=0.6, high=1.7)
"""Until probe programs have run: the errors of the single collectives below, which do not average out entirely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A fitted machine and how well its forms explain the points."""

    machine: Machine
    residuals: tuple[Residuals, ...]


def fit_cpu_machine(points: Sequence[Point], environment: Mapping[str, str], *, name: str = "this-cpu") -> Calibration:
    """The machine that `points` were measured on.

    Args:
        points: of `executor.calibrate.cpu`.
        environment: what was written next to them: ranks, cores, memory_bytes, date, torch.
        name: name of the machine.

    Raises:
        TwofoldError: points of a kind or facts about the environment are missing.
    """
    try:
        limits = {key: int(environment[key]) for key in ("ranks", "cores", "memory_bytes")}
    except (KeyError, ValueError) as error:
        raise TwofoldError(f"the environment of the measured points has no {error}; measure again") from None
    ranks, cores, date = limits["ranks"], limits["cores"], environment.get("date", "")
    known = {
        "memory_bytes": Provenance(status="measured", source="memory of the computer over its ranks", date=date),
        "cores_per_node": Provenance(status="measured", source="cores that the processes may use", date=date),
        "interval": Provenance(status="assumed", source="no probe program has run yet", date=date),
    }
    draft = Draft(
        points=tuple(points),
        source=f"measured on {ranks} gloo processes on {cores} cores, torch {environment.get('torch', '?')}",
        date=date,
        limits=limits,
        provenance=known,
    )
    draft = fit_sections(SECTIONS, draft)
    machine = Machine(
        name=name,
        device="cpu",
        num_devices=ranks,
        devices_per_node=ranks,
        memory_bytes=limits["memory_bytes"] // ranks,
        host_async=False,
        cores_per_node=cores,
        interval=START_INTERVAL,
        provenance=dict(draft.provenance),
        **draft.values,
    )
    return Calibration(machine=machine, residuals=draft.residuals)


def _host_times(draft: Draft) -> list[Point]:
    return [point for point in draft.points if point.kind == "dispatch"]


def _fit_host_times(points: Sequence[Point], draft: Draft) -> SectionFit:
    seconds = {point.call: worked_s(point) for point in points}
    seconds.setdefault("attention", seconds.get("matrix", 0.0))
    if missing := [name for name in DISPATCH_CLASSES if name not in seconds]:
        raise TwofoldError(f"no dispatch time was measured for {', '.join(missing)}; measure again")
    return SectionFit(
        values={"dispatch_s": seconds},
        provenance={
            "dispatch_s": draft.provenance_of(),
            "dispatch_s.attention": Provenance(status="assumed", source="as a matrix product", date=draft.date),
        },
    )


def _kernels(draft: Draft) -> list[Point]:
    return [point for point in draft.points if point.kind in ("matrix", "memory")]


def _fit_kernels(points: Sequence[Point], draft: Draft) -> SectionFit:
    compute, *quality = fit_compute(points, dispatch_s=draft.dispatch_s, host_async=False)
    # a message costs the processors, which `fit_collective` measures; the link itself is never the limit
    link = Link(name="loopback", ranks=draft.limits["ranks"], latency_s=0.0, bandwidth_Bps=compute.memory_Bps)
    vector = "as the matrix rate: element-wise kernels are bound by memory"
    loopback = "loopback at memory bandwidth; its cost is the processors' (collectives)"
    return SectionFit(
        values={"compute": compute, "links": (link,)},
        provenance={
            "compute": draft.provenance_of(),
            "compute.vector_flops_per_s": Provenance(status="assumed", source=vector, date=draft.date),
            "links": Provenance(status="assumed", source=loopback, date=draft.date),
        },
        residuals=tuple(quality),
    )


def _messages(call: str, draft: Draft) -> list[Point]:
    return [point for point in draft.points if point.call == call and point.kind in ("collective", "transfer")]


def _fit_messages(call: str, points: Sequence[Point], draft: Draft) -> SectionFit:
    (link,) = draft.values["links"]
    issue_s = draft.dispatch_s["transfer" if call == "transfer" else "collective"]
    model, quality = fit_collective(
        points, link=link, library="gloo", dispatch_s=issue_s, cores=draft.limits["cores"]
    )  # fmt: skip
    return SectionFit(
        values={"collectives": {**draft.collectives, call: model}},
        provenance={"collectives": draft.provenance_of()},
        residuals=(quality,),
    )


def _shared(draft: Draft) -> list[Point]:
    """Calls that all ranks made at once and that one rank also made alone."""
    alone = _alone_s(draft)
    return [point for point in draft.points if point.kind == "sharing" and _subject(point) in alone]


def _fit_sharing(points: Sequence[Point], draft: Draft) -> SectionFit:
    """Fits no parameter. Its residuals show whether n busy ranks on c cores really run at c/n of their speed."""
    alone, cores = _alone_s(draft), draft.limits["cores"]
    predicted_s = np.array([alone[_subject(point)] * crowding(point, cores) for point in points])
    measured_s = np.array([point.seconds for point in points])
    return SectionFit(residuals=(residuals("processor sharing", predicted_s, measured_s),))


def _alone_s(draft: Draft) -> dict[tuple[object, ...], float]:
    return {
        (point.kind, point.shape, point.size_bytes): worked_s(point)
        for point in draft.points
        if point.active_ranks == 1
    }


def _subject(point: Point) -> tuple[object, ...]:
    return (point.call, point.shape, point.size_bytes)


SECTIONS = (
    FitSection(name="dispatch", points=_host_times, fit=_fit_host_times, required=True),
    FitSection(name="compute", points=_kernels, fit=_fit_kernels, required=True),
    *(
        FitSection(name=call, points=partial(_messages, call), fit=partial(_fit_messages, call), required=True)
        for call in COLLECTIVES
    ),
    FitSection(name="sharing", points=_shared, fit=_fit_sharing),
)
"""The sections to fit, in the order of their dependencies."""
