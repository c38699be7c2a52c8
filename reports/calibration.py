"""The calibration report: measured points with fitted curves, residuals, roofline, bandwidths, the contention map.

One HTML file without anything fetched; pictures are SVG for light and dark pages, the points are inside as JSON.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from string import Template

from costmodels.fit.device import DeviceFit
from costmodels.fit.points import Point
from costmodels.fit.predict import TARGETS, Predicted, scoreboard
from costmodels.machine.catalogue import Device
from costmodels.machine.sections import COLLECTIVES
from costmodels.price.communication import route, wire_s
from costmodels.price.compute import matrix_s
from costmodels.price.traffic import Traffic, collective_traffic
from plans.files import write_atomically
from plans.model.graph import itemsize
from reports.calibration_picture import Series, log_picture, map_picture
from reports.html import _figure, _folded, _json, _key_figures, _section
from reports.svg import Picture, style_sheet, template
from reports.tables import Table

__all__ = ["calibration_html", "write_calibration_report"]

_NAMES = {
    "matrix": "matrix products", "attention": "attention", "memory": "memory-bound kernels",
    "collective": "collectives", "transfer": "transfers",
    "matrix32": "32-bit matrix products", "overlap": "compute beside communication",
}  # fmt: skip


def write_calibration_report(path: str | os.PathLike[str], fit: DeviceFit) -> Path:
    """Write `calibration_html(fit)` to a file, whole or not at all."""
    return write_atomically(path, calibration_html(fit).encode())


def calibration_html(fit: DeviceFit) -> str:
    """The report of a calibrated device as text.

    Args:
        fit: the device with its predictions of every measured point.
    """
    device, title = fit.device, f"Calibration of {fit.device.name}"
    held = {entry.section: entry for entry in fit.held_out}
    keys = {f"{_NAMES[name]}, held out": f"{entry.median_error:.1%} median" for name, entry in held.items()}
    sections = [
        _section("errors", "How well the forms predict", _errors(fit).html(), *_pictures([_residuals(fit)])),
        _section("roofline", "Matrix products and attention", *_pictures([_roofline(fit), _depths(fit)])),
        _section("memory", "Memory-bound kernels", *_pictures([_bandwidth(fit)])),
        _section("links", "Collectives", *_pictures(_collectives(fit))),
        _section("contention", "Contention", *_pictures([_contention(device)])),
        _section("extrapolated", "What is extrapolated", _extrapolated(fit).html()),
        _folded("provenance", "Where every figure comes from", _provenance(device).html()),
    ]
    data = [
        {"kind": entry.section, "call": entry.point.call, "shape": entry.point.shape, "ranks": entry.point.ranks,
         "size_bytes": entry.point.size_bytes, "measured_s": entry.point.seconds, "predicted_s": entry.seconds,
         "held_out": entry.point.held_out}
        for entry in fit.predicted
    ]  # fmt: skip
    return Template(template("report.html")).substitute(
        title=escape(title), subtitle=escape(device.variant),
        notes="<li>Filled points were fitted, open ones held out. Seconds are the device's, without its host.</li>",
        style=style_sheet() + template("report.css"), figures=_key_figures(keys), sections="\n".join(sections),
        footer="Made by twofold.", data=_json(device=device.name, forms=dict(fit.forms), points=data),
    )  # fmt: skip


def _pictures(drawn: Sequence[tuple[Picture, str] | None]) -> list[str]:
    return [_figure(*each) for each in drawn if each is not None]


def _said(entry: Predicted) -> str:
    point = entry.point
    what = " x ".join(map(str, point.shape)) or f"{point.size_bytes:,} B"
    ranks = f", {point.ranks} ranks" if point.ranks > 1 else ""
    return f"{point.call} {what}{ranks}: {1e6 * point.seconds:.4g} us measured, {entry.error:+.1%} predicted"


def _of(fit: DeviceFit, *sections: str) -> list[Predicted]:
    return [entry for entry in fit.predicted if entry.section in sections]


def _errors(fit: DeviceFit) -> Table:
    rows = []
    judged = {
        "fitted": fit.residuals, "held out": fit.held_out,
        "held out, at their clock": scoreboard(fit.held_out_at_clock),
    }  # fmt: skip
    for kind, entries in judged.items():
        for entry in entries:
            median, p95 = TARGETS[entry.section]
            target = f"{median:.0%}" + (f" / {p95:.0%}" if p95 else "")
            inside = fit.inside(entry.section) if kind == "held out" else None
            rows.append((_NAMES[entry.section], kind, str(entry.num_points), f"{entry.median_error:.1%}",
                         f"{entry.p95_error:.1%}", f"{entry.bias:+.1%}", target,
                         "" if inside is None else f"{inside:.0%}"))  # fmt: skip
    columns = ("kernels", "points", "number", "median error", "95th percentile", "bias", "target",
               "inside 90 % interval")  # fmt: skip
    forms = tuple(f"Form of {name}: {form}." for name, form in fit.forms.items())
    return Table(title="Relative errors of predicted times", columns=columns, rows=tuple(rows),
                 right=frozenset(columns[2:]), notes=forms)  # fmt: skip


def _residuals(fit: DeviceFit) -> tuple[Picture, str] | None:
    groups = {
        "compute": ("matrix", "attention"), "memory-bound": ("memory",),
        "communication": ("collective", "transfer"), "contention": ("overlap",),
    }  # fmt: skip
    series = []
    for name, sections in groups.items():
        own = _of(fit, *sections)
        points = [[(1e6 * e.point.seconds, e.error, _said(e)) for e in own if e.point.held_out is held]
                  for held in (False, True)]  # fmt: skip
        series.append(Series(name=name, points=points[0], held_out=points[1]))
    if not fit.predicted:
        return None
    picture = log_picture(series, title="Residuals", x_name="measured time (us)", y_name="predicted / measured - 1",
                          linear_y=True)  # fmt: skip
    return picture, "Every measured point; rest the pointer on one to read it."


def _flops(point: Point) -> float:
    if point.kind == "matrix":
        m, n, k = point.shape
        return 2.0 * point.batch * m * n * k
    batch, heads, _, queries, keys, dim = point.shape
    share = 0.5 if point.options.get("causal") else 1.0
    return 4.0 * batch * heads * queries * keys * dim * share * (2.5 if point.call.endswith("backward") else 1.0)


def _intensity(point: Point) -> float:
    size = itemsize("float32" if point.dtype == "tf32" else point.dtype)
    if point.kind == "matrix":
        m, n, k = point.shape
        return _flops(point) / (size * point.batch * (m * k + n * k + m * n))
    batch, heads, kv_heads, queries, keys, dim = point.shape
    return _flops(point) / (size * dim * batch * (2 * heads * queries + 2 * kv_heads * keys))


def _roofline(fit: DeviceFit) -> tuple[Picture, str] | None:
    own = [e for e in _of(fit, "matrix", "attention") if e.point.dtype in ("bfloat16", "float16")]
    if not own:
        return None
    compute = fit.device.compute
    peak = max(compute.matrix_flops_per_s[e.point.dtype] for e in own)
    xs = [_intensity(e.point) for e in own]
    low, high = min(10.0, min(xs)), max(2000.0, max(xs))
    grid = [low * (high / low) ** (at / 80) for at in range(81)]

    def place(point: Point) -> tuple[float, float]:
        return _intensity(point), _flops(point) / point.seconds / 1e12

    series = [
        _series("matrix products", [e for e in own if e.section == "matrix"], place),
        _series("attention", [e for e in own if e.section == "attention"], place),
        Series(name="vendor's roofline", curve=[(x, min(peak, x * compute.memory_Bps) / 1e12) for x in grid]),
    ]
    picture = log_picture(series, title="Roofline, 16-bit", x_name="floating-point operations per byte",
                          y_name="TFLOP/s")  # fmt: skip
    return picture, "Measured rates under the peaks of arithmetic and memory."


def _series(
    name: str, own: Sequence[Predicted], place: Callable[[Point], tuple[float, float]],
    curve: Sequence[tuple[float, float]] = (),
) -> Series:  # fmt: skip
    fitted, held_out = (
        [(*place(entry.point), _said(entry)) for entry in own if entry.point.held_out is held] for held in (False, True)
    )
    return Series(name=name, points=fitted, held_out=held_out, curve=curve)


def _depths(fit: DeviceFit) -> tuple[Picture, str] | None:
    compute = fit.device.compute
    dtype = next((name for name in ("bfloat16", "float16") if name in compute.matrix_flops_per_s), None)
    if dtype is None or "matrix" not in fit.forms:
        return None
    sizes = sorted({round(2 ** (at / 12)) for at in range(169)})
    series = []
    for name, fixed in (("k = 4096, n = 4096, over m", (4096, 4096)), ("k = 1024, n = 1024, over m", (1024, 1024))):
        n, k = fixed
        curve = []
        for m in sizes:
            seconds = matrix_s(compute, (m, n, k), compute.matrix_flops_per_s[dtype], 2 * (m * k + n * k + m * n))
            curve.append((float(m), 2 * m * n * k / seconds / 1e12))
        near = [e for e in _of(fit, "matrix") if e.point.shape[1:] == fixed and e.point.dtype == dtype]
        series.append(_series(name, near, lambda point: (point.shape[0], _flops(point) / point.seconds / 1e12), curve))
    picture = log_picture(
        series, title=f"Rate of {dtype} products by the fitted form", x_name="rows m", y_name="TFLOP/s"
    )
    return picture, "Teeth are waves: one more tile than the cores hold begins another wave."


def _bandwidth(fit: DeviceFit) -> tuple[Picture, str] | None:
    own = _of(fit, "memory")
    if not own:
        return None
    compute = fit.device.compute
    low, high = min(e.point.size_bytes for e in own), max(e.point.size_bytes for e in own)
    grid = [low * (high / low) ** (at / 60) for at in range(61)] if high > low else [float(low), 2.0 * low]
    reached = compute.memory_Bps * compute.memory_efficiency
    curve = [(x, x / (compute.kernel_s + x / reached) / 1e9) for x in grid]
    series = [
        _series("measured", own, lambda point: (point.size_bytes, point.size_bytes / point.seconds / 1e9)),
        Series(name="fitted, at the least bytes", curve=curve),
        Series(name="vendor's peak", curve=[(x, compute.memory_Bps / 1e9) for x in (grid[0], grid[-1])], dashed=True),
    ]
    picture = log_picture(series, title="Memory-bound kernels", x_name="bytes read and written", y_name="GB/s")
    return picture, "Bandwidth against size: small kernels are bound by their launch."


def _collectives(fit: DeviceFit) -> list[tuple[Picture, str] | None]:
    device = fit.device
    drawn: list[tuple[Picture, str] | None] = []
    library = {"cuda": "nccl", "npu": "hccl"}[device.device]
    for call in COLLECTIVES:
        own = [e for e in _of(fit, "collective", "transfer") if e.point.call == call]
        if not own:
            continue
        series = []
        for ranks in sorted({e.point.ranks for e in own})[-4:]:
            these = [e for e in own if e.point.ranks == ranks]
            low, high = min(1e4, *(e.point.size_bytes for e in these)), max(e.point.size_bytes for e in these)
            curve = []
            for at in range(81):
                size = int(low * (high / low) ** (at / 80))
                moved = _moved(call, ranks, size, library)
                seconds = wire_s(device.collectives[call], moved, ranks, route(device.node, 0, 1, ranks, ranks - 1))
                curve.append((float(size), moved.moved_bytes / seconds / 1e9))
            name = f"{ranks} ranks" if call != "transfer" else "one way"
            series.append(_series(name, these, partial(_sent, call, ranks, library), curve))
        picture = log_picture(series, title=call, x_name="message (bytes)", y_name="GB/s sent by a rank")
        said = "Curves are the fitted form with its protocols; bends are where one takes over."
        if call == "transfer":
            said += (
                " The curve is of one pattern, points are of all (recorded launches, there and back, back to back) and "
                "lie up to two times above or below it."
            )
        else:
            said += " Small messages below were issued back to back and waited for their host."
        drawn.append((picture, said))
    return drawn


def _sent(call: str, ranks: int, library: str, point: Point) -> tuple[float, float]:
    """Bytes of the message, and gigabytes a second that a rank sends."""
    return point.size_bytes, _moved(call, ranks, point.size_bytes, library).moved_bytes / point.seconds / 1e9


def _moved(call: str, ranks: int, size: int, library: str) -> Traffic:
    if call == "transfer":
        return Traffic(messages=1, hops=1, moved_bytes=size, size_bytes=size)
    return collective_traffic(call, ranks, size, 2, library)


def _contention(device: Device) -> tuple[Picture, str] | None:
    if not device.overlap:
        return None
    pairs: Mapping[tuple[str, str], tuple[float, float]] = {
        (entry.compute, entry.collective): (entry.compute_rate, entry.comm_rate) for entry in device.overlap
    }
    rows = ("matrix", "attention", "memory")
    values = [[pairs.get((row, column)) for column in COLLECTIVES] for row in rows]
    picture = map_picture(rows, COLLECTIVES, values, title="Speed while both run, as a share of that alone")
    said = device.provenance.get("overlap")
    distinct = len(set(pairs.values()))
    shared = "" if distinct == len(pairs) else (
        f"The fit found {distinct} pairs of rates for these {len(pairs)} cells: cells that share one are not told "
        "apart by what was measured. "
    )  # fmt: skip
    own = said.source if said else ""
    return picture, f"Upper bar: the compute of the row; lower bar: the communication. {shared}{own}"


def _extrapolated(fit: DeviceFit) -> Table:
    rows = []
    for section in TARGETS:
        own = [e.point for e in _of(fit, section)]
        if not own:
            rows.append((_NAMES[section], "nothing was measured", "everything"))
            continue
        if section in ("matrix", "matrix32"):
            spans = [(min(p.shape[at] for p in own), max(p.shape[at] for p in own)) for at in range(3)]
            inside = ", ".join(f"{name} {low:,} to {high:,}" for name, (low, high) in zip("mnk", spans, strict=True))
        elif section == "attention":
            inside = f"{min(p.shape[3] for p in own):,} to {max(p.shape[3] for p in own):,} queries"
        else:
            sizes = [p.size_bytes for p in own]
            inside = f"{min(sizes):,} to {max(sizes):,} bytes"
            inside += f", up to {max(p.ranks for p in own)} ranks" if section == "collective" else ""
        rows.append((_NAMES[section], inside, "beyond these"))
    columns = ("kernels", "measured", "extrapolated by the form")
    return Table(title="Sizes that were measured", columns=columns, rows=tuple(rows))


def _provenance(device: Device) -> Table:
    rows = tuple((name, says.status, says.source, says.date) for name, says in sorted(device.provenance.items()))
    return Table(title="Sources", columns=("entry", "status", "source", "date"), rows=rows)
