"""What users say of single operators: forms, errors, the strategies that follow, plans on several meshes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from costmodels import Machine
from executor.capture.capture import capture
from executor.launch.job import Job, Task, save_job
from executor.launch.run_plan import read_result, run
from executor.networks import OperatorNetwork
from executor.reference.verification import check_run
from executor.sharding import given_strategies, shard, sharded_modules
from executor.train.losscell import WithLossCell
from executor.weights.models import load_model
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import Graph, Operator, Tensor
from plans.model.transformer import TransformerConfig, transformer
from plans.plan import Plan, Stage, Strategy, load_plan, plan_from_json, plan_to_json, save_plan
from plans.user_strategy import given_strategy
from search import search
from tests.plans.lower.test_lowering import check_training
from tests.support.on_ranks import run_on_ranks
from tests.support.random_plans import GraphMaker
from twofold import AutoParallel, Model, ops
from twofold.demo import CASES
from twofold.mindspore.context import get_auto_parallel_context, reset_auto_parallel_context, set_auto_parallel_context

MESH = Layout((2, 2, 2), ("dp", "sp", "mp"))


def product(rows: int = 8, inner: int = 16, columns: int = 4) -> tuple[Operator, Graph]:
    """y = x @ w and a loss."""
    shapes = {"x": (rows, inner), "w": (inner, columns), "y": (rows, columns), "t": (rows, columns), "l": ()}
    kinds = {"x": "input", "w": "parameter", "t": "input"}
    operators = (
        Operator(name="mm", kind="matmul", inputs=("x", "w"), outputs=("y",)),
        Operator(name="loss", kind="mse_loss", inputs=("y", "t"), outputs=("l",)),
    )
    tensors = {
        name: Tensor(name=name, shape=shape, kind=kinds.get(name, "activation")) for name, shape in shapes.items()
    }
    return operators[0], Graph(name="product", batch_size=rows, tensors=tensors, operators=operators, loss="l")


def mlp(batch: int = 8) -> Graph:
    make = GraphMaker(batch)
    value = make.tensor("x", (batch, 8), "input")
    for width in (16, 8):
        value = make.apply("relu", make.linear(value, width))
    return make.graph(make.apply("mse_loss", value, make.tensor("t", (batch, 8), "input"), shape=()))


@pytest.mark.parametrize(
    ("in_strategy", "out_strategy", "message"),
    [
        ((4, 1), None, r"\(\(4, 1\),\).*got \(4, 1\), whose entry 4 is neither"),
        ("dp", None, "takes a tuple with one entry per tensor"),
        ((), None, "takes a tuple with one entry per tensor"),
        (((4, 0),), None, r"\(\(4, 0\),\): 0 is not a number of parts"),
        (((4, True),), None, "True is not a number of parts"),
        (((4, 1), MESH("dp", "None")), None, r"\(\(4, 1\), layout\(dp, None\)\) mixes ints and layouts"),
        (((4, 1),), (MESH("dp", "None"),), "mixes ints and layouts"),
        ((MESH("dp", "None"), Layout((8,), ("tp",))("tp", "None")), None, r"two meshes, Layout\(\(2, 2, 2\)"),
        ((MESH,), None, "call it with the axes"),
        (None, ((4, 1),), "needs an in_strategy"),
        (((4, 1),), ((4, 1), (4, 1)), "operators have one output"),
        ((Layout((2, 2), ("dp", "interleaved_parallel"))("dp", "None"),), None, "MicroBatchInterleaved"),
    ],
)
def test_wrong_forms_are_refused_and_shown(in_strategy, out_strategy, message):
    with pytest.raises(TwofoldError, match=message):
        given_strategy(in_strategy, out_strategy)


@pytest.mark.parametrize(
    ("in_strategy", "out_strategy", "message"),
    [
        (((4,), (1, 1)), None, r"'mm' \(matmul\) was given \(\(4,\), \(1, 1\)\).*1 dims, input 'x' \(8, 16\) has 2"),
        (((3, 1), (1, 1)), None, r"dim 0 of input 'x' \(8, 16\) into 3 parts: 8 % 3 != 0"),
        (((2, 2), (4, 1)), None, r"dim 'k' is split by 2 in entry 0 and by 4 in entry 1"),
        (((1, 1), (1, 1), (1, 1)), None, r"3 entries; it reads 2 tensors of \(8, 16\), \(16, 4\)"),
        (((4, 4), (4, 1)), None, "16 parts, which do not divide the 8 devices"),
        ((Layout((4,), ("a",))("a", "None"),), None, "of 4 ranks; the operator runs on 8 devices"),
        (((2, 4), (4, 1)), ((1, 1),), r"can be \(2, 1\) \(reduced\) or \(8, 1\) \(reduce-scattered\)"),
        (((4, 1), (1, 2)), ((8, 1),), r"the output \(8, 4\) can be \(4, 2\)$"),
        (
            (MESH("mp", ("sp", "dp")), MESH(("sp", "dp"), "None")),
            (MESH(("sp", "dp", "mp"), "None"),),
            r"can be layout\(mp, None\) \(reduced\) or layout\(\(mp, sp, dp\), None\) \(reduce-scattered\)",
        ),
    ],
)
def test_what_does_not_fit_the_operator_is_refused_with_what_would(in_strategy, out_strategy, message):
    operator, graph = product()
    with pytest.raises(TwofoldError, match=message):
        given_strategy(in_strategy, out_strategy).strategy(operator, graph, 8)


def test_ints_split_over_the_slowest_axes():
    operator, graph = product()
    strategy = given_strategy(((4, 1), (1, 1))).strategy(operator, graph, 8)
    layout = graph.spec(operator).input_layout(0, strategy.mesh, strategy.dims)
    assert [layout.region(rank, (8, 16))[0] for rank in range(8)] == [
        (2 * part, 2 * part + 2) for part in (0, 0, 1, 1, 2, 2, 3, 3)
    ]


def test_layouts_keep_the_order_of_their_axes():
    operator, graph = product()
    given = given_strategy((MESH("mp", ("sp", "dp")), MESH(("sp", "dp"), "None")))
    strategy = given.strategy(operator, graph, 8)
    layout = graph.spec(operator).input_layout(0, strategy.mesh, strategy.dims)
    upper_half = sorted(
        (layout.region(rank, (8, 16))[1], rank) for rank in range(8) if layout.region(rank, (8, 16))[0] == (0, 4)
    )
    assert [rank for _, rank in upper_half] == [0, 4, 2, 6]  # the first row of the figure of the tutorial
    assert strategy.mesh == MESH and strategy.out is None


def test_a_bias_follows_the_strategy_of_the_weight():
    make = GraphMaker(8)
    value = make.linear(make.tensor("x", (8, 8), "input"), 16)
    graph = make.graph(make.apply("mse_loss", value, make.tensor("t", (8, 16), "input"), shape=()))
    (linear, _), given = graph.operators, given_strategy(((2, 1), (4, 1)))
    strategy = given.strategy(linear, graph, 8)
    assert graph.spec(linear).input_layout(2, strategy.mesh, strategy.dims).split_counts == (4,)


@pytest.mark.parametrize("out", [(("mp",), ()), (("mp", "sp", "dp"), ())])
def test_an_output_has_the_requested_layout(out):
    graph = mlp()
    first = graph.operators[0]
    given = given_strategy((MESH("mp", ("sp", "dp")), MESH("None", ("sp", "dp"))), (MESH(*out),))
    strategies = {first.name: given.strategy(first, graph, 8)}
    names = tuple(operator.name for operator in graph.operators)
    plan = Plan(graph=graph, stages=(Stage(mesh=MESH, operators=names),), strategies=strategies)
    assert plan.strategies[first.name].out == out
    assert plan_from_json(plan_to_json(plan)) == plan
    check_training(plan)
    calls = [each.call for _, each in lower(plan).groups[0].walk() if first.outputs[0] in each.name and each.axes]
    assert calls[0] == ("all_reduce" if out[0] == ("mp",) else "reduce_scatter")


def test_neighbours_on_meshes_with_equal_axis_names_train_as_one_device_does():
    graph, wide, tall = mlp(), Layout((2, 4), ("a", "b")), Layout((4, 2), ("a", "b"), [0, 2, 4, 6, 1, 3, 5, 7])
    first, act, second, last, loss = graph.operators
    strategies = {
        first.name: Strategy(dims={"b0": ("a",), "n": ("b",)}, mesh=wide),
        act.name: Strategy(dims={"d0": ("a",), "d1": ("b",)}, mesh=tall),  # the same words mean another place
        second.name: Strategy(dims={"k": ("b", "a")}, mesh=wide),
        last.name: Strategy(dims={"d0": ("a",), "d1": ("b",)}, mesh=tall),
        loss.name: Strategy(dims={"d0": ("b",)}, mesh=wide),
    }
    names = tuple(operator.name for operator in graph.operators)
    check_training(Plan(graph=graph, stages=(Stage(mesh=wide, operators=names),), strategies=strategies))


def test_the_search_keeps_what_is_pinned_and_fills_in_the_rest():
    graph, mesh = mlp(), Layout((2, 2), ("u", "v"))
    first, second = graph.operators[0], graph.operators[2]
    pinned = {
        first.name: Strategy(dims={"n": ("v", "u")}, mesh=mesh),
        second.name: Strategy(dims={"k": ("v", "u")}, mesh=mesh, out=((), ())),
    }
    plan = search(graph, Machine.load("h200-x4"), pinned=pinned).best
    assert {name: plan.strategies[name] for name in pinned} == pinned
    # between the two, the relu is best left where it is: split by the pinned mesh in its order of axes
    assert plan.strategies[graph.operators[1].name].dims == {"d1": ("v", "u")}
    check_training(plan)


def test_pinned_meshes_count_ranks_within_their_stage():
    graph, mesh = mlp(), Layout((2,), ("u",))
    names = [operator.name for operator in graph.operators]
    pinned = {names[2]: Strategy(dims={"k": ("u",)}, mesh=mesh)}
    found = search(
        graph, Machine.load("h200-x4"), num_stages=2, stages=(names[:2], names[2:]), pinned=pinned, num_micro_batches=2
    )
    assert found.best.strategies[names[2]].mesh == Layout((2,), ("u",), [2, 3])
    with pytest.raises(TwofoldError, match="'nobody'"):
        search(graph, Machine.load("h200-x4"), pinned={"nobody": Strategy()})


def network(**strategies: object) -> WithLossCell:
    net = OperatorNetwork()
    for name, given in strategies.items():
        getattr(net, name).shard(given)
    return WithLossCell(net, nn.CrossEntropyLoss())


def test_methods_of_operators_and_the_function_mark_modules():
    cell = network(relu1=((2, 1),))
    shard(cell._backbone.matmul2, ((1, 2), (2, 1)))
    graph = capture(cell, ((8, 1, 28, 28), ((8,), "int64")))
    found = given_strategies(graph, cell, 4)
    assert {name: sorted(strategy.dims) for name, strategy in found.items()} == {
        "_backbone.relu1.relu": ["d0"],
        "_backbone.matmul2.matmul": ["k"],
    }
    with pytest.raises(TwofoldError, match=r"shard takes a torch\.nn\.Module"):
        shard(torch.matmul, ((1, 2), (2, 1)))


@pytest.mark.parametrize(
    ("module", "in_strategy", "out_strategy", "message"),
    [
        (nn.Linear(16, 8), ((4, 1), (2, 1, 1)), None, r"entry 1 names 3 dims, input 'weight' \[8, 16\] has 2"),
        (
            nn.Linear(16, 8),
            ((4, 1), (3, 1)),
            None,
            r"entry 1 cuts dim 0 of input 'weight' \[8, 16\] into 3 parts: 8 % 3",
        ),
        (nn.Linear(16, 8), ((2, 2, 5), (1, 5)), None, r"dim 2 of input 'x' \[\.\., 16\] into 5 parts: 16 % 5 != 0"),
        (
            nn.Linear(16, 8, bias=False),
            ((4, 1), (1, 1), (1,)),
            None,
            r"3 entries; it reads 2: 'x' \[\.\., 16\] x 'weight'",
        ),
        (nn.Linear(16, 8), ((4, 1), (2, 1)), ((4, 2, 1),), r"names 3 dims, the output has 2; it can be \(4, 2\)$"),
        (
            nn.Linear(16, 8),
            ((2, 4), (1, 4)),
            ((1, 8),),
            r"\(1, 8\) parts; it can be \(2, 1\) \(reduced\) or \(8, 1\)",
        ),
        (nn.Linear(16, 8), (MESH("dp", "None"), MESH("mp", "None")), (MESH("dp"),), "names 1 dims, the output has 2"),
        (ops.MatMul(), ((2, 1), (1, 4)), ((2, 2),), r"it can be \(2, 4\)$"),
        (ops.ReLU(), ((2, 1),), ((2,),), "names 1 dims, the output has 2"),
        (ops.ReLU(), ((2, 1), (2, 1)), None, "2 entries; it reads 1"),
        (ops.Flatten(), ((2, 2, 1),), ((2, 1),), r"it can be \(2, 2\)$"),
        (ops.Add(), ((4, 2), (2,)), ((4, 1),), r"it can be \(4, 2\)$"),
        (nn.LayerNorm((4, 6)), ((6,),), None, r"names 1 dims, input 'x' \[\.\., 4, 6\] has at least 2"),
        (nn.Conv2d(3, 8, 3), ((2, 1, 1),), None, r"names 3 dims, input 'x' \[\?, 3, \?, \?\] has 4"),
        (nn.Embedding(64, 16), ((4, 1), (1, 3)), None, r"dim 1 of input 'weight' \[64, 16\] into 3 parts"),
    ],
)
def test_strategies_wrong_for_any_input_are_refused_immediately(module, in_strategy, out_strategy, message):
    with pytest.raises(TwofoldError, match=rf"{type(module).__name__} was given .*{message}"):
        shard(module, in_strategy, out_strategy)
    assert not sharded_modules(module)


def test_input_dependent_checks_are_left_to_planning():
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    shard(Twice(16, 8), ((4, 1), (2, 1, 1)))  # it may read anything
    shard(nn.Linear(16, 8), ((4, 1, 1), (2, 1)), ((4, 1, 2),))  # for inputs of 3 dims
    shard(nn.Linear(16, 8), ((2, 4), (1, 4)), ((8, 1),))
    shard(nn.LayerNorm(16), ((8, 1),), ((8, 1),))
    shard(ops.MatMul(), ((2, 2, 1), (2, 1, 2)), ((2, 2, 2),))
    assert shard(nn.Conv2d(3, 8, 3), ((2, 1, 1, 1), (4, 1, 1, 1))) is not None


def test_modules_that_are_not_one_operator_are_refused():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    cell = WithLossCell(net, nn.CrossEntropyLoss())
    graph = capture(cell, ((8, 4), ((8,), "int64")))
    shard(net, ((2, 1),))
    with pytest.raises(
        TwofoldError, match=r"Sequential '_backbone', sharded as \(\(2, 1\),\), has several operators: .*relu"
    ):
        given_strategies(graph, cell, 4)
    net[1].register_module("unused", shard(ops.ReLU(), ((2, 1),)))
    del net._twofold_strategy
    with pytest.raises(TwofoldError, match=r"'_backbone\.1\.unused'.* has no operator in the graph"):
        given_strategies(graph, cell, 4)


def planned(cell: nn.Module, mode: str) -> Plan:
    wrapped = AutoParallel(cell, parallel_mode=mode)
    wrapped.full_batch = True
    model = Model(wrapped, torch.optim.SGD(cell.parameters(), 0.1), machine="h200-x4")
    return model.planned((np.zeros((8, 1, 28, 28), np.float32), np.zeros(8, np.int64)), 4, "cuda")


@pytest.mark.parametrize(
    "given", [(np.zeros((1, 28, 28), np.float32), np.int64(3)), {"data": np.zeros((8, 1, 28, 28))}]
)
def test_a_data_set_of_samples_is_refused(given):
    cell = network()
    model = Model(AutoParallel(cell, parallel_mode="semi_auto"), torch.optim.SGD(cell.parameters()), machine="h200-x4")
    with pytest.raises(TwofoldError, match=r"does not give batches, .*DataLoader\(dataset, batch_size="):
        model.planned(given, 4, "cuda")


def test_semi_auto_mode_keeps_strategies_and_the_full_search_refuses_them():
    plan = planned(network(matmul2=((1, 4), (4, 1))), "semi_auto")
    assert plan.strategies["_backbone.matmul2.matmul"].dims == {"k": ("s0",)}
    with pytest.raises(TwofoldError, match=r"_backbone.matmul2, but in parallel_mode='recursive_programming'"):
        planned(network(matmul2=((1, 4), (4, 1))), "recursive_programming")


def test_the_older_form_of_semi_auto_mode():
    try:
        set_auto_parallel_context(parallel_mode="semi_auto_parallel")
        assert get_auto_parallel_context().parallel_mode == "semi_auto"
        with pytest.raises(TwofoldError, match="needs parallel_mode='auto_parallel'"):
            set_auto_parallel_context(search_mode="recursive_programming")
    finally:
        reset_auto_parallel_context()


def run_job(rank, folder):
    from executor.launch.job_main import main

    main([str(folder / "job.json")])


@pytest.mark.ranks
def test_the_cases_train_as_one_process_does(tmp_path):
    """Both in one job, with what is not given replicated."""
    names, tasks = ("advanced_operator_parallel", "multiple_copy"), []
    for name in names:
        case = CASES[name]
        module, examples = load_model(case.model)
        graph = capture(module, examples)
        pinned = given_strategies(graph.with_batch(graph.batch_size // case.interleave), module, 8)
        operators = tuple(operator.name for operator in graph.operators)
        plan = Plan(
            graph=graph, stages=(Stage(mesh=Layout((8,), ("all",)), operators=operators),), strategies=pinned,
            interleave=case.interleave, optimizer=case.optimizer,
        )  # fmt: skip
        folder = tmp_path / name
        file = save_plan(plan, folder / "plan.json")
        tasks.append(Task(plan=str(file), out=str(folder), steps=2, model=case.model, data="digits"))
    save_job(Job(tasks=tuple(tasks), device="cpu"), tmp_path / "job.json")
    run_on_ranks(run_job, 8, tmp_path, joined=False)
    for name in names:
        folder = tmp_path / name
        result = read_result(load_plan(folder / "plan.json"), folder, tmp_path, 0.0)
        found = check_run(result, model=CASES[name].model, seed=0, predicted=None)
        assert found.loss_first_rel_diff < 2e-6 and found.weights_max_rel_diff < 1e-5
        assert result.collectives_match


def test_a_plan_larger_than_the_memory_of_its_host_is_refused_before_a_rank_starts():
    vast = TransformerConfig(name="vast", num_layers=1, hidden=2**20, num_heads=1024, ffn=2**22, vocab=256, seq=16)
    plan = plan_of(Degrees(dp=2, global_batch=2), transformer(vast, batch_size=2))
    with pytest.raises(TwofoldError, match=r"of the plan are [\d.]+ TB, but this host"):
        run(plan, steps=1, device="cpu")
