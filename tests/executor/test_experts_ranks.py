"""Expert parallelism on eight gloo ranks: loss and weights as a plain module has them, and what is sent."""

from collections import Counter

import pytest

from costmodels import Machine
from plans.lower import lower
from plans.model.transformer import transformer
from plans.optimizer import Optimizer
from plans.program import Kind
from search import uniform_plan
from tests.executor.transformers_on_ranks import check, material, train_on_ranks
from tests.modules.transformer import random_weights, trained
from tests.plans.model.test_experts import ALL, CHOSEN, config_of

pytestmark = pytest.mark.ranks

OPTIMIZER = Optimizer(settings={"lr": 0.1}, threshold_bytes=1)
CASES = {
    "ep 2 of dp 4, tp 2, sequence parallel, zero 1": (
        CHOSEN, {"dp": 4, "ep": 2, "tp": 2, "sequence_parallel": True, "zero": 1},
    ),
    "ep 2, tp 2, pp 2, recompute, zero 2": (
        ALL, {"dp": 2, "ep": 2, "tp": 2, "pp": 2, "micro_batch": 2, "recompute": "full", "zero": 2},
    ),
    "ep 2 of dp 8": (ALL, {"dp": 8, "ep": 2, "zero": 3}),
}  # fmt: skip


def plan_of(name):
    experts, degrees = CASES[name]
    graph = transformer(config_of(experts), batch_size=8)
    return uniform_plan(graph, Machine.load("h200-x8"), optimizer=OPTIMIZER, **degrees)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    train_on_ranks({name: plan_of(name) for name in CASES}, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_a_module_that_walks_token_by_token(folder, name):
    plan = plan_of(name)
    _, _, batches = material(plan)
    losses, weights = trained(config_of(CASES[name][0]), random_weights(plan.graph), batches)
    check(folder, name, losses, {key: each.numpy() for key, each in weights.items()})


def test_tokens_travel_by_one_all_to_all_there_and_one_back_each_way():
    graph = transformer(config_of(CHOSEN), batch_size=8)
    program = lower(uniform_plan(graph, Machine.load("h200-x8"), dp=4, ep=2, tp=2))
    lines = [line for _, line in program.groups[0].walk()]
    sent = Counter(line.axes for line in lines if line.call == "all_to_all")
    assert sent == {("ep",): 4 * 2}  # to the experts and back, forward and backward, in two layers
    assert not any(line.kind is Kind.SEND for line in lines)


def test_gradients_of_experts_are_reduced_over_their_copies_only():
    (group,) = lower(plan_of("ep 2 of dp 8")).groups
    axes = {placement.name: placement.reduce_axes for placement in group.parameters}
    assert axes["layers.1.feed_forward.experts.w1.weight"] == ("dp",)
    assert set(axes["layers.1.feed_forward.router.weight"]) == {"dp", "ep"}
