"""Graphs too entangled to be eliminated: dual bounds against brute force, elimination and integer programming."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.field.models import MODELS
from benchmarks.field.wide import captured
from benchmarks.search.exact import by_integer_programming, random_problem, tangled_problem
from costmodels import Machine
from executor.capture.capture import capture
from plans.model.graph import Graph
from plans.optimizer import Optimizer
from search import search, uniform_plan
from search.operators import refine
from search.operators.additive import StageCosts
from search.operators.dual import Dual
from search.operators.eliminate import best_assignment, min_marginals
from search.operators.moves import Moves
from search.operators.pricing import instruction_cost, redistribution_choice
from search.operators.refine import cheapest
from search.operators.space import finest, meshes

MACHINES = ("h200-x8", "ascend-910b2-x8", "cpu-2core-x8", "a100-80gb-x16")


def costs_of(graph: Graph, seed: int, bounded: bool, num_devices: int = 8, num_micro_batches: int = 2) -> StageCosts:
    machine = Machine.load(MACHINES[seed % len(MACHINES)])
    mesh = finest(meshes(range(num_devices)))[-1]
    choice = redistribution_choice(machine, num_devices)
    moves = Moves(choice.seconds, choice.price_of) if bounded else None  # type: ignore[arg-type]
    return StageCosts(
        micro=graph, operators=graph.operators, mesh=mesh, num_micro_batches=num_micro_batches, optimizer=Optimizer(),
        full_batch=True, cost=instruction_cost(machine, mesh, num_devices), choice=choice, moves=moves,
    )  # fmt: skip


def graph_of(seed: int) -> Graph:
    return random_problem(seed, 7) if seed % 2 else tangled_problem(seed)


@pytest.mark.parametrize("cells", [70_000, 1])
@pytest.mark.parametrize("seed", range(6))
def test_bounds_are_below_what_every_value_costs(seed: int, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables whole and as pairs; the bound never falls, also where values are taken away."""
    monkeypatch.setattr("search.operators.dual.MOST_CELLS", cells)
    problem = costs_of(graph_of(seed), seed, bounded=False).problem()
    exact = [np.array([total for total, _ in row]) for row in min_marginals(problem.sizes, problem.tables())]
    least = min(row.min() for row in exact)
    dual, before, limit = Dual(problem), 0.0, math.inf
    for sweep in range(12):
        dual.sweep()
        bound = dual.bound()
        assert before * (1 - 1e-12) <= bound <= least * (1 + 1e-9)
        for left, found, real in zip(dual.problem.left, dual.value_bounds(), exact, strict=True):
            assert (found <= real[left] * (1 + 1e-9))[real[left] <= limit].all()
        assert all(problem.total(dual.problem.numbers(values)) >= least * (1 - 1e-9) for values in dual.met)
        before = bound
        if sweep % 4 == 3:
            limit = least * 1.01
            dual.drop(limit)
            assert dual.bound() >= before * (1 - 1e-9)
    assert bound >= 0.98 * least


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_rises_with_prices(seed: int) -> None:
    costs = costs_of(graph_of(seed), seed, bounded=True)
    question = costs.question()
    dual = Dual(question.problem)
    for _ in range(6):
        dual.sweep()
        before = dual.bound()
        met = [question.priced(values) for values in dual.met]
        dual.rise()
        assert before * (1 - 1e-12) <= dual.bound() <= min(met).cost_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_the_dual_finds_what_elimination_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(seed)
    priced = costs_of(graph, seed, bounded=False).problem()
    least_s = best_assignment(priced.sizes, priced.tables())[0]
    monkeypatch.setattr(refine, "MAX_CELLS", 0)
    monkeypatch.setattr(refine, "LEFT_CELLS", 10_000 if seed % 3 else 300)
    question = costs_of(graph, seed, bounded=True).question()
    assert not question.is_small
    answers = cheapest(question, 4)
    assert answers.bound_s <= least_s * (1 + 1e-9)
    assert answers.found[0].cost_s >= least_s * (1 - 1e-9)
    assert all(priced.total(each.values) == pytest.approx(each.cost_s, rel=1e-9) for each in answers.found)
    if seed % 3:
        assert answers.found[0].cost_s == pytest.approx(least_s, rel=1e-8)
        assert answers.bound_s == pytest.approx(least_s, rel=1e-8)
    else:
        assert answers.found[0].cost_s <= 1.02 * least_s and answers.bound_s >= 0.98 * least_s


@pytest.fixture(scope="module")
def llama() -> Graph:
    return captured("Llama", 1)


def test_a_block_as_written_is_solved_exactly(llama: Graph) -> None:
    """On four devices elimination would need a table of more than 2e6 cells; HiGHS solves the same with other means."""
    bounded = costs_of(llama, 0, bounded=True, num_devices=4, num_micro_batches=1)
    assert bounded.problem().entangled()[0] > 2e6
    answers = cheapest(bounded.question(), 4)
    assert answers.found[0].cost_s == pytest.approx(answers.bound_s, rel=1e-8)
    priced = costs_of(llama, 0, bounded=False, num_devices=4, num_micro_batches=1)
    assert answers.found[0].cost_s == pytest.approx(by_integer_programming(priced), rel=1e-6)


def test_at_the_time_limit_the_best_answer_is_returned_with_its_bound(llama: Graph) -> None:
    question = costs_of(llama, 0, bounded=True).question()
    answers = cheapest(question, 4, is_over=lambda: True)
    assert 0 < answers.bound_s < answers.found[0].cost_s < 1.2 * answers.bound_s
    assert question.priced(answers.found[0].values).cost_s == answers.found[0].cost_s


def test_the_search_states_the_gap_of_its_strategies(llama: Graph) -> None:
    found = search(llama, Machine.load("h200-x8"), num_devices=4, top_k=1, method="operators")
    assert found.strategies_gap == pytest.approx(0.0, abs=1e-8)
    assert found.to_json()["strategies_gap"] == found.strategies_gap
    assert "additive cost is the lowest of all strategies for its stages" in found.summary()


@pytest.mark.parametrize(("name", "devices"), [("plain Llama", 4), ("nanoGPT", 2)])
def test_no_plan_is_slower_than_data_parallel(name: str, devices: int) -> None:
    """The search of a wide Llama on 4 devices takes minutes: it is not here."""
    graph, machine = capture(*MODELS[name]()), Machine.load("h200-x8")
    found = search(graph, machine, num_devices=devices, top_k=1).best.prediction
    split = uniform_plan(graph, machine, dp=devices).prediction
    assert found is not None and split is not None
    assert found.step_s <= split.step_s * (1 + 1e-9)
