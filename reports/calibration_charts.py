"""Pictures of a calibration: residuals, rates, bandwidths, times of messages, and how compute and messages slow each
other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from costmodels.fit.curves import kernel_bandwidths, message_bandwidths, moved_bytes, product_rates
from costmodels.fit.device import DeviceFit
from costmodels.fit.points import Point
from costmodels.fit.predict import Predicted
from costmodels.machine.catalogue import Device
from costmodels.machine.sections import COLLECTIVES
from plans.units import Share
from reports.charts import Chart, Scale, Series, roofline_chart, series_chart
from reports.tables import Cell, Table

__all__ = [
    "bandwidth_picture",
    "collective_pictures",
    "contention_table",
    "message_pictures",
    "rate_picture",
    "residual_picture",
    "roofline_picture",
]


def predictions_of(fit: DeviceFit, *sections: str) -> list[Predicted]:
    """The predicted points of some sections."""
    return [entry for entry in fit.predicted if entry.section in sections]


def _described(entry: Predicted) -> str:
    point = entry.point
    what = " x ".join(map(str, point.shape)) or f"{point.size_bytes:,} B"
    ranks = f", {point.ranks} ranks" if point.ranks > 1 else ""
    return f"{point.call} {what}{ranks}: {1e6 * point.seconds:.4g} us measured, {entry.error:+.1%} predicted"


def residual_picture(fit: DeviceFit) -> Iterator[Chart]:
    """Errors of all points by how long they take."""
    groups = {
        "compute": ("matrix", "attention"), "memory-bound": ("memory",),
        "communication": ("collective", "transfer"), "contention": ("overlap",),
    }  # fmt: skip
    series = []
    for name, sections in groups.items():
        predictions = predictions_of(fit, *sections)
        points = [
            [(1e6 * e.point.seconds, e.error, _described(e)) for e in predictions if e.point.held_out is is_held_out]
            for is_held_out in (False, True)
        ]
        series.append(Series(name=name, points=points[0], held_out=points[1]))
    if not fit.predicted:
        return
    scale = Scale(x="measured time (µs)", y="predicted / measured - 1", log_x=True, relative=True)
    yield series_chart(series, scale, title="Residuals", caption="Every measured point; hover over a point to read it.")


def roofline_picture(fit: DeviceFit) -> Iterator[Chart]:
    """Measured rates of 16-bit products and attention under the peaks."""
    predictions = [e for e in predictions_of(fit, "matrix", "attention") if e.point.dtype in ("bfloat16", "float16")]
    if not predictions:
        return
    compute = fit.device.compute
    peak = max(compute.matrix_flops_per_s[e.point.dtype] for e in predictions)

    def place(point: Point) -> tuple[float, float]:
        return point.flops_per_byte, point.flops / point.seconds / 1e12

    series = [
        _series("matrix products", [e for e in predictions if e.section == "matrix"], place),
        _series("attention", [e for e in predictions if e.section == "attention"], place),
    ]
    note = "Measured rates under the peaks of arithmetic and memory."
    yield roofline_chart(series, peak, compute.memory_Bps, title="Roofline, 16-bit", caption=note)


def _series(
    name: str, predictions: Sequence[Predicted], place: Callable[[Point], tuple[float, float]],
    curve: Sequence[tuple[float, float]] = (),
) -> Series:  # fmt: skip
    fitted, held_out = (
        [(*place(entry.point), _described(entry)) for entry in predictions if entry.point.held_out is is_held_out]
        for is_held_out in (False, True)
    )
    return Series(name=name, points=fitted, held_out=held_out, curve=curve)


def rate_picture(fit: DeviceFit) -> Iterator[Chart]:
    """The rate of products by the fitted form over their rows."""
    compute = fit.device.compute
    dtype = next((name for name in ("bfloat16", "float16") if name in compute.matrix_flops_per_s), None)
    if dtype is None or "matrix" not in fit.forms:
        return
    series = []
    for name, fixed in (("k = 4096, n = 4096, over m", (4096, 4096)), ("k = 1024, n = 1024, over m", (1024, 1024))):
        curve = [(m, rate / 1e12) for m, rate in product_rates(compute, dtype, *fixed)]
        near = [e for e in predictions_of(fit, "matrix") if e.point.shape[1:] == fixed and e.point.dtype == dtype]
        series.append(_series(name, near, lambda point: (point.shape[0], point.flops / point.seconds / 1e12), curve))
    scale = Scale(x="rows m", y="TFLOP/s", log_x=True, log_y=True)
    note = "Teeth are waves: one more tile than the cores hold begins another wave."
    yield series_chart(series, scale, title=f"Rate of {dtype} products by the fitted form", caption=note)


def bandwidth_picture(fit: DeviceFit) -> Iterator[Chart]:
    """Bandwidth of memory-bound kernels over their size."""
    predictions = predictions_of(fit, "memory")
    if not predictions:
        return
    compute = fit.device.compute
    sizes = [e.point.size_bytes for e in predictions]
    curve = [(size, rate_Bps / 1e9) for size, rate_Bps in kernel_bandwidths(compute, min(sizes), max(sizes))]
    peak = [(size, compute.memory_Bps / 1e9) for size, _ in (curve[0], curve[-1])]
    series = [
        _series("measured", predictions, lambda point: (point.size_bytes, point.size_bytes / point.seconds / 1e9)),
        Series(name="fitted, at the least bytes", curve=curve),
        Series(name="vendor's peak", curve=peak, dashed=True),
    ]
    scale = Scale(x="bytes read and written", y="GB/s", log_x=True, log_y=True)
    note = "Bandwidth against size: small kernels are bound by their launch."
    yield series_chart(series, scale, title="Memory-bound kernels", caption=note)


def collective_pictures(fit: DeviceFit) -> Iterator[Chart]:
    """Bandwidth of each kind of communication over its size, one series for each number of ranks."""
    device = fit.device
    for call in COLLECTIVES:
        predictions = [e for e in predictions_of(fit, "collective", "transfer") if e.point.call == call]
        if not predictions:
            continue
        series = []
        for ranks in sorted({e.point.ranks for e in predictions})[-4:]:
            these = [e for e in predictions if e.point.ranks == ranks]
            low, high = min(1e4, *(e.point.size_bytes for e in these)), max(e.point.size_bytes for e in these)
            curve = [(x, rate_Bps / 1e9) for x, rate_Bps in message_bandwidths(device, call, ranks, low, high)]
            name = f"{ranks} ranks" if call != "transfer" else "one way"
            series.append(_series(name, these, partial(_sent, device, call, ranks), curve))
        scale = Scale(x="message (bytes)", y="GB/s sent by a rank", log_x=True, log_y=True)
        caption = "Curves are the fitted form with its protocols; bends are where one takes over."
        if call == "transfer":
            caption += (
                " The curve is of one pattern, points are of all (recorded launches, there and back, back to back) and "
                "lie up to two times above or below it."
            )
        else:
            caption += " Small messages below were issued back to back and waited for their host."
        yield series_chart(series, scale, title=call, caption=caption)


def _sent(device: Device, call: str, ranks: int, point: Point) -> tuple[float, float]:
    """Bytes of the message, and gigabytes a second that a rank sends."""
    return point.size_bytes, moved_bytes(device, call, ranks, point.size_bytes) / point.seconds / 1e9


def contention_table(device: Device) -> Iterator[Table]:
    """Rates of compute and communication while both run, as shares of those alone; nothing where they are not known."""
    if not device.overlap:
        return
    rows: list[tuple[Cell, ...]] = [
        (overlap.compute, overlap.collective, Share(overlap.compute_rate), Share(overlap.comm_rate))
        for overlap in device.overlap
    ]
    distinct = len({(overlap.compute_rate, overlap.comm_rate) for overlap in device.overlap})
    shared = f"The fit found {distinct} pairs of rates for these {len(rows)} cells: cells with one pair "
    shared += "cannot be distinguished in the measurements."
    known = device.provenance.get("overlap")
    notes = [*([shared] if distinct < len(rows) else []), *([known.source] if known else [])]
    columns = ("compute", "communication", "speed of the compute", "speed of the communication")
    yield Table(title="Speed while both run, relative to each alone", columns=columns, rows=tuple(rows),
                notes=tuple(notes))  # fmt: skip


def message_pictures(points: Sequence[Point]) -> Iterator[Chart]:
    """Time against size of every kind of communication, one series for each number of ranks in a group."""
    for call in sorted({point.call for point in points if point.kind in ("collective", "transfer")}):
        measured = [point for point in points if point.call == call and point.kind in ("collective", "transfer")]
        busiest = max(point.active_ranks for point in measured)
        series = [
            Series(
                name=f"groups of {ranks}",
                points=[
                    (float(point.size_bytes), 1e6 * point.seconds, _size_and_time(point))
                    for point in sorted(measured, key=lambda point: point.size_bytes)
                    if point.ranks == ranks and point.active_ranks == busiest
                ],
            )
            for ranks in sorted({point.ranks for point in measured if point.active_ranks == busiest})[:4]
        ]  # fmt: skip
        scale = Scale(x="size (bytes)", y="time (µs)", log_x=True, log_y=True)
        yield series_chart(series, scale, title=call, caption=f"{call} while all {busiest} ranks are at work.")


def _size_and_time(point: Point) -> str:
    return f"{point.size_bytes:,} B: {1e6 * point.seconds:.4g} us"
