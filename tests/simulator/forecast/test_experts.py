"""Mixtures of experts that are folded: templates against real lowering, forecasts against the SimPy engine."""

from dataclasses import replace

import msgspec
import pytest

from costmodels import Machine
from interop.measurements.devices import network_of
from interop.measurements.machines import machine_of
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.lower import lower
from plans.lower.symbolic import model_template
from plans.model.transformer import (
    Experts,
    TransformerConfig,
    named_config,
    transformer,
)
from plans.optimizer import Optimizer
from search import uniform_plan
from simulator import simulate
from simulator.forecast import forecast
from simulator.stacks import stack_named
from simulator.stacks.steps import Message
from tests.support.folded_lowering import check_template, small_plan

CONFIG = TransformerConfig(
    num_layers=4, hidden=96, num_heads=8, num_kv_heads=4, head_dim=16, ffn=192, vocab=512, seq=64, dtype="float32",
    experts=Experts(num_experts=8, top_k=2, ffn=48, num_shared=2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "ep", "sequence_parallel", "recompute", "schedule"),
    [
        (1, 1, False, "none", "1f1b"),
        (1, 4, False, "full", "1f1b"),
        (2, 1, False, "none", "zb_h1"),
        (2, 2, False, "selective", "1f1b"),
        (4, 2, True, "none", "zb_h1"),
    ],
)
@pytest.mark.parametrize("num_shared", [0, 2])
def test_template_says_what_lowering_of_these_sizes_says(tp, ep, sequence_parallel, recompute, schedule, num_shared):
    config = replace(CONFIG, experts=replace(CONFIG.experts, num_shared=num_shared))
    settings = {"tp": tp, "ep": ep, "sequence_parallel": sequence_parallel, "recompute": recompute}
    program = lower(small_plan(config, schedule=schedule, **settings))
    template = model_template(config, **settings)
    check_template(template, program, config, tp=tp, ep=ep)


@pytest.mark.parametrize(
    ("degrees", "zero", "num_dense", "position"),
    [
        ({"dp": 4, "ep": 2, "micro_batch": 2}, 0, 0, "rope"),
        ({"dp": 2, "ep": 2, "tp": 2, "micro_batch": 2}, 0, 1, "rope"),
        ({"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True, "micro_batch": 1}, 0, 0, "rope"),
        ({"dp": 4, "ep": 2, "pp": 2, "micro_batch": 1}, 1, 0, "rope"),
        ({"dp": 2, "ep": 2, "pp": 2, "micro_batch": 2}, 0, 3, "rope"),
        ({"dp": 4, "ep": 2, "micro_batch": 2}, 0, 0, "learned"),
        ({"dp": 8, "ep": 4, "micro_batch": 1}, 0, 0, "learned"),
    ],
)
def test_forecast_is_close_to_the_engine_on_the_whole_program(degrees, zero, num_dense, position):
    config = TransformerConfig(
        num_layers=4, hidden=2048, num_heads=16, num_kv_heads=4, ffn=5632, vocab=32_000, seq=2048, dtype="bfloat16",
        experts=Experts(num_experts=8, top_k=2, ffn=5632, num_shared=1, num_dense_layers=num_dense), position=position,
    )  # fmt: skip
    machine = msgspec.structs.replace(Machine.load("h200-x8"), overlap=())
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, bucket_bytes=0, parallel_level=zero)
    plan = uniform_plan(transformer(config, batch_size=16), machine, optimizer=optimizer, zero=zero, **degrees)
    expected = simulate(lower(plan), machine)
    found = forecast(config, Degrees(global_batch=16, optimizer=optimizer, **degrees), machine)
    assert found.step_s == pytest.approx(expected.step_interval_s, rel=0.02)
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.02)


def test_expert_parallelism_makes_a_large_mixture_fit():
    config, machine = replace(named_config("mixtral-8x7b"), seq=4096), Machine.load("h200-x64")
    common = {"dp": 32, "tp": 2, "micro_batch": 1, "global_batch": 64, "sequence_parallel": True}
    alone, spread = (forecast(config, Degrees(ep=ep, **common), machine) for ep in (1, 8))
    assert alone.memory["weight"] > 4 * spread.memory["weight"]
    assert alone.peak_bytes > machine.memory_bytes > spread.peak_bytes


@pytest.mark.parametrize(
    ("name", "degrees", "message"),
    [
        ("mixtral-8x7b", {"dp": 2, "ep": 4}, "dp 2 is not a multiple of ep 4"),
        ("mixtral-8x7b", {"dp": 3, "ep": 3}, "8 experts cannot be split over ep 3: 8 % 3 != 0"),
        ("mixtral-8x7b", {"cp": 2}, "experts need complete samples, but cp 2 splits them"),
        ("llama-3-8b", {"dp": 2, "ep": 2}, "has no experts to split over ep 2"),
    ],
)
def test_what_cannot_be_is_refused(name, degrees, message):
    with pytest.raises(TwofoldError, match=message):
        forecast(named_config(name), Degrees(global_batch=24, **degrees), Machine.load("h200-x8"))


def test_messages_of_experts_during_compute_cost_its_cores_only():
    """20 of 132 cores, as DeepSeek-V3's training had them (arXiv 2412.19437, section 3.2.2). Of 4 micro-batches the
    first forward and the last backward run alone."""
    mixture, machine = named_config("mixtral-8x7b"), Machine.load("h200-x16")
    degrees = Degrees(dp=16, ep=8, global_batch=64)
    exposed, hidden = (
        forecast(mixture, degrees, machine, stack=stack_named(name)) for name in ("megatron", "megatron-overlap")
    )
    exchanged = max(rank.get("all_to_all", 0.0) for rank in exposed.rank_s)
    assert exchanged > 0 and not any(rank.get("all_to_all") for rank in hidden.rank_s)
    computed, slower = (max(rank["compute"] for rank in each.rank_s) for each in (exposed, hidden))
    assert 1.1 * computed < slower < 132 / 112 * computed
    assert slower <= hidden.step_s <= exposed.step_s - 0.7 * exchanged + (132 / 112 - 1) * computed


def test_messages_of_experts_set_the_pace_on_a_slow_network():
    """On links of 5 GB/s the messages take longer than the compute of 8 micro-batches, which hides behind them except
    at both ends."""
    experts = Experts(num_experts=64, top_k=8, ffn=1792)
    mixture = replace(named_config("mixtral-8x7b"), num_layers=8, experts=experts)
    machine = machine_of("h100-sxm-x64", network_of("40 Gb/s per GPU", "", 8))
    degrees = Degrees(dp=64, ep=64, global_batch=512)
    exposed, hidden = (
        forecast(mixture, degrees, machine, stack=replace(stack_named(name), is_measured=True, chip_spread=0.0))
        for name in ("megatron", "megatron-overlap")
    )
    sent, computed = (exposed.rank_s[0][name] for name in ("all_to_all", "compute"))
    assert sent > 2 * computed
    assert sent < hidden.step_s < exposed.step_s - 0.7 * computed


def test_tokens_are_gathered_after_they_were_sent():
    """Half of the sequence goes to experts, and comes back, on each of two tensor-parallel ranks."""
    exchange = {"call": "all_to_all", "axes": ("ep",), "item_bytes": 2}
    steps = [
        Message(**exchange, size_bytes=64, token=0), Message(call="wait", token=0),
        Message(call="reduce_scatter", axes=("tp",), size_bytes=64, item_bytes=2, token=1),
        Message(**exchange, size_bytes=32, token=2), Message(call="wait", token=2),
    ]  # fmt: skip
    arranged = stack_named("megatron").arranged(steps, 2)
    sizes = [(step.call, step.size_bytes) for step in arranged if step.call != "wait"]
    assert sizes == [("all_to_all", 32), ("all_gather", 64), ("reduce_scatter", 64), ("all_to_all", 32)]
    assert stack_named("megatron").arranged(steps, 1) == steps


def test_megatron_computes_the_chosen_experts_only():
    mixture, machine = named_config("mixtral-8x7b"), Machine.load("h200-x8")
    degrees = Degrees(dp=8, ep=8, global_batch=8)
    stack = stack_named("megatron")
    found = forecast(replace(mixture, seq=4096), degrees, machine, stack=stack)
    dense = forecast(replace(mixture, seq=4096, experts=None), replace(degrees, ep=1), machine, stack=stack)
    assert dense.step_s < found.step_s < 3 * dense.step_s  # two of eight experts work for a token
    assert found.peak_bytes > dense.peak_bytes


def test_dense_layers_of_a_mixture_are_priced_under_tensor_parallel_torch():
    """Their host time is that of blocks; a mixture with one dense layer takes less than with none."""
    machine, stack = Machine.load("h200-x8"), stack_named("torchtitan")
    degrees = Degrees(dp=4, tp=2, global_batch=8)
    some, none = (
        forecast(
            replace(CONFIG, experts=replace(CONFIG.experts, num_dense_layers=count)), degrees, machine, stack=stack
        )
        for count in (2, 0)
    )
    assert 0 < some.step_s < none.step_s


def test_megatron_core_keeps_no_output_of_experts_and_narrow_inputs():
    """Of each token in 32 blocks 2 outputs of experts of 4096 features in 16 bits; with float8 half of the 2 inputs of
    experts, of two norms' outputs and of the 2 inputs of the last products, of 14336 features."""
    mixture, machine = replace(named_config("mixtral-8x7b"), seq=4096), Machine.load("h200-x8")
    degrees = Degrees(dp=8, ep=8, global_batch=8)
    stack = stack_named("megatron")
    kept = {
        name: forecast(mixture, degrees, machine, stack=each).memory["activation"]
        for name, each in {
            "late": replace(stack, weights_early=False), "early": stack, "float8": stack_named("megatron-float8"),
        }.items()
    }  # fmt: skip
    load = mixture.experts.capacity_factor
    assert kept["late"] - kept["early"] == pytest.approx(32 * 4096 * 2 * 4096 * 2 * load, rel=0.01)
    narrower = 2 * load * (4096 + 14336) + 2 * 4096
    assert kept["early"] - kept["float8"] == pytest.approx(32 * 4096 * narrower, rel=0.01)
