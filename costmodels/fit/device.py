"""A device of the catalogue from measured points: kernels, links, contention, dispatch, and how well they are known.

Points that are held out are never fitted; `held_out` reports on them. What was not measured keeps the figures of the
device it starts from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from costmodels.fit.forms import Residuals, residuals
from costmodels.fit.kernels import fit_attention, fit_memory, predicted_s
from costmodels.fit.links import HOST_BOUND_BYTES, BackToBack, communication_s, fit_links, fit_overlaps, overlap_s
from costmodels.fit.matrix import density_weights, fit_clock, fit_dtypes, fit_matrix, weighted_quantile
from costmodels.fit.points import Point
from costmodels.machine.catalogue import Device
from costmodels.machine.machine import DISPATCH_CLASSES
from costmodels.machine.sections import COLLECTIVES, Collective, Interval, Overlap, Provenance
from costmodels.price.communication import with_switch
from costmodels.price.compute import Compute
from costmodels.price.executor_kernels import fit_rules, rule_points
from plans.model.graph import itemsize

__all__ = ["TARGETS", "DeviceFit", "Predicted", "fit_device", "predict_points", "scoreboard"]

SIXTEEN = ("bfloat16", "float16")
"""Dtypes of the products that are fitted; others have one factor each (section matrix32)."""

LEAST_S = 5e-9
"""Points below this are not times of anything."""

TARGETS: Mapping[str, tuple[float, float | None]] = {
    "matrix": (0.04, 0.10), "attention": (0.06, None), "memory": (0.05, None), "collective": (0.07, None),
    "transfer": (0.07, None), "overlap": (0.08, None), "matrix32": (0.04, 0.10),
}  # fmt: skip
"""Section -> error that the median and the 95th percentile of held-out points should stay below."""

_SPREAD_OF = {"matrix": "matrix", "attention": "attention", "memory": "memory", "collective": "collective",
              "transfer": "transfer"}  # fmt: skip

OTHER_HOST: Mapping[str, float] = {
    "matrix": 0.02, "attention": 0.02, "memory": 0.02, "collective": 0.02, "transfer": 0.06, "dispatch": 0.3,
}  # fmt: skip
"""Class -> by how much all its instructions together are off on another host and chip of the same kind.

Other H200 hosts measured the same points again (benchmarks/data/repeat-h200-*): the median of a run was off by 1.3 %
for products and attention (root of the mean square over four runs), 0.1 % for memory-bound kernels, 0 % for
collectives, 6 % for transfers and 11 % for dispatch. At least 2 % is taken: chips differ, and four are few. Of dispatch
30 %: steps that hosts set the pace of took 1.0, 1.2, 1.6 and 1.9 times the prediction on four hosts.
"""

DIFFERENT: Mapping[str, float] = {"matrix": 8, "attention": 2, "memory": 8, "collective": 3, "transfer": 1}
"""Class -> instructions of different sizes in a step, whose own errors average out (assumed: the linears of a block and
the head, each in three forms of unequal length; attention forward and backward; what stands between them)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A measured point and what the model says of it."""

    point: Point
    section: str
    seconds: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.seconds / self.point.seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """A calibrated device, the forms that were chosen, and its predictions of all points, held out or not.

    The same chip takes up to a fifth longer when it is warm: `held_out_at_clock` are the predictions of held-out
    products and attention at the clock that was recorded beside each, which a forecast does not know.
    """

    device: Device
    forms: Mapping[str, str]
    predicted: tuple[Predicted, ...]
    held_out_at_clock: tuple[Predicted, ...] = ()

    def inside(self, section: str) -> float | None:
        """Share of the held-out points of a section within the 90 % interval of their price; None without one."""
        known = self.device.price_intervals.get(_SPREAD_OF.get(section, ""))
        own = [entry for entry in self.predicted if entry.section == section and entry.point.held_out]
        if known is None or not own:
            return None
        return sum(known.low <= 1 / (1 + entry.error) <= known.high for entry in own) / len(own)

    @property
    def residuals(self) -> tuple[Residuals, ...]:
        """Of the points that were fitted, by section."""
        return scoreboard([entry for entry in self.predicted if not entry.point.held_out])

    @property
    def held_out(self) -> tuple[Residuals, ...]:
        """Of the points that were not, by section."""
        return scoreboard([entry for entry in self.predicted if entry.point.held_out])


def fit_device(points: Iterable[Point], environment: Mapping[str, str], base: Device) -> DeviceFit:
    """The device that `points` were measured on.

    Args:
        points: of calibration runs, of any number of ranks of one node; kinds that no form is for are left alone.
        environment: of the points: date, torch, and so on.
        base: peaks and what is not measured.

    Raises:
        TwofoldError: too few points of a kind that was measured.
    """
    points = [point for point in points if point.seconds > LEAST_S]
    recorded = {point.call for point in points if _linked(point) and point.options.get("recorded")}
    points = [
        point for point in points
        if not _linked(point) or point.call not in recorded or point.options.get("recorded")
        or point.size_bytes >= HOST_BOUND_BYTES
    ]  # fmt: skip
    kept = {_what(point) for point in points if point.held_out}
    points = [point for point in points if point.held_out or _what(point) not in kept]
    fitted = [point for point in points if not point.held_out]
    said = ", ".join(f"{name} {environment[name]}" for name in ("torch", "nccl", "driver") if environment.get(name))
    source = f"measured on {environment.get('device_name') or environment.get('device', base.name)}"
    source += f", {said}" if said else ""
    date = environment.get("date", "")
    provenance, forms, compute = dict(base.provenance), {}, base.compute
    left_out: dict[str, tuple[float, ...]] = {}

    def of(kind: str) -> list[Point]:
        return [point for point in fitted if point.kind == kind and _priced(point, compute)]

    def says(entry: str, what: str, status: str = "measured") -> None:
        for known in [known for known in provenance if known.startswith(f"{entry}.")]:
            del provenance[known]
        text = f"{source}: {what}"
        provenance[entry] = Provenance(status=status, source=text, date=date)  # type: ignore[arg-type]

    if memory := of("memory"):
        fit = fit_memory(memory, compute)
        compute, forms["memory"], left_out["memory"] = fit.compute, fit.form, fit.left_out_s
        for name in ("memory_efficiency", "memory_chunk_s", "kernel_s", "kernel_cost", "kernel_start"):
            says(f"compute.{name}", f"{len(memory)} memory-bound kernels")
    if matrix := [point for point in of("matrix") if point.dtype in SIXTEEN]:
        compute = fit_clock(matrix, compute)
        for name in ("clock_MHz", "clock_drop"):
            says(f"compute.{name}", f"clocks beside {len(matrix)} matrix products, after other products")
        fit = fit_matrix(matrix, compute, kernel_s=compute.kernel_s if memory else None)
        # the least time of a kernel is that of memory-bound ones where both were measured: products hide it
        compute, forms["matrix"], left_out["matrix"] = fit.compute, fit.form, fit.left_out_s
        for name in ("matrix_efficiency", "half_depth", "half_rows", "tiled", "sharpness", "form_cost"):
            says(f"compute.{name}", f"{len(matrix)} matrix products, form: {fit.form}")
        if others := [point for point in of("matrix") if point.dtype not in SIXTEEN]:
            compute = fit_dtypes(others, compute)
            says("compute.dtype_efficiency", f"{len(others)} products of other dtypes")
    if attention := of("attention"):
        fit = fit_attention(attention, compute)
        compute, forms["attention"], left_out["attention"] = fit.compute, fit.form, fit.left_out_s
        says("compute.attention", f"{len(attention)} attention kernels")
    if rule_points(points):
        rules = fit_rules(points, compute)
        compute = msgspec.structs.replace(compute, rules={**compute.rules, **rules.rules})
        forms["rule"] = f"kernels and passes of {len(rules.rules)} instructions; fitted {rules.fitted}"
        forms["rule"] += f"; held out {rules.held_out}" if rules.held_out else ""
        says("compute.rules", f"{rules.fitted.num_points} instructions of the executor alone")
    collectives, issued = dict(base.collectives), {}
    library = {"cuda": "nccl", "npu": "hccl"}[base.device]
    for call in COLLECTIVES:
        kind = "transfer" if call == "transfer" else "collective"
        own = [point for point in fitted if point.kind == kind and point.call == call and _alone(point)]
        if len(own) >= 3:
            link_fit = fit_links(own, base.node, library)
            collectives[call] = with_switch(link_fit.collective, collectives[call], base.per_node)
            forms[call], issued[call] = link_fit.form, link_fit.issued
            most = max(point.ranks for point in own)
            says(f"collectives.{call}", f"{len(own)} points of 2 to {most} ranks, {link_fit.form}")
    overlaps, overlap_points = base.overlap, [point for point in fitted if point.kind == "overlap"]
    if overlap_points:
        lengths = [_lengths(point, compute, collectives, base) for point in overlap_points]
        new, forms["overlap"] = fit_overlaps(overlap_points, lengths)
        pairs = {(entry.compute, entry.collective) for entry in new}
        overlaps = (*(entry for entry in base.overlap if (entry.compute, entry.collective) not in pairs), *new)
        says("overlap", f"{len(overlap_points)} pairs; those not measured as the nearest pair")
        overlaps = _completed(overlaps)
    dispatch = dict(base.dispatch_s)
    for name in DISPATCH_CLASSES:
        own = [point for point in fitted if point.kind == "dispatch" and point.call == name and not point.options
               and point.stack in ("", "twofold")]  # fmt: skip
        if own:
            dispatch[name] = float(np.median([point.seconds for point in own]))
            says(f"dispatch_s.{name}", "host time to issue one")
    device = msgspec.structs.replace(
        base, compute=compute, collectives=collectives, overlap=overlaps, dispatch_s=dispatch, provenance=provenance
    )
    predicted = predict_points(points, device, issued)
    at_clock = predict_points([point for point in points if point.held_out], device, at_clock=True)
    spreads, intervals = dict(device.spreads), dict(device.price_intervals)
    for section, name in _SPREAD_OF.items():
        known = [entry for entry in predicted if entry.section == section and not entry.point.held_out]
        if len(known) < 6:
            continue
        seconds = np.array([entry.point.seconds for entry in known])
        told = np.array(left_out.get(section) or [entry.seconds for entry in known])
        errors = np.log(seconds / told)
        # the grid of products is dense where steps of transformers have their shapes
        weights = density_weights([entry.point for entry in known]) if section == "matrix" else np.ones(len(known))
        points_of = f"{len(known)} points, " + (
            "each by a fit to others" if section in left_out else "by the fit to them"
        )
        # robust: 1.4826 times the median of absolute errors is the deviation of a normal distribution
        single = 1.4826 * float(np.median(np.abs(errors)))
        spreads[name] = round(math.hypot(OTHER_HOST[name], single / math.sqrt(DIFFERENT[name])), 4)
        says(
            f"spreads.{name}",
            f"1.4826 times the median size of the errors of {points_of}: {single:.3f}, over the root of "
            f"{DIFFERENT[name]:g} different ones in a step; beside {OTHER_HOST[name]} that other hosts differ by",
        )
        low, high = (weighted_quantile(errors, weights, share) for share in (0.05, 0.95))
        intervals[name] = Interval(low=round(min(1.0, math.exp(low)), 4), high=round(max(1.0, math.exp(high)), 4))
        says(f"price_intervals.{name}", f"5 % and 95 % quantiles of measured over predicted of {points_of}")
    if "memory" in spreads and any(point.kind == "rule" and point.call.startswith("adamw") for point in fitted):
        spreads["update"] = spreads["memory"]
        says("spreads.update", "as memory-bound kernels: AdamW is one of the measured instructions", "interpolated")
    if any(known.startswith("dispatch_s.") and provenance[known].source.startswith(source) for known in provenance):
        spreads["dispatch"] = OTHER_HOST["dispatch"]
        says(
            "spreads.dispatch", "host-bound steps on four hosts took 1.0 to 1.9 times as long as one host's points say"
        )
    device = msgspec.structs.replace(device, spreads=spreads, price_intervals=intervals, provenance=provenance)
    clocked = tuple(entry for entry in at_clock if entry.section in ("matrix", "attention") and entry.point.clock_MHz)
    return DeviceFit(device=device, forms=forms, predicted=tuple(predicted), held_out_at_clock=clocked)


def predict_points(
    points: Iterable[Point], device: Device, issued: Mapping[str, BackToBack] | None = None, *, at_clock: bool = False
) -> list[Predicted]:
    """What a device's forms say of measured points; points of kinds without a form are left out.

    Args:
        points: measured.
        device: of the catalogue.
        issued: kind of communication -> how its points were issued, unless recorded.
        at_clock: products and attention at the clock recorded beside them, rather than at the device's usual one.
    """
    library = {"cuda": "nccl", "npu": "hccl"}[device.device]

    def linked_s(point: Point) -> float:
        alone_s = communication_s(point, device.collectives[point.call], device.node, library)
        return (issued or {}).get(point.call, BackToBack()).measured_s(point, alone_s)

    forms: Mapping[str, Callable[[Point], float]] = {
        "matrix": lambda point: predicted_s(point, device.compute, at_clock=at_clock),
        "memory": lambda point: predicted_s(point, device.compute),
        "attention": lambda point: predicted_s(point, device.compute, at_clock=at_clock),
        "collective": linked_s,
        "transfer": linked_s,
        "overlap": lambda point: overlap_s(
            point, device.overlap, *_lengths(point, device.compute, device.collectives, device)
        ),
    }
    found = []
    for point in points:
        if point.kind in forms and _priced(point, device.compute) and _alone(point):
            if point.kind == "collective" and point.call not in device.collectives:
                continue
            section = "matrix32" if point.kind == "matrix" and point.dtype not in SIXTEEN else point.kind
            found.append(Predicted(point=point, section=section, seconds=forms[point.kind](point)))
    return found


def scoreboard(predicted: Sequence[Predicted]) -> tuple[Residuals, ...]:
    """Relative errors by section."""
    return tuple(
        residuals(section, [entry.seconds for entry in own], [entry.point.seconds for entry in own])
        for section in TARGETS
        if (own := [entry for entry in predicted if entry.section == section])
    )


def _lengths(
    point: Point, compute: Compute, collectives: Mapping[str, Collective], device: Device
) -> tuple[float, float]:
    """How long one kernel and one message of a measured pair take alone; each was repeated until both took long."""
    call = {"matrix": "mm", "attention": "sdpa_forward", "memory": "add"}[point.call]
    size = 3 * itemsize(point.dtype) * math.prod(point.shape) if point.call == "memory" else 0
    kernel = Point(kind=point.call, call=call, shape=point.shape, size_bytes=size, dtype=point.dtype, form="nn",
                   options={"causal": 1} if point.call == "attention" else {}, seconds=1.0)  # fmt: skip
    kind = "transfer" if point.beside == "transfer" else "collective"
    message = Point(kind=kind, call=point.beside, size_bytes=point.size_bytes, ranks=max(2, point.ranks),
                    dtype=point.dtype, seconds=1.0)  # fmt: skip
    library = {"cuda": "nccl", "npu": "hccl"}[device.device]
    message_s = communication_s(message, collectives[point.beside], device.node, library)
    return min(predicted_s(kernel, compute), point.figures["compute_s"]), min(message_s, point.figures["comm_s"])


def _completed(overlaps: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """Pairs that were not measured take the rates of the same compute beside an all-reduce, or of a matrix product."""
    known = {(entry.compute, entry.collective): entry for entry in overlaps}
    entries = []
    for compute in ("matrix", "attention", "memory"):
        for collective in COLLECTIVES:
            like = [(compute, collective), (compute, "all_reduce"), ("matrix", collective), ("matrix", "all_reduce")]
            found = next((known[key] for key in like if key in known), None)
            if found is not None:
                entries.append(msgspec.structs.replace(found, compute=compute, collective=collective))
    return tuple(entries)


def _linked(point: Point) -> bool:
    return point.kind in ("collective", "transfer")


def _what(point: Point) -> tuple[object, ...]:
    """What was measured, held out or not, whatever way it was timed."""
    options = tuple(sorted((name, value) for name, value in point.options.items() if name != "recorded"))
    return (point.kind, point.call, point.shape, point.form or "nt", point.batch, point.size_bytes, point.ranks,
            point.dtype, point.beside, options)  # fmt: skip


def _alone(point: Point) -> bool:
    """Whether a communication was measured as one group, one way."""
    if point.kind == "transfer":
        return (
            point.options.get("pattern", "one_way") in ("one_way", "ping_pong") and point.options.get("groups", 1) == 1
        )
    return not _linked(point) or point.options.get("groups", 1) == 1


def _priced(point: Point, compute: Compute) -> bool:
    """Whether there is a rate for the point's dtype, and it is no measurement of warm caches."""
    if point.options.get("warm"):
        return False
    return point.kind not in ("matrix", "attention") or point.dtype in compute.matrix_flops_per_s
