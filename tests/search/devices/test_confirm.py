"""The plans of a search in the event engine, and the simplest of those that are equally fast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodels import Machine
from plans.lower import lower
from plans.model.transformer import transformer_config
from search.devices import Pins, Problem, solve
from search.devices.confirm import confirmed, plan_of
from search.devices.preference import preferred
from simulator import simulate


@pytest.fixture(scope="module")
def found():
    config, pins = transformer_config("llama-3-8b", num_layers=2, seq=512), Pins(recompute="none", tp=1)
    machine = Machine.load("h100-sxm-x8")
    return solve(Problem(config=config, machine=machine, num_devices=2, global_batch=8, pins=pins))


def test_plans_are_ordered_by_the_engine(found):
    checked = confirmed(found, 3)
    first = checked.result.plans[:3]
    assert not checked.left_out and {each.degrees for each in first} == {each.degrees for each in found.plans[:3]}
    for each in first:
        timeline = simulate(lower(plan_of(found.problem, each)), found.problem.machine)
        assert each.simulated_s == timeline.step_interval_s
    assert [each.simulated_s for each in first] == sorted(each.simulated_s for each in first)


def test_long_steps_are_not_simulated_unasked(found):
    checked = confirmed(found, 2, most_instructions=10)
    assert [each for each, _ in checked.left_out] == list(found.plans[:2]) == list(checked.result.plans[:2])
    assert "too many instructions" in checked.left_out[0][1]
    assert checked.result.num_proven == found.num_proven == 1


def test_of_equal_plans_the_simplest_comes_first(found):
    best = found.plans[0]
    odd = replace(best, degrees=replace(best.degrees, order=("dp", "tp", "cp", "pp")))
    slower = replace(best, forecast=replace(best.forecast, step_s=best.forecast.step_s * 1.009))
    much_slower = replace(best, forecast=replace(best.forecast, step_s=best.forecast.step_s * 1.02))
    ranked = replace(found, plans=(odd, slower, much_slower), num_proven=1)
    chosen = preferred(ranked, 3)
    assert chosen.num_equal == 2 and chosen.plans == (slower, odd, much_slower)
    assert chosen.num_proven == 0 and chosen.gap == pytest.approx(0.009)
    assert "at most 0.9 % longer than the shortest of the search space" in chosen.summary()


def test_of_equal_plans_fewer_chunks_are_simpler(found):
    def interleaved(virtual, peak_bytes):
        degrees = replace(found.plans[0].degrees, pp=2, schedule="interleaved_1f1b", virtual=virtual, layers=None)
        return replace(
            found.plans[0], degrees=degrees, forecast=replace(found.plans[0].forecast, peak_bytes=peak_bytes)
        )

    many, few = interleaved(6, 10), interleaved(4, 11)
    assert preferred(replace(found, plans=(many, few), num_proven=1), 2).plans == (few, many)


def test_a_plan_that_is_proven_stays_proven_where_nothing_moves(found):
    chosen = preferred(replace(found, plans=found.plans[:1]), 5)
    assert chosen.num_equal == 1 and chosen.num_proven == 1
