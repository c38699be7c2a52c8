"""Language models under random plans on four gloo ranks train as the module itself, dropout included."""

import random

import numpy as np
import pytest
import torch

from executor.capture.capture import capture
from executor.reference.reference import train_reference
from executor.train.options import RunOptions
from executor.train.result import RankResult
from executor.train.run import run_rank
from executor.weights.models import InitialParameters
from plans.layout import Layout
from plans.plan import Plan, Stage
from search.operators.space import strategies
from tests.executor.capture.test_blocks import (
    BATCH,
    SGD,
    GPT2Block,
    Ignoring,
    LanguageModel,
    LlamaBlock,
    Shifted,
    padded,
    seeded,
    tokens,
)
from tests.support.on_ranks import keep_plan, kept_plan, run_on_ranks

pytestmark = pytest.mark.ranks

NUM_STEPS = 2
MESHES = (Layout((2, 2), ("a", "b")), Layout((4,), ("a",), (1, 3, 0, 2)))
MODELS = {
    "llama": lambda: LanguageModel(LlamaBlock()),
    "gpt-2": lambda: LanguageModel(GPT2Block(p=0.3), positions=True),
    "masked": Shifted,
    "padded": Ignoring,
}
INPUTS = {"padded": padded}
PLANS = [(name, seed) for name in ("llama", "gpt-2") for seed in range(3)] + [("masked", 0), ("padded", 2)]
"""Models and seeds; the last two differ from "llama" in their mask and their labels only."""


def inputs(model):
    return INPUTS.get(model, tokens)()


def feed(graph, model):
    names = [tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"]
    return [dict(zip(names, map(torch.Tensor.numpy, inputs(model)), strict=True))] * NUM_STEPS


def random_plan(graph, seed):
    """One stage on four ranks or two on two, with any strategy for every operator."""
    draw = random.Random(seed)
    names = [operator.name for operator in graph.operators]
    stages = (Stage(mesh=draw.choice(MESHES), operators=tuple(names)),)
    if seed % 3 == 2:
        cut = draw.randrange(len(names) // 4, 3 * len(names) // 4)
        halves = (Layout((2,), ("a",), (0, 1)), Layout((2,), ("a",), (3, 2)))
        stages = tuple(
            Stage(mesh=mesh, operators=tuple(part))
            for mesh, part in zip(halves, (names[:cut], names[cut:]), strict=True)
        )
    num_micro_batches, interleave = draw.choice(((1, 1), (2, 1), (1, 2)))
    micro = graph.with_batch(BATCH // num_micro_batches // interleave)
    mesh_of = {name: stage.mesh for stage in stages for name in stage.operators}
    chosen = {each.name: draw.choice(strategies(micro.spec(each), mesh_of[each.name])) for each in micro.operators}
    recompute = tuple(draw.sample(names[:-1], len(names) // 5))
    return Plan(
        graph=graph, stages=stages, strategies=chosen, num_micro_batches=num_micro_batches, recompute=recompute,
        optimizer=SGD, output_broadcast=True, interleave=interleave,
    )  # fmt: skip


def parameters(folder, model):
    with np.load(folder / f"{model}.npz") as file:
        return dict(file)


def work(rank, folder):
    torch.set_num_threads(1)
    for path in sorted(folder.glob("*.plan")):
        plan, program = kept_plan(path)
        model = path.stem.split(".")[0]
        run_rank(
            program, plan, feed(plan.graph, model), parameters(folder, model), NUM_STEPS, device="cpu",
            options=RunOptions(record_steps=0), weights_path=path.with_suffix(".weights.npz"),
        ).save(path.with_suffix(f".{rank}.npz"))  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operators")
    modules = {name: seeded(make) for name, make in MODELS.items()}
    for name, module in modules.items():
        np.savez(folder / f"{name}.npz", **InitialParameters(module, 0))
        graph = capture(module, inputs(name))
        for seed in [seed for model, seed in PLANS if model == name]:
            keep_plan(random_plan(graph, seed), folder / f"{name}.{seed}.plan")
    run_on_ranks(work, 4, folder)
    return folder, modules


@pytest.mark.parametrize(("model", "seed"), PLANS)
def test_random_plans_train_as_one_rank_does(runs, model, seed):
    folder, modules = runs
    path = folder / f"{model}.{seed}.plan"
    plan, _ = kept_plan(path)
    expected = train_reference(
        modules[model], [inputs(model)] * NUM_STEPS, optimizer=SGD, num_steps=NUM_STEPS,
        num_micro_batches=plan.num_slices, graph=plan.graph,
    )  # fmt: skip
    results = [RankResult.load(path.with_suffix(f".{rank}.npz")) for rank in range(4)]
    assert not any(each.differences for each in results)  # executed communication is the planned one
    assert results[0].losses == pytest.approx(expected.losses, rel=2e-6)
    with np.load(path.with_suffix(".weights.npz")) as found:
        assert set(found) == {tensor.name for tensor in plan.graph.parameters}
        for name in found:
            np.testing.assert_allclose(found[name], expected.weights[name].numpy(), rtol=2e-4, atol=2e-6)
