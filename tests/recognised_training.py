"""Plans of recognised modules, saved for ranks, and trained there."""

import msgspec
import numpy as np

from executor.train.run import run_rank
from plans.degrees.plan import plan_of
from plans.lower import lower
from plans.model.transformer import transformer
from plans.plan import load_plan, save_plan


def save_plans(folder, cases):
    """`cases` are what was recognised and the degrees; the plan of number 0 is 0.json."""
    for number, (found, degrees) in enumerate(cases):
        plan = found.plan(plan_of(degrees, transformer(found.config, batch_size=degrees.global_batch)))
        save_plan(msgspec.structs.replace(plan, output_broadcast=True), folder / f"{number}.json")


def train_plans(rank, folder, cases, num_steps):
    """`cases` are a name, one batch for all steps, and initial values; rank 0 keeps losses and weights."""
    for number, (name, batch, parameters) in enumerate(cases):
        plan = load_plan(folder / f"{number}.json")
        result = run_rank(
            lower(plan), plan, [batch] * num_steps, parameters, num_steps, device="cpu",
            weights_path=folder / f"{number}.weights.npz",
        )  # fmt: skip
        assert not result.differences, (name, result.differences)
        if rank == 0:
            np.save(folder / f"{number}.losses.npy", np.asarray(result.losses))
