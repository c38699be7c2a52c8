"""One configuration says the same as symbolic bodies, as a lowered program and in the event engine.

`python -m benchmarks.one_world` compares thousands; here a few of each kind stand for them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

sys.path.append(str(Path(__file__).parents[1]))

from random import Random

from benchmarks.one_world import Score, check, draw_case
from costmodels import Machine, executing
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.model.transformer import transformer, transformer_config
from plans.plan import EXECUTIONS, Optimizer
from simulator import simulate
from simulator.forecast import estimate, forecast

SEEDS = (1, 2, 3)
"""Between them: all levels, tied tables, experts, heads of keys that several ranks share."""


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_forecast_program_and_engine_agree(seed: int, execution: str) -> None:
    draw, score = Random(seed), Score()
    while score.cases < 5:
        case = draw_case(draw, num_ranks=8)
        if case is not None:
            check(replace(case, machine=executing(case.machine, execution)), score)
    assert score.differ == []
    assert score.bodies_equal == score.memory_equal == score.time_equal == score.cases
    assert max(map(abs, score.errors)) <= 0.04


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2"])
def test_an_estimate_is_near_the_forecast(schedule: str, recompute: str) -> None:
    config = transformer_config("llama-3-70b", num_layers=12)
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=1, master_dtype="float32")
    degrees = Degrees(
        tp=8, pp=2, global_batch=8, schedule=schedule, recompute=recompute, optimizer=optimizer, sequence_parallel=True
    )
    found = [ask(config, degrees, Machine.load("h100-sxm-x16")) for ask in (estimate, forecast)]
    assert found[0].step_s == pytest.approx(found[1].step_s, rel=0.05)
    assert found[0].peak_bytes == pytest.approx(found[1].peak_bytes, rel=0.05)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_h2", 1)])
def test_a_step_is_the_pace_of_the_engine(schedule: str, virtual: int, execution: str) -> None:
    """Schedules whose ranks do not end together overlap one step with the next."""
    quiet = msgspec.structs.replace(executing(Machine.load("h200-x8"), execution), overlap=())
    config = transformer_config("llama-3-8b", num_layers=8)
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=1, master_dtype="float32")
    degrees = Degrees(dp=2, pp=4, global_batch=16, schedule=schedule, virtual=virtual, optimizer=optimizer)
    timeline = simulate(plan_of(degrees, transformer(config, batch_size=16)), quiet, num_steps=3, with_memory=False)
    assert forecast(config, degrees, quiet).step_s == timeline.step_interval_s
