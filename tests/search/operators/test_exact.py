"""The search over strategies against every combination, and against mixed-integer programming (scipy's HiGHS)."""

import pytest

from benchmarks.search.exact import against_every_plan, against_every_strategy, against_milp


@pytest.mark.parametrize("seed", range(40))
def test_least_additive_cost_is_that_of_every_combination(seed: int) -> None:
    found_s, least_s, _ = against_every_strategy(seed)
    assert found_s == pytest.approx(least_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_longer_chains_and_branches_agree_with_integer_programming(seed: int) -> None:
    found, least = against_milp(seed, num_variables=12)
    assert found == pytest.approx(least, rel=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_chosen_plan_is_within_one_percent_of_all_simulated(seed: int) -> None:
    chosen_s, least_s, num_plans = against_every_plan(seed)
    assert num_plans >= 8
    assert chosen_s <= 1.01 * least_s
