"""A small two-layer network for tests of the executor: its graph, data, and training in plain torch as the oracle."""

import numpy as np
import torch
import torch.nn.functional as F

from plans.layout import Layout
from plans.model.graph import Graph, Operator, Tensor
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy

BATCH = 8
SIZES = {"w1": (8, 6), "b1": (8,), "w2": (2, 8), "b2": (2,)}


def graph():
    shapes = {"x": (BATCH, 6), "t": (BATCH, 2), "h": (BATCH, 8), "r": (BATCH, 8), "y": (BATCH, 2), "l": ()}
    kinds = {"x": "input", "t": "input"} | dict.fromkeys(SIZES, "parameter")
    tensors = {
        name: Tensor(name=name, shape=shape, kind=kinds.get(name, "activation"))
        for name, shape in (shapes | SIZES).items()
    }
    operators = (
        Operator(name="fc1", kind="linear", inputs=("x", "w1", "b1"), outputs=("h",)),
        Operator(name="act", kind="relu", inputs=("h",), outputs=("r",)),
        Operator(name="fc2", kind="linear", inputs=("r", "w2", "b2"), outputs=("y",)),
        Operator(name="loss", kind="l1_loss", inputs=("y", "t"), outputs=("l",)),
    )
    return Graph(name="small", batch_size=BATCH, tensors=tensors, operators=operators, loss="l")


def parameters():
    generator = np.random.default_rng(0)
    return {name: (0.3 * generator.standard_normal(shape)).astype(np.float32) for name, shape in SIZES.items()}


def batches(count):
    generator = np.random.default_rng(1)
    return [
        {name: generator.standard_normal((BATCH, width)).astype(np.float32) for name, width in (("x", 6), ("t", 2))}
        for _ in range(count)
    ]


def trained(count, optimizer="sgd", lr=0.1):
    """Losses and final weights of `count` steps with torch's autograd and optimizer."""
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in parameters().items()}
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    steps = kinds[optimizer](weights.values(), lr=lr, foreach=False)
    losses = []
    for batch in batches(count):
        hidden = torch.relu(F.linear(torch.tensor(batch["x"]), weights["w1"], weights["b1"]))
        loss = F.l1_loss(F.linear(hidden, weights["w2"], weights["b2"]), torch.tensor(batch["t"]))
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, {name: weight.detach().numpy() for name, weight in weights.items()}


def plan(*stages, strategies=None, **rest):
    """A plan of stages given as (mesh, operator names)."""
    return Plan(
        graph=graph(),
        stages=tuple(Stage(mesh=mesh, operators=operators) for mesh, operators in stages),
        strategies={name: Strategy(dims=dims) for name, dims in (strategies or {}).items()},
        **{"optimizer": Optimizer(settings={"lr": 0.1}, parallel_level=1, threshold_bytes=0)} | rest,
    )


ALL = ("fc1", "act", "fc2", "loss")


def one_rank(**rest):
    return plan((Layout((1,), ("dp",)), ALL), **rest)


def four_ranks():
    """Plans on four ranks that differ in every way that matters to the executor."""
    permuted = Layout((2, 2), ("a", "b"), (3, 1, 2, 0))
    rows = {"fc1": {"b0": ("dp",)}, "act": {"d0": ("dp",)}, "fc2": {"b0": ("dp",)}, "loss": {"d0": ("dp",)}}
    adamw = Optimizer(kind="adamw", settings={"lr": 0.01}, parallel_level=1, threshold_bytes=0)
    whole = Optimizer(settings={"lr": 0.1}, parallel_level=0)
    return {
        "data parallel": plan((Layout((4,), ("dp",)), ALL), strategies=rows, num_micro_batches=2),
        "data parallel, level 0": plan((Layout((4,), ("dp",)), ALL), strategies=rows, optimizer=whole),
        "own rows": plan((Layout((4,), ("dp",)), ALL), strategies=rows, num_micro_batches=2, full_batch=False),
        "split weights": plan(
            (permuted, ALL),
            strategies={
                "fc1": {"n": ("b", "a")},
                "act": {"d1": ("a", "b")},
                "fc2": {"k": ("b",)},
                "loss": {"d0": ("b",)},
            },
            num_micro_batches=2,
        ),
        "two stages": plan(
            (Layout((2,), ("dp",), (0, 1)), ("fc1", "act")), (Layout((2,), ("dp",), (3, 2)), ("fc2", "loss")),
            strategies=rows | {"act": {"d1": ("dp",)}}, num_micro_batches=4, recompute=("act",), output_broadcast=True,
        ),
        "unequal stages": plan(
            (Layout((1,), ("dp",), (1,)), ("fc1", "act")), (Layout((3,), ("dp",), (0, 2, 3)), ("fc2", "loss")),
            num_micro_batches=4, schedule="gpipe", optimizer=adamw,
        ),
    }  # fmt: skip
