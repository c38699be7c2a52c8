"""Lowered programs on pretend ranks against training on one device, and the properties that a program must have."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from plans.graph import Graph
from plans.lower import lower
from plans.plan import Optimizer, Plan
from pretend import Pretend
from random_plans import random_plan

TOLERANCE = 1e-10
ELEMENTWISE = {
    "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "abs": torch.abs,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "linear": F.linear,
    "l1_loss": F.l1_loss, "mse_loss": F.mse_loss,
}  # fmt: skip


def torch_loss(graph: Graph, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The whole batch on one device."""
    tensors = dict(tensors)
    for operator in graph.operators:
        inputs, made = [tensors[name] for name in operator.inputs], graph.tensors[operator.outputs[0]]
        if operator.kind == "reshape":
            result = inputs[0].reshape(made.shape)
        elif operator.kind == "cast":
            result = inputs[0].double()
        elif operator.kind == "cross_entropy":
            result = F.cross_entropy(inputs[0].flatten(0, -2), inputs[1].flatten())
        else:
            result = ELEMENTWISE[operator.kind](*inputs)
        tensors[made.name] = result
    return tensors[graph.loss]


def torch_optimizer(settings: Optimizer, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    make = torch.optim.AdamW if settings.kind == "adamw" else torch.optim.SGD
    return make(parameters, **settings.settings)


def random_values(graph: Graph, seed: int, steps: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    random = np.random.default_rng(seed)
    parameters = {tensor.name: random.normal(size=tensor.shape) * 0.5 for tensor in graph.parameters}
    batches = []
    for _ in range(steps):
        batch = {}
        for tensor in graph.inputs:
            batch[tensor.name] = random.normal(size=tensor.shape)
            if tensor.dtype == "int64":
                batch[tensor.name] = random.integers(0, 3, size=tensor.shape)
        batches.append(batch)
    return parameters, batches


def feed(plan: Plan, rank: int, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With full_batch everything, else the rank's rows of every micro-batch."""
    if plan.full_batch:
        return batch
    mesh = next(stage.mesh for stage in plan.stages if rank in stage.mesh.rank_list)
    index = mesh.rank_list.index(rank)
    return {
        name: np.concatenate(
            [np.split(rows, mesh.num_ranks)[index] for rows in np.split(whole, plan.num_micro_batches)]
        )
        for name, whole in batch.items()
    }


def check_training(plan: Plan, steps: int = 2) -> Pretend:
    parameters, batches = random_values(plan.graph, 0, steps)
    leaves = {name: torch.tensor(value, requires_grad=True) for name, value in parameters.items()}
    optimizer = torch_optimizer(plan.optimizer, list(leaves.values()))
    pretend = Pretend(lower(plan), parameters)
    loss_stage = next(s for s in plan.stages if plan.graph.operators[-1].name in s.operators)
    for batch in batches:
        losses = pretend.step(lambda rank, batch=batch: feed(plan, rank, batch))
        loss = torch_loss(plan.graph, leaves | {name: torch.tensor(value) for name, value in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        knows = set(losses) if plan.output_broadcast else set(loss_stage.mesh.rank_list)
        assert {rank for rank, value in losses.items() if value is not None} == knows
        for rank in knows:
            assert losses[rank] == pytest.approx(loss.item(), abs=TOLERANCE, rel=TOLERANCE), rank
    found = pretend.parameters()
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        np.testing.assert_allclose(found[name], leaf.detach().numpy(), rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    return pretend


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_train_as_one_device_does(seed):
    check_training(random_plan(seed))
