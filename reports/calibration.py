"""The calibration report of a device or of a CPU: measured points, what the forms make of them, where figures are from.

One HTML file without anything fetched; pictures are SVG for light and dark pages, the points are inside as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from costmodels import Machine
from costmodels.fit.device import DeviceFit
from costmodels.fit.points import Point
from costmodels.fit.predict import TARGETS, scoreboard
from costmodels.machine.catalogue import Device
from plans.units import Change, Count, Seconds, Share
from reports.calibration_charts import (
    bandwidth_picture,
    collective_pictures,
    contention_table,
    message_pictures,
    predictions_of,
    rate_picture,
    residual_picture,
    roofline_picture,
)
from reports.page import Page, Part, Section, Text
from reports.tables import Cell, Table

__all__ = ["CalibrationReport", "Probe", "calibration_page"]

_NAMES = {
    "matrix": "matrix products", "attention": "attention", "memory": "memory-bound kernels",
    "collective": "collectives", "transfer": "transfers",
    "matrix32": "32-bit matrix products", "overlap": "compute during communication",
}  # fmt: skip


class Probe(Protocol):
    """A probe program that was predicted and run."""

    @property
    def name(self) -> str:
        """Title of the program."""

    @property
    def predicted_s(self) -> float:
        """From step to step, before the overall factor."""

    @property
    def measured_s(self) -> float:
        """From step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationReport:
    """The content of a calibration report.

    Args:
        machine: what was fitted: a device of the catalogue, or the machine of a CPU.
        fit: of a device, with its predictions of every measured point; None for a CPU.
        points: that were measured on a CPU.
        residuals: lines about the quality of a CPU's fit.
        probes: programs that were predicted and run on a CPU; the interval comes from them.
    """

    machine: Machine | Device
    fit: DeviceFit | None = None
    points: Sequence[Point] = ()
    residuals: Sequence[str] = ()
    probes: Sequence[Probe] = ()

    @classmethod
    def of_device(cls, fit: DeviceFit) -> CalibrationReport:
        """The report of a calibrated device."""
        return cls(machine=fit.device, fit=fit)


def calibration_page(report: CalibrationReport) -> Page:
    """The page; sections about which nothing was measured are left out."""
    fit = report.fit
    if fit is None:
        parts: dict[str, Iterable[Part]] = {
            "errors": map(Text, report.residuals), "probes": _probes(report), "links": message_pictures(report.points)
        }  # fmt: skip
    else:
        parts = {
            "errors": [_error_table(fit), *residual_picture(fit)],
            "roofline": [*roofline_picture(fit), *rate_picture(fit)],
            "memory": bandwidth_picture(fit),
            "links": collective_pictures(fit),
            "contention": contention_table(fit.device),
            "extrapolated": [_extrapolated(fit)],
        }
    parts["provenance"] = [_provenance(report)]
    sections = [
        Section(id=id_, title=title, parts=list(parts.get(id_, ())), folded=id_ == "provenance")
        for id_, title in _SECTIONS.items()
    ]
    return Page(
        kind="calibration", title=f"Calibration of {report.machine.name}", sections=sections,
        subtitle=_subtitle(report), notes=[_note(report)], figures=_key_figures(report), data=_data(report),
    )  # fmt: skip


def _subtitle(report: CalibrationReport) -> str:
    if isinstance(report.machine, Device):
        return report.machine.variant
    return f"{report.machine.num_devices} gloo ranks of a CPU"


def _note(report: CalibrationReport) -> str:
    if report.fit is None:
        return "Processes share the cores; times are for this many ranks at once."
    return "Filled points were fitted, open ones held out. Times are device times, without the host."


def _key_figures(report: CalibrationReport) -> dict[str, str]:
    if report.fit is not None:
        return {
            f"{_NAMES[entry.section]}, held out": f"{entry.median_error:.1%} median" for entry in report.fit.held_out
        }
    low, high = report.machine.interval.low - 1, report.machine.interval.high - 1
    return {"90 % interval of a step": f"{low:+.0%} to {high:+.0%}", "measured points": str(len(report.points))}


def _data(report: CalibrationReport) -> dict[str, Any]:
    """The points as JSON values."""
    if report.fit is None:
        return {"machine": report.machine.name, "points": [
            {"kind": point.kind, "call": point.call, "shape": point.shape, "ranks": point.ranks, "cpu_s": point.cpu_s,
             "active_ranks": point.active_ranks, "size_bytes": point.size_bytes, "measured_s": point.seconds}
            for point in report.points
        ]}  # fmt: skip
    return {"device": report.machine.name, "forms": dict(report.fit.forms), "points": [
        {"kind": entry.section, "call": entry.point.call, "shape": entry.point.shape, "ranks": entry.point.ranks,
         "size_bytes": entry.point.size_bytes, "measured_s": entry.point.seconds, "predicted_s": entry.seconds,
         "held_out": entry.point.held_out}
        for entry in report.fit.predicted
    ]}  # fmt: skip


# -- sections ----------------------------------------------------------------------------------------------------------


def _error_table(fit: DeviceFit) -> Table:
    rows: list[tuple[Cell, ...]] = []
    judged = {
        "fitted": fit.residuals, "held out": fit.held_out,
        "held out, at their clock": scoreboard(fit.held_out_at_clock),
    }  # fmt: skip
    for kind, entries in judged.items():
        for entry in entries:
            median, p95 = TARGETS[entry.section]
            target = f"{median:.0%}" + (f" / {p95:.0%}" if p95 else "")
            inside = fit.inside(entry.section) if kind == "held out" else None
            rows.append((_NAMES[entry.section], kind, Count(entry.num_points), Share(entry.median_error),
                         Share(entry.p95_error), Change(entry.bias), target,
                         None if inside is None else Share(inside)))  # fmt: skip
    columns = ("kernels", "points", "number", "median error", "95th percentile", "bias", "target",
               "inside 90 % interval")  # fmt: skip
    forms = tuple(f"Form of {name}: {form}." for name, form in fit.forms.items())
    return Table(title="Relative errors of predicted times", columns=columns, rows=tuple(rows), notes=forms)


def _probes(report: CalibrationReport) -> Iterator[Table]:
    rows = tuple(
        (probe.name, Seconds(probe.predicted_s), Seconds(probe.measured_s),
         Change(probe.predicted_s / probe.measured_s - 1))
        for probe in report.probes
    )  # fmt: skip
    if rows:
        notes = ("Predicted from the micro-benchmarks, before the overall factor that these errors give.",)
        yield Table(title="Small networks that no example uses", columns=("program", "predicted", "measured", "error"),
                    rows=rows, notes=notes)  # fmt: skip


def _extrapolated(fit: DeviceFit) -> Table:
    rows = []
    for name in TARGETS:
        points = [entry.point for entry in predictions_of(fit, name)]
        measured, beyond = (_measured_range(name, points), "beyond these") if points else ("nothing", "everything")
        rows.append((_NAMES[name], measured, beyond))
    columns = ("kernels", "measured", "extrapolated by the form")
    return Table(title="Sizes that were measured", columns=columns, rows=tuple(rows))


def _measured_range(name: str, points: Sequence[Point]) -> str:
    """The measured range, from smallest to largest, in words."""
    if name in ("matrix", "matrix32"):
        spans = [
            (min(point.shape[at] for point in points), max(point.shape[at] for point in points)) for at in range(3)
        ]
        return ", ".join(f"{dim} {low:,} to {high:,}" for dim, (low, high) in zip("mnk", spans, strict=True))
    if name == "attention":
        queries = [point.shape[3] for point in points]
        return f"{min(queries):,} to {max(queries):,} queries"
    sizes = [point.size_bytes for point in points]
    ranks = f", up to {max(point.ranks for point in points)} ranks" if name == "collective" else ""
    return f"{min(sizes):,} to {max(sizes):,} bytes{ranks}"


def _provenance(report: CalibrationReport) -> Table:
    known = sorted(report.machine.provenance.items())
    rows = tuple((name, entry.status, entry.source, entry.date) for name, entry in known)
    return Table(title="Sources", columns=("entry", "status", "source", "date"), rows=rows)


_SECTIONS = {
    "errors": "Accuracy of the fit", "probes": "Probe programs", "roofline": "Matrix products and attention",
    "memory": "Memory-bound kernels", "links": "Collectives and transfers", "contention": "Contention",
    "extrapolated": "Extrapolation", "provenance": "Sources of all figures",
}  # fmt: skip
"""The anchor of a section and its heading."""
