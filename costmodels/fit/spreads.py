"""The uncertainty of the prices of a calibrated device: a spread by class of instruction, and 90 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from costmodels.fit.matrix import density_weights, weighted_quantile
from costmodels.fit.points import Point
from costmodels.fit.section import Draft, FitSection, SectionFit
from costmodels.machine.sections import Interval
from costmodels.widths import DIFFERENT, HOST, OTHER_CHIP

__all__ = ["SPREADS", "SPREAD_OF"]

SPREAD_OF = ("matrix", "attention", "memory", "collective", "transfer")
"""Sections of predictions that are classes of instructions too, each with a spread and an interval of its own."""

LEAST_POINTS = 6
"""Points that a spread needs."""


def _judged(name: str, draft: Draft) -> list[Point]:
    """The points of a section that were fitted and that a price predicts."""
    fitted = [entry.point for entry in draft.predicted if entry.section == name and not entry.point.held_out]
    return fitted if len(fitted) >= LEAST_POINTS else []


def _fit_spread(name: str, points: Sequence[Point], draft: Draft) -> SectionFit:
    """From the errors of single points to the spread of their class and the interval of one price."""
    known = [entry for entry in draft.predicted if entry.section == name and not entry.point.held_out]
    left_out_s = draft.left_out_s.get(name)
    predicted_s = np.array(left_out_s or [entry.seconds for entry in known])
    errors = np.log(np.array([entry.point.seconds for entry in known]) / predicted_s)
    # the grid of products is dense where steps of transformers have their shapes
    weights = density_weights(points) if name == "matrix" else np.ones(len(points))
    subject = f"{len(points)} points, " + ("each by a fit to others" if left_out_s else "by the fit to them")
    # robust: 1.4826 times the median of absolute errors is the deviation of a normal distribution
    single = 1.4826 * float(np.median(np.abs(errors)))
    spread = round(math.hypot(OTHER_CHIP[name], single / math.sqrt(DIFFERENT[name])), 4)
    low, high = (weighted_quantile(errors, weights, share) for share in (0.05, 0.95))
    interval = Interval(low=round(min(1.0, math.exp(low)), 4), high=round(max(1.0, math.exp(high)), 4))
    device = draft.device
    return SectionFit(
        values={
            "spreads": {**device.spreads, name: spread},
            "price_intervals": {**device.price_intervals, name: interval},
        },
        provenance={
            f"spreads.{name}": draft.provenance_of(
                f"1.4826 times the median size of the errors of {subject}: {single:.3f}, over the root of "
                f"{DIFFERENT[name]:g} different ones in a step; beside {OTHER_CHIP[name]} that other chips differ by"
            ),
            f"price_intervals.{name}": draft.provenance_of(
                f"5 % and 95 % quantiles of measured over predicted of {subject}"
            ),
        },
    )


def _updates(draft: Draft) -> list[Point]:
    if "memory" not in draft.device.spreads:
        return []
    return [point for point in draft.fitted_points if point.kind == "rule" and point.call.startswith("adamw")]


def _fit_update_spread(points: Sequence[Point], draft: Draft) -> SectionFit:
    spreads = draft.device.spreads
    what = "as memory-bound kernels: AdamW is one of the measured instructions"
    return SectionFit(
        values={"spreads": {**spreads, "update": spreads["memory"]}},
        provenance={"spreads.update": draft.provenance_of(what, "interpolated")},
    )


def _host_times(draft: Draft) -> list[Point]:
    """All host times, where the host times of a class come from this measurement."""
    measured = any(
        name.startswith("dispatch_s.") and entry.source.startswith(draft.source)
        for name, entry in draft.provenance.items()
    )
    return [point for point in draft.fitted_points if point.kind == "dispatch"] if measured else []


def _fit_dispatch_spread(points: Sequence[Point], draft: Draft) -> SectionFit:
    what = "what a host's times to issue are off by from the median of other hosts (leave-one-out)"
    return SectionFit(
        values={"spreads": {**draft.device.spreads, "dispatch": HOST}},
        provenance={"spreads.dispatch": draft.provenance_of(what)},
    )


SPREADS = (
    *(FitSection(name=name, points=partial(_judged, name), fit=partial(_fit_spread, name)) for name in SPREAD_OF),
    FitSection(name="update", points=_updates, fit=_fit_update_spread),
    FitSection(name="dispatch", points=_host_times, fit=_fit_dispatch_spread),
)
"""The uncertainty of prices; fitted once every point is predicted (`Draft.predicted`)."""
