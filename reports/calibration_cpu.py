"""The calibration report of a CPU: measured points, fitted models, and probe programs.

One HTML file without anything fetched; pictures are SVG for light and dark pages, the points are inside as JSON.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Protocol

from costmodels import Machine
from costmodels.fit.points import Point
from plans.files import write_atomically
from reports.calibration_picture import Series, log_picture
from reports.page import figure, folded, key_figures, page, page_data, section
from reports.tables import Table

__all__ = ["Probe", "cpu_calibration_html", "write_cpu_calibration_report"]


class Probe(Protocol):
    """A probe program that was predicted and run."""

    @property
    def name(self) -> str:
        """The name of the program."""

    @property
    def predicted_s(self) -> float:
        """The predicted seconds from step to step, before the overall factor."""

    @property
    def measured_s(self) -> float:
        """The measured seconds from step to step."""


def write_cpu_calibration_report(
    path: str | os.PathLike[str], machine: Machine, points: Sequence[Point], residuals: Sequence[str],
    probes: Sequence[Probe],
) -> Path:  # fmt: skip
    """Write `cpu_calibration_html(...)` to a file atomically."""
    return write_atomically(path, cpu_calibration_html(machine, points, residuals, probes).encode())


def cpu_calibration_html(
    machine: Machine, points: Sequence[Point], residuals: Sequence[str], probes: Sequence[Probe]
) -> str:
    """The report as text.

    Args:
        machine: what was fitted.
        points: that were measured.
        residuals: lines that say how well the forms explain them.
        probes: programs that were predicted and run; the interval comes from them.
    """
    low, high = machine.interval.low - 1, machine.interval.high - 1
    figures = {"90 % interval of a step": f"{low:+.0%} to {high:+.0%}", "measured points": str(len(points))}
    sections = [
        section("errors", "How well the forms explain the points", _lines(residuals)),
        section("probes", "Probe programs", _probes(probes).html()),
        section("links", "Collectives and transfers", *_pictures(points)),
        folded("provenance", "Where every figure comes from", _provenance(machine).html()),
    ]
    data = [
        {"kind": point.kind, "call": point.call, "shape": point.shape, "ranks": point.ranks, "cpu_s": point.cpu_s,
         "active_ranks": point.active_ranks, "size_bytes": point.size_bytes, "measured_s": point.seconds}
        for point in points
    ]  # fmt: skip
    return page(
        f"Calibration of {machine.name}", sections, subtitle=f"{machine.num_devices} gloo ranks of a CPU",
        notes="<li>Processes share the cores; a time holds for this many ranks at once.</li>",
        figures=key_figures(figures), data=page_data(machine=machine.name, points=data),
    )  # fmt: skip


def _lines(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _probes(probes: Sequence[Probe]) -> Table:
    rows = tuple(
        (probe.name, f"{probe.predicted_s * 1e3:.2f} ms", f"{probe.measured_s * 1e3:.2f} ms",
         f"{probe.predicted_s / probe.measured_s - 1:+.0%}")
        for probe in probes
    )  # fmt: skip
    columns = ("program", "predicted", "measured", "error")
    notes = ("Predicted from the micro-benchmarks, before the overall factor that these errors give.",)
    return Table(title="Small networks that no example uses", columns=columns, rows=rows,
                 right=frozenset(columns[1:]), notes=notes)  # fmt: skip


def _pictures(points: Sequence[Point]) -> list[str]:
    """Time against size of every kind of communication, one series for each number of ranks in a group."""
    drawn = []
    for call in sorted({point.call for point in points if point.kind in ("collective", "transfer")}):
        own = [point for point in points if point.call == call and point.kind in ("collective", "transfer")]
        busiest = max(point.active_ranks for point in own)
        series = [
            Series(
                name=f"groups of {ranks}",
                points=[
                    (float(point.size_bytes), 1e6 * point.seconds, _said(point))
                    for point in sorted(own, key=lambda point: point.size_bytes)
                    if point.ranks == ranks and point.active_ranks == busiest
                ],
            )
            for ranks in sorted({point.ranks for point in own if point.active_ranks == busiest})[:4]
        ]  # fmt: skip
        picture = log_picture(series, title=call, x_name="size (bytes)", y_name="time (us)")
        drawn.append(figure(picture, f"{call} while all {busiest} ranks are at work."))
    return drawn


def _said(point: Point) -> str:
    return f"{point.size_bytes:,} B: {1e6 * point.seconds:.4g} us"


def _provenance(machine: Machine) -> Table:
    rows = tuple((name, says.status, says.source, says.date) for name, says in sorted(machine.provenance.items()))
    return Table(title="Provenance", columns=("entry", "status", "source", "date"), rows=rows)
