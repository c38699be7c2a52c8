import math
import re

import msgspec
import pytest

from costmodels import Machine, axes_group, price_collective, price_transfer
from costmodels.fit.transfer_calibration import anchored, at_sustained_clock, carried
from costmodels.machine.catalogue import CitedProduct, device_names, known_names, load_device
from costmodels.price.compute import Compute, matrix_s
from costmodels.widths import CARRIED
from plans.errors import TwofoldError


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("h200-x1", [1]),
        ("h200-x4", [4]),
        ("h100-sxm-x8", [8]),
        ("h100-sxm-x1024", [8, 1024]),
        ("gh200-x12", [4, 12]),
        ("ascend-910c-x384", [16, 384]),
        ("ascend-910c-x1536", [16, 768, 1536]),
    ],
)
def test_tiers_of_a_number_of_devices(name, ranks):
    machine = Machine.load(name)
    assert [link.ranks for link in machine.links] == ranks
    assert machine.num_devices == ranks[-1] == int(name.rpartition("x")[2])
    assert machine.devices_per_node == ranks[0]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("h200-x12", "h200-x8 or h200-x16"), ("h300-x8", "h200-x8"), ("a100-x8", "a100-80gb-x8"), ("h200-x0", "h200-x8")],
)
def test_unknown_names_suggest_known_ones(name, hint):
    with pytest.raises(TwofoldError, match=hint):
        Machine.load(name)


@pytest.mark.parametrize("name", device_names())
def test_devices_state_their_variant_and_the_source_of_every_efficiency(name):
    device = load_device(name)
    assert device.variant and device.memory_bytes > 10**10
    for entry in ("memory_bytes", "node", "compute.matrix_flops_per_s", "compute.memory_Bps", "collectives"):
        assert any(known.startswith(entry) for known in device.provenance), entry
    measured = [entry for entry, says in device.provenance.items() if says.status == "measured"]
    assert bool(measured) == (name in ("h100-sxm", "h200"))
    assert name.startswith("ascend") == any("not run on Ascend" in says.source for says in device.provenance.values())


def entries_of(machine: Machine) -> list[str]:
    """What a machine file says, down to the entries of its tables, but for what is as it is without a file."""
    plain = {field.name: field.default for field in msgspec.structs.fields(Machine)}
    usual = {
        field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in msgspec.structs.fields(Compute)
    }
    found = []
    for name in machine.__struct_fields__:
        value = getattr(machine, name)
        if name == "compute":
            found += [f"{name}.{part}" for part in usual if getattr(value, part) != usual[part]]
        elif isinstance(value, dict) and name != "provenance":
            found += [f"{name}.{part}" for part in value]
        elif name not in NAMES and value != plain[name]:
            found.append(name)
    return found


NAMES = ("name", "variant", "device", "num_devices", "devices_per_node", "host_async", "provenance")


@pytest.mark.parametrize("name", known_names())
def test_every_figure_of_every_shipped_machine_has_a_source(name):
    machine = Machine.load(name)
    entries = entries_of(machine)
    assert len(entries) > 20
    for entry in entries:
        known = [says for says in machine.provenance if entry == says or says.startswith(f"{entry}.")]
        assert known or entry.partition(".")[0] in machine.provenance, f"{entry} does not say where it is from"
    for entry, says in machine.provenance.items():
        assert len(says.source) >= 10 and re.fullmatch(r"20\d\d-\d\d-\d\d", says.date), f"{entry}: {says}"
        if says.status == "cited":
            assert "taken" not in says.source and "assumed" not in says.source, f"{entry} is not what is cited"


def test_unmeasured_figures_of_a_device_are_not_called_measured():
    provenance = load_device("h100-sxm").provenance
    assert provenance["compute.attention"].status == provenance["compute.tiled"].status == "measured"
    assert "NVIDIA H100 80GB HBM3" in provenance["compute.tiled"].source
    for entry in ("collectives.all_reduce", "overlap", "dispatch_s.transfer"):
        says = provenance.get(entry) or provenance[entry.partition(".")[0]]
        assert says.status != "measured", entry


def test_figures_carried_over_keep_their_original_status():
    says = load_device("h100-sxm-96gb").provenance["collectives.all_gather"]
    assert says.status == "assumed" and "there assumed: carried over from h200" in says.source


def test_a_device_carried_over_keeps_cited_figures():
    source, target = load_device("h200"), load_device("a100-80gb")
    faster = msgspec.structs.replace(
        source, compute=msgspec.structs.replace(source.compute, kernel_s=9e-6, sharpness=4.0)
    )
    got = carried(target, faster, date="2026-11-21")
    assert (got.compute.kernel_s, got.compute.sharpness) == (9e-6, 4.0)
    assert got.compute.attention == target.compute.attention  # cited
    assert got.collectives["all_reduce"].link_fraction == target.collectives["all_reduce"].link_fraction  # cited
    assert got.provenance["compute.kernel_s"].status == "assumed"


def test_carrying_over_twice_changes_nothing():
    source = load_device("h200")
    once = carried(load_device("b200"), source, date="2026-11-21")
    assert carried(once, source, date="2026-11-21") == once


def test_spreads_include_the_errors_of_carrying_over():
    source = load_device("h100-sxm")
    near, far = (carried(load_device(name), source, date="2026-11-21").spreads for name in ("gh200", "a100-80gb"))
    for name in ("matrix", "attention", "memory"):
        assert near[name] == far[name] == pytest.approx(math.hypot(source.spreads[name], CARRIED[name]), abs=1e-4)
    assert near["collective"] == source.spreads["collective"]  # they are an H200's there too
    assert far["collective"] > near["collective"]


def test_factors_by_size_stay_with_cores_of_their_kind():
    source = load_device("h100-sxm")
    assert source.compute.tiled.table is not None
    assert carried(load_device("gh200"), source, date="2026-11-21").compute.tiled.table == source.compute.tiled.table
    assert carried(load_device("a100-80gb"), source, date="2026-11-21").compute.tiled.table is None


def test_what_a_core_loads_grows_with_its_rate():
    source, target = load_device("h200"), load_device("a100-80gb")
    rates = [each.compute.matrix_flops_per_s["float16"] / each.compute.num_cores for each in (source, target)]
    got = carried(target, source, date="2026-11-21").compute
    assert got.half_depth == pytest.approx(source.compute.half_depth * rates[1] / rates[0])
    assert got.tiled.core_Bps / source.compute.tiled.core_Bps == pytest.approx(rates[1] / rates[0])
    assert got.tiled.step_s == source.compute.tiled.step_s


def test_an_anchored_form_gives_the_cited_rate():
    shape, rate = (1024, 10240, 5120), 250e12
    m, n, k = shape
    cited = CitedProduct(shape=shape, dtype="bfloat16", flops_per_s=rate)
    compute = anchored(load_device("a100-80gb").compute, [cited])
    seconds = matrix_s(compute, shape, 312e12, 2 * (m * k + n * k + m * n))
    assert 2 * m * n * k / seconds == pytest.approx(rate, rel=1e-6)


@pytest.mark.parametrize("name", ["b200", "b300", "gb200", "a100-pcie-80gb"])
def test_typical_products_are_met_in_the_geometric_mean(name):
    device = load_device(name)
    ratios = []
    for product in device.typical_products:
        m, n, k = product.shape
        peak = device.compute.matrix_flops_per_s[product.dtype]
        seconds = matrix_s(device.compute, product.shape, peak, 2 * (m * k + n * k + m * n))
        ratios.append(2 * m * n * k / seconds / product.flops_per_s)
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1.0, rel=1e-6)
    assert min(ratios) > 0.7 and max(ratios) < 1.4


@pytest.mark.parametrize(("name", "bus_Bps", "tolerance"), [("a100-80gb", 235e9, 0.02), ("h100-sxm", 480e9, 0.03)])
def test_large_all_reduces_of_a_node_reach_the_cited_bus_bandwidth(name, bus_Bps, tolerance):
    machine, size = Machine.load(f"{name}-x8"), 8 * 2**30
    seconds = price_collective(machine, "all_reduce", axes_group(machine, [(8, 1)], 8), size, 2).work_ps / 1e12
    assert 2 * 7 / 8 * size / seconds == pytest.approx(bus_Bps, rel=tolerance)


def test_nodes_are_joined_by_their_cards():
    machine, size = Machine.load("h100-sxm-x64"), 2**30
    alone = price_transfer(machine, 0, 8, size).work_ps
    assert size / (alone / 1e12) < 50e9 < size / (price_transfer(machine, 0, 1, size).work_ps / 1e12)
    # one member in each node has one card, eight members have eight
    one = price_collective(machine, "all_gather", axes_group(machine, [(8, 8)], 64), size, 2).work_ps
    eight = price_collective(machine, "all_gather", axes_group(machine, [(64, 1)], 64), size, 2).work_ps
    assert one > 4 * eight


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("memory_Bps", -1.0, "memory_Bps is -1.0"),
        ("memory_Bps", 0.0, "memory_Bps is 0"),
        ("memory_Bps", "4.8 TB/s", r"compute.memory_Bps"),
        ("num_cores", 0, "num_cores must be .* not 0"),
        ("clock_drop", 1.5, "clock_drop must be .* not 1.5"),
        ("sustained_clock", 0.0, "sustained_clock is 0"),
        ("kernel_start", {"add.forward": -2.0}, "kernel_start.add.forward is -2.0"),
        ("tiled.quantisation", 1.5, "quantisation must be .* not 1.5"),
        ("tiled.core_Bps", 0.0, "core_Bps is 0"),
        ("tiled.tiles", [], "at least one"),
        ("tiled.arithmetic_cost", {"3": 2.0}, "alignment in bytes '3'"),
        ("attention.backward_tail", 2.0, "backward_tail must be .* not 2.0"),
        ("form_cost", {"tt": 1.0}, "form of a matrix product 'tt'"),
    ],
)
def test_bad_figures_of_a_device_are_named(path, value, said):
    content = msgspec.json.decode(msgspec.json.encode(load_device("h200")))
    *outer, last = path.split(".")
    section = content["compute"]
    for name in outer:
        section = section[name]
    section[last] = value
    with pytest.raises((TwofoldError, msgspec.ValidationError), match=said):
        msgspec.json.decode(msgspec.json.encode(content), type=type(load_device("h200")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file["collectives"]["all_gather"].update(chunk_s=-1e-6), "chunk_s is -1e-06"),
        (lambda file: file["overlap"][0].update(hold=9.0), "hold is 9.0"),
        (lambda file: file["price_intervals"].update(matrx={"low": 0.9, "high": 1.1}), "did you mean 'matrix'"),
        (lambda file: file["price_intervals"].update(matrix={"low": 1.2, "high": 1.1}), "interval 1.2 to 1.1"),
        (lambda file: file["compute"].pop("memory_Bps"), r"missing key `memory_Bps`.*compute"),
        (lambda file: file["compute"].update(memory_GBps=4800.0), r"unknown key `memory_GBps`.*compute"),
        (lambda file: file["dispatch_s"].pop("matrix"), "dispatch_s lacks matrix"),
    ],
)  # fmt: skip
def test_bad_figures_of_a_machine_file_are_named(change, said):
    content = msgspec.json.decode(Machine.load("h200-x2").to_json())
    change(content)
    with pytest.raises(TwofoldError, match=said) as caught:
        Machine.from_json(msgspec.json.encode(content), "mine.json")
    assert "mine.json" in str(caught.value)


def test_an_unknown_unit_is_refused():
    content = msgspec.json.decode(Machine.load("h200-x2").to_json())
    content["links"][0]["bandwidth_GBps"] = content["links"][0].pop("bandwidth_Bps") / 1e9
    with pytest.raises(TwofoldError, match=r"bandwidth.*links\[0\]"):
        Machine.from_json(msgspec.json.encode(content), "mine.json")


def test_runtime_communicators_and_fragmentation_take_their_part_of_the_memory():
    """On an H200: 2.64 GB for the context, 0.4 GB for a communicator of each of four groups, 4.1 % of the tensors."""
    machine = Machine.load("h200-x4")
    assert machine.free_bytes == machine.memory_bytes - 2_639_134_720
    assert machine.room_bytes == pytest.approx((machine.free_bytes - 4 * 400e6) / 1.041, abs=1)
    assert Machine.load("h200-x1").room_bytes == pytest.approx(machine.free_bytes / 1.041, abs=1)
    npu = Machine.load("ascend-910b2-x8")  # not measured: what is not known is not made up
    assert npu.runtime_bytes is None and npu.room_bytes == npu.free_bytes == npu.memory_bytes


def test_published_products_that_disagree_widen_the_spread_of_a_device():
    """Of a B200 a table of operators has 1.1 PFLOP/s, a list of best shapes 1.7, of which ordinary kernels reach 0.91:
    half of the logarithm of 1.45 is 0.19."""
    device, source = load_device("b200"), load_device("h200")
    assert device.spreads["matrix"] == pytest.approx(0.19, abs=0.015)
    alone = carried(msgspec.structs.replace(device, best_product=None), source, date="2026-11-25")
    assert alone.spreads["matrix"] == load_device("a100-80gb").spreads["matrix"]


def test_a_lower_clock_slows_the_cores_part_of_kernels_that_move_bytes():
    """Of one kernel sqrt(1 + c^2 / clock^2), with 1 + c^2 the square of its cost. Several that move the counted bytes p
    times follow each other: p + c / clock, with p + c their cost."""
    compute = load_device("h100-sxm").compute
    slow = at_sustained_clock(compute, 0.85)
    cores = compute.kernel_cost["rope_by_hand.forward"] ** 2 - 1
    assert slow.kernel_cost["rope_by_hand.forward"] == pytest.approx(math.sqrt(1 + cores / 0.85**2), abs=1e-4)
    for call, passes in (("cross_entropy.forward", 7), ("rms_norm_by_hand.forward", 9)):
        slower = passes + (compute.kernel_cost[call] - passes) / 0.85
        assert slow.kernel_cost[call] == pytest.approx(slower, abs=1e-4)
    assert slow.kernel_cost["softmax.grad0"] == compute.kernel_cost["softmax.grad0"]


@pytest.mark.parametrize(("name", "is_limited"), [("b200", True), ("h20", False)])
def test_products_of_another_chip_run_at_the_clock_that_its_power_leaves(name, is_limited):
    """An operation takes as much energy as on an H200, whose products are held at 692.6 W. A B200 settles where they
    draw 1,000 W; an H20, with 15 % of the operations and 400 W, stays at the highest clock."""
    source, device = load_device("h200"), load_device(name)
    bare = msgspec.structs.replace(device, typical_products=(), best_product=None)
    power, compute = source.compute.power, carried(bare, source, date="").compute
    settled = ((power.limit_W - power.idle_W) / (power.matrix_W * source.compute.matrix_efficiency)) ** (
        1 / power.exponent
    )
    if not is_limited:
        assert compute.sustained_clock * source.compute.clock_MHz == pytest.approx(power.highest_MHz)
        assert compute.clock_drop == 0.0
        return
    clock = compute.sustained_clock * settled
    drawn_W = power.matrix_W * 2250 / 989 * source.compute.matrix_efficiency * clock**power.exponent
    assert drawn_W + power.idle_W * 148 / 132 == pytest.approx(1000)
    assert carried(bare, load_device("h100-sxm"), date="").compute.sustained_clock == 1.0  # its power is not measured


def test_the_number_of_devices_has_at_most_seven_digits():
    assert Machine.load("h100-sxm-x8000000").num_devices == 8_000_000
    with pytest.raises(TwofoldError, match="more than 9,999,999 devices"):
        Machine.load("h100-sxm-x80000000")
