"""How plans of any graph are run: level, schedule with chunks, slices, blocks computed again; searched and executed."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from costmodels import Machine, executing
from executor.capture.capture import capture
from executor.reference.reference import compare_losses, compare_weights, train_reference
from executor.train.options import RunOptions
from executor.train.result import RankResult
from executor.train.run import run_rank
from plans.model.mlp import mlp_graph
from plans.optimizer import Optimizer
from search import search
from search.operators.ways import Ways, recomputable
from simulator import simulate
from tests.modules.data import linear
from tests.modules.modules import Net
from tests.support.on_ranks import keep_plan, kept_plan, run_on_ranks

ALL = Ways(levels=True, schedules=True, slices=True, recompute=True)
ANYTHING = {
    "num_stages": None, "num_micro_batches": None, "interleave": None, "schedule": None, "recompute": None,
    "any_level": True,
}  # fmt: skip
NUM_STEPS = 2


def machine(count):
    return executing(Machine.load(f"h200-x{count}"), "graph")


def convolutional():
    """Residual blocks of convolutions with group norms, which have no entry of their own."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)

        def forward(self, x):
            return x + torch.relu(self.norm(self.conv(x)))

    torch.manual_seed(2)
    blocks = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), *(Block() for _ in range(6)))
    return Net(
        lambda net, x: net.head(net.blocks(x).mean((2, 3))), blocks=blocks, head=nn.Linear(8, 10)
    )  # fmt: skip


def images():
    generator = torch.Generator().manual_seed(3)
    return torch.randn((16, 2, 8, 8), generator=generator), torch.randint(0, 10, (16,), generator=generator)


@pytest.fixture(scope="module")
def pipeline():
    """The graph and its best plan in two stages of two devices."""
    graph = capture(convolutional(), images())
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-3}, threshold_bytes=1)
    return search(
        graph, machine(4), num_stages=2, num_micro_batches=4, optimizer=optimizer, output_broadcast=True, top_k=1
    ).best


def test_a_block_is_recomputed_from_outputs_of_other_blocks(pipeline):
    graph, before = pipeline.graph, simulate(pipeline, machine(4))
    blocks = recomputable(graph)
    assert len(blocks) >= 6
    kept = {operator.name for operator in graph.operators} - {name for block in blocks for name in block}
    for block in blocks:
        inside = {name for each in block for name in graph.by_name[each].outputs}
        readers = {reader.name for name in inside for reader in graph.consumers()[name]}
        assert readers <= kept | set(block)
    again = msgspec.structs.replace(pipeline, recompute=tuple(name for block in blocks for name in block))
    after = simulate(again, machine(4))
    assert after.peak_bytes < before.peak_bytes and after.step_s > before.step_s


def test_open_choices_are_searched_and_never_worse():
    graph = mlp_graph([2048] * 5, 512)
    given = search(graph, machine(2), num_stages=None, num_micro_batches=None, top_k=1).best
    found = search(graph, machine(2), top_k=1, **ANYTHING).best
    assert found.prediction.step_s <= given.prediction.step_s
    staged = {"num_stages": 2, "num_micro_batches": 4, "top_k": 1}
    given = search(graph, machine(2), **staged).best
    found = search(graph, machine(2), schedule=None, **staged).best
    assert found.prediction.step_s < 0.95 * given.prediction.step_s and found.schedule != "1f1b"


def test_oversized_plans_fit_by_levels_and_recomputation():
    graph = capture(convolutional(), images()).with_batch(4096)
    asked = {"top_k": 1, "num_stages": 1, "num_micro_batches": 1}
    plain = search(graph, machine(4), **asked).best
    limit = int(plain.prediction.peak_bytes * 0.6)
    found = search(graph, machine(4), memory_limit_bytes=limit, **asked, any_level=True, recompute=None).best
    assert found.prediction.peak_bytes <= limit and (found.optimizer.parallel_level or found.recompute)


def test_readers_of_one_weight_stay_in_one_stage():
    middle = nn.Sequential(*(linear() for _ in range(12)))
    net = Net(lambda net, x: net.last(net.middle(net.first(x))), first=linear(), middle=middle, last=linear())
    net.middle[9].weight = net.middle[3].weight
    found = search(capture(net, (torch.zeros(64, 8), torch.zeros(64, 8))), machine(4), **ANYTHING)
    assert found.plans and len(found.best.stages) > 1
    for plan in found.plans:
        mesh_of = {name: stage.mesh for stage in plan.stages for name in stage.operators}
        assert mesh_of["middle.3.linear"] == mesh_of["middle.9.linear"]


# -- ranks -------------------------------------------------------------------------------------------------------------


VARIED = ("zb_h2", "dualpipe_v", "zb_v")
"""Schedules that are run; tests/plans/schedules/test_schedules.py has the others."""


def varied(pipeline):
    """Two slices, levels 1 and 3, schedules with one and two chunks, and all blocks computed again at level 1."""
    every = list(ALL.others(pipeline, lambda: [1.0] * len(pipeline.graph.operators)))
    lean = list(ALL.leaner(pipeline, lambda plan: False))
    assert {plan.optimizer.parallel_level for plan in lean} == {0, 1, 2, 3} and all(plan.recompute for plan in lean)
    assert {len(plan.stages) for plan in every} == {2, 4, 6} and {plan.interleave for plan in every} == {1, 2}
    kept = [plan for plan in every if plan.schedule in VARIED or plan.interleave == 2]
    return [*kept, *(plan for plan in every if plan.optimizer.parallel_level in (1, 3)), lean[1]]


def work(rank, folder):
    for path in sorted(folder.glob("*.plan")):
        plan, program = kept_plan(path)
        with np.load(folder / "values.npz") as values, np.load(folder / "batch.npz") as batch:
            batches, parameters = [dict(batch)] * NUM_STEPS, dict(values)
        result = run_rank(
            program, plan, batches, parameters, NUM_STEPS, device="cpu",
            weights_path=folder / f"{path.stem}.weights.npz", options=RunOptions(record_steps=0, count=False),
        )  # fmt: skip
        result.save(folder / f"{path.stem}.{rank}.npz")


@pytest.mark.ranks
def test_every_way_trains_on_ranks_as_the_module_does_alone(pipeline, tmp_path):
    module, batch, plans = convolutional(), images(), varied(pipeline)
    held = {key: each.detach().numpy() for key, each in (*module.named_parameters(), *module.named_buffers())}
    np.savez(tmp_path / "values.npz", **held)
    inputs = [tensor.name for tensor in pipeline.graph.tensors.values() if tensor.kind == "input"]
    np.savez(tmp_path / "batch.npz", **{name: each.numpy() for name, each in zip(inputs, batch, strict=True)})
    for number, plan in enumerate(plans):
        keep_plan(plan, tmp_path / f"{number:02}.plan")
    run_on_ranks(work, 4, tmp_path)
    expected = train_reference(
        module, [batch] * NUM_STEPS, optimizer=pipeline.optimizer, num_steps=NUM_STEPS, num_micro_batches=4
    )
    for number, plan in enumerate(plans):
        for rank in range(4):
            result = RankResult.load(tmp_path / f"{number:02}.{rank}.npz")
            assert compare_losses(result.losses, expected.losses).max_rel_diff < 2e-6, plan
        with np.load(tmp_path / f"{number:02}.weights.npz") as weights:
            same = {name: expected.weights[name] for name in weights}
            assert compare_weights(dict(weights), same).max_rel_diff < 1e-4, plan
