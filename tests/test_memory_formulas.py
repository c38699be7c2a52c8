"""Formulas of memory against the peak of the lowered program, in the order of its instructions."""

import pytest

from costmodels import Machine
from costmodels.price.clock import at_usual_clock
from plans.degrees import Degrees
from plans.model.transformer import transformer_config
from plans.plan import Optimizer
from search.devices import Pins, Problem, solve
from simulator.forecast import estimate, forecast
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
