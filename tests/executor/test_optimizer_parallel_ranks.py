"""Optimizer parallel on four gloo ranks: every level trains as a plain loop does and communicates what was planned."""

import numpy as np
import pytest
from msgspec.structs import replace

from executor.train.options import RunOptions
from executor.train.result import RankResult
from executor.train.run import run_rank
from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from tests.support.layered_training import ADAMW, MOMENTUM, batches, graph, parameters, plan, trained
from tests.support.on_ranks import run_on_ranks

pytestmark = pytest.mark.ranks

NUM_RANKS, NUM_STEPS = 4, 4
DP, BOTH = Layout((4,), ("dp",)), Layout((2, 2), ("dp", "tp"), (0, 2, 3, 1))
MEGATRON = {"gradient_dtype": "float32", "master_dtype": "float32"}


def adamw(level, **rest):
    return Optimizer(kind="adamw", settings=ADAMW, parallel_level=level, threshold_bytes=40, **rest)


def momentum(level, **rest):
    return Optimizer(kind="momentum", settings=MOMENTUM, parallel_level=level, threshold_bytes=40, **rest)


def two_stages(optimizer):
    """Two layers on ranks 0 and 2, one on 1 and 3; the batch is split over each pair."""
    whole = plan(Layout((2,), ("dp",)), optimizer, num_micro_batches=4)
    names = whole.stages[0].operators
    stages = (
        Stage(mesh=Layout((2,), ("dp",), (0, 2)), operators=names[:5]),
        Stage(mesh=Layout((2,), ("dp",), (1, 3)), operators=names[5:]),
    )
    return Plan(graph=whole.graph, stages=stages, strategies=whole.strategies, num_micro_batches=4, optimizer=optimizer)


HALF = graph(dtype="bfloat16")
PLANS = {
    "level 0": plan(DP, adamw(0), num_micro_batches=2),
    "level 1": plan(DP, adamw(1), num_micro_batches=2),
    "level 2": plan(DP, adamw(2), num_micro_batches=2),
    "level 3": plan(DP, adamw(3), num_micro_batches=2),
    "level 2 once a step, small buckets": plan(
        DP, adamw(2, reduce_every="step", bucket_bytes=200), num_micro_batches=2
    ),
    "level 3 each alone": plan(BOTH, adamw(3, bucket_bytes=0, prefetch=2), tp="tp", num_micro_batches=2),
    "level 3, three slices": plan(DP, adamw(3), num_micro_batches=2, interleave=3),
    "level 3, two stages, clipped": two_stages(adamw(3, clip_norm=0.05)),
    "momentum, level 0, small buckets": plan(DP, momentum(0, bucket_bytes=200), num_micro_batches=3),
    "momentum, level 1, clipped": plan(BOTH, momentum(1, clip_norm=0.05), tp="tp", num_micro_batches=2),
    "momentum, level 2, clipped, once a step": two_stages(momentum(2, clip_norm=0.05, reduce_every="step")),
    "momentum, level 3, prefetch 2": plan(DP, momentum(3, prefetch=2), num_micro_batches=3),
    "bfloat16, level 1": plan(DP, adamw(1, **MEGATRON, clip_norm=0.05), of=HALF, num_micro_batches=2),
    "bfloat16, level 3": plan(BOTH, adamw(3, **MEGATRON), of=HALF, num_micro_batches=2),
    "bfloat16, momentum, level 2": plan(DP, momentum(2, **MEGATRON, clip_norm=0.05), of=HALF, num_micro_batches=2),
    "bfloat16 reduced": plan(DP, adamw(2, **MEGATRON, reduce_dtype="bfloat16"), of=HALF, num_micro_batches=2),
}


def work(rank, folder):
    for name, each in PLANS.items():
        result = run_rank(
            lower(each), each, batches(each.graph, NUM_STEPS), parameters(each.graph), NUM_STEPS, device="cpu",
            options=RunOptions(record_steps=1), weights_path=folder / f"{name}.npz",
        )  # fmt: skip
        result.save(folder / f"{name}.{rank}.npz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_on_ranks(work, NUM_RANKS, folder)
    return folder


def results(folder, name):
    return [RankResult.load(folder / f"{name}.{rank}.npz") for rank in range(NUM_RANKS)]


def tolerance(name):
    """Sums over ranks are taken in another order; gradients of bfloat16 products are rounded on every rank."""
    return 2**-6 if name.startswith("bfloat16") else 3e-6


@pytest.mark.parametrize("name", PLANS)
def test_training_is_that_of_a_plain_loop(folder, name):
    each = PLANS[name]
    losses, weights, _ = trained(each.graph, each.optimizer, NUM_STEPS, each.num_micro_batches)
    for result in results(folder, name):
        np.testing.assert_allclose(result.losses, losses, rtol=tolerance(name))
    with np.load(folder / f"{name}.npz") as found:
        for parameter, expected in weights.items():
            assert np.linalg.norm(found[parameter] - expected) <= tolerance(name) * np.linalg.norm(expected), parameter


@pytest.mark.parametrize("name", PLANS)
def test_the_comparison_would_see_a_wrong_step(name):
    """Training moves the weights by far more than the tolerance, and clipping and the scale of gradients matter."""
    each = PLANS[name]
    args = (NUM_STEPS, each.num_micro_batches)
    expected = trained(each.graph, each.optimizer, *args)[1]
    others = [parameters(each.graph)]
    if each.optimizer.clip_norm is not None and each.optimizer.kind == "momentum":
        others.append(trained(each.graph, replace(each.optimizer, clip_norm=None), *args)[1])
    for other in others:
        moved = [np.linalg.norm(expected[each] - other[each]) / np.linalg.norm(expected[each]) for each in expected]
        assert min(moved) > 0.5 * tolerance(name) and max(moved) > 3 * tolerance(name), moved


@pytest.mark.parametrize("name", PLANS)
def test_executed_communication_is_the_planned_one(folder, name):
    assert [result.differences for result in results(folder, name)] == [()] * NUM_RANKS
    assert all(result.num_communications for result in results(folder, name))
