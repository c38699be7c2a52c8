"""Constants (buffers, frozen parameters) in programs: kept in every layout they are read in, never communicated."""

import numpy as np
import pytest

from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy, plan_from_json, plan_to_json
from plans.program import Kind, Scope
from tests.pretend.program import Pretend
from tests.support.random_plans import GraphMaker

BATCH, WIDTH = 12, 8
MESH = Layout((2, 2), ("a", "b"), (2, 0, 3, 1))


def graph():
    """|relu(c)| is made of a constant alone; the loss is the mean square of x w^T |c| + c - y."""
    make = GraphMaker(BATCH)
    x, c = make.tensor("x", (BATCH, WIDTH), "input"), make.tensor("c", (WIDTH,), "constant")
    scale = make.apply("abs", c)
    value = make.apply("add", make.apply("mul", make.linear(x, WIDTH, bias=False), scale), c)
    return make.graph(make.apply("mse_loss", value, make.tensor("y", (BATCH, WIDTH), "input"), shape=()))


def values(seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.standard_normal(shape) for name, shape in
            (("x", (BATCH, WIDTH)), ("y", (BATCH, WIDTH)), ("c", (WIDTH,)), ("w1", (WIDTH, WIDTH)))}  # fmt: skip


def loss(given):
    made = given["x"] @ given["w1"].T * np.abs(given["c"]) + given["c"]
    return ((made - given["y"]) ** 2).mean()


def plan(strategies, stages=None, **rest):
    names = tuple(operator.name for operator in graph().operators)
    stages = stages or (Stage(mesh=MESH, operators=names),)
    return Plan(
        graph=graph(), stages=stages, optimizer=Optimizer(settings={"lr": 0.1}, parallel_level=0),
        strategies={name: Strategy(dims=dims) for name, dims in strategies.items()}, **rest,
    )  # fmt: skip


def pipeline(**rest):
    first, second = (Layout((2,), ("a",), ranks) for ranks in ((0, 1), (3, 2)))
    names = [operator.name for operator in graph().operators]
    return plan(
        {}, (Stage(mesh=first, operators=tuple(names[:2])), Stage(mesh=second, operators=tuple(names[2:]))), **rest
    )


PLANS = {
    "whole": plan({}),
    "split": plan({"t0.abs": {"d0": ("b",)}, "t2.mul": {"d0": ("a",), "d1": ("b",)}, "t3.add": {"d1": ("b", "a")}}),
    "own rows": plan({"t2.mul": {"d1": ("b",)}, "t3.add": {"d0": ("a",), "d1": ("b",)}}, full_batch=False),
    "micro-batches": plan({"t3.add": {"d1": ("a",)}}, num_micro_batches=3, recompute=("t0.abs", "t3.add")),
    "stages": pipeline(num_micro_batches=3),
    "stages and slices": pipeline(interleave=3),
    "stages and slices in sequence": pipeline(num_micro_batches=2, interleave=2, interleave_order="sequential"),
}


def fed(made, given):
    def feed(rank):
        if made.full_batch:
            return given
        part = MESH.rank_list.index(rank)
        return {name: array[part * 3 : part * 3 + 3] if name in "xy" else array for name, array in given.items()}

    return feed


@pytest.mark.parametrize("name", PLANS)
def test_programs_with_constants_train_the_same_function(name):
    given = values()
    ranks = Pretend(lower(PLANS[name]), given)
    losses = [each for each in ranks.step(fed(PLANS[name], given)).values() if each is not None]
    assert losses == pytest.approx([loss(given)] * len(losses), rel=1e-12)
    step = 1e-6 * np.eye(WIDTH)[3][:, None] * np.eye(WIDTH)[2]
    slope = (loss(given | {"w1": given["w1"] + step}) - loss(given | {"w1": given["w1"] - step})) / 2e-6
    assert given["w1"][3, 2] - ranks.parameters()["w1"][3, 2] == pytest.approx(0.1 * slope, rel=1e-6)


@pytest.mark.parametrize("name", PLANS)
def test_constants_are_kept_and_nothing_is_sent_for_them(name):
    for group in lower(PLANS[name]).groups:
        for placement in group.constants:
            value = group.values[placement.value]
            assert (value.scope, value.role, value.shape) == (
                Scope.KEPT,
                "weight",
                placement.layout.local_shape((WIDTH,)),
            )
        made = {output for _, each in group.walk() for output in each.outputs}
        assert not made & {placement.value for placement in group.constants}
        collectives = [each for _, each in group.walk() if each.kind is Kind.COLLECTIVE]
        assert not any(
            name in each.inputs for each in collectives for name in {placement.value for placement in group.constants}
        )
    assert {placement.name for group in lower(PLANS[name]).groups for placement in group.constants} == {"c"}


def test_a_plan_with_constants_is_a_file():
    assert plan_from_json(plan_to_json(PLANS["split"])) == PLANS["split"]
    assert [tensor.name for tensor in PLANS["split"].graph.constants] == ["c"]
