"""Sequences chosen under a machine's price: stored in a plan, lowered, saved, explained, trained with."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from costmodels import Machine
from executor.train.options import RunOptions
from executor.train.result import RankResult
from executor.train.run import run_rank
from plans.errors import TwofoldError
from plans.graph_data import graph_data
from plans.layout import Layout
from plans.lower import lower, lower_by
from plans.model.mlp import mlp_graph
from plans.plan import Plan, load_plan, plan_from_json, plan_to_json, save_plan
from plans.program import Kind
from plans.ranks import format_axes
from search.attach_prediction import predicted
from search.operators.pricing import redistribution_choice
from search.result import SearchResult
from simulator import simulate
from tests.plans.lower.test_lowering import OneDevice, check_training, plan_of, random_values
from tests.support.on_ranks import run_on_ranks
from tests.support.random_plans import random_plan

MACHINE = "ascend-910b2-x64"


def chosen(plan: Plan) -> Plan:
    choice = redistribution_choice(Machine.load(MACHINE), plan.num_ranks)
    program = lower_by(plan, choice)
    stored = msgspec.structs.replace(plan, redistributions=choice.redistributions)
    assert lower(stored) == program  # lowering needs no machine
    return stored


@pytest.mark.parametrize("seed", range(16))
def test_random_plans_train_by_sequences_of_least_time(seed: int) -> None:
    check_training(chosen(random_plan(seed)))


def test_some_random_plans_store_sequences() -> None:
    assert sum(bool(chosen(random_plan(seed)).redistributions) for seed in range(8)) >= 2


def reordering() -> Plan:
    """Layers on axes in other orders: least bytes and least time differ on this machine."""
    splits = {
        "layer1.linear": {"b0": ("a", "b")},
        "layer1.relu": {"d0": ("b", "a")},
        "layer2.linear": {"b0": ("b",), "n": ("a",)},
    }
    plan = plan_of(mlp_graph([64, 512, 64], 64), Layout((2, 2), ("a", "b")), splits)
    return predicted(msgspec.structs.replace(plan, execution="eager"), Machine.load(MACHINE))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return reordering()


def test_the_faster_sequences_are_stored(plan: Plan) -> None:
    assert plan.redistributions
    assert plan.prediction is not None
    bare = msgspec.structs.replace(plan, redistributions=())
    machine = Machine.load(MACHINE)
    assert simulate(bare, machine).step_interval_s > simulate(plan, machine).step_interval_s == plan.prediction.step_s
    check_training(plan)


def test_they_are_explained(plan: Plan) -> None:
    text = SearchResult(
        plans=[plan], lower_bound_s=1e-6, relaxed_bound_s=1e-6, physics_bound_s=1e-6, search_s=0.1
    ).explain()
    for each in plan.redistributions:
        source, target = each.key[:2]
        line = next(line for line in text.splitlines() if line.startswith(f"{source} to {target} of "))
        assert all(str(step.kind) in line.partition("instead of")[0] for step in each.sequence)


def test_the_graph_shows_what_the_program_moves(plan: Plan) -> None:
    for each in (plan, msgspec.structs.replace(plan, redistributions=())):
        shown = [word for edge in graph_data(each.graph, each).edges for word in edge.steps]
        moved = [
            f"{one.call} over {format_axes(one.axes)}" if one.axes else one.call
            for block, one in lower(each).groups[0].walk()
            if block.label == "0F0" and one.kind in (Kind.COLLECTIVE, Kind.RECV)
        ]
        assert [word for word in shown if word.startswith(("all_", "reduce_", "transfer"))] == moved


def test_a_saved_plan_keeps_them(plan: Plan, tmp_path) -> None:
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert lower(load_plan(tmp_path / "plan.json")) == lower(plan)


def test_a_plan_saved_without_them_still_loads(plan: Plan) -> None:
    fields = json.loads(plan_to_json(plan))
    del fields["redistributions"]
    bare = plan_from_json(json.dumps(fields).encode(), "older.json")
    assert bare.redistributions == ()
    assert lower(bare) != lower(plan)
    check_training(bare)


def test_steps_that_lead_elsewhere_are_refused(plan: Plan) -> None:
    fields = json.loads(plan_to_json(plan))
    fields["redistributions"][0]["steps"].pop()
    with pytest.raises(TwofoldError, match="stored redistribution from"):
        plan_from_json(json.dumps(fields).encode(), "edited.json")


def work(rank: int, folder: Path) -> None:
    plan = reordering()
    weights, batches = random_values(plan.graph, 0, 3)
    weights = {name: each.astype(np.float32) for name, each in weights.items()}
    batches = [{name: each.astype(np.float32) for name, each in batch.items()} for batch in batches]
    result = run_rank(lower(plan), plan, batches, weights, 3, device="cpu", options=RunOptions(record_steps=1))
    result.save(folder / f"{rank}.npz")


@pytest.mark.ranks
def test_ranks_execute_them(plan: Plan, tmp_path: Path) -> None:
    """On four gloo ranks: losses of one device, and the communication that was planned, not that of least bytes."""
    run_on_ranks(work, 4, tmp_path)
    weights, batches = random_values(plan.graph, 0, 3)
    device = OneDevice(plan.graph, plan.optimizer, weights)
    losses = [device.step(batch) for batch in batches]
    for rank in range(4):
        result = RankResult.load(tmp_path / f"{rank}.npz")
        assert result.differences == ()
        np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
