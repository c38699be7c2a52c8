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
from pretend_rules import UPDATES
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


class OneDevice:
    """Trains the whole batch at once: gradients by autograd, updates by the whole tensors."""

    def __init__(self, graph: Graph, optimizer: Optimizer, parameters: dict[str, np.ndarray]) -> None:
        self.graph, self.optimizer, self.steps, self.weights = graph, optimizer, 0, dict(parameters)
        self.states = {
            name: [np.zeros_like(value)] * optimizer.num_states for name, value in parameters.items()
        }

    def step(self, batch: dict[str, np.ndarray]) -> float:
        self.steps += 1
        leaves = {name: torch.tensor(value, requires_grad=True) for name, value in self.weights.items()}
        loss = torch_loss(self.graph, leaves | {name: torch.tensor(value) for name, value in batch.items()})
        loss.backward()
        for name, leaf in leaves.items():
            self.weights[name], *self.states[name] = UPDATES[f"{self.optimizer.kind}.update"](
                self.optimizer.settings, self.steps, self.weights[name], leaf.grad.numpy(), *self.states[name]
            )
        return loss.item()


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
    one_device = OneDevice(plan.graph, plan.optimizer, parameters)
    pretend = Pretend(lower(plan), parameters)
    loss_stage = next(s for s in plan.stages if plan.graph.operators[-1].name in s.operators)
    for batch in batches:
        losses = pretend.step(lambda rank, batch=batch: feed(plan, rank, batch))
        loss = one_device.step(batch)
        knows = set(losses) if plan.output_broadcast else set(loss_stage.mesh.rank_list)
        assert {rank for rank, value in losses.items() if value is not None} == knows
        for rank in knows:
            assert losses[rank] == pytest.approx(loss, abs=TOLERANCE, rel=TOLERANCE), rank
    found = pretend.parameters()
    assert found.keys() == one_device.weights.keys()
    for name, weight in one_device.weights.items():
        np.testing.assert_allclose(found[name], weight, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    return pretend


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_train_as_one_device_does(seed):
    check_training(random_plan(seed))
