"""Fits of made-up measurements, and what is predicted from them (see `tests.kept`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from costmodels.fit.curves import kernel_bandwidths, message_bandwidths, moved_bytes, product_rates
from costmodels.fit.forms import crowding, fit_collective, fit_compute, fit_overlap, worked_s
from costmodels.fit.kernels import fit_attention, fit_memory, predicted_s
from costmodels.fit.links import communication_s, fit_links, fit_overlaps
from costmodels.fit.matrix import density_weights, fit_clock, fit_dtypes, fit_matrix, fit_step_clock
from costmodels.fit.points import Point, held_out
from costmodels.fit.power import fit_power, mixtures
from costmodels.fit.predict import predict_points, scoreboard
from costmodels.fit.probe import fit_probe, fit_processor
from costmodels.fit.transfer_calibration import carried
from costmodels.interval import price_interval
from costmodels.machine.catalogue import CitedProduct
from costmodels.machine.links import Link
from costmodels.machine.machine import Machine
from costmodels.price.compute import Compute
from costmodels.price.executor_kernels import fit_rules
from costmodels.price.size_table import fit_size_table, knot_shapes
from plans.errors import TwofoldError
from tests.support.made_up import device, machines

Row = tuple[str, Iterable[float]]


def _numbers(value: Any) -> Iterator[float]:
    """All numbers that a value consists of, in order."""
    match value:
        case dict():
            for name in sorted(value):
                yield from _numbers(value[name])
        case list() | tuple():
            for item in value:
                yield from _numbers(item)
        case bool() | str() | None:
            return
        case int() | float():
            yield value
        case _:
            plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else msgspec.to_builtins(value)
            yield from _numbers(plain)


def _wrong(number: int) -> float:
    """By which the measurement of this number is off."""
    return 1 + 0.04 * math.sin(5.0 * number)


def _products() -> list[Point]:
    sizes = [
        (m, n, k)
        for m, n in ((4096, 4096), (128, 4096), (100, 1000), (16, 8192), (2048, 512)) for k in (64, 500, 1024, 8192)
    ]  # fmt: skip
    return [
        Point(kind="matrix", call="mm", shape=shape, seconds=1.0, dtype=dtype, form=form, batch=batch, clock_MHz=clock)
        for number, shape in enumerate(sizes)
        for dtype, form, batch, clock in (
            ("bfloat16", ("nt", "nn", "tn")[number % 3], 1, 1500.0 + 10 * number), ("tf32", "nt", 1 + number % 2, 0.0),
        )
    ]  # fmt: skip


def _memory() -> list[Point]:
    return [
        Point(kind="memory", call=call, size_bytes=4**power, seconds=1.0, dtype=dtype, figures={"kernels": kernels})
        for call, dtype, kernels in (
            ("add", "bfloat16", 1), ("softmax_backward", "bfloat16", 1), ("softmax_backward", "float32", 1),
            ("adamw_foreach", "bfloat16", 8), ("copy", "bfloat16", 1),
        )
        for power in range(6, 15)
    ]  # fmt: skip


def _attention() -> list[Point]:
    return [
        Point(kind="attention", call=call, shape=(2, 16, kv_heads, queries, keys, dim), dtype="bfloat16",
              options={"causal": causal}, seconds=1.0, clock_MHz=1700.0 + queries % 7)
        for call in ("sdpa_forward", "sdpa_backward")
        for queries, keys, kv_heads in ((128, 128, 16), (1024, 1024, 4), (4096, 4096, 16), (64, 4096, 16))
        for dim in (64, 128) for causal in (0, 1)
    ]  # fmt: skip


def _messages(call: str) -> list[Point]:
    kind = "transfer" if call == "transfer" else "collective"
    return [
        Point(kind=kind, call=call, size_bytes=size, ranks=ranks, seconds=1.0, dtype="bfloat16",
              options={"recorded": 1} if size % 3 else {})
        for ranks in ((2,) if call == "transfer" else (2, 4, 8)) for size in (1000, 2**14, 2**18, 2**22, 2**27)
    ]  # fmt: skip


def _measured(points: list[Point], seconds: Callable[[Point], float]) -> list[Point]:
    return [replace(point, seconds=seconds(point) * _wrong(at)) for at, point in enumerate(points)]


def _plain() -> Compute:
    return replace(machines()["nodes"].compute, tiled=None, step_clock_MHz=None, step_clock_drop=None, power=None)


def _kernel_fits() -> Iterator[Row]:
    """Memory-bound kernels, attention, clocks and dtypes."""
    compute = _plain()
    memory = fit_memory(_measured(_memory(), lambda point: predicted_s(point, compute)), replace(
        compute, kernel_cost={}, kernel_start={}, kernel_s=1e-6, memory_efficiency=1.0, memory_chunk_s=0.0,
    ))  # fmt: skip
    yield "memory", [*_numbers(memory.compute), *memory.left_out_s]
    attention = fit_attention(
        _measured(_attention(), lambda point: predicted_s(point, compute, at_clock=True)),
        replace(compute, attention=None),
    )
    yield "attention", [*_numbers(attention.compute.attention), *attention.left_out_s]
    products = _measured(_products(), lambda point: predicted_s(point, compute))
    yield "clock", _numbers(fit_clock([point for point in products if point.clock_MHz] * 3, compute))
    settled = [point for point in products if point.clock_MHz]
    yield "clock in a step", _numbers(fit_step_clock(settled[:3], [replace(settled[0], clock_MHz=1900.0)], compute))
    yield (
        "dtypes",
        _numbers(fit_dtypes([point for point in products if point.dtype == "tf32"], compute).dtype_efficiency),
    )
    yield "weights", density_weights(products)
    matrix = fit_matrix([point for point in products if point.clock_MHz], compute)
    yield "products", [*_numbers(matrix.compute), *matrix.predicted_s]


def _link_fits() -> Iterator[Row]:
    """Messages, and kernels beside messages."""
    own = device()
    for call in ("all_gather", "all_reduce", "transfer"):
        model = own.collectives[call]
        points = _measured(_messages(call), lambda point: communication_s(point, model, own.node, "nccl"))  # noqa: B023
        found = fit_links(points, own.node, "nccl")
        yield call, [*_numbers(found.collective), *_numbers(found.issued), *found.predicted_s]
    pairs = [
        Point(kind="overlap", call=kind, beside=call, seconds=(1.3e-3, 1.6e-3)[at % 2] * _wrong(at), size_bytes=2**20,
              figures={"compute_s": 1e-3, "comm_s": 4e-4 * (1 + at)})
        for at, (kind, call) in enumerate(
            (kind, call) for kind in ("matrix", "memory") for call in ("all_reduce", "all_gather") for _ in "123"
        )
    ]  # fmt: skip
    lengths = [(point.figures["compute_s"], point.figures["comm_s"]) for point in pairs]
    overlaps, _ = fit_overlaps(pairs, [(each / 10, other / 10) for each, other in lengths])
    yield "overlap", _numbers(list(overlaps))


def _predictions_of_points() -> Iterator[Row]:
    """Points of all kinds predicted, scores, curves, and intervals of single prices."""
    own = device()
    points = [*_products(), *_memory(), *_attention(), *_messages("all_reduce"), *_messages("transfer")]
    points += [
        Point(kind="overlap", call="matrix", beside="all_reduce", shape=(4096, 4096, 4096), dtype="bfloat16",
              seconds=1.0, form="nn", size_bytes=2**24, ranks=4, figures={"compute_s": 3e-4, "comm_s": 2e-4}),
        Point(kind="overlap", call="memory", beside="transfer", shape=(2**12, 2**12), dtype="bfloat16", seconds=1.0,
              size_bytes=2**24, ranks=2, figures={"compute_s": 3e-3, "comm_s": 2e-3}),
    ]  # fmt: skip
    for at_clock in (False, True):
        found = predict_points(points, own, at_clock=at_clock)
        yield f"seconds, {at_clock}", [each.seconds for each in found]
    known = {id(each.point): each.seconds for each in found}
    measured = [
        replace(point, seconds=known[id(point)] * _wrong(at)) for at, point in enumerate(points) if id(point) in known
    ]
    yield "scores", _numbers(list(scoreboard(predict_points(measured, own))))
    yield "held out", [len(part) for part in held_out(measured)]
    yield (
        "operations",
        [number for point in [*_products(), *_attention()] for number in (point.flops, point.flops_per_byte)],
    )
    yield "rates", [rate for _, rate in product_rates(own.compute, "bfloat16", 4096, 1024)[::12]]
    yield "bandwidths", [rate for _, rate in kernel_bandwidths(own.compute, 1e3, 1e9)[::10]]
    for call in ("all_reduce", "transfer"):
        curve = message_bandwidths(own, call, 4, 1e3, 1e9)
        yield f"{call} bandwidths", [*(rate for _, rate in curve[::10]), moved_bytes(own, call, 4, 10**6)]
    nodes = machines()["nodes"]
    yield "intervals", [edge for name in nodes.spreads for edge in price_interval(nodes, name, 1e-3)]


def _probes() -> Iterator[Row]:
    """Factors of probes, of processors, and work on crowded cores."""
    yield "probe", _numbers(fit_probe([1.0, 2.0, 4.0], [1.3, 2.2, 4.1]))
    yield "one probe", _numbers(fit_probe([1.0], [1.3]))
    yield "processor", _numbers(fit_processor([(1.0, 1.0, 5.0), (2.0, 1.0, 7.5), (1.0, 3.0, 10.0), (4.0, 1.0, 9.0)]))
    yield "a processor of one kind", _numbers(fit_processor([(1.0, 2.0, 5.0), (2.0, 4.0, 7.5)]))
    points = [
        Point(
            kind="collective",
            call="all_reduce",
            ranks=2,
            active_ranks=active,
            seconds=2.0,
            cpu_s=cpu,
            outside_cores=outside,
        )
        for active, cpu, outside in ((2, 0.0, 0.0), (4, 1.0, 0.5), (1, 1.5, 3.0))
    ]
    yield "crowding", [number for point in points for number in (crowding(point, 2), worked_s(point))]
    yield "rates of a pair", fit_overlap([1.0, 3.0, 1.0], [1.0, 1.0, 3.0], [1.5, 3.6, 3.4])


def _carried() -> Iterator[Row]:
    """A device of which only the data sheet is known."""
    source = device()
    sheet = Compute(
        matrix_flops_per_s={"bfloat16": 3e14, "float16": 3e14, "float32": 2e13, "tf32": 1.5e14},
        vector_flops_per_s={"bfloat16": 8e13, "float16": 8e13, "float32": 4e13}, memory_Bps=2e12, num_cores=108,
    )  # fmt: skip
    peaks = source.compute.matrix_flops_per_s
    bare = replace(source, name="sheet", compute=sheet, best_product=None, variant="of a data sheet")
    typical = tuple(CitedProduct(shape=(m, 4096, 4096), dtype="bfloat16", flops_per_s=2e14) for m in (1024, 4096))
    best = CitedProduct(shape=(8192, 8192, 4096), dtype="bfloat16", flops_per_s=2.6e14)
    for name, known in (
        ("alone", bare), ("at a limit", replace(bare, limit_W=400.0)),
        ("fastest product", replace(bare, best_product=best)),
        ("products", replace(bare, typical_products=typical, best_product=best)),
        ("equal cores", replace(bare, compute=replace(sheet, num_cores=132, matrix_flops_per_s=peaks))),
    ):  # fmt: skip
        found = carried(known, source, date="2026-01-01")
        yield name, [*_numbers(found.compute), *_numbers(found.collectives), *_numbers(found.spreads),
                     *_numbers(found.price_intervals)]  # fmt: skip


def _processors() -> Iterator[Row]:
    """Hosts that compute, and what their messages take of them; a wire; sharing of cores."""
    dispatch_s = {"matrix": 3e-6, "memory": 1e-6}

    def taken_s(m: int, n: int, k: int) -> float:
        traffic_s = 4 * (m * k + n * k + m * n) / 5e10
        return 3e-6 + math.hypot(2 * m * n * k / 8e10 * (1 + 4 / m) * (1 + 6 / k), traffic_s)

    points = [
        Point(kind="matrix", call="linear", shape=(m, n, k), seconds=taken_s(m, n, k))
        for m in (2, 8, 32, 128) for n, k in ((512, 784), (512, 8), (1024, 1024))
    ]  # fmt: skip
    points += [
        Point(kind="memory", call="relu", size_bytes=size, seconds=1e-6 + size / 5e10) for size in (10**4, 10**6, 10**7)
    ]
    points = _measured(points, lambda point: point.seconds)
    for peaks in ({}, {"peak_flops_per_s": 1e11, "peak_memory_Bps": 1e11}, {"peak_memory_Bps": 4e10}):
        for is_async in (False, True):
            compute, *errors = fit_compute(points, dispatch_s=dispatch_s, host_async=is_async, **peaks)
            yield f"compute, {is_async}, {len(peaks)}", [*_numbers(compute), *_numbers(errors)]
    wire = Link(name="wire", ranks=8, latency_s=1e-6, bandwidth_Bps=4e11)
    for call, library, cores in (("all_gather", "nccl", None), ("all_reduce", "gloo", 2), ("transfer", "gloo", 2)):
        messages = [
            Point(kind="transfer" if call == "transfer" else "collective", call=call, size_bytes=size, ranks=ranks,
                  active_ranks=ranks, seconds=3e-4 + ranks * 1e-4 + size / 2e10,
                  cpu_s=1e-4 + ranks * 1e-4 + size / 1.5e9)
            for ranks in ((2,) if call == "transfer" else (2, 4, 8)) for size in (64, 4096, 2**16, 2**20, 2**24)
        ]  # fmt: skip
        measured = _measured(messages, lambda point: point.seconds)
        found, errors = fit_collective(measured, link=wire, library=library, dispatch_s=4e-5, cores=cores)
        yield f"{call} of {library}", [*_numbers(found), *_numbers(errors)]


def _power() -> Iterator[Row]:
    """Mixtures of kernels at a power limit and below it."""
    powers_W = {"matrix": 900.0, "attention": 1000.0, "memory": 400.0, "norm": 450.0, "update": 350.0}
    points = []
    for at, name in enumerate(
        (
            "matrix",
            "attention",
            "memory",
            "norm",
            "update",
            "matrix memory",
            "matrix norm",
            "matrix attention",
            "matrix update",
        )
    ):
        kinds = name.split()
        share = 1 / len(kinds)
        clock = 1900.0 if "matrix" not in kinds else 1500.0 + 40 * at
        figures = dict[str, float]()
        for kind in kinds:
            seconds = 1e-3 * 1900 / (clock if kind == "matrix" else 1900 + 2 * at)
            figures |= {f"{kind}_share": share, f"{kind}_flops": 7e11, f"{kind}_s": seconds}
        drawn_W = 120 + sum(share * powers_W[kind] for kind in kinds) * (clock / 1900)
        points += [
            Point(kind="clock", call="mixture", dtype="bfloat16", options={"mixture": name, "window": window},
                  seconds=1.0, clock_MHz=clock + window, power_W=min(690.0, drawn_W), figures=figures)
            for window in range(8)
        ]  # fmt: skip
    compute = _plain()
    others = [replace(point, power_W=250.0, options={}) for point in _messages("all_reduce")]
    yield "power", _numbers(fit_power(points, others, compute).power)
    yield "mixtures", _numbers(mixtures(points, compute))


def _rules() -> Iterator[Row]:
    """Single instructions, and factors of products on a grid of sizes."""
    compute = _plain()
    points = [
        Point(kind="rule", call=call, shape=(size // 64, 32), size_bytes=size, dtype="bfloat16", stack="twofold",
              options={"class": "memory", "inputs": inputs}, held_out=size == 2**24,
              seconds=(kernels * compute.kernel_s + passes * size / compute.memory_Bps))
        for call, kernels, passes, inputs in (
            ("rope.forward", 12.0, 9.0, "8;8"), ("mul.grad0", 1.0, 1.5, "8"), ("sum", 2.0, 2.0, "8;8;8"),
        ) for size in (2**12, 2**16, 2**20, 2**24, 2**28)
    ]  # fmt: skip
    points = _measured(points, lambda point: point.seconds)
    points.append(
        Point(kind="dispatch", call="rope.forward", stack="twofold", options={"class": "memory"}, seconds=7e-5)
    )
    found = fit_rules(points, compute)
    yield "rules", [*_numbers(found.rules), *_numbers(found.fitted), *_numbers(found.held_out)]
    shapes = np.array([point.shape for point in _products()], dtype=float)
    errors = np.array([math.log(_wrong(at)) for at in range(len(shapes))])
    table = fit_size_table(shapes, errors, 1.5, np.prod(knot_shapes(), axis=1) / 1e14 + 1e-6)
    yield "sizes", [*table.factors, *(table.factor(*map(int, shape)) for shape in shapes)]


def _catalogue() -> Iterator[Row]:
    """Machines of a device: parts of a node, nodes, pods."""
    own = device()
    near = own.node[0]
    pod = replace(near, name="pod", ranks=32, bandwidth_Bps=1e11)
    tiers = replace(own, node=(replace(near, ranks=2), replace(near, ranks=4, bandwidth_Bps=2e11)), pod=pod)
    for name, known in (("node", own), ("tiers", tiers)):
        for number in (1, 2, 3, 4, 8, 16, 24, 32, 64):
            try:
                machine = Machine(**known.fields(number))
            except TwofoldError:
                continue
            yield f"{name}, {number}", [machine.room_bytes, machine.free_bytes, machine.devices_per_node,
                                        *(figure for link in machine.links for figure in _numbers(link))]  # fmt: skip


CASES: Mapping[str, Callable[[], Iterator[Row]]] = {
    "fits of kernels": _kernel_fits, "fits of links": _link_fits, "predicted points": _predictions_of_points,
    "probes": _probes, "carried devices": _carried, "fits of processors": _processors, "fits of power": _power,
    "rules and sizes": _rules, "machines of a device": _catalogue,
}  # fmt: skip
"""Name -> what computes the rows of numbers."""
