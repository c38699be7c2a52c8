"""A transformer under tp 2, dp 2, pp 2 on eight gloo ranks: loss, weights and communication."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from executor.train.options import RunOptions
from executor.train.run import run_rank
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from search import uniform_plan
from tests.modules.transformer import random_tokens, random_weights, trained
from tests.plans.test_uniform import GPT, LLAMA, MACHINE
from tests.support.on_ranks import keep_plan, kept_plan, run_on_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 2
DROPPING = TransformerConfig(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, ffn=48, vocab=32, seq=8, dtype="float64", dropout=0.3,
    attention_dropout=0.2,
)  # fmt: skip
OPTIMIZER = Optimizer(settings={"lr": 0.1}, threshold_bytes=1)
CASES = {
    **{
        f"{name}, {recompute}, sequence parallel {sequence_parallel}": (
            config, {"sequence_parallel": sequence_parallel, "recompute": recompute, "zero": zero},
        )
        for name, config, recompute, sequence_parallel, zero in (
            ("llama", LLAMA, "selective", False, 1), ("gpt", GPT, "full", True, 1),
            ("llama", LLAMA, "memory_bound", True, 0),
        )
    },
    "some blocks recompute, stages innermost": (
        replace(LLAMA, num_layers=4),
        {"recompute": "full", "recompute_layers": 1, "order": ("pp", "tp", "cp", "dp"), "zero": 1},
    ),
    "pairs of dualpipe_v at once": (
        replace(LLAMA, num_layers=4),
        {"schedule": "dualpipe_v", "virtual": 2, "micro_batch": 1, "sequence_parallel": True, "zero": 1},
    ),
    "dropping": (DROPPING, {"sequence_parallel": True, "recompute": "full"}),
}  # fmt: skip


def plan_of(name):
    config, options = CASES[name]
    degrees = {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 2, "optimizer": OPTIMIZER} | options
    plan = uniform_plan(transformer(config, batch_size=8), MACHINE, **degrees)
    return msgspec.structs.replace(plan, overlap_pairs=name.startswith("pairs"))


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
    folder = tmp_path_factory.mktemp("uniform")
    for name in CASES:
        keep_plan(plan_of(name), folder / f"{name}.plan")
    run_on_ranks(work, 8, folder)
    return folder


def check(folder, name, losses, weights):
    np.testing.assert_allclose(np.load(folder / f"{name}.losses.npy"), losses, rtol=1e-10)
    with np.load(folder / f"{name}.npz") as found:
        assert set(found.files) == set(weights)
        for weight, expected in weights.items():
            np.testing.assert_allclose(found[weight], expected, rtol=1e-8, atol=1e-10, err_msg=weight)


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropping"])
def test_ranks_train_as_a_plain_torch_module_does(folder, name):
    plan = plan_of(name)
    _, _, batches = material(plan)
    losses, weights = trained(CASES[name][0], random_weights(plan.graph), batches)
    check(folder, name, losses, {key: each.numpy() for key, each in weights.items()})


def test_dropout_drops_the_same_on_any_number_of_ranks(folder, tmp_path):
    plan = plan_of("dropping")
    weights, batches, _ = material(plan)
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(operator.name for operator in plan.graph.operators))
    alone = Plan(graph=plan.graph, stages=(stage,), optimizer=OPTIMIZER, num_micro_batches=1)
    result = run_rank(lower(alone), alone, batches, weights, NUM_STEPS, device="cpu", weights_path=tmp_path / "w.npz")
    with np.load(tmp_path / "w.npz") as expected:
        check(folder, "dropping", np.asarray(result.losses), {name: expected[name] for name in expected.files})
