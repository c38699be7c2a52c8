"""Slices of a micro-batch: the same training, and communication of one slice beside compute of the others."""

from __future__ import annotations

import re

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from costmodels import Machine
from executor.train.losscell import WithLossCell
from executor.train.options import RunOptions
from executor.train.run import run_rank
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import Graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.program import Instruction, Kind
from simulator import simulate
from tests.plans.lower import test_lowering
from tests.pretend.program import Pretend
from tests.support.random_plans import GraphMaker, random_plan
from twofold.mindspore.wrappers import AutoParallel, MicroBatchInterleaved, Pipeline, unwrap

MESH = Layout((4,), ("tp",))


def blocks_of_layers(batch: int = 12, width: int = 16, num_layers: int = 2) -> Graph:
    """Pairs of linear layers with a residual sum around each pair."""
    make = GraphMaker(batch)
    value = make.tensor("x", (batch, width), "input")
    for _ in range(num_layers):
        inner = make.apply("relu", make.linear(value, 4 * width))
        value = make.apply("add", value, make.linear(inner, width))
    return make.graph(make.apply("mse_loss", value, make.tensor("t", (batch, width), "input"), shape=()))


def tensor_parallel(graph: Graph, **rest: object) -> Plan:
    """Columns, then rows: one all-reduce per pair forward, one backward."""
    strategies = {}
    linears = [operator for operator in graph.operators if operator.kind == "linear"]
    for number, operator in enumerate(linears):
        strategies[operator.name] = Strategy(dims={"k" if number % 2 else "n": ("tp",)})
    for operator in graph.operators:
        if operator.kind == "relu":
            strategies[operator.name] = Strategy(dims={"d1": ("tp",)})
    names = tuple(operator.name for operator in graph.operators)
    return Plan(graph=graph, stages=(Stage(mesh=MESH, operators=names),), strategies=strategies, **rest)


def check_training(plan: Plan) -> Pretend:
    """As in test_lowering, with the rows of a rank fed in its order of slices."""
    parameters, batches = test_lowering.random_values(plan.graph, 0, 2)
    one_device = test_lowering.OneDevice(plan.graph, plan.optimizer, parameters)
    pretend = Pretend(lower(plan), parameters)
    for batch in batches:
        losses = pretend.step(lambda rank, batch=batch: fed(plan, rank, batch))
        loss = one_device.step(batch)
        known = [value for value in losses.values() if value is not None]
        assert known and known == pytest.approx([loss] * len(known), rel=1e-10, abs=1e-10)
    for name, weight in pretend.parameters().items():
        np.testing.assert_allclose(weight, one_device.weights[name], rtol=1e-10, atol=1e-10, err_msg=name)
    return pretend


def fed(plan: Plan, rank: int, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if plan.full_batch:
        return batch
    mesh = next(stage.mesh for stage in plan.stages if rank in stage.mesh.rank_list)
    index = mesh.rank_list.index(rank)
    return {
        name: np.concatenate([np.split(rows, mesh.num_ranks)[index] for rows in np.split(whole, plan.num_slices)])
        for name, whole in batch.items()
    }


def body(plan: Plan, label: str) -> list[Instruction]:
    return [each for block, each in lower(plan).groups[0].walk() if block.label == label]


@pytest.mark.parametrize("order", ["interleaved", "sequential"])
@pytest.mark.parametrize("count", [2, 3])
def test_slices_train_as_one_device_does(count, order):
    optimizer = Optimizer(kind="momentum", parallel_level=1, threshold_bytes=1)
    check_training(
        tensor_parallel(
            blocks_of_layers(), interleave=count, interleave_order=order, num_micro_batches=2, optimizer=optimizer
        )
    )


@pytest.mark.parametrize("seed", [0, 3, 4, 7, 13, 16, 21, 29])
def test_slices_of_random_plans_train_as_one_device_does(seed):
    plan = random_plan(seed)
    for count in (2, 3):
        try:
            sliced = msgspec.structs.replace(plan, interleave=count)
        except TwofoldError:
            continue
        check_training(sliced)
        return
    pytest.fail(f"plan {seed} cannot be sliced; take another seed")


def test_slices_drop_what_micro_batches_of_their_rows_drop():
    make = GraphMaker(8)
    hidden = make.apply("dropout", make.linear(make.tensor("x", (8, 16), "input"), 16))
    make.operators[-1] = msgspec.structs.replace(make.operators[-1], attrs={"p": 0.5, "seed": 3})
    graph = make.graph(make.apply("mse_loss", hidden, make.tensor("t", (8, 16), "input"), shape=()))
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(each.name for each in graph.operators))
    drawn = test_lowering.random_values(graph, 0, 2)
    single = [{name: array.astype(np.float32) for name, array in each.items()} for each in (drawn[0], *drawn[1])]
    parameters, batches = single[0], single[1:]
    told = []
    for shape in ({"num_micro_batches": 4}, {"num_micro_batches": 2, "interleave": 2}, {"interleave": 4}):
        plan = Plan(graph=graph, stages=(stage,), **shape)
        options = RunOptions(count=False, record_steps=0)
        told.append(run_rank(lower(plan), plan, iter(batches), parameters, 2, device="cpu", options=options).losses)
    np.testing.assert_allclose(told[1:], [told[0]] * 2, rtol=1e-6)


@pytest.mark.parametrize("label", ["0F0", "0B0"])
@pytest.mark.parametrize("count", [2, 3])
def test_one_slice_computes_while_the_others_communicate(label, count):
    lines = body(tensor_parallel(blocks_of_layers(num_layers=3), interleave=count), label)
    issued = [at for at, each in enumerate(lines) if each.kind is Kind.COLLECTIVE and each.name.endswith("[0]")]
    assert len(issued) == (3 if label == "0F0" else 2)  # nobody wants the gradient of the data
    for at in issued:
        waited = next(i for i, each in enumerate(lines) if each.waits == lines[at].token)
        between = [each for each in lines[at:waited] if each.kind is Kind.COMPUTE and each.flops]
        slices = {each.name[-3:] for each in between}
        assert slices >= {f"[{number}]" for number in range(1, count)}, (lines[at].name, slices)


def test_the_sequential_order_ends_one_slice_before_the_next():
    for label in ("0F0", "0B0"):
        plan = tensor_parallel(blocks_of_layers(), interleave=2, interleave_order="sequential")
        numbers = [number for each in body(plan, label) for number in re.findall(r"\[\d\]", each.name)]
        assert numbers == sorted(numbers) and set(numbers) == {"[0]", "[1]"}


def test_work_outside_slices_runs_once():
    make = GraphMaker(12)
    value = make.tensor("x", (12, 16), "input")
    weight = make.tensor("w", (16, 16), "parameter")
    for _ in range(2):  # the same weight, which the second reader wants whole
        value = make.apply("relu", make.apply("linear", value, weight))
    graph = make.graph(make.apply("mse_loss", value, make.tensor("t", (12, 16), "input"), shape=()))
    names = tuple(operator.name for operator in graph.operators)
    strategies = {names[0]: Strategy(dims={"n": ("tp",)}), names[2]: Strategy(dims={"b0": ("tp",)})}
    plan = Plan(graph=graph, stages=(Stage(mesh=MESH, operators=names),), strategies=strategies, interleave=3)
    gathers = [each for each in body(plan, "0F0") if each.call == "all_gather" and each.inputs == ("w",)]
    assert len(gathers) == 1 and not gathers[0].name.endswith("]")
    check_training(plan)
    whole = [(each.call, each.axes) for _, each in lower(data_parallel(1)).groups[0].walk() if each.axes]
    sliced = [(each.call, each.axes) for _, each in lower(data_parallel(2)).groups[0].walk() if each.axes]
    assert whole == sliced and whole  # the reductions of gradients and of the loss


def data_parallel(count: int) -> Plan:
    graph = blocks_of_layers(batch=24)
    strategies = {
        operator.name: Strategy(dims={("b0" if operator.kind == "linear" else "d0"): ("tp",)})
        for operator in graph.operators
    }
    names = tuple(operator.name for operator in graph.operators)
    return Plan(graph=graph, stages=(Stage(mesh=MESH, operators=names),), strategies=strategies, interleave=count)


SLICED = {
    "tensor": tensor_parallel(blocks_of_layers(num_layers=3), interleave=2),
    "tensor, three slices": tensor_parallel(blocks_of_layers(), interleave=3, num_micro_batches=2),
    "tensor, level 3": tensor_parallel(
        blocks_of_layers(), interleave=2, num_micro_batches=2,
        optimizer=Optimizer(kind="adamw", settings={"lr": 0.1}, parallel_level=3, threshold_bytes=1),
    ),
    "data": data_parallel(2),
}  # fmt: skip
"""Plans whose slices run on two streams."""


def test_interleaving_hides_communication_that_the_sequential_order_shows():
    graph, machine = blocks_of_layers(batch=4096, width=2048), Machine.load("h200-x4")
    exposed = {
        order: simulate(tensor_parallel(graph, interleave=2, interleave_order=order), machine).exposed_comm_s
        for order in ("interleaved", "sequential")
    }
    assert exposed["interleaved"] < 0.7 * exposed["sequential"]


def test_slices_that_do_not_divide_are_refused():
    with pytest.raises(TwofoldError, match="interleave 5 does not divide the micro-batch of 6: 6 % 5 != 0"):
        tensor_parallel(blocks_of_layers(), num_micro_batches=2, interleave=5)
    with pytest.raises(TwofoldError, match="interleave_order 'random' is not known"):
        tensor_parallel(blocks_of_layers(), interleave_order="random")


def test_the_wrapper_sets_the_number_of_slices():
    cell = WithLossCell(nn.Linear(4, 4), nn.CrossEntropyLoss())
    wrapped = unwrap(AutoParallel(Pipeline(MicroBatchInterleaved(cell, 3), 4, {"_backbone": 0}), "semi_auto"))
    assert (wrapped.interleave, wrapped.num_micro_batches, wrapped.module) == (3, 4, cell)
    with pytest.raises(TwofoldError, match="the order is AutoParallel"):
        unwrap(AutoParallel(MicroBatchInterleaved(Pipeline(cell, 4), 3)))
    with pytest.raises(TwofoldError, match=r"interleave_num must be .* not 0"):
        MicroBatchInterleaved(cell, 0)


def test_a_rank_takes_the_rows_of_its_slice():
    from executor.device import pick_device
    from executor.step.interpreter import Interpreter

    names = tuple(operator.name for operator in blocks_of_layers().operators)
    plan = Plan(
        graph=blocks_of_layers(), stages=(Stage(mesh=Layout((1,), ("one",)), operators=names),), num_micro_batches=2,
        interleave=3,
    )  # fmt: skip
    parameters, (batch,) = test_lowering.random_values(plan.graph, 0, 1)
    single = {name: value.astype(np.float32) for name, value in batch.items()}
    interpreter = Interpreter(lower(plan), 0, pick_device("cpu"))
    interpreter.set_parameters({name: value.astype(np.float32) for name, value in parameters.items()})
    loss = interpreter.step(single)
    expected = test_lowering.torch_loss(
        plan.graph, {name: torch.tensor(value) for name, value in (parameters | batch).items()}
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
