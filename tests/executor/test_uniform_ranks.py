"""A transformer under tp 2, dp 2, pp 2 on eight gloo ranks: loss, weights and communication."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from executor.train.run import run_rank
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from search import uniform_plan
from tests.executor.transformers_on_ranks import NUM_STEPS, check, material, train_on_ranks
from tests.modules.transformer import random_weights, trained
from tests.plans.test_uniform import GPT, LLAMA, MACHINE

pytestmark = pytest.mark.ranks

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uniform")
    train_on_ranks({name: plan_of(name) for name in CASES}, folder)
    return folder


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
