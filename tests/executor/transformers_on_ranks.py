"""Transformers that train on eight gloo ranks under several plans, and comparison with a plain module."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from executor.train.options import RunOptions
from executor.train.run import run_rank
from plans.plan import Plan
from tests.modules.transformer import random_tokens, random_weights
from tests.support.on_ranks import keep_plan, kept_plan, run_on_ranks

NUM_STEPS = 2


def material(plan):
    """Weights and batches as arrays, and the batches as tensors."""
    weights = {name: each.numpy() for name, each in random_weights(plan.graph).items()}
    batches = [random_tokens(plan.graph, 32, seed) for seed in range(NUM_STEPS)]
    return weights, [{name: each.numpy() for name, each in batch.items()} for batch in batches], batches


def train_on_ranks(plans: Mapping[str, Plan], folder: Path) -> None:
    """Train every plan; losses and weights are in files of its name."""
    for name, plan in plans.items():
        keep_plan(plan, folder / f"{name}.plan")
    run_on_ranks(_train, 8, folder)


def _train(rank, folder):
    for path in sorted(folder.glob("*.plan")):
        plan, program = kept_plan(path)
        weights, batches, _ = material(plan)
        result = run_rank(
            program, plan, batches, weights, NUM_STEPS, device="cpu", weights_path=path.with_suffix(".npz"),
            options=RunOptions(record_steps=0),
        )  # fmt: skip
        assert not result.differences, result.differences
        if rank == 0:
            np.save(path.with_suffix(".losses.npy"), np.asarray(result.losses))


def check(folder, name, losses, weights):
    """Losses and weights of the ranks are these."""
    np.testing.assert_allclose(np.load(folder / f"{name}.losses.npy"), losses, rtol=1e-10)
    with np.load(folder / f"{name}.npz") as found:
        assert set(found.files) == set(weights)
        for weight, expected in weights.items():
            np.testing.assert_allclose(found[weight], expected, rtol=1e-8, atol=1e-10, err_msg=weight)
