"""Expert parallelism on eight gloo ranks: loss and weights as a plain module has them, and what is sent."""

from collections import Counter

import numpy as np
import pytest

from costmodels import Machine
from executor.train.options import RunOptions
from executor.train.run import run_rank
from plans.lower import lower
from plans.model.transformer import transformer
from plans.optimizer import Optimizer
from plans.program import Kind
from search import uniform_plan
from tests.modules.transformer import random_tokens, random_weights, trained
from tests.plans.model.test_experts import ALL, CHOSEN, config_of
from tests.support.on_ranks import keep_plan, kept_plan, run_on_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 2
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


def material(plan):
    weights = {name: each.numpy() for name, each in random_weights(plan.graph).items()}
    batches = [random_tokens(plan.graph, 32, seed) for seed in range(NUM_STEPS)]
    return weights, [{name: each.numpy() for name, each in batch.items()} for batch in batches], batches


def work(rank, folder):
    for name in CASES:
        plan, program = kept_plan(folder / f"{name}.plan")
        weights, batches, _ = material(plan)
        result = run_rank(
            program, plan, batches, weights, NUM_STEPS, device="cpu", weights_path=folder / f"{name}.npz",
            options=RunOptions(record_steps=0),
        )  # fmt: skip
        assert not result.differences, result.differences
        if rank == 0:
            np.save(folder / f"{name}.losses.npy", np.asarray(result.losses))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    for name in CASES:
        keep_plan(plan_of(name), folder / f"{name}.plan")
    run_on_ranks(work, 8, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_a_module_that_walks_token_by_token(folder, name):
    plan = plan_of(name)
    _, _, batches = material(plan)
    losses, weights = trained(config_of(CASES[name][0]), random_weights(plan.graph), batches)
    np.testing.assert_allclose(np.load(folder / f"{name}.losses.npy"), losses, rtol=1e-10)
    with np.load(folder / f"{name}.npz") as found:
        assert set(found.files) == set(weights)
        for weight, expected in weights.items():
            np.testing.assert_allclose(found[weight], expected.numpy(), rtol=1e-8, atol=1e-10, err_msg=weight)


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
