"""Lower bounds on the time of compute streams hold for simulated plans, and are near what small plans take."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.search.exact import random_problem, tangled_problem
from costmodels import Machine, executing
from costmodels.price.clock import at_usual_clock
from executor.capture.capture import capture
from executor.train.losscell import WithLossCell
from plans.lower import lower
from plans.model.graph import Graph
from plans.model.mlp import mlp_graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from search import search
from search.operators.additive import StageCosts
from search.operators.stage import StageSearch
from simulator import simulate

MACHINE = at_usual_clock(executing(Machine.load("h200-x8"), "graph"))


class OneBlock(nn.Module):
    """Norms and activations of one block, which may fuse with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(256), nn.LayerNorm(256)
        self.inner, self.out = nn.Linear(256, 256), nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.inner(self.first(x)))
        return self.out(nn.functional.silu(self.second(h + x)))


class Residual(nn.Module):
    """A block of norms, products and sums of what goes around them, scaled as in models that drop paths."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.inner, self.outer, self.beside = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 64, bias=False)
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.norms
        x = x + self.beside(first(x)) * self.scale
        return third(x) * x + torch.tanh(self.outer(nn.functional.gelu(self.inner(second(x)))))


class PreNorm(nn.Module):
    """A block of an MLP behind its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


def classifier(body: nn.Module) -> Graph:
    return capture(WithLossCell(body, nn.CrossEntropyLoss()), ((64, 256), ((64,), "int64")))


GRAPHS = {
    "MLP": lambda: mlp_graph([512, 256, 64], 64),
    "norms": lambda: classifier(OneBlock()),
    "residual": lambda: classifier(nn.Sequential(nn.Linear(256, 64), nn.Sequential(Residual(), Residual()))),
    "pre-norm": lambda: classifier(nn.Sequential(PreNorm(), PreNorm())),
    "random": lambda: random_problem(1, 7),
    "tangled": lambda: tangled_problem(0),
}


def stage_search(graph: Graph, optimizer: Optimizer, num_micro_batches: int) -> StageSearch:
    return StageSearch(
        graph=graph, machine=MACHINE, num_ranks=8, num_micro_batches=num_micro_batches, interleave=1,
        optimizer=optimizer, full_batch=True, fused=True, in_order=True, pinned={}, check_time=lambda: None, known={},
        moves={},
    )  # fmt: skip


def drawn(costs: StageCosts, draw: random.Random) -> list[int]:
    """Strategies of which half split the batch, as in good plans."""
    return [
        split if draw.random() < 0.5 else draw.randrange(size)
        for split, size in zip(costs.batch_split(), costs.sizes, strict=True)
    ]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_bound_of_any_strategies_is_below_their_simulated_step(name: str, kind: str) -> None:
    graph, draw = GRAPHS[name](), random.Random(name)
    names = tuple(operator.name for operator in graph.operators)
    for num_micro_batches in (1, 2):
        optimizer = Optimizer(kind=kind, settings={"lr": 0.01})
        stages = stage_search(graph, optimizer, num_micro_batches)
        for mesh in stages.meshes((), range(8)):
            costs = stages.costs(names, mesh)
            problem = costs.stream_problem()
            least_s = costs.stream_s()
            for level in range(4):
                values = drawn(costs, draw) if level else list(costs.batch_split())
                plan = Plan(
                    graph=graph, stages=(Stage(mesh=mesh, operators=names),), strategies=costs.picked(values),
                    num_micro_batches=num_micro_batches, fused=True,
                    optimizer=msgspec.structs.replace(optimizer, parallel_level=level),
                )  # fmt: skip
                total_s = problem.total(values)
                assert least_s <= total_s * (1 + 1e-12)  # the same terms may be summed in another order
                assert total_s <= simulate(lower(plan), MACHINE, fold_ranks=True).step_s


def test_bounds_of_kernels_grow_with_the_time_that_there_is() -> None:
    """The operators that take longest come first; a later call goes on where the time was up."""
    graph = mlp_graph([512, 256, 64, 256], 64)
    stages, left = stage_search(graph, Optimizer(), 1), iter([False, False, True])
    some = dict(stages.floors(range(8), lambda: next(left)))
    (longest,) = [name for name, floor in some.items() if floor.device_s]
    assert not stages.has_floors(range(8))
    every = stages.floors(range(8))
    assert stages.has_floors(range(8)) and all(floor.device_s > 0.0 for floor in every.values())
    assert some[longest] == every[longest] == max(every.values(), key=lambda floor: floor.device_s)


def test_what_an_operator_takes_alone_is_in_the_bound() -> None:
    """One device only computes, and no two of these layers are in one block."""
    graph = classifier(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8)))
    found = search(graph, MACHINE, num_devices=1)
    assert found.lower_bound_s > 0.8 * found.best.prediction.step_s


def test_the_kernels_that_norms_take_in_any_run_are_in_the_bound() -> None:
    """Most of them are fused with what is around them, and most of their time is that of their start."""
    graph = classifier(nn.Sequential(*(PreNorm() for _ in range(4))))
    found = search(graph, MACHINE, num_devices=1)
    assert found.lower_bound_s > 0.6 * found.best.prediction.step_s


def test_redistributions_between_neighbours_are_in_the_bound() -> None:
    """Without them a layer that is split by its inputs would pass on sums for nothing."""
    graph = mlp_graph([512, 256, 64], 64)
    names = tuple(operator.name for operator in graph.operators)
    stages = stage_search(graph, Optimizer(), 1)
    for mesh in stages.meshes((), range(8)):
        costs = stages.costs(names, mesh)
        kernels_s = sum(float(own.min()) for own in costs.stream_problem().own)
        assert np.isfinite(kernels_s) and costs.stream_s() > kernels_s
