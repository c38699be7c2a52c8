"""What the search assumes about recomputation when it leaves plans out: a further block never makes a step shorter."""

import random
from dataclasses import replace

import pytest

from costmodels import Machine
from costmodels.price.clock import at_usual_clock
from plans.degrees import Degrees
from plans.model.transformer import transformer_config
from plans.optimizer import Optimizer
from search.devices.costs import SHORTER
from simulator.forecast import forecast

ORDERS = ("tp", "cp", "dp", "pp"), ("pp", "dp", "tp", "cp")


@pytest.mark.parametrize("schedule", ["zb_v", "dualpipe_v", "zb_h2", "interleaved_zb"])
def test_a_further_block_that_recomputes_never_makes_a_step_shorter(schedule: str) -> None:
    draw, config = random.Random(schedule), transformer_config("llama-3-8b", num_layers=8)
    for machine in (at_usual_clock(Machine.load(name)) for name in ("h100-sxm-x64", "h200-x64")):
        optimizer = Optimizer(settings={"lr": 1e-4}, kind="adamw", parallel_level=draw.choice((0, 1, 2, 3)))
        few = Degrees(
            dp=2, tp=draw.choice((1, 2)), pp=2, global_batch=2 * draw.choice((4, 16)), schedule=schedule,
            virtual=1 if schedule == "zb_h2" else 2, optimizer=optimizer, order=draw.choice(ORDERS),
        ).spelled_out(8)  # fmt: skip
        assert few.layers is not None
        mode = draw.choice(("memory_bound", "selective", "selective_op", "full"))
        before = forecast(config, few, machine).step_s
        for number in range(1, max(few.layers)):
            step_s = forecast(config, replace(few, recompute=mode, recompute_layers=number), machine).step_s
            assert step_s >= before * (1.0 - SHORTER)
            before = step_s
