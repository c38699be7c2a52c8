import math
import subprocess
import sys

import msgspec
import pytest

from costmodels import axes_group, executing
from costmodels.machine.machine import COLLECTIVES, DISPATCH_CLASSES, Collective, Compute, Interval, Link, Machine
from costmodels.machine.sections import Replay
from costmodels.price.compute import Rule, join
from costmodels.price.instruction import (
    Cost,
    compute_class,
    matrix_shape,
    price,
    price_collective,
    price_compute,
    price_launch,
    price_step,
    price_transfer,
)
from costmodels.price.traffic import collective_traffic
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.operators import kinds
from plans.program import GroupProgram, Instruction, Kind, Value
from plans.redistribution import Piece, Step, StepKind, TransferPieces

MESH = Layout((2, 4), ("dp", "mp"))
GROUP = GroupProgram(mesh=MESH, values={}, blocks=())


def machine(**changes) -> Machine:
    """8 devices, round figures, no fixed times: prices are the closed forms."""
    plain = Machine(
        name="plain",
        device="cuda",
        num_devices=8,
        devices_per_node=8,
        memory_bytes=10**9,
        compute=Compute(
            matrix_flops_per_s={"float32": 1e12}, vector_flops_per_s={"float32": 1e12}, memory_Bps=1e11, sharpness=1.0
        ),
        links=(Link(name="wire", ranks=8, latency_s=1e-6, bandwidth_Bps=1e9),),
        collectives=dict.fromkeys(COLLECTIVES, Collective()),
        dispatch_s=dict.fromkeys(DISPATCH_CLASSES, 1e-6),
        host_async=True,
        interval=Interval(low=0.9, high=1.1),
        provenance={},
    )
    return msgspec.structs.replace(plain, **changes)


def collective(call: str, size_bytes: int, axes=("mp",)) -> Instruction:
    return Instruction(name="c", kind=Kind.COLLECTIVE, call=call, part="C", axes=axes, message_bytes=size_bytes)


def compute(call: str, *shapes: tuple[int, ...], dtype: str = "float32") -> Instruction:
    return Instruction(name="i", kind=Kind.COMPUTE, call=call, part="F", shapes=shapes, dtype=dtype)


def send(*pieces: Piece) -> Instruction:
    return Instruction(name="s", kind=Kind.SEND, call="transfer", part="C", pieces=TransferPieces(pieces))


def work_s(instruction: Instruction, of: Machine | None = None) -> float:
    return price(instruction, GROUP, of or machine(), 8).work_ps / 1e12


@pytest.mark.parametrize(
    ("call", "rounds", "share"),
    [("all_gather", 3, 3 / 4), ("reduce_scatter", 3, 3 / 4), ("all_reduce", 6, 6 / 4), ("all_to_all", 1, 3 / 4)],
)
def test_ring_closed_forms(call, rounds, share):
    assert work_s(collective(call, 4_000_000)) == pytest.approx(rounds * 1e-6 + share * 4e6 / 1e9, rel=1e-9)


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter"])
def test_flat_variants_cost_what_the_plain_ones_do(call):
    assert work_s(collective(f"{call}_flat", 8192)) == work_s(collective(call, 8192))


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    parts = work_s(collective("reduce_scatter", 10**6)) + work_s(collective("all_gather", 10**6))
    assert work_s(collective("all_reduce", 10**6)) == pytest.approx(parts)


def test_a_group_of_one_costs_only_its_issue():
    group = GroupProgram(mesh=Layout((1, 8), ("dp", "mp")), values={}, blocks=())
    assert price(collective("all_reduce", 4096, ("dp",)), group, machine(), 8) == Cost(10**6, 0, 0)


@pytest.mark.parametrize("call", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("library_device", ["cuda", "cpu", "npu"])
def test_communication_grows_with_size_and_group(call, library_device):
    carried = Collective(start_s=1e-6, cpu_start_s=1e-6, cpu_message_s=1e-5, cpu_Bps=1e9)
    of = machine(device=library_device, collectives=dict.fromkeys(COLLECTIVES, carried))
    costs = [price(collective(call, 2**power), GROUP, of, 8) for power in range(2, 24)]
    assert costs == sorted(costs, key=lambda cost: (cost.work_ps, cost.cpu_ps))
    wide = price(collective(call, 2**20, ("dp", "mp")), GROUP, of, 8)
    narrow = price(collective(call, 2**20, ("dp",)), GROUP, of, 8)
    assert wide.work_ps > narrow.work_ps and wide.cpu_ps > narrow.cpu_ps


def test_gloo_sends_no_empty_segments():
    # one element travels round a ring of 8 twice: 14 sends over 8 members
    assert collective_traffic("all_reduce", 8, 4, 4, "gloo").messages == pytest.approx(14 / 8)
    assert collective_traffic("all_reduce", 8, 4096, 4, "gloo").messages == 28
    assert collective_traffic("all_gather", 8, 4096, 4, "gloo").messages == 14


def test_processor_time_counts_messages_and_bytes():
    carried = Collective(cpu_start_s=1e-4, cpu_message_s=1e-5, cpu_Bps=1e9)
    of = machine(device="cpu", collectives=dict.fromkeys(COLLECTIVES, carried))
    cost = price(collective("all_gather", 4_000_000), GROUP, of, 8)
    assert cost.cpu_ps / 1e12 == pytest.approx(1e-4 + 6 * 1e-5 + 3e6 / 1e9)


def test_the_slowest_tier_prices_a_group_and_nics_of_a_node_work_together():
    fast, slow = (
        Link(name="a", ranks=4, latency_s=0.0, bandwidth_Bps=1e10),
        Link(name="b", ranks=8, latency_s=0.0, bandwidth_Bps=1e9),
    )
    of = machine(links=(fast, slow))
    size = 8_000_000
    inside, across = (
        work_s(collective("all_gather", size, ("mp",)), of),
        work_s(collective("all_gather", size, ("dp",)), of),
    )
    assert inside == pytest.approx(3 / 4 * size / 1e10)
    assert across == pytest.approx(1 / 2 * size / 1e9)
    assert work_s(collective("all_gather", size, ("dp", "mp")), of) == pytest.approx(7 / 8 * size / 4e9)


def test_a_full_mesh_of_links_gives_a_pair_one_link():
    of = machine(links=(Link(name="mesh", ranks=8, latency_s=0.0, bandwidth_Bps=7e9, peer_Bps=1e9),))
    assert price_transfer(of, 0, 1, 10**6).work_ps == 10**9
    assert work_s(collective("all_gather", 8 * 10**6, ("dp", "mp")), of) == pytest.approx(1e-3)


def test_matrix_product_is_arithmetic_plus_traffic_at_sharpness_one():
    touched = 4 * (64 * 256 + 128 * 256 + 64 * 128)
    expected = 2 * 64 * 128 * 256 / 1e12 + touched / 1e11
    assert work_s(compute("linear.forward", (64, 256), (128, 256), (64, 128))) == pytest.approx(expected, rel=1e-6)


def test_high_sharpness_is_the_roofline():
    rates = msgspec.structs.replace(machine().compute, sharpness=64.0)
    instruction = compute("linear.forward", (512, 512), (512, 512), (512, 512))
    assert work_s(instruction, machine(compute=rates)) == pytest.approx(2 * 512**3 / 1e12, rel=1e-3)


def test_half_sizes_halve_the_rate():
    rates = msgspec.structs.replace(machine().compute, half_rows=8.0, memory_Bps=1e30)
    instruction = compute("linear.forward", (8, 512), (512, 512), (8, 512))
    assert work_s(instruction, machine(compute=rates)) == pytest.approx(2 * 2 * 8 * 512 * 512 / 1e12)


@pytest.mark.parametrize("name", ["h200-x8", "ascend-910b2-x8"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_matrix_products_grow_with_every_size(name, position):
    of, last = Machine.load(name), 0.0
    for power in range(4, 14):
        m, n, k = (2**power if place == position else 512 for place in range(3))
        now = work_s(compute("linear.forward", (m, k), (n, k), (m, n), dtype="bfloat16"), of)
        assert now >= last
        last = now


def test_the_three_products_of_a_linear_have_equal_work():
    x, weight, grad = (4, 8, 96), (160, 96), (4, 8, 160)
    shapes = [
        matrix_shape("linear.forward", (x, weight, grad)),
        matrix_shape("linear.grad0", (grad, weight, x)),
        matrix_shape("linear.grad1", (grad, x, weight)),
    ]
    assert shapes == [(32, 160, 96), (32, 96, 160), (160, 96, 32)]


def test_views_cost_their_issue_only():
    assert price(compute("reshape.forward", (4, 4), (16,)), GROUP, machine(), 8) == Cost(10**6, 0, 0)


@pytest.mark.parametrize(
    "call", ["relu.forward", "sum", "accumulate", "slice", "load", "l1_loss.forward", "sgd.update"]
)
def test_memory_bound_calls_cost_their_bytes(call):
    assert work_s(compute(call, (1000, 100), (1000, 100))) == pytest.approx(2 * 4 * 10**5 / 1e11)


def test_bytes_come_from_the_values_where_they_are_known():
    values = {name: Value(name=name, shape=(500,), dtype="float64") for name in ("w", "g")}
    group = GroupProgram(mesh=MESH, values=values, blocks=())
    update = Instruction(name="u", kind=Kind.COMPUTE, call="sgd.update", part="U", inputs=("w", "g"), outputs=("w",))
    assert price(update, group, machine(), 8).work_ps == round(3 * 500 * 8 / 1e11 * 1e12)


def test_adamw_costs_its_eight_kernels():
    values = {name: Value(name=name, shape=(1000,)) for name in "wgms"}
    group = GroupProgram(mesh=MESH, values=values, blocks=())
    update = Instruction(
        name="u", kind=Kind.COMPUTE, call="adamw.update", part="U", inputs=tuple("wgms"), outputs=tuple("wms")
    )
    cost = price(update, group, machine(), 8)
    assert (cost.dispatch_ps, cost.work_ps) == (8 * 10**6, round(20 * 1000 * 4 / 1e11 * 1e12))


def test_every_operator_has_a_class():
    calls = [f"{kind}.{part}" for kind in kinds() for part in ("forward", "grad0", "grad1")]
    assert {compute_class(call) for call in calls} == {"attention", "matrix", "memory", "view"}
    assert compute_class("adamw.update") == "update"


def test_a_transfer_is_priced_by_its_busiest_rank():
    pieces = [
        Piece(src_rank=0, dst_rank=4, region=((0, 1000),)),
        Piece(src_rank=0, dst_rank=5, region=((1000, 2000),)),
        Piece(src_rank=1, dst_rank=6, region=((2000, 2500),)),
        Piece(src_rank=7, dst_rank=7, region=((2500, 9999),)),
    ]
    assert work_s(send(*pieces)) == pytest.approx(1e-6 + 8000 / 1e9)
    received = Instruction(name="s", kind=Kind.RECV, call="transfer", part="C", pieces=TransferPieces(pieces))
    assert price(received, GROUP, machine(), 8) == price(send(*pieces), GROUP, machine(), 8)


def test_a_local_hand_over_costs_its_issue_only():
    assert price(send(Piece(src_rank=3, dst_rank=3, region=((0, 8),))), GROUP, machine(), 8) == Cost(10**6, 0, 0)
    assert price_transfer(machine(), 3, 3, 32) == Cost(10**6, 0, 0)


def test_steps_are_priced_as_their_instructions():
    step = Step(kind=StepKind.ALL_GATHER, axes=("mp",), dim=0, before=MESH("mp"), after=MESH("None"))
    assert price_step(step, (1024,), "float32", machine()) == price(collective("all_gather", 4096), GROUP, machine(), 8)
    cut = Step(kind=StepKind.SLICE, axes=("mp",), dim=0, before=MESH("None"), after=MESH("mp"))
    assert price_step(cut, (1024,), "float32", machine()).work_ps == round(2 * 1024 / 1e11 * 1e12)


def test_host_scale_scales_everything():
    instruction = collective("all_reduce", 4_000_000)
    once, twice = (price(instruction, GROUP, machine(host_scale=scale), 8) for scale in (1.0, 2.0))
    assert (twice.dispatch_ps, twice.work_ps) == (2 * once.dispatch_ps, 2 * once.work_ps)


def test_prices_are_exact_integers_and_repeat():
    instruction = collective("all_reduce", 12_345)
    costs = {price(instruction, GROUP, Machine.load("h200-x8"), 8) for _ in range(2)}
    assert len(costs) == 1
    assert all(type(figure) is int for cost in costs for figure in (cost.dispatch_ps, cost.work_ps, cost.cpu_ps))
    assert math.isclose(next(iter(costs)).alone_s, sum((c.dispatch_ps + c.work_ps) for c in costs) / 1e12)


def test_more_ranks_than_devices():
    with pytest.raises(TwofoldError, match=r"16 ranks.*8 devices"):
        price(collective("all_reduce", 4), GROUP, machine(), 16)


def test_a_dtype_without_a_rate_names_those_that_have_one():
    with pytest.raises(TwofoldError, match=r"float64.*float32"):
        price(compute("linear.forward", (8, 8), (8, 8), (8, 8), dtype="float64"), GROUP, machine(), 8)


def test_an_unknown_collective():
    with pytest.raises(TwofoldError, match="scan"):
        price(collective("scan", 4), GROUP, machine(), 8)


@pytest.mark.parametrize("replay", [None, Replay(launch_s=3e-6, node_s=5e-7)])
def test_a_replayed_step_has_a_time_per_node_and_one_launch(replay):
    rules = {"linear.grad2": Rule(kernels=2.0, passes=3.0, dispatch_s=9e-6), "scale": Rule(passes=2.0)}
    eager = machine(replay=replay, dispatch_s=dict.fromkeys(DISPATCH_CLASSES, 4e-6))
    eager = msgspec.structs.replace(eager, compute=msgspec.structs.replace(eager.compute, rules=rules))
    graph = executing(eager, "graph")
    node_s, launch_s = (1e-6, 1e-5) if replay is None else (5e-7, 3e-6)
    assert price_launch(graph) == round(launch_s * 1e12) and price_launch(eager) == 0
    for name in DISPATCH_CLASSES:
        assert graph.dispatch_s[name] == (0 if name in ("view", "wait") else node_s)
    before, after = (
        price_compute(each, "linear.grad2", ((8, 8), (8,)), "float32", 512, 0, True) for each in (eager, graph)
    )
    assert (before.dispatch_ps, after.dispatch_ps) == (9 * 10**6, round(node_s * 1e12))
    assert before.work_ps == after.work_ps  # kernels take what they take
    assert executing(graph, "graph") is graph and executing(eager, "eager") is eager


def test_an_assumed_node_takes_no_longer_than_its_call():
    quick = machine(dispatch_s=dict.fromkeys(DISPATCH_CLASSES, 1e-8))
    assert set(executing(quick, "graph").dispatch_s.values()) == {0.0, 1e-8}


def test_hosts_that_compute_replay_nothing():
    cpu = Machine.load("cpu-2core-x8")
    assert executing(cpu, "graph") is cpu
    with pytest.raises(TwofoldError, match=r"execution 'fast' is not known: graph .* or eager"):
        executing(cpu, "fast")


def test_pricing_imports_neither_torch_nor_scipy():
    code = "import sys, costmodels; print([m for m in ('torch', 'scipy', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("members", "together"), [(256, 8), (32, 8), (16, 1)])
def test_an_all_to_all_across_nodes_leaves_by_the_own_link_of_every_member(members, together):
    of = Machine.load("h100-sxm-x2048")
    far = of.links[1]
    group = axes_group(of, [(members, 1 if together == 8 else 8)], members * (1 if together == 8 else 8))
    cost = price_collective(of, "all_to_all", group, 2**30, 2)
    least_s = 2**30 * (members - together) / members / (far.bandwidth_Bps * (far.reached_fraction or 1.0))
    assert least_s <= cost.work_ps / 1e12 <= 1.25 * least_s


@pytest.mark.parametrize(
    ("call", "sums", "times"),
    [
        ("attention.forward", (), 1.0),
        ("attention.backward", ((4, 1024),), 2.5),
        ("attention.grad", ((4, 1024),), 2.5),
        ("attention.grad", (), 3.5),
    ],
)
def test_attention_without_a_model_of_its_own_is_priced_by_its_products(call, sums, times):
    """4 heads x queries x keys x head dim; backward 2.5 times that, 3.5 with the forward again; half where causal."""
    each = (4, 1024, 64)
    shapes = (each, each, each, each) if call == "attention.forward" else (each,) * 5 + sums + (each,) * 3
    flops = round(times * 4 * 4 * 1024 * 1024 * 64)
    whole, causal = (price_compute(machine(), call, shapes, "float32", 0, part).work_ps for part in (flops, flops // 2))
    assert (whole, causal) == (flops, flops // 2)  # 10^12 flop/s: one a picosecond


@pytest.mark.parametrize(
    ("times_s", "sharpness", "expected_s"),
    [((3.0, 4.0), 1.0, 7.0), ((3.0, 4.0), 2.0, 5.0), ((0.0, 4.0), 3.0, 4.0), ((0.0, 0.0), 1.0, 0.0)],
)
def test_times_that_overlap_in_part_join_by_their_p_norm(times_s, sharpness, expected_s):
    assert join(*times_s, sharpness) == pytest.approx(expected_s)
    assert join(*reversed(times_s), sharpness) == pytest.approx(expected_s)


def test_a_message_that_takes_forever_names_the_machine():
    machine = Machine.load("h200-x8")
    slow = msgspec.structs.replace(machine.collectives["all_to_all"], link_fraction=1e-308, protocols=())
    machine = msgspec.structs.replace(machine, collectives={**machine.collectives, "all_to_all": slow})
    with pytest.raises(TwofoldError, match="forever on machine 'h200-x8'"):
        price_collective(machine, "all_to_all", axes_group(machine, [(8, 1)], 8), 2**20, 2)
