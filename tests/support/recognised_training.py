"""Plans of recognised modules, saved with initial values and a batch for ranks, and trained there."""

import msgspec
import numpy as np
import torch

from executor.train.options import RunOptions
from executor.train.run import run_rank
from executor.weights.models import InitialParameters
from plans.degrees.plan import plan_of
from plans.model.transformer import transformer
from tests.support.on_ranks import keep_plan, kept_plan

NUM_STEPS = 2  # the second one reads the states of the optimizer that the first one made


def save_cases(folder, cases):
    """A case is what was recognised, the degrees, the module and a batch; the plan of number 0 is in 0.plan."""
    for number, (found, degrees, module, batch) in enumerate(cases):
        plan = found.plan(plan_of(degrees, transformer(found.config, batch_size=degrees.global_batch)))
        keep_plan(msgspec.structs.replace(plan, output_broadcast=True), folder / f"{number}.plan")
        names = [tensor.name for tensor in found.graph.tensors.values() if tensor.kind == "input"]
        np.savez(folder / f"{number}.batch.npz", **dict(zip(names, map(torch.Tensor.numpy, batch), strict=True)))
        np.savez(folder / f"{number}.values.npz", **InitialParameters(module, 0))


def train_cases(rank, folder):
    """Train every case; rank 0 keeps losses and weights."""
    for number in range(len([*folder.glob("*.batch.npz")])):
        plan, program = kept_plan(folder / f"{number}.plan")
        with np.load(folder / f"{number}.values.npz") as values, np.load(folder / f"{number}.batch.npz") as batch:
            parameters, batches = dict(values), [dict(batch)] * NUM_STEPS
        result = run_rank(
            program, plan, batches, parameters, NUM_STEPS, device="cpu",
            weights_path=folder / f"{number}.weights.npz", options=RunOptions(count=False, record_steps=0),
        )  # fmt: skip
        if rank == 0:
            np.save(folder / f"{number}.losses.npy", np.asarray(result.losses))
