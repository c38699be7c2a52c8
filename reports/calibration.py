"""The calibration report of a device or a CPU: errors of the fit, measured points with fitted curves, sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from costmodels import Machine
from costmodels.fit.curves import kernel_bandwidths, message_bandwidths, moved_bytes, product_rates
from costmodels.fit.device import DeviceFit
from costmodels.fit.points import Point
from costmodels.fit.predict import SIXTEEN_BIT, TARGETS, Predicted, scoreboard
from costmodels.machine.catalogue import Device
from costmodels.machine.sections import COLLECTIVES
from plans.units import Change, Count, Seconds, Share
from reports.charts import Chart, Scale, Series, roofline_chart, series_chart
from reports.page import Page, Section, Text
from reports.tables import Table

__all__ = ["CalibrationReport", "Probe", "calibration_page"]

_NAMES = {
    "matrix": "matrix products", "attention": "attention", "memory": "memory-bound kernels",
    "collective": "collectives", "transfer": "transfers",
    "matrix32": "32-bit matrix products", "overlap": "compute during communication",
}  # fmt: skip

_GROUPS = {
    "compute": ("matrix", "attention"), "memory-bound": ("memory",), "communication": ("collective", "transfer"),
    "contention": ("overlap",),
}  # fmt: skip
"""Series of the chart of residuals -> sections of its points."""

_MOST_RANKS = 4
"""Numbers of ranks with a series in a chart of messages."""


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
    """The page, without sections for which nothing was measured."""
    known = sorted(report.machine.provenance.items())
    sources = Table.of("Sources", (
        {"entry": name, "status": entry.status, "source": entry.source, "date": entry.date} for name, entry in known
    ))  # fmt: skip
    provenance = Section(id="provenance", title="Sources of all figures", parts=[sources], folded=True)
    title = f"Calibration of {report.machine.name}"
    if report.fit is not None:
        fit = report.fit
        return Page(
            kind="calibration", title=title, subtitle=fit.device.variant, sections=[*_device_sections(fit), provenance],
            notes=["Filled points were fitted, open ones held out. Times are device times, without the host."],
            figures={
                f"{_NAMES[entry.section]}, held out": f"{Share(entry.median_error)} median" for entry in fit.held_out
            },
            data={"device": fit.device.name, "forms": dict(fit.forms), "points": [
                _values(entry.point) | {"kind": entry.section, "predicted_s": entry.seconds} for entry in fit.predicted
            ]},
        )  # fmt: skip
    assert isinstance(report.machine, Machine)
    low, high = report.machine.interval.low - 1, report.machine.interval.high - 1
    return Page(
        kind="calibration", title=title, subtitle=f"{report.machine.num_devices} gloo ranks of a CPU",
        sections=[*_cpu_sections(report), provenance],
        notes=["Processes share the cores; times are for this many ranks at once."],
        figures={"90 % interval of a step": f"{Change(low)} to {Change(high)}",
                 "measured points": Count(len(report.points))},
        data={"machine": report.machine.name, "points": [_values(point) for point in report.points]},
    )  # fmt: skip


def _values(point: Point) -> dict[str, Any]:
    """A point as JSON values."""
    return {
        "kind": point.kind, "call": point.call, "shape": point.shape, "ranks": point.ranks, "cpu_s": point.cpu_s,
        "active_ranks": point.active_ranks, "size_bytes": point.size_bytes, "measured_s": point.seconds,
        "held_out": point.held_out,
    }  # fmt: skip


def _device_sections(fit: DeviceFit) -> Iterator[Section]:
    matrix = "Matrix products and attention"
    yield Section(id="errors", title="Accuracy of the fit", parts=[_errors(fit), *_residuals(fit)])
    yield Section(id="roofline", title=matrix, parts=[*_roofline(fit), *_rates(fit)])
    yield Section(id="memory", title="Memory-bound kernels", parts=list(_bandwidths(fit)))
    yield Section(id="links", title="Collectives and transfers", parts=list(_messages(fit)))
    yield Section(id="contention", title="Contention", parts=list(_contention(fit.device)))
    yield Section(id="extrapolated", title="Extrapolation", parts=[_extrapolated(fit)])


def _cpu_sections(report: CalibrationReport) -> Iterator[Section]:
    yield Section(id="errors", title="Accuracy of the fit", parts=list(map(Text, report.residuals)))
    probes = Table.of(
        "Small networks that no example uses",
        (
            {"program": probe.name, "predicted": Seconds(probe.predicted_s), "measured": Seconds(probe.measured_s),
             "error": Change(probe.predicted_s / probe.measured_s - 1)}
            for probe in report.probes
        ),
        notes=["Predicted from the micro-benchmarks, without the overall factor that is derived from these errors."],
    )  # fmt: skip
    yield Section(id="probes", title="Probe programs", parts=[probes] if report.probes else [])
    yield Section(id="links", title="Collectives and transfers", parts=list(_cpu_messages(report.points)))


# -- errors ------------------------------------------------------------------------------------------------------------


def _errors(fit: DeviceFit) -> Table:
    judged = {
        "fitted": fit.residuals, "held out": fit.held_out,
        "held out, at their clock": scoreboard(fit.held_out_at_clock),
    }  # fmt: skip
    records = []
    for kind, entries in judged.items():
        for entry in entries:
            targets = [f"{target:.0%}".replace("%", " %") for target in TARGETS[entry.section] if target]
            inside = fit.inside(entry.section) if kind == "held out" else None
            records.append({
                "kernels": _NAMES[entry.section], "points": kind, "number": Count(entry.num_points),
                "median error": Share(entry.median_error), "95th percentile": Share(entry.p95_error),
                "bias": Change(entry.bias), "target": " / ".join(targets),
                "inside 90 % interval": None if inside is None else Share(inside),
            })  # fmt: skip
    forms = [f"Form of {name}: {form}." for name, form in fit.forms.items()]
    return Table.of("Relative errors of predicted times", records, notes=forms)


def _residuals(fit: DeviceFit) -> Iterator[Chart]:
    """Errors of all points by how long they take."""
    series = [
        _series(name, _predictions(fit, *sections), lambda entry: (1e6 * entry.point.seconds, entry.error))
        for name, sections in _GROUPS.items()
    ]
    scale = Scale(x="measured time (µs)", y="predicted / measured - 1", log_x=True, relative=True)
    if fit.predicted:
        caption = "Every measured point; hover over a point to read it."
        yield series_chart(series, scale, title="Residuals", caption=caption)


def _predictions(fit: DeviceFit, *sections: str) -> list[Predicted]:
    return [entry for entry in fit.predicted if entry.section in sections]


def _series(
    name: str, predictions: Iterable[Predicted], place: Callable[[Predicted], tuple[float, float]],
    curve: Sequence[tuple[float, float]] = (),
) -> Series:  # fmt: skip
    """Predicted points where `place` puts them, those that were held out drawn open."""
    points: dict[bool, list[tuple[float, float, str]]] = {False: [], True: []}
    for entry in predictions:
        points[entry.point.held_out].append((*place(entry), _described(entry)))
    return Series(name=name, points=points[False], held_out=points[True], curve=curve)


def _described(entry: Predicted) -> str:
    point = entry.point
    size = " x ".join(map(str, point.shape)) or f"{point.size_bytes:,} B"
    ranks = f", {point.ranks} ranks" if point.ranks > 1 else ""
    return f"{point.call} {size}{ranks}: {Seconds(point.seconds)} measured, {Change(entry.error)} predicted"


# -- kernels -----------------------------------------------------------------------------------------------------------


def _tflops(entry: Predicted) -> float:
    return entry.point.flops / entry.point.seconds / 1e12


def _roofline(fit: DeviceFit) -> Iterator[Chart]:
    """Measured rates of 16-bit products and attention under the peaks."""
    predictions = [e for e in _predictions(fit, "matrix", "attention") if e.point.dtype in SIXTEEN_BIT]
    if not predictions:
        return
    compute = fit.device.compute
    peak = max(compute.matrix_flops_per_s[e.point.dtype] for e in predictions)
    series = [
        _series(_NAMES[section], (e for e in predictions if e.section == section),
                lambda e: (e.point.flops_per_byte, _tflops(e)))
        for section in ("matrix", "attention")
    ]  # fmt: skip
    note = "Measured rates under the peaks of arithmetic and memory."
    yield roofline_chart(series, peak, compute.memory_Bps, title="Roofline, 16-bit", caption=note)


def _rates(fit: DeviceFit) -> Iterator[Chart]:
    """The rate of products by the fitted form over their rows."""
    compute = fit.device.compute
    dtype = next((name for name in SIXTEEN_BIT if name in compute.matrix_flops_per_s), None)
    if dtype is None or "matrix" not in fit.forms:
        return
    series = []
    for fixed in ((4096, 4096), (1024, 1024)):
        curve = [(m, rate / 1e12) for m, rate in product_rates(compute, dtype, *fixed)]
        near = [e for e in _predictions(fit, "matrix") if e.point.shape[1:] == fixed and e.point.dtype == dtype]
        name = f"k = {fixed[0]}, n = {fixed[1]}, over m"
        series.append(_series(name, near, lambda e: (e.point.shape[0], _tflops(e)), curve))
    scale = Scale(x="rows m", y="TFLOP/s", log_x=True, log_y=True)
    note = "Each drop in the curve is a new wave: one tile more than the cores can hold."
    yield series_chart(series, scale, title=f"Rate of {dtype} products by the fitted form", caption=note)


def _bandwidths(fit: DeviceFit) -> Iterator[Chart]:
    """Bandwidth of memory-bound kernels over their size."""
    predictions = _predictions(fit, "memory")
    if not predictions:
        return
    compute = fit.device.compute
    sizes = [e.point.size_bytes for e in predictions]
    curve = [(size, rate_Bps / 1e9) for size, rate_Bps in kernel_bandwidths(compute, min(sizes), max(sizes))]
    peak = [(size, compute.memory_Bps / 1e9) for size, _ in (curve[0], curve[-1])]
    series = [
        _series("measured", predictions, lambda e: (e.point.size_bytes, e.point.size_bytes / e.point.seconds / 1e9)),
        Series(name="fitted, at the least bytes", curve=curve),
        Series(name="vendor's peak", curve=peak, dashed=True),
    ]
    scale = Scale(x="bytes read and written", y="GB/s", log_x=True, log_y=True)
    note = "Small kernels do not reach the bandwidth, because their launch takes longer than their traffic."
    yield series_chart(series, scale, title="Memory-bound kernels", caption=note)


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages(fit: DeviceFit) -> Iterator[Chart]:
    """Bandwidth of each kind of communication over its size, one series for each number of ranks."""
    for call in COLLECTIVES:
        predictions = [e for e in _predictions(fit, "collective", "transfer") if e.point.call == call]
        series = []
        for ranks in sorted({e.point.ranks for e in predictions})[-_MOST_RANKS:]:
            these = [e for e in predictions if e.point.ranks == ranks]
            low, high = min(1e4, *(e.point.size_bytes for e in these)), max(e.point.size_bytes for e in these)
            curve = [(x, rate_Bps / 1e9) for x, rate_Bps in message_bandwidths(fit.device, call, ranks, low, high)]
            name = f"{ranks} ranks" if call != "transfer" else "one way"
            series.append(_series(name, these, partial(_sent, fit.device), curve))
        scale = Scale(x="message (bytes)", y="GB/s sent by a rank", log_x=True, log_y=True)
        caption = "Curves are the fitted form. A bend is the size from which another protocol is faster. " + (
            "The curve is for one pattern. Points are for all patterns (recorded launches, there and back, back to "
            "back) and differ from it by up to a factor of two."
            if call == "transfer"
            else "Small messages below the curve were issued back to back and waited for the host."
        )
        if predictions:
            yield series_chart(series, scale, title=call, caption=caption)


def _sent(device: Device, entry: Predicted) -> tuple[float, float]:
    """Bytes of the message, and gigabytes a second that a rank sends."""
    point = entry.point
    return point.size_bytes, moved_bytes(device, point.call, point.ranks, point.size_bytes) / point.seconds / 1e9


def _cpu_messages(points: Sequence[Point]) -> Iterator[Chart]:
    """Time against size of every kind of communication, one series for each number of ranks in a group."""
    messages = [point for point in points if point.kind in ("collective", "transfer")]
    for call in sorted({point.call for point in messages}):
        measured = [point for point in messages if point.call == call]
        busiest = max(point.active_ranks for point in measured)
        groups: dict[int, list[tuple[float, float, str]]] = {}
        for point in sorted(measured, key=lambda point: (point.ranks, point.size_bytes)):
            if point.active_ranks == busiest:
                text = f"{point.size_bytes:,} B: {Seconds(point.seconds)}"
                groups.setdefault(point.ranks, []).append((point.size_bytes, 1e6 * point.seconds, text))
        series = [Series(name=f"groups of {ranks}", points=groups[ranks]) for ranks in list(groups)[:_MOST_RANKS]]
        scale = Scale(x="size (bytes)", y="time (µs)", log_x=True, log_y=True)
        yield series_chart(series, scale, title=call, caption=f"{call} while all {busiest} ranks are busy.")


def _contention(device: Device) -> Iterator[Table]:
    """Rates of compute and communication while both run, as shares of those alone; nothing where they are not known."""
    overlaps = device.overlap
    distinct = len({(overlap.compute_rate, overlap.comm_rate) for overlap in overlaps})
    notes = [device.provenance["overlap"].source] if "overlap" in device.provenance else []
    if distinct < len(overlaps):
        notes.insert(0, f"The fit found {distinct} pairs of rates for these {len(overlaps)} cells: cells with one pair "
                        "cannot be distinguished in the measurements.")  # fmt: skip
    if overlaps:
        yield Table.of("Speed while both run, relative to each alone", (
            {"compute": overlap.compute, "communication": overlap.collective,
             "speed of the compute": Share(overlap.compute_rate),
             "speed of the communication": Share(overlap.comm_rate)}
            for overlap in overlaps
        ), notes=notes)  # fmt: skip


# -- extrapolation -----------------------------------------------------------------------------------------------------


def _extrapolated(fit: DeviceFit) -> Table:
    records = []
    for name in TARGETS:
        points = [entry.point for entry in _predictions(fit, name)]
        measured, beyond = (_measured_range(name, points), "beyond these") if points else ("nothing", "everything")
        records.append({"kernels": _NAMES[name], "measured": measured, "extrapolated by the form": beyond})
    return Table.of("Sizes that were measured", records)


def _measured_range(name: str, points: Sequence[Point]) -> str:
    """The measured range, from smallest to largest, in words."""
    if name in ("matrix", "matrix32"):
        dims = {dim: [point.shape[at] for point in points] for at, dim in enumerate("mnk")}
        return ", ".join(f"{dim} {min(sizes):,} to {max(sizes):,}" for dim, sizes in dims.items())
    if name == "attention":
        queries = [point.shape[3] for point in points]
        return f"{min(queries):,} to {max(queries):,} queries"
    sizes = [point.size_bytes for point in points]
    ranks = f", up to {max(point.ranks for point in points)} ranks" if name == "collective" else ""
    return f"{min(sizes):,} to {max(sizes):,} bytes{ranks}"
