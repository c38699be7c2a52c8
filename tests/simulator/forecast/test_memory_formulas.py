"""Formulas of memory against the peak of the lowered program, in the order of its instructions."""

from dataclasses import replace

import pytest

from costmodels import Machine
from costmodels.price.clock import at_usual_clock
from plans.degrees import Degrees
from plans.model.transformer import transformer_config
from plans.optimizer import Optimizer
from search.devices import Pins, Problem, solve
from simulator.estimate import estimate
from simulator.forecast import forecast
from simulator.forecast.predict import step_forecast
from simulator.stacks import stack_named

MACHINE = at_usual_clock(Machine.load("h100-sxm-x64"))
LLAMA = transformer_config("llama-3-8b", num_layers=16)
MIXTRAL = transformer_config("mixtral-8x7b", num_layers=16)
CASES = [
    (LLAMA, {"schedule": "1f1b", "num_micro_batches": 8}),
    (LLAMA, {"schedule": "1f1b", "num_micro_batches": 8, "recompute": "selective", "recompute_layers": 2}),
    (LLAMA, {"schedule": "interleaved_1f1b", "virtual": 2, "num_micro_batches": 8, "optimizer_level": 2}),
    (LLAMA, {"schedule": "zb_h1", "num_micro_batches": 8}),
    (LLAMA, {"schedule": "zb_v", "virtual": 2, "num_micro_batches": 8, "recompute": "full", "recompute_layers": 1}),
    (LLAMA, {"schedule": "dualpipe_v", "virtual": 2, "num_micro_batches": 16, "tp": 2, "sequence_parallel": True}),
    (
        LLAMA,
        {"schedule": "1f1b", "num_micro_batches": 8, "tp": 2, "sequence_parallel": True, "recompute": "memory_bound"},
    ),
    (LLAMA, {"schedule": "gpipe", "num_micro_batches": 4}),
    (LLAMA, {"schedule": "zb_h2", "num_micro_batches": 2, "optimizer_level": 1}),  # before all gradients are there
    (LLAMA, {"schedule": "1f1b", "num_micro_batches": 1}),
    (MIXTRAL, {"schedule": "zb_v", "virtual": 2, "num_micro_batches": 8, "ep": 2}),
    (MIXTRAL, {"schedule": "1f1b", "num_micro_batches": 8, "ep": 2, "recompute": "selective_op"}),
]


@pytest.mark.parametrize(("config", "given"), CASES)
def test_formulas_hardly_exceed_the_peak_of_the_program(config, given):
    values = dict(given)
    count, level = values.pop("num_micro_batches"), values.pop("optimizer_level", 0)
    degrees = Degrees(
        dp=2, pp=4, micro_batch=1, global_batch=2 * count, optimizer=Optimizer(kind="adamw", parallel_level=level),
        **values,
    )  # fmt: skip
    exact = step_forecast(config, degrees, MACHINE).peak_bytes
    assert -0.1 < estimate(config, degrees, MACHINE).peak_bytes / exact - 1 < 0.005


def test_the_peak_of_a_rank_that_does_not_fit_is_found_without_the_others():
    step = step_forecast(LLAMA, Degrees(dp=2, pp=4, micro_batch=1, global_batch=16), MACHINE)
    assert step.peak_above(step.peak_bytes) is None
    assert step.peak_above(min(peak for peak, _ in step.peaks) - 1) == step.peaks[0][0]


def test_a_search_for_other_software_predicts_the_steps_that_forecasts_of_it_do():
    machine, stack = Machine.load("h200-x8"), stack_named("torch")
    pins = Pins(tp=1, cp=1, pp=1, recompute="none", micro_batch=1)
    problem = Problem(config=LLAMA, machine=machine, num_devices=8, global_batch=16, pins=pins, stack=stack)
    best = solve(problem).best
    assert best.forecast == forecast(LLAMA, best.degrees, machine, stack=stack)


@pytest.mark.parametrize(("schedule", "virtual", "layers"), [
    ("1f1b", 1, (7, *[8] * 14, 7)), ("interleaved_1f1b", 4, (1, *[2] * 62, 1)),
])  # fmt: skip
def test_llama_3_405b_fits_where_it_was_trained(schedule, virtual, layers):
    """Grattafiori et al. 2024 (arXiv 2407.21783), table 4 and section 3.3.2: tp 8, pp 16, dp 128, 16 sequences of 8,192
    tokens per replica, one layer less at either end, no product computed twice; H100 of 80 GB."""
    machine, config = Machine.load("h100-sxm-x16384"), transformer_config("llama-3-405b")
    optimizer = Optimizer(kind="adamw", parallel_level=1, gradient_dtype="float32", master_dtype="float32")
    degrees = Degrees(
        dp=128, tp=8, pp=16, micro_batch=1, global_batch=2048, schedule=schedule, virtual=virtual, layers=layers,
        sequence_parallel=True, optimizer=optimizer,
    )  # fmt: skip
    kept, again = (
        forecast(config, replace(degrees, recompute=mode), machine).peak_bytes for mode in ("none", "memory_bound")
    )
    assert again < machine.room_bytes < kept


def test_what_sequence_parallelism_gathers_is_not_kept_where_norms_are_computed_again():
    """Per block and micro-batch, in s b h elements at tp 8 with 4 query heads for each head of keys: queries 1/8, keys
    and values 1/32 each, attention 1/8, two residual sums 1/8 each, gate and value 3.5/8 each; and both inputs of
    products, whole, if they are kept."""
    config = transformer_config("llama-3-8b")
    elements = config.seq * config.hidden
    kept = {}
    for mode in ("none", "memory_bound"):
        degrees = Degrees(tp=8, pp=1, micro_batch=1, global_batch=1, sequence_parallel=True, recompute=mode)
        few, many = (
            forecast(replace(config, num_layers=count), degrees, MACHINE).memory["activation"] for count in (8, 16)
        )
        kept[mode] = (many - few) / 8 / 2 / elements
    each = 1 / 8 + 2 / 32 + 1 / 8 + 2 / 8 + 2 * 3.5 / 8
    assert kept["memory_bound"] == pytest.approx(each, rel=0.01)
    assert kept["none"] == pytest.approx(each + 2 + 3.5 / 8, rel=0.01)


def test_a_gated_layer_of_megatron_keeps_what_its_fused_kernels_save():
    """In units of s b h / t bytes of 16 bits, with sequence parallelism: input, both norms' outputs, attention's output
    and the residual sum 2 each, queries and keys and values 2 + 4/4, the MLP's two products 2 x 7, their product 7."""
    machine, stack = Machine.load("h100-sxm-x4"), stack_named("megatron")
    degrees = Degrees(tp=4, micro_batch=1, global_batch=1, sequence_parallel=True)
    configs = [transformer_config("llama-3-70b", num_layers=layers, seq=8192) for layers in (8, 16)]
    small, large = (forecast(config, degrees, machine, stack=stack).memory["activation"] for config in configs)
    layer = (5 * 2 + 2 * (1 + 2 * 8 / 64) + 3 * 2 * 3.5) * 8192 * configs[0].hidden / 4
    assert (large - small) / 8 == pytest.approx(layer, rel=0.02)
