"""Modules as users write them: losses and weights of the captured graph are those of torch, in double precision."""

import functools
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from executor.capture.capture import capture
from executor.device import Device
from executor.reference.reference import compare_losses, compare_weights, train_reference
from executor.step.interpreter import Interpreter
from executor.train.options import RunOptions
from executor.train.result import RankResult
from executor.train.run import gather_parameters, run_rank
from executor.weights.initial import as_array
from executor.weights.module_weights import as_graph, as_module
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.whole import apart
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from tests.kept.captures import OF_TORCH, graph_line
from tests.kept.lines import check
from tests.modules.modules import MODULES, ON_RANKS, ONE_RANK, made
from tests.support.on_ranks import keep_plan, kept_plan, run_on_ranks
from tests.support.random_plans import _strategy

NUM_STEPS = 2
MESHES = (Layout((2,), ("a",)), Layout((2, 2), ("a", "b"), (3, 1, 0, 2)))
"""In turn; a collective of two ranks takes a sixth of the messages of one of four."""
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*every rank computes all of it", "ignore:.*the loss depends on the number of micro-batches"
)


@functools.cache
def captured(name):
    """A module, a batch and the module's graph."""
    module, batch = made(name)
    return module, batch, capture(module, batch)


def plan_of(graph, mesh=None, level=0, draw=None, num_micro_batches=1):
    mesh = mesh or Layout((1,), ("dp",))
    micro = graph.with_batch(graph.batch_size // num_micro_batches)
    names = tuple(operator.name for operator in graph.operators)
    share = 1.0  # of the operators that have a strategy drawn: fewer after every plan that is refused
    while True:
        drawn = [each for each in micro.operators if draw and (share == 1 or draw.random() < share)]
        try:
            return Plan(
                graph=graph, stages=(Stage(mesh=mesh, operators=names),), num_micro_batches=num_micro_batches,
                strategies={each.name: _strategy(draw, micro, each, mesh) for each in drawn},
                recompute=tuple(name for name in names[:-1] if draw and draw.random() < 0.3),
                optimizer=Optimizer(settings={"lr": 0.1}, parallel_level=level, threshold_bytes=1),
            )  # fmt: skip
        except TwofoldError:
            if draw is None:
                raise
            share *= 0.99


def values(graph, module):
    held = {name: as_array(each.detach()) for name, each in [*module.named_parameters(), *module.named_buffers()]}
    named = as_graph(graph, held)
    return {tensor.name: named[tensor.name][...] for tensor in (*graph.parameters, *graph.constants)}


def fed(graph, batch):
    names = [tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"]
    return dict(zip(names, map(torch.Tensor.numpy, batch), strict=True))


def expected_of(module, batch, plan):
    return train_reference(
        module, [batch] * NUM_STEPS, optimizer=plan.optimizer, num_steps=NUM_STEPS, graph=plan.graph,
        num_micro_batches=plan.num_micro_batches,
    )  # fmt: skip


@pytest.mark.parametrize("name", [*MODULES, *ONE_RANK])
def test_one_rank_trains_as_torch(name):
    """With micro-batches, and with joined products as they are and split; the graph is what it was."""
    module, batch, whole = captured(name)
    if name not in OF_TORCH:
        check(f"captured {name}", graph_line(whole), "kept_captures")
    split = apart(whole)
    for count, graph in ((4, split),) if split == whole else ((1, whole), (4, split)):
        plan = plan_of(graph, num_micro_batches=count)
        program = lower(plan)
        rank = Interpreter(program, 0, Device(kind="cpu"))
        rank.set_parameters(values(graph, module))
        losses = [rank.step(fed(graph, batch)).item() for _ in range(NUM_STEPS)]
        expected = expected_of(module, batch, plan)
        assert compare_losses(losses, expected.losses).max_rel_diff < 1e-12
        weights = as_module(graph, gather_parameters(program, rank))
        assert set(weights) == {name for name, each in module.named_parameters() if each.requires_grad} | graph.updated
        assert compare_weights(weights, {name: expected.weights[name] for name in weights}).max_rel_diff < 1e-12


def drawn(name):
    """A plan of random strategies on two or four ranks, its module and a batch."""
    draw, number = random.Random(f"strategies of {name}"), ON_RANKS.index(name)
    module, batch, graph = captured(name)
    return module, batch, plan_of(graph, MESHES[number % len(MESHES)], (0, 1, 3)[number % 3], draw, 1 + number % 2)


def work(rank, folder):
    """Ranks need the plan only: the module is captured once, by the test."""
    turn = [mesh.num_ranks for mesh in MESHES].index(dist.get_world_size())
    for name in ON_RANKS[turn :: len(MESHES)]:
        plan, program = kept_plan(folder / f"{name}.plan")
        with np.load(folder / f"{name}.values.npz") as values, np.load(folder / f"{name}.batch.npz") as batch:
            batches, parameters = [dict(batch)] * NUM_STEPS, dict(values)
        result = run_rank(
            program, plan, batches, parameters, NUM_STEPS, device="cpu", weights_path=folder / f"{name}.npz",
            options=RunOptions(record_steps=0, count=False),  # test_operators_ranks.py counts communication
        )  # fmt: skip
        result.save(folder / f"{name}.{rank}.npz")


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """The folder of what ranks found, and name -> (module, batch, plan)."""
    folder = tmp_path_factory.mktemp("run")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(every rank computes all of it|depends on the number of micro-batches)")
        plans = {name: drawn(name) for name in ON_RANKS}
    for name, (module, batch, plan) in plans.items():
        keep_plan(plan, folder / f"{name}.plan")
        np.savez(folder / f"{name}.values.npz", **values(plan.graph, module))
        np.savez(folder / f"{name}.batch.npz", **fed(plan.graph, batch))
    for mesh in MESHES:
        run_on_ranks(work, mesh.num_ranks, folder)
        (folder / "rendezvous").unlink(missing_ok=True)
    return folder, plans


@pytest.mark.ranks
@pytest.mark.parametrize("name", ON_RANKS)
def test_ranks_train_as_torch(on_ranks, name):
    """Random strategies, dropout included, split over gloo ranks."""
    folder, plans = on_ranks
    module, batch, plan = plans[name]
    expected = expected_of(module, batch, plan)
    for rank in range(plan.num_ranks):
        result = RankResult.load(folder / f"{name}.{rank}.npz")
        assert compare_losses(result.losses, expected.losses).max_rel_diff < 1e-12
    with np.load(folder / f"{name}.npz") as found:
        weights = dict(found)
    assert compare_weights(weights, {name: expected.weights[name] for name in weights}).max_rel_diff < 1e-12


def test_one_call_makes_the_gradients_of_a_recurrent_layer():
    graph = captured("LSTM tagger")[2]  # two layers in two directions; the first reads a trained table
    calls = [each.call for _, each in lower(plan_of(graph)).groups[0].walk()]
    assert [call for call in calls if call.startswith("recurrent.grad")] == ["recurrent.grad01234"] * 4
