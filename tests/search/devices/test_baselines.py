"""What people try by hand, against plain loops over it."""

import itertools
import math

import pytest

from costmodels import Machine
from plans.model.transformer import TransformerConfig
from search.devices import Problem, baseline
from search.devices.baselines import BASELINES
from simulator.forecast import forecast_grid
from simulator.stacks import stack_named

CONFIG = TransformerConfig(
    name="small", num_layers=4, hidden=512, num_heads=8, ffn=2048, vocab=8192, seq=1024
)  # fmt: skip


def problem(**values):
    given = {"num_devices": 4, "global_batch": 8, "stack": stack_named("megatron")}
    return Problem(config=CONFIG, machine=Machine.load("h100-sxm-x8"), **given | values)


def test_the_greedy_halving_ends_with_all_modes_levels_and_sizes_of_its_degrees():
    asked = problem()
    tried = [each.degrees for each in BASELINES["greedy"](asked)]
    found = {(each.recompute, each.optimizer.parallel_level, each.micro_batch) for each in tried}
    dp = tried[0].dp
    assert len({(each.dp, each.cp, each.tp, each.pp) for each in tried}) == 1
    sizes = [size for size in (1, 2, 4) if asked.global_batch % (dp * size) == 0]
    assert dp > 1  # one replica has nothing to share
    assert found == set(itertools.product(asked.stack.recompute_modes, range(4), sizes)) and len(found) == len(tried)


def test_the_grid_tries_every_even_split_and_the_clock_changes_nothing():
    asked = problem(num_devices=8, global_batch=16)
    tried = [each.degrees for each in BASELINES["grid"](asked)]
    expected = {
        (dp, tp, pp, size, virtual, mode)
        for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4))
        if tp * pp <= 8
        for dp in [8 // tp // pp]
        for size in (1, 2, 4)
        if 16 % (dp * size) == 0
        for virtual in (1, 2, 4)
        if virtual == 1 or (pp > 1 and CONFIG.num_layers % (pp * virtual) == 0)
        for mode in ("none", "selective", "full")
    }
    assert {(each.dp, each.tp, each.pp, each.micro_batch, each.virtual, each.recompute) for each in tried} == expected
    assert len(tried) == len(expected) > 50  # more than are forecast between two looks at the clock
    assert [each.degrees for each in BASELINES["grid"](asked, 1e18)] == tried


@pytest.mark.parametrize("name", ["grid", "greedy"])
def test_a_baseline_is_the_fastest_that_fits_of_what_it_tries(name):
    asked = problem()
    tried = [each.degrees for each in BASELINES[name](asked)]
    seen = forecast_grid(asked.config, tried, asked.machine, stack=asked.stack)
    limit = sorted(each.peak_bytes for each in seen)[len(seen) // 3]
    fitting = sorted(each.step_s for each in seen if each.peak_bytes <= limit)
    found = baseline(asked.changed(memory_limit_bytes=limit), name)
    if name == "grid":
        assert [each.forecast.step_s for each in found.plans] == pytest.approx(fitting, rel=1e-9)
    assert all(each.forecast.peak_bytes <= limit for each in found.plans)
    assert math.isclose(found.best.forecast.step_s, min(each.forecast.step_s for each in found.plans))
    assert 0 < found.physics_bound_s < found.best.forecast.step_s
