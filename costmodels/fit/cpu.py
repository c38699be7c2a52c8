"""A machine file for this computer: CPU ranks that talk through gloo and share the cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from costmodels.fit.forms import Residuals, crowding, fit_collective, fit_compute, residuals, worked_s
from costmodels.fit.points import Point
from costmodels.machine.machine import COLLECTIVES, DISPATCH_CLASSES, Interval, Link, Machine, Provenance
from plans.errors import TwofoldError

__all__ = ["Calibration", "fit_cpu_machine"]

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
        environment: what was written beside them: ranks, cores, memory_bytes, date, torch.

    Raises:
        TwofoldError: points of a kind are missing, or the environment does not say what is needed.
    """
    try:
        ranks, cores, memory_bytes = (int(environment[key]) for key in ("ranks", "cores", "memory_bytes"))
    except (KeyError, ValueError) as error:
        raise TwofoldError(f"the measured points do not say {error} of the machine; measure again") from None
    dispatch = {point.call: worked_s(point) for point in points if point.kind == "dispatch"}
    dispatch.setdefault("attention", dispatch.get("matrix", 0.0))
    if missing := [call for call in DISPATCH_CLASSES if call not in dispatch]:
        raise TwofoldError(f"no dispatch time was measured for {', '.join(missing)}; measure again")
    compute, *quality = fit_compute(points, dispatch_s=dispatch, host_async=False)
    link = Link(name="loopback", ranks=ranks, latency_s=0.0, bandwidth_Bps=compute.memory_Bps)
    collectives = {}
    for call in COLLECTIVES:
        own = [point for point in points if point.call == call and point.kind in ("collective", "transfer")]
        issued = dispatch["transfer" if call == "transfer" else "collective"]
        collectives[call], quality_of_call = fit_collective(
            own, link=link, library="gloo", dispatch_s=issued, cores=cores
        )
        quality.append(quality_of_call)
    if shared := _sharing(points, cores):
        quality.append(shared)
    date = environment.get("date", "")
    said = f"measured on {ranks} gloo processes on {cores} cores, torch {environment.get('torch', '?')}"
    measured = Provenance(status="measured", source=said, date=date)
    machine = Machine(
        name=name,
        device="cpu",
        num_devices=ranks,
        devices_per_node=ranks,
        memory_bytes=memory_bytes // ranks,
        compute=compute,
        links=(link,),
        collectives=collectives,
        dispatch_s=dispatch,
        host_async=False,
        cores_per_node=cores,
        interval=START_INTERVAL,
        provenance={
            "compute": measured,
            "compute.vector_flops_per_s": Provenance(
                status="assumed", source="as the matrix rate: element-wise kernels are bound by memory", date=date
            ),
            "collectives": measured,
            "dispatch_s": measured,
            "dispatch_s.attention": Provenance(status="assumed", source="as a matrix product", date=date),
            "links": Provenance(
                status="assumed",
                source="loopback at memory bandwidth; its cost is the processors' (collectives)",
                date=date,
            ),
            "memory_bytes": Provenance(status="measured", source="memory of the computer over its ranks", date=date),
            "cores_per_node": Provenance(status="measured", source="cores that the processes may use", date=date),
            "interval": Provenance(status="assumed", source="no probe program has run yet", date=date),
        },
    )
    return Calibration(machine=machine, residuals=tuple(quality))


def _sharing(points: Sequence[Point], cores: int) -> Residuals | None:
    """Whether n busy ranks on c cores really run at c/n of their speed alone."""
    alone = {
        (point.kind, point.shape, point.size_bytes): worked_s(point) for point in points if point.active_ranks == 1
    }
    pairs = [
        (alone[key] * crowding(point, cores), point.seconds)
        for point in points
        if point.kind == "sharing" and (key := (point.call, point.shape, point.size_bytes)) in alone
    ]
    if not pairs:
        return None
    predicted, measured = np.array(pairs).T
    return residuals("processor sharing", predicted, measured)
