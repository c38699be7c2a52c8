"""The forms of prices: closed forms, monotone where physics says so, fits that find what made the points."""

import math

import msgspec
import numpy as np
import pytest

from benchmarks.accuracy.calibration import files_of, held_out_table, of_new_linears, points_of
from costmodels import Machine, price, price_interval, step_interval
from costmodels.fit import matrix
from costmodels.fit.device import DeviceFit, fit_device
from costmodels.fit.kernels import fit_attention, fit_memory, folds, predicted_s
from costmodels.fit.links import communication_s, fit_links, fit_overlaps, overlap_s
from costmodels.fit.matrix import fit_clock, fit_dtypes, fit_matrix
from costmodels.fit.points import Point
from costmodels.fit.predict import predict_points, scoreboard
from costmodels.interval import class_seconds, dispatch_seconds
from costmodels.machine.catalogue import load_device
from costmodels.machine.links import Link
from costmodels.machine.sections import Collective, Interval, Overlap, Protocol
from costmodels.price.communication import wire_s
from costmodels.price.compute import Attention, Compute, attention_s, matrix_s, memory_s
from costmodels.price.group import first_group
from costmodels.price.program import ProgramPrices
from costmodels.price.size_table import SizeTable, fit_size_table, knot_shapes, knot_weights
from costmodels.price.tiled import ProductTerms, Tiled, alignment_bytes, one_tiled_s, tiled_s
from costmodels.price.traffic import collective_traffic
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program
from simulator import simulate
from twofold.calibration.probe_plans import dispatch_plans

CHIP = Compute(
    matrix_flops_per_s={"bfloat16": 1e15}, vector_flops_per_s={"bfloat16": 1e14}, memory_Bps=4e12, num_cores=100,
    matrix_efficiency=0.8, memory_efficiency=0.9, sharpness=3.0, kernel_s=3e-6,
    tiled=Tiled(start_s=1e-6, tile_s=5e-7, step_s=5e-8, core_Bps=2e11, core_store_Bps=5e10, split_s=3e-6,
                quantisation=0.3, arithmetic_cost={"8": 2.5, "2": 4.0}, memory_cost={"2": 1.5}),
    attention=Attention(forward_efficiency=0.6, backward_efficiency=0.5, half_keys=150.0, backward_half_keys=250.0,
                        start_s=4e-6, backward_start_s=9e-6),
)  # fmt: skip
LINKS = (Link(name="a", ranks=8, latency_s=0.0, bandwidth_Bps=4e11),)


def product_s(compute: Compute, m: int, n: int, k: int, batch: int = 1) -> float:
    return matrix_s(compute, (m, n, k), 1e15, 2 * batch * (m * k + n * k + m * n), batch)


PURE = msgspec.structs.replace(CHIP, tiled=Tiled(), memory_Bps=1e30, kernel_s=0.0)


def with_tiles(compute: Compute, **fields: object) -> Compute:
    return msgspec.structs.replace(compute, tiled=msgspec.structs.replace(compute.tiled, **fields))


def test_one_wave_of_whole_tiles_in_closed_form():
    # 10 x 10 tiles of 128 x 256 on 100 cores: one full wave; 64 steps each, of which loads take 1 us
    made_s = 2 * 1280 * 2560 * 4096 / 0.8e15
    assert product_s(with_tiles(PURE, tiles=((128, 256),)), 1280, 2560, 4096) == pytest.approx(made_s, rel=1e-5)
    loads = with_tiles(PURE, tiles=((128, 256),), core_Bps=64 * 384 * 2 / 1e-6, core_store_Bps=128 * 256 * 2 / 3e-6)
    more = with_tiles(loads, step_s=1e-7, tile_s=2e-6, start_s=4e-6)
    assert product_s(more, 1280, 2560, 4096) == pytest.approx(64 * 1.1e-6 + 3e-6 + 2e-6 + 4e-6, rel=1e-5)


def test_one_more_tile_begins_another_wave():
    pure = with_tiles(PURE, tiles=((128, 256),), split_s=1.0)
    full, more = product_s(pure, 1280, 2560, 4096), product_s(pure, 1281, 2560, 4096)
    assert more == pytest.approx(2 * full, rel=1e-5)
    softer = with_tiles(pure, quantisation=0.25)
    assert product_s(softer, 1281, 2560, 4096) == pytest.approx(full * (0.25 * 2 + 0.75 * 1.1), rel=1e-5)


def test_one_product_is_timed_as_many_at_once():
    rng, model = np.random.default_rng(7), CHIP.tiled
    shapes = [tuple(int(2 ** rng.uniform(0, 14)) for _ in range(3)) for _ in range(200)]
    terms = ProductTerms(8e12, 100, 3, 2, 1.1, 2.0, 1.5, 1.0)
    at_once = tiled_s(np.array(shapes, dtype=float), terms, model)
    one = [one_tiled_s(shape, terms, model) for shape in shapes]
    assert one == pytest.approx(list(at_once), rel=1e-12)


def test_few_tiles_cut_their_sums():
    # one tile, deep: without cutting the sums only one of the 100 cores works
    uncut_s = 2 * 64 * 32 * 65_536 * 100 / 0.8e15
    assert product_s(PURE, 64, 32, 65_536) < uncut_s / 8
    dear = with_tiles(PURE, split_s=1.0, tiles=((64, 32),))
    assert product_s(dear, 64, 32, 65_536) == pytest.approx(uncut_s, rel=1e-4)


@pytest.mark.parametrize(
    ("form", "shape", "aligned"),
    [("nt", (3, 8, 8), 16), ("nt", (8, 8, 12), 8), ("nn", (3, 10, 8), 4), ("tn", (7, 8, 8), 2), ("tn", (8, 8, 7), 16)],
)
def test_rows_that_are_not_aligned_take_slower_kernels(form, shape, aligned):
    assert alignment_bytes(shape, form, 2) == aligned
    m, n, k = (size * 512 for size in shape)
    odd = tuple(size * 512 + size % 8 for size in shape)
    got = [matrix_s(CHIP, each, 1e15, 1.0, form=form) for each in ((m, n, k), odd)]
    if aligned in (8, 2):
        assert got[1] > 2 * got[0]
    else:  # CHIP has no figure for 4 bytes
        assert got[1] < 1.2 * got[0]


@pytest.mark.parametrize("position", [0, 1, 2])
def test_tiled_products_of_equal_alignment_grow_with_every_size(position):
    last, chip = 0.0, with_tiles(CHIP, arithmetic_cost={}, memory_cost={})
    for power in np.arange(3, 15, 0.25):
        m, n, k = (round(2**power) if place == position else 1500 for place in range(3))
        now = product_s(chip, m, n, k)
        assert now >= last * (1 - 1e-12)
        last = now


def test_the_clock_falls_with_the_load():
    # a large product at 0.8 of the peak of a chip whose clock did not fall; a small one hardly loads the chip
    lower = msgspec.structs.replace(PURE, clock_drop=0.2)
    large, small = ((product_s(chip, 12_800, 25_600, 8192), product_s(chip, 16, 8, 64)) for chip in (PURE, lower))
    assert small[0] / large[0] == pytest.approx(1 + 0.2 * 0.8, rel=1e-3)
    assert small[1] / large[1] == pytest.approx(1, abs=1e-2)
    reached = 2 * 12_800 * 25_600 * 8192 / small[0] / 1e15
    assert large[0] / small[0] == pytest.approx(1 - 0.2 * reached, rel=1e-3)  # as `fit_clock` reads it off points


def test_recorded_clocks_explain_times():
    rng, made = np.random.default_rng(8), []
    for _ in range(60):
        point = Point(kind="matrix", call="mm", shape=tuple(int(2 ** rng.uniform(7, 13)) // 8 * 8 for _ in range(3)),
                      dtype="bfloat16", seconds=1.0)  # fmt: skip
        seconds = predicted_s(point, CHIP)
        load = 2 * math.prod(point.shape) / (1e15 * seconds)
        made.append(msgspec.structs.replace(point, seconds=seconds, clock_MHz=1700 * (1 - 0.1 * load)))
    got = fit_clock(made, CHIP)
    assert (got.clock_MHz, got.clock_drop) == (pytest.approx(1700, rel=2e-3), pytest.approx(0.1, rel=0.05))
    assert fit_clock([msgspec.structs.replace(point, clock_MHz=0.0) for point in made], CHIP) == CHIP


def test_a_dtype_that_reaches_less_of_its_peak_has_a_factor():
    rates = {"bfloat16": 1e15, "tf32": 5e14}
    chip = msgspec.structs.replace(CHIP, matrix_flops_per_s=rates, dtype_efficiency={"tf32": 0.6})
    shapes = [(2048, 4096, size) for size in (1024, 2048, 4096, 8192)]
    made = [Point(kind="matrix", call="mm", shape=shape, dtype="tf32", seconds=1.0) for shape in shapes]
    made = [msgspec.structs.replace(point, seconds=predicted_s(point, chip)) for point in made]
    got = fit_dtypes(made, msgspec.structs.replace(chip, dtype_efficiency={}))
    assert got.dtype_efficiency == {"tf32": pytest.approx(0.6, rel=1e-3)}


def test_attention_in_closed_form():
    pure = msgspec.structs.replace(
        CHIP, attention=Attention(forward_efficiency=0.5, backward_efficiency=0.4, tile=64, quantisation=0.0)
    )
    whole = attention_s(pure, (32, 4096, 128), 4096, 128, 1e15, 0.0, causal=False)
    assert whole == pytest.approx(3e-6 + 4 * 32 * 4096**2 * 128 / 0.5e15)
    causal = attention_s(pure, (32, 4096, 128), 4096, 128, 1e15, 0.0, causal=True)
    assert causal - 3e-6 == pytest.approx((whole - 3e-6) * 0.5 * (1 + 64 / 4096))
    back = attention_s(pure, (32, 4096, 128), 4096, 128, 1e15, 0.0, causal=False, backward=True)
    assert back - 3e-6 == pytest.approx(2.5 * 0.5 / 0.4 * (whole - 3e-6))


def test_a_causal_tile_of_a_core_each_takes_as_long_as_a_whole_one():
    model = Attention(forward_efficiency=0.5, backward_efficiency=0.4, tile=128, causal_cost=1.0, tail=0.0)
    one = msgspec.structs.replace(CHIP, num_cores=16, attention=model)
    whole, causal = (attention_s(one, (1, 2048, 128), 2048, 128, 1e15, 0.0, causal=each) for each in (False, True))
    assert whole == causal  # the last of the 16 tiles sees all keys
    late = msgspec.structs.replace(one, attention=msgspec.structs.replace(model, tail=0.5))
    two_waves = attention_s(late, (2, 2048, 128), 2048, 128, 1e15, 0.0, causal=True) - 3e-6
    assert two_waves / (whole - 3e-6) == pytest.approx(2 * 0.5 * (1 + 128 / 2048) + 0.5)


def test_waves_of_attention_tiles():
    model = Attention(forward_efficiency=0.5, backward_efficiency=0.4, tile=128, quantisation=1.0)
    chip = msgspec.structs.replace(CHIP, attention=model)
    full, more = (attention_s(chip, (h, 1280, 128), 1280, 128, 1e15, 0.0, causal=False) - 3e-6 for h in (10, 11))
    assert more == pytest.approx(2 * full)


def test_memory_bound_kernels_grow_with_their_bytes_through_the_cache():
    cached = msgspec.structs.replace(CHIP, cache_bytes=5 * 10**7, cache_Bps=1e13)
    times = [memory_s(cached, 2.0**power) for power in np.arange(10, 32, 0.1)]
    assert times == sorted(times)
    assert memory_s(cached, 10**6) < memory_s(CHIP, 10**6)
    assert memory_s(cached, 10**9) == memory_s(CHIP, 10**9) == pytest.approx(3e-6 + 10**9 / 3.6e12)


def test_the_first_bytes_come_late():
    late = msgspec.structs.replace(CHIP, memory_chunk_s=4e-7)
    for moved_s in (1e-6, 1e-3):
        touched = moved_s * 3.6e12
        assert memory_s(late, touched) - memory_s(CHIP, touched) == pytest.approx(math.sqrt(4e-7 * moved_s))


def test_fits_find_a_root_of_bytes_where_there_is_one():
    late, made = msgspec.structs.replace(CHIP, memory_chunk_s=4e-7), []
    for call in ("add", "mul"):
        for power in np.arange(14, 31, 0.5):
            size = int(2**power)
            point = Point(kind="memory", call=call, size_bytes=size, dtype="bfloat16", seconds=memory_s(late, size))
            made.append(point)
    base = msgspec.structs.replace(CHIP, memory_efficiency=1.0, kernel_s=0.0)
    got = fit_memory(made, base)
    assert "root" in got.form.partition("(")[0] and got.compute.memory_chunk_s == pytest.approx(4e-7, rel=0.15)
    plain = [msgspec.structs.replace(point, seconds=memory_s(CHIP, point.size_bytes)) for point in made]
    assert fit_memory(plain, base).compute.memory_chunk_s == 0


def test_the_fastest_protocol_is_taken():
    low = Protocol(name="LL", start_s=5e-6, hop_s=1e-6, share=0.25)
    high = Protocol(name="Simple", start_s=9e-6, hop_s=3e-6)
    both = Collective(protocols=(low, high))
    group = first_group(LINKS, 4)
    for size in (1024, 10**6, 10**9):
        traffic = collective_traffic("all_gather", 4, size)
        alone = [wire_s(Collective(protocols=(each,)), LINKS, group, "all_gather", traffic) for each in (low, high)]
        assert wire_s(both, LINKS, group, "all_gather", traffic) == min(alone)
    assert wire_s(
        Collective(protocols=(low,)), LINKS, group, "all_gather", collective_traffic("all_gather", 4, 1024)
    ) == pytest.approx(5e-6 + 3 * 1e-6 + 768 / 1e11)


def test_trees_win_on_many_nodes_for_small_messages():
    links = (*LINKS, Link(name="b", ranks=1024, latency_s=0.0, bandwidth_Bps=5e10))
    ring = Protocol(name="ring", hop_s=1e-6, cross_s=4e-6)
    tree = Protocol(name="tree", algorithm="tree", hop_s=1e-6, cross_s=8e-6, share=0.9)
    group = first_group(links, 1024)
    traffic = collective_traffic("all_reduce", 1024, 65_536)
    by = {
        each.name: wire_s(Collective(protocols=(each,)), links, group, "all_reduce", traffic) for each in (ring, tree)
    }
    assert by["tree"] < by["ring"] / 5
    large = collective_traffic("all_reduce", 1024, 2**33)
    slow, fast = (wire_s(Collective(protocols=(each,)), links, group, "all_reduce", large) for each in (tree, ring))
    assert fast < slow


@pytest.fixture
def points() -> list[Point]:
    rng, made = np.random.default_rng(3), []

    def add(point: Point, seconds: float) -> None:
        noisy = seconds * float(np.exp(rng.normal(0, 0.01)))
        made.append(msgspec.structs.replace(point, seconds=noisy, held_out=bool(rng.random() < 0.25)))

    for _ in range(120):
        m, n, k = (8 * int(2 ** rng.uniform(2, 10.5)) for _ in range(3))
        point = Point(kind="matrix", call="mm", shape=(m, n, k), dtype="bfloat16", seconds=1.0)
        add(point, predicted_s(point, CHIP))
    for call, cost in (("add", 1.0), ("layer_norm", 1.4)):
        for power in range(16, 30):
            seconds = 3e-6 + cost * 2**power / 3.6e12
            add(Point(kind="memory", call=call, size_bytes=2**power, dtype="bfloat16", seconds=1.0), seconds)
    for call in ("sdpa_forward", "sdpa_backward"):
        for length in (256, 512, 1024, 2048, 4096, 8192):
            for heads in (8, 32):
                point = Point(kind="attention", call=call, shape=(2, heads, heads, length, length, 128),
                              dtype="bfloat16", options={"causal": 1}, seconds=1.0)  # fmt: skip
                add(point, predicted_s(point, CHIP))
    return made


def test_fits_find_the_form_that_made_the_points(points):
    base = msgspec.structs.replace(CHIP, matrix_efficiency=1.0, memory_efficiency=1.0, kernel_s=0.0, attention=None)
    some = {
        kind: [p for p in points if p.kind == kind and not p.held_out] for kind in ("matrix", "memory", "attention")
    }
    memory = fit_memory(some["memory"], base).compute
    assert memory.kernel_s == pytest.approx(3e-6, rel=0.05)
    costs = memory.kernel_cost
    assert costs["layer_norm.forward"] / costs.get("add.forward", 1.0) == pytest.approx(1.4, rel=0.03)
    matrix = fit_matrix(some["matrix"], memory, kernel_s=memory.kernel_s)
    assert matrix.form.startswith("tiles")
    attention = fit_attention(some["attention"], matrix.compute)
    for kind, compute, most in (("matrix", matrix.compute, 0.03), ("attention", attention.compute, 0.03)):
        errors = [abs(predicted_s(p, compute) / p.seconds - 1) for p in points if p.kind == kind and p.held_out]
        assert np.median(errors) < most
    assert [predicted_s(point, matrix.compute) for point in some["matrix"]] == pytest.approx(list(matrix.predicted_s))


def test_link_fits_find_bandwidth_and_gap():
    rng, truth = np.random.default_rng(4), Collective(start_s=4e-6, link_fraction=0.85, gap=0.6)
    made = []
    for ranks in (2, 4, 8):
        for power in range(20, 31):
            point = Point(kind="collective", call="all_gather", size_bytes=2**power, ranks=ranks, seconds=1.0)
            seconds = communication_s(point, truth, LINKS, "hccl") * float(np.exp(rng.normal(0, 0.01)))
            made.append(msgspec.structs.replace(point, seconds=seconds))
    got = fit_links(made, LINKS, "hccl").collective
    assert got.link_fraction == pytest.approx(0.85, rel=0.03) and got.gap == pytest.approx(0.6, abs=0.08)


def test_back_to_back_calls_separate_host_and_links():
    # a ring of 1 to 10^6 KiB: measured alone, and issued back to back by a host that takes 30 us for each
    rng, truth = np.random.default_rng(5), Collective(start_s=7e-6, link_fraction=0.85, chunk_s=2e-6)
    made = []
    for ranks, recorded in ((2, 0), (2, 1), (4, 0), (4, 1)):
        for power in range(12, 30):
            point = Point(kind="collective", call="all_gather", size_bytes=2**power, ranks=ranks, seconds=1.0,
                          options={"recorded": 1} if recorded else {})  # fmt: skip
            alone_s = communication_s(point, truth, LINKS, "hccl")
            seconds = alone_s if recorded else max(3e-5, alone_s - 4e-6)
            made.append(msgspec.structs.replace(point, seconds=seconds * float(np.exp(rng.normal(0, 0.01)))))
    got = fit_links(made, LINKS, "hccl")
    assert got.issued.host_s == pytest.approx(3e-5, rel=0.03) and got.issued.hidden_s == pytest.approx(4e-6, rel=0.3)
    small = Point(kind="collective", call="all_gather", size_bytes=4096, ranks=2, seconds=1.0)
    assert communication_s(small, got.collective, LINKS, "hccl") == pytest.approx(7e-6, rel=0.05)


def test_a_chain_of_transfers_hides_what_a_message_alone_takes():
    # 14 us to start: back and forth shows it, one way hides 6 of them; the host of unrecorded calls is left out
    rng, truth = np.random.default_rng(12), Collective(start_s=1.4e-5, link_fraction=0.85)
    made = []
    for pattern in ("one_way", "ping_pong"):
        for power in range(10, 31):
            point = Point(kind="transfer", call="transfer", size_bytes=2**power, ranks=2, dtype="bfloat16",
                          options={"pattern": pattern, "recorded": 1}, seconds=1.0)  # fmt: skip
            alone_s = communication_s(point, truth, LINKS, "hccl")
            seconds = alone_s - 6e-6 if pattern == "one_way" else alone_s
            made.append(msgspec.structs.replace(point, seconds=seconds * float(np.exp(rng.normal(0, 0.01)))))
    got = fit_links(made, LINKS, "hccl")
    assert got.issued.hidden_s == pytest.approx(6e-6, rel=0.1)
    small = msgspec.structs.replace(made[0], options={"pattern": "ping_pong", "recorded": 1})
    assert communication_s(small, got.collective, LINKS, "hccl") == pytest.approx(1.4e-5, rel=0.05)


def test_small_messages_of_a_host_are_left_out_where_launches_were_recorded(points):
    base = load_device("h200")
    sizes = [2**power for power in range(10, 30)]

    def transfers(recorded: bool) -> list[Point]:
        option = {"recorded": 1} if recorded else {}
        return [
            Point(kind="transfer", call="transfer", size_bytes=size, ranks=2, dtype="bfloat16",
                  options={"pattern": "one_way", **option}, seconds=1e-5 + size / 3.5e11 + (0 if recorded else 5e-5))
            for size in sizes
        ]  # fmt: skip

    fit = fit_device([*points, *transfers(True), *transfers(False)], {"date": "2026-11-21"}, base)
    own = [entry.point for entry in fit.predicted if entry.section == "transfer"]
    assert {point.size_bytes for point in own if not point.options.get("recorded")} == {s for s in sizes if s > 4e6}
    assert len([point for point in own if point.options.get("recorded")]) == len(sizes)


def test_chunks_cost_the_root_of_what_is_moved():
    group, traffic = first_group(LINKS, 2), collective_traffic("all_gather", 2, 2 * 10**9)
    plain_s, chunked_s = (wire_s(Collective(chunk_s=each), LINKS, group, "all_gather", traffic) for each in (0.0, 4e-6))
    assert chunked_s - plain_s == pytest.approx(2 * math.sqrt(4e-6 * plain_s))


def test_too_few_points_are_refused():
    with pytest.raises(TwofoldError, match="2 matrix products"):
        fit_matrix([Point(kind="matrix", call="mm", shape=(8, 8, 8), dtype="bfloat16", seconds=1.0)] * 2, CHIP)
    with pytest.raises(TwofoldError, match="measured 1 times"):
        fit_links([Point(kind="collective", call="all_gather", ranks=2, seconds=1.0)], LINKS, "nccl")


def test_measurings_of_one_point_are_left_out_together(points):
    twice = [*points, *points[:50]]
    for inside, outside in folds(twice):
        assert not {twice[at].key for at in inside} & {twice[at].key for at in outside}
        assert sorted(inside + outside) == list(range(len(twice)))


def test_a_shape_that_is_held_out_is_not_fitted(points):
    hidden = next(point for point in points if point.kind == "matrix" and point.held_out)
    copies = [msgspec.structs.replace(hidden, held_out=False, form=form, seconds=1.0) for form in ("", "nt")]
    base = load_device("h200")
    with_copies, without = (fit_device(some, {"date": "2026-11-21"}, base) for some in ([*points, *copies], points))
    assert with_copies.device.compute == without.device.compute


def test_held_out_points_decide_nothing(points):
    base = load_device("h200")
    spoiled = [msgspec.structs.replace(p, seconds=p.seconds * 7) if p.held_out else p for p in points]
    clean, dirty = (fit_device(some, {"date": "2026-11-21"}, base) for some in (points, spoiled))
    assert clean.device.compute == dirty.device.compute
    assert dirty.held_out[0].median_error > 5 * clean.held_out[0].median_error
    assert clean.device.provenance["compute.matrix_efficiency"].status == "measured"


def test_prices_carry_the_interval_of_their_class():
    machine = Machine.load("h200-x8")
    known = msgspec.structs.replace(
        machine, price_intervals={"matrix": Interval(low=0.9, high=1.25)}, spreads={"collective": 0.1}
    )
    assert price_interval(known, "matrix", 2e-3) == pytest.approx((1.8e-3, 2.5e-3))
    assert price_interval(known, "collective", 1.0) == pytest.approx((math.exp(-0.16449), math.exp(0.16449)))
    with pytest.raises(TwofoldError, match="matrices"):
        price_interval(known, "matrices", 1.0)


@pytest.mark.parametrize(("host_share", "later"), [(0.4, 0), (0.8, 0.5), (1.0, 0), (1.3, 0.2), (5.0, 0)])
def test_the_edges_of_an_interval_are_those_of_the_longer_of_device_and_host(host_share, later):
    machine = Machine.load("h200-x2")
    spreads = {"dispatch": 0.3, "matrix": 0.1}
    still = msgspec.structs.replace(machine, interval=Interval(low=1.0, high=1.0), spreads=spreads)
    rng, count = np.random.default_rng(5), 400_000
    low, high = step_interval(still, 1.0, {"matrix": 1.0}, host_share=host_share, host_later=later)
    longer = max(1.0, host_share)
    device = rng.normal(math.log(1 / longer), 0.1, count)
    host = rng.normal(math.log(host_share / longer) + later, 0.3, count)
    edges = np.quantile(np.maximum(device, host), [0.05, 0.95])
    assert [math.log(low), math.log(high)] == pytest.approx(edges.tolist(), abs=4e-3)


def test_a_prediction_is_inside_its_interval_also_where_nearly_all_hosts_are_slower():
    machine = msgspec.structs.replace(Machine.load("h200-x2"), spreads={"dispatch": 0.3})
    low, high = step_interval(machine, 1.0, {}, host_share=1.0, host_later=2.0)
    assert low == 1.0 and high == pytest.approx(math.exp(2.0 + 1.6449 * 0.3), rel=1e-3)


def test_the_unexplained_part_of_an_interval_is_one_sided_where_it_is_stated_so():
    machine = msgspec.structs.replace(Machine.load("h200-x2"), spreads={})
    assert step_interval(machine, 1.0, {}, Interval(low=0.99, high=1.08)) == pytest.approx((0.99, 1.08))


def test_step_intervals_add_classes_as_independent_errors():
    machine = Machine.load("h200-x8")
    still = msgspec.structs.replace(machine, spreads={"matrix": 0.1, "collective": 0.2})
    low, high = step_interval(still, 2.0, {"matrix": 1.2, "collective": 0.6})
    squares = (1.6449 * 0.6 * 0.1) ** 2 + (1.6449 * 0.3 * 0.2) ** 2
    assert math.log(high / 2) == pytest.approx(math.sqrt(math.log(machine.interval.high) ** 2 + squares))
    assert math.log(2 / low) == pytest.approx(math.sqrt(math.log(machine.interval.low) ** 2 + squares))
    with pytest.raises(TwofoldError, match="matrices"):
        step_interval(still, 2.0, {"matrices": 1.0})


def test_products_and_attention_err_together_in_part():
    # drawn: two classes of half a step each share half of the variance of their errors, by one common clock
    rng, count = np.random.default_rng(11), 400_000
    clock, first, second = (rng.normal(0, 0.1 / math.sqrt(2), count) for _ in range(3))
    deviation = float(np.std(0.5 * (clock + first) + 0.5 * (clock + second)))
    machine = Machine.load("h200-x8")
    still = msgspec.structs.replace(
        machine, spreads={"matrix": 0.1, "attention": 0.1, "memory": 0.1}, interval=Interval(low=1.0, high=1.0)
    )
    _, high = step_interval(still, 1.0, {"matrix": 0.5, "attention": 0.5})
    assert math.log(high) == pytest.approx(1.6449 * deviation, rel=0.01)
    _, apart = step_interval(still, 1.0, {"matrix": 0.5, "memory": 0.5})
    assert math.log(apart) == pytest.approx(1.6449 * 0.1 / math.sqrt(2))


def test_seconds_by_class_are_those_of_the_busiest_group():
    machine = Machine.load("h200-x8")

    def group(ranks: tuple[int, ...], *calls: str) -> GroupProgram:
        shapes = ((512, 512), (512, 512), (512, 512))
        made = tuple(
            Instruction(name=f"i{at}", kind=Kind.COMPUTE, call=call, part="F", shapes=shapes, dtype="bfloat16")
            for at, call in enumerate(calls)
        )
        mesh = Layout((len(ranks),), ("dp",), rank_list=ranks)
        return GroupProgram(
            mesh=mesh, values={}, blocks=(Block(label="0F0", micro_batch=0, body=Body(name="F", instructions=made)),)
        )

    idle, busy = (
        group((0,), "relu.forward"),
        group((1,), "linear.forward", "linear.forward", "relu.forward", "reshape.forward"),
    )
    seconds = class_seconds(ProgramPrices(Program(groups=(idle, busy), num_micro_batches=1), machine))
    one = price(busy.blocks[0].body.instructions[0], busy, machine, 2).work_ps / 1e12
    assert set(seconds) == {"matrix", "memory"} and seconds["matrix"] == pytest.approx(2 * one)


@pytest.mark.parametrize("name", ["h100-sxm", "h200"])
def test_a_shipped_device_predicts_held_out_points(name):
    held = [point for point in points_of(files_of(name))[0] if point.held_out and point.seconds > 1e-6]
    device = load_device(name)
    fit = DeviceFit(device=device, forms={}, predicted=tuple(predict_points(held, device)))
    rows = {row["section"]: row for row in held_out_table(fit)}
    assert all(rows[section]["median_error"] < 0.06 for section in ("matrix", "attention", "memory"))
    inside = [(row["points"], row["inside"]) for row in rows.values() if row["inside"] is not None]
    assert 0.85 < sum(points * share for points, share in inside) / sum(points for points, _ in inside) < 0.95
    linears = scoreboard([entry for entry in fit.predicted if of_new_linears(entry.point)])
    assert len(linears) == 1 and linears[0].num_points == 100 and linears[0].median_error < 0.04


def test_a_shipped_device_equals_the_fit_of_its_points():
    device = load_device("h100-sxm")
    held = {point.shape for point in points_of(files_of("h100-sxm"))[0] if point.kind == "attention" and point.held_out}
    points = [
        point for point in points_of(files_of("h100-sxm"))[0]
        if point.kind == "attention" and not point.held_out and point.shape not in held
    ]  # fmt: skip
    got = fit_attention(points, device.compute).compute.attention
    for field in ("forward_efficiency", "backward_efficiency", "half_keys", "tail", "clock_MHz"):
        assert getattr(got, field) == pytest.approx(getattr(device.compute.attention, field), rel=1e-6)


def test_rates_of_a_pair_depend_on_how_long_kernels_hold_the_cores():
    pair = Overlap(compute="matrix", collective="all_reduce", compute_rate=0.7, comm_rate=0.5, hold=0.8)
    assert pair.rates(2e-4, 2e-4) == pytest.approx((0.7, 0.5))
    # no kernel to wait for: comm at b, compute at a, of which the pair's rates are the mean over moving and waiting
    alone, undisturbed = pair.rates(0.0, 1e-4)[1], pair.rates(1.0, 1e-6)
    moving = (1 / alone) / (1 / alone + 0.8)
    assert alone * moving == pytest.approx(0.5)
    assert undisturbed == pytest.approx((1.0, 0.0), abs=1e-3)
    with pytest.raises(TwofoldError, match="hold"):
        Overlap(compute="matrix", collective="all_reduce", compute_rate=0.7, comm_rate=0.5, hold=2.0)


def test_overlap_fits_find_how_long_messages_wait():
    rng, made, lengths = np.random.default_rng(6), [], []
    truth = Overlap(compute="matrix", collective="all_reduce", compute_rate=0.75, comm_rate=0.5, hold=0.7)
    for kernel_s in (2e-5, 1e-4, 1e-3):
        for message_s in (5e-5, 3e-4, 1e-3):
            for times in (0.7, 1.0, 1.4):
                figures = {"compute_s": 1e-3, "comm_s": 1e-3 * times}
                point = Point(kind="overlap", call="matrix", beside="all_reduce", figures=figures, seconds=1.0)
                seconds = overlap_s(point, [truth], kernel_s, message_s) * float(np.exp(rng.normal(0, 0.005)))
                made.append(msgspec.structs.replace(point, seconds=seconds))
                lengths.append((kernel_s, message_s))
    (got,), _ = fit_overlaps(made, lengths)
    for kernel_s in (1e-5, 5e-4):
        assert got.rates(kernel_s, 2e-4) == pytest.approx(truth.rates(kernel_s, 2e-4), abs=0.05)


def test_a_latency_of_loads_is_hidden_by_work_that_takes_longer():
    # one tile on each of 100 cores, 64 steps: 0.5 us of arithmetic each, or the latency where that is longer
    pure = with_tiles(PURE, tiles=((128, 256),))
    made_s = product_s(pure, 1280, 2560, 4096)
    assert product_s(with_tiles(pure, hidden_s=0.9 * made_s / 64), 1280, 2560, 4096) == pytest.approx(made_s)
    assert product_s(with_tiles(pure, hidden_s=3 * made_s / 64), 1280, 2560, 4096) == pytest.approx(3 * made_s)
    slow = msgspec.structs.replace(with_tiles(pure, hidden_s=3 * made_s / 64), sustained_clock=0.5)
    assert product_s(slow, 1280, 2560, 4096) == pytest.approx(6 * made_s)


def test_factors_by_size_are_for_single_aligned_products():
    table = SizeTable(first=3.0, step=2.0, number=2, factors=(1.25,) * 8)
    with_table = with_tiles(CHIP, table=table)
    for shape, batch, factor in (((512, 512, 512), 1, 1.25), ((512, 512, 512), 4, 1.0), ((512, 512, 511), 1, 1.0)):
        assert product_s(with_table, *shape, batch) / product_s(CHIP, *shape, batch) == pytest.approx(factor)


def test_a_size_table_is_linear_between_its_knots():
    rng = np.random.default_rng(9)
    factors = tuple(rng.uniform(0.8, 1.2, 8**3))
    table = SizeTable(first=3.0, step=2.0, number=8, factors=factors)
    for _ in range(50):
        shape = [int(2 ** rng.uniform(1, 19)) for _ in range(3)]
        (weights,) = knot_weights(np.array([shape], dtype=float))
        assert weights.sum() == pytest.approx(1) and (weights >= 0).all()
        assert table.factor(*shape) == pytest.approx(float(weights @ np.array(factors)))
    with pytest.raises(TwofoldError, match="number\\^3 factors"):
        SizeTable(first=3.0, step=2.0, number=3, factors=(1.0,) * 8)
    with pytest.raises(TwofoldError, match="above 0"):
        SizeTable(first=3.0, step=2.0, number=2, factors=(0.0,) * 8)


def test_a_size_table_follows_its_neighbours_and_forgets_far_away():
    shapes = knot_shapes()
    plain = np.prod(shapes, axis=1) ** 0.5
    near = np.array([[500.0 + at, 600.0, 700.0] for at in range(0, 200, 10)])
    table = fit_size_table(near, np.full(len(near), 0.1), 1.0, plain)
    assert table.factor(512, 600, 700) == pytest.approx(math.exp(0.1), abs=0.015)
    assert table.factor(131_072, 8, 131_072) == pytest.approx(1, abs=0.005)
    doubtful = fit_size_table(near[:1], np.array([0.1]), 1.0, plain)
    assert 1.02 < doubtful.factor(512, 600, 700) < 1.09
    stray = fit_size_table(near[:1], np.array([50.0]), 1.0, plain)
    assert stray.factor(512, 600, 700) < 1.4


def test_no_larger_knot_takes_less_time():
    rng = np.random.default_rng(10)
    shapes = knot_shapes()
    plain = 2e-6 + np.prod(shapes, axis=1) / 1e15
    some = rng.choice(shapes, 200) * rng.uniform(0.7, 1.4, (200, 3))
    table = fit_size_table(some, rng.normal(0, 0.2, 200), 1.0, plain)
    seconds = (plain * np.array(table.factors)).reshape(8, 8, 8)
    assert all(
        (np.diff(seconds, axis=axis) >= -2e-4 * seconds.max(axis=axis, keepdims=True)).all() for axis in range(3)
    )
    assert any((np.diff(np.array(table.factors).reshape(8, 8, 8), axis=axis) < -0.01).any() for axis in range(3))


def test_a_step_that_its_host_bounds_is_as_uncertain_as_the_host():
    program = lower(dispatch_plans(1)["tiny"])
    machine = Machine.load("h200-x1")
    issued_s = sum(
        price(instruction, program.groups[0], machine, 1).dispatch_ps for _, instruction in program.groups[0].walk()
    ) / 1e12  # fmt: skip
    prices = ProgramPrices(program, machine)
    assert dispatch_seconds(prices, issued_s) == pytest.approx(issued_s)
    reach = math.exp(1.6449 * machine.spreads["dispatch"])
    assert dispatch_seconds(prices, 1.001 * reach * issued_s) == 0.0  # a slow host does not reach this step
    step_s = math.sqrt(reach) * issued_s
    assert dispatch_seconds(prices, step_s) == pytest.approx(step_s / 2)
    bound = simulate(program, machine)
    assert bound.high_s / bound.step_interval_s > math.exp(1.6 * machine.spreads["dispatch"])
    certain = msgspec.structs.replace(machine, spreads={**machine.spreads, "dispatch": 0.0})
    assert dispatch_seconds(ProgramPrices(program, certain), issued_s) == 0.0


@pytest.mark.parametrize("batch", [1, 3])
def test_a_fit_times_all_points_as_products_are_priced_one_by_one(batch):
    compute = Compute(
        matrix_flops_per_s={"bfloat16": 2e14}, vector_flops_per_s={"float32": 1e13}, memory_Bps=1e12, kernel_s=2e-6,
        half_rows=40.0, half_depth=100.0, matrix_efficiency=0.8, memory_efficiency=0.9,
    )  # fmt: skip
    shapes = [(m, n, k) for m in (16, 300) for n in (64, 2000) for k in (32, 5000)]
    points = [
        Point(kind="matrix", call="matmul", shape=shape, dtype="bfloat16", batch=batch, seconds=1.0) for shape in shapes
    ]
    found = matrix._Products(points, compute, tiled=False, kernel_s=None).seconds(compute)
    touched = [2 * batch * (m * k + n * k + m * n) for m, n, k in shapes]
    expected = [matrix_s(compute, shape, 2e14, of, batch) for shape, of in zip(shapes, touched, strict=True)]
    assert found == pytest.approx(expected, rel=1e-9)
