"""Small formulas of the core against numbers worked out by hand."""

import math
from dataclasses import replace
from statistics import NormalDist

import msgspec
import pytest

from costmodels import Machine
from costmodels.fit.points import Point, PointLog
from costmodels.fit.predict import is_one_group
from costmodels.fit.probe import ProcessorFit, with_processor
from costmodels.price.compute import join
from costmodels.widths import NINETY
from plans.degrees import Degrees, check
from plans.errors import TwofoldError
from plans.model.mlp import mlp_graph
from plans.model.transformer import TransformerConfig, sizes_of, transformer_config
from plans.operators import declare
from plans.optimizer import Optimizer
from search.devices import Problem
from search.physics import physics_s
from simulator import WhatIf
from simulator.estimate.classes import class_seconds
from simulator.estimate.memory import memory_interval
from simulator.forecast import Forecast
from simulator.study.stragglers import slow_pipelines

CPU, H100 = Machine.load("cpu-2core-x8"), Machine.load("h100-sxm-x8")


# -- measured points ---------------------------------------------------------------------------------------------------


def test_operations_of_attention():
    """Two products of 2 operations per pair and dim for 2 x 3 heads, 5 queries, 7 keys and 11 dims: 9,240."""

    def flops(call, **options):
        return Point(kind="attention", call=call, shape=(2, 3, 3, 5, 7, 11), options=options, seconds=1.0).flops

    assert flops("sdpa_forward") == 2 * 2 * 2 * 3 * 5 * 7 * 11 == 9240
    assert flops("sdpa_forward", causal=1) == 4620 and flops("sdpa_backward") == 23_100


def test_a_log_of_points_is_rewritten_only_where_a_line_was_cut_off(tmp_path):
    path = tmp_path / "points.jsonl"
    log = PointLog(path)
    log.add(Point(kind="memory", call="copy", size_bytes=8, seconds=1.0))
    whole, first = path.read_bytes(), path.stat().st_ino
    assert len(PointLog(path).points) == 1 and path.stat().st_ino == first
    path.write_bytes(whole + whole[:20])
    assert len(PointLog(path).points) == 1 and path.read_bytes() == whole


def test_communication_of_one_group_is_told_from_that_of_several():
    def of(kind, **options):
        return is_one_group(Point(kind=kind, call="all_reduce", size_bytes=8, ranks=2, options=options, seconds=1.0))

    assert of("collective") and of("collective", groups=1) and not of("collective", groups=2)
    assert of("matrix", groups=2)  # no communication
    assert of("transfer", pattern="ping_pong") and not of("transfer", pattern="both_ways")


def test_processor_times_of_programs_scale_everything_that_the_processor_does():
    """Computing takes 2 times as long, communication 4 times."""
    machine = msgspec.structs.replace(CPU, compute=msgspec.structs.replace(CPU.compute, kernel_s=1e-6))
    found = with_processor(machine, ProcessorFit(compute=2.0, communication=4.0, spread=0.1), date="2026-11-26")
    own, compute = machine.compute, found.compute
    assert compute.matrix_efficiency == own.matrix_efficiency / 2
    assert compute.memory_efficiency == own.memory_efficiency / 2
    assert compute.kernel_s == own.kernel_s * 2
    for name, seconds in CPU.dispatch_s.items():
        assert found.dispatch_s[name] == seconds * (4 if name in ("collective", "transfer") else 2)
    for name, collective in CPU.collectives.items():
        assert found.collectives[name].cpu_start_s == collective.cpu_start_s * 4
        assert found.collectives[name].cpu_message_s == collective.cpu_message_s * 4


# -- prices and intervals ----------------------------------------------------------------------------------------------


def test_two_times_are_joined_by_their_norm():
    assert join(3.0, 4.0, 2.0) == join(4.0, 3.0, 2.0) == pytest.approx(5.0)
    assert join(3.0, 4.0, 1.0) == 7.0 and join(0.0, 0.0, 2.0) == 0.0


def test_a_machine_with_twice_the_compute_has_every_rate_twice():
    found = WhatIf(compute=2.0).machine(H100).compute
    for rates in ("matrix_flops_per_s", "vector_flops_per_s"):
        assert getattr(found, rates) == {name: 2 * each for name, each in getattr(H100.compute, rates).items()}
    assert found.memory_Bps == H100.compute.memory_Bps


def test_an_interval_of_memory_is_the_root_of_its_squared_parts():
    """3.7 % of 1,000 bytes; 90 % of a normal distribution lie within 1.645 standard deviations."""
    assert pytest.approx(NormalDist().inv_cdf(0.95), abs=1e-3) == NINETY
    low, high = memory_interval({"weight": 1000})
    assert (1000 - low, high - 1000) == pytest.approx((37 * NINETY, 37 * NINETY))
    low, high = memory_interval({"weight": 1000}, unknown_bytes=(0, 1000))
    assert (1000 - low, high - 1000) == pytest.approx((37 * NINETY, math.hypot(37 * NINETY, 1000)))


@pytest.mark.parametrize("host_s", [0.5, 0.79, 0.81, 1.5])
def test_dispatch_has_the_share_of_a_step_with_which_its_host_is_late(host_s):
    """Logarithms of the times of host and device are normal; the device takes 0.6 + 0.2 s."""
    machine = msgspec.structs.replace(H100, spreads={"matrix": 0.03, "dispatch": 0.04})
    found = class_seconds(machine, 1.0, {"matrix": 0.6}, 0.2, 0.0, host_s)
    late = NormalDist(math.log(0.8), 0.05).cdf(math.log(host_s))
    assert found["dispatch"] == pytest.approx(late) and found["collective"] == pytest.approx(0.2 * (1 - late))


def test_a_forecast_shows_milliseconds_and_gigabytes():
    found = Forecast(
        step_s=0.02, low_s=0.015, high_s=0.025, peak_bytes=3 * 10**9, memory={}, bubble_fraction=0.0,
        exposed_comm_s=0.0, rank_s=({}, {}),
    )  # fmt: skip
    assert repr(found) == "<Forecast: a step of 20 ms (15 to 25), peak 3 GB, 2 pipeline ranks>"


def test_the_bound_of_physics_takes_the_fastest_form_of_a_product():
    """An MLP of 64 -> 32 without bias: forward and weight gradient of 2 x 16 x 64 x 32 operations each."""
    graph, compute = mlp_graph([64, 32], 16, bias=False), H100.compute
    slow = msgspec.structs.replace(H100, compute=msgspec.structs.replace(compute, form_cost={}, memory_Bps=1e30))

    def of_forms(**costs):
        machine = msgspec.structs.replace(slow, compute=msgspec.structs.replace(slow.compute, form_cost=costs))
        return physics_s(graph, machine, 1, Optimizer())

    peak = max(compute.matrix_flops_per_s["float32"], compute.vector_flops_per_s["float32"])
    assert of_forms() == pytest.approx(2 * 2 * 16 * 64 * 32 / peak, rel=0.05)
    assert of_forms(nt=1.25) == of_forms() and of_forms(nt=1.25, tn=0.5) == pytest.approx(of_forms() / 2)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_operations_of_a_recurrent_layer():
    """2 sequences of 3 steps, 5 inputs and 7 states: 4 gates of 2 x (5 + 7) x 7 operations in each."""
    shapes = [(2, 3, 5), (28, 5), (28, 7)]
    spec = declare("recurrent", shapes, [(2, 3, 7)], {"mode": "LSTM", "bias": False, "reverse": False}, "lstm")
    assert spec.flops == 2 * 3 * 4 * 7 * 2 * (5 + 7)


@pytest.mark.parametrize("dim", [0, -1])
def test_a_softmax_of_one_dim_leaves_it_whole(dim):
    spec = declare("softmax", [(6,)], [(6,)], {"dim": dim}, "softmax")
    assert not spec.splittable


def test_the_next_valid_tp_for_heads_of_keys_and_values_is_named():
    config = TransformerConfig(
        name="m", num_layers=2, hidden=48, num_heads=24, num_kv_heads=4, ffn=96, vocab=96, seq=8
    )  # fmt: skip
    with pytest.raises(TwofoldError, match=r"4 heads of keys and values and tp 6: .*; the next valid tp is 8$"):
        check(Degrees(tp=6, global_batch=1), sizes_of(config))


# -- search and studies ------------------------------------------------------------------------------------------------


def test_one_device_and_one_sequence_are_enough_to_search():
    asked = Problem(config=transformer_config("gpt2"), machine=H100, num_devices=1, global_batch=1)
    for name in ("num_devices", "global_batch"):
        with pytest.raises(TwofoldError, match="at least 1"):
            replace(asked, **{name: 0})


def test_pipelines_that_another_one_dominates_are_left_out():
    """Replicas 0 to 2 of 2 stages: the second is as slow as the first and slow on another stage, too."""
    degrees = Degrees(dp=3, pp=2, global_batch=3)
    stride_dp, stride_pp = degrees.strides[2:]
    slow = {0: 1.2, stride_dp: 1.2, stride_dp + stride_pp: 1.1, 2 * stride_dp + stride_pp: 1.3}
    assert slow_pipelines(degrees, slow) == ({0: 1.2, 1: 1.1}, {1: 1.3})
    for level, found in ((3, ({0: 1.2, 1: 1.3},)), (2, ({0: 1.2, 1: 1.1}, {1: 1.3}))):  # at level 3 all blocks meet
        optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=level, reduce_every="step")
        assert slow_pipelines(replace(degrees, optimizer=optimizer), slow) == found
