"""Predictions of a device's fit for measured points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodels.fit.forms import Residuals, residuals
from costmodels.fit.kernels import predicted_s
from costmodels.fit.links import BackToBack, communication_s, overlap_s
from costmodels.fit.points import Point
from costmodels.machine.catalogue import Device
from costmodels.price.compute import Compute
from plans.model.graph import itemsize

__all__ = [
    "SIXTEEN_BIT",
    "TARGETS",
    "Predicted",
    "is_communication",
    "is_one_group",
    "is_priced",
    "library_of",
    "pair_lengths_s",
    "predict_points",
    "scoreboard",
]

SIXTEEN_BIT = ("bfloat16", "float16")
"""Dtypes of the products that are fitted; others have one factor each (section matrix32)."""

TARGETS: Mapping[str, tuple[float, float | None]] = {
    "matrix": (0.04, 0.10), "attention": (0.06, None), "memory": (0.05, None), "collective": (0.07, None),
    "transfer": (0.07, None), "overlap": (0.08, None), "matrix32": (0.04, 0.10),
}  # fmt: skip
"""Section -> error that the median and the 95th percentile of held-out points should stay below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A measured point and what the form predicts for it, in seconds."""

    point: Point
    section: str
    seconds: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.seconds / self.point.seconds - 1


def library_of(device: Device) -> str:
    """The communication library of a device: nccl or hccl."""
    return {"npu": "hccl", "hpu": "hccl"}.get(device.device, "nccl")


def predict_points(
    points: Iterable[Point], device: Device, issued: Mapping[str, BackToBack] | None = None, *, at_clock: bool = False
) -> list[Predicted]:
    """Predictions of a device's fit for measured points; points of kinds without a form are left out.

    Args:
        points: measured.
        device: device of the catalogue.
        issued: kind of communication -> how its points were issued, unless recorded.
        at_clock: products and attention at the clock recorded next to them, rather than at the device's usual one.
    """
    library = library_of(device)

    def linked_s(point: Point) -> float:
        alone_s = communication_s(point, device.collectives[point.call], device.node, library)
        return (issued or {}).get(point.call, BackToBack()).measured_s(point, alone_s)

    forms: Mapping[str, Callable[[Point], float]] = {
        "matrix": lambda point: predicted_s(point, device.compute, at_clock=at_clock),
        "memory": lambda point: predicted_s(point, device.compute),
        "attention": lambda point: predicted_s(point, device.compute, at_clock=at_clock),
        "collective": linked_s,
        "transfer": linked_s,
        "overlap": lambda point: overlap_s(point, device.overlap, *pair_lengths_s(point, device)),
    }
    predicted = []
    for point in points:
        if point.kind in forms and is_priced(point, device.compute) and is_one_group(point):
            if point.kind == "collective" and point.call not in device.collectives:
                continue
            section = "matrix32" if point.kind == "matrix" and point.dtype not in SIXTEEN_BIT else point.kind
            predicted.append(Predicted(point=point, section=section, seconds=forms[point.kind](point)))
    return predicted


def scoreboard(predicted: Sequence[Predicted]) -> tuple[Residuals, ...]:
    """Relative errors by section."""
    return tuple(
        residuals(section, [entry.seconds for entry in own], [entry.point.seconds for entry in own])
        for section in TARGETS
        if (own := [entry for entry in predicted if entry.section == section])
    )


def pair_lengths_s(point: Point, device: Device) -> tuple[float, float]:
    """The times of one kernel and one message of a measured pair when alone; each was repeated until both took long."""
    call = {"matrix": "mm", "attention": "sdpa_forward", "memory": "add"}[point.call]
    size = 3 * itemsize(point.dtype) * math.prod(point.shape) if point.call == "memory" else 0
    kernel = Point(kind=point.call, call=call, shape=point.shape, size_bytes=size, dtype=point.dtype, form="nn",
                   options={"causal": 1} if point.call == "attention" else {}, seconds=1.0)  # fmt: skip
    kind = "transfer" if point.beside == "transfer" else "collective"
    message = Point(kind=kind, call=point.beside, size_bytes=point.size_bytes, ranks=max(2, point.ranks),
                    dtype=point.dtype, seconds=1.0)  # fmt: skip
    message_s = communication_s(message, device.collectives[point.beside], device.node, library_of(device))
    return min(predicted_s(kernel, device.compute), point.figures["compute_s"]), min(message_s, point.figures["comm_s"])


def is_communication(point: Point) -> bool:
    """Whether several ranks were measured."""
    return point.kind in ("collective", "transfer")


def is_one_group(point: Point) -> bool:
    """Whether a communication was measured as one group, one way."""
    if point.kind == "transfer":
        return (
            point.options.get("pattern", "one_way") in ("one_way", "ping_pong") and point.options.get("groups", 1) == 1
        )
    return not is_communication(point) or point.options.get("groups", 1) == 1


def is_priced(point: Point, compute: Compute) -> bool:
    """Whether there is a rate for the point's dtype, and it is not a measurement of warm caches."""
    if point.options.get("warm"):
        return False
    return point.kind not in ("matrix", "attention") or point.dtype in compute.matrix_flops_per_s
