"""What the search takes one operator to cost is what the instructions cost that lowering writes for it.

The operator stands alone in the middle stage of a pipeline, so that all that its ranks run is its own: the oracle is
the lowered program of that plan, priced instruction by instruction.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from costmodels import Machine, executing
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import Attr, Graph, Operator, Tensor
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.program import GroupProgram, Instruction, Kind
from search.operators.cost_keys import CostKeys
from search.operators.operator_costs import OperatorCosts
from search.operators.pricing import instruction_cost
from search.operators.space import meshes, strategies

WIDTH = 16
OPTIMIZERS = (
    Optimizer(),
    Optimizer(kind="adamw", bucket_bytes=0),
    Optimizer(kind="momentum", parallel_level=1, threshold_bytes=64),
    Optimizer(kind="adamw", parallel_level=1, threshold_bytes=64, gradient_dtype="float32", master_dtype="float32"),
    Optimizer(kind="sgd", parallel_level=2, threshold_bytes=64),
    Optimizer(kind="adamw", parallel_level=2, threshold_bytes=64, reduce_every="step"),
    Optimizer(kind="adamw", parallel_level=3, threshold_bytes=64),
)


def chain(kind: str, *parameters: tuple[int, ...], dtype: str = "float32", **attrs: Attr) -> Graph:
    """Two layers, the operator "mine" between them, and a loss."""
    tensors = [
        Tensor(name="x", shape=(32, WIDTH), kind="input"), Tensor(name="y", shape=(32, WIDTH), kind="input"),
        Tensor(name="w0", shape=(WIDTH, WIDTH), kind="parameter"),
        Tensor(name="w1", shape=(WIDTH, WIDTH), kind="parameter"),
        Tensor(name="before", shape=(32, WIDTH)), Tensor(name="after", shape=(32, WIDTH)),
        Tensor(name="end", shape=(32, WIDTH)), Tensor(name="loss", shape=()),
    ]  # fmt: skip
    names = [f"p{number}" for number in range(len(parameters))]
    tensors += [Tensor(name=name, shape=shape, kind="parameter") for name, shape in zip(names, parameters, strict=True)]
    operators = (
        Operator(name="first", kind="linear", inputs=("x", "w0"), outputs=("before",)),
        Operator(name="mine", kind=kind, inputs=("before", *names), outputs=("after",), attrs=attrs),
        Operator(name="last", kind="linear", inputs=("after", "w1"), outputs=("end",)),
        Operator(name="loss", kind="mse_loss", inputs=("end", "y"), outputs=("loss",)),
    )
    return Graph(
        name=kind, batch_size=32, operators=operators, loss="loss",
        tensors={each.name: msgspec.structs.replace(each, dtype=dtype) for each in tensors},
    )  # fmt: skip


GRAPHS = (
    chain("linear", (WIDTH, WIDTH)),
    chain("linear", (WIDTH, WIDTH), (WIDTH,), dtype="bfloat16"),
    chain("relu"),
    chain("layer_norm", (WIDTH,), (WIDTH,), eps=1e-5),
    chain("softmax", dim=1),
)


def in_the_middle(
    graph: Graph, mesh_of: Sequence[Layout], strategy: Strategy, optimizer: Optimizer, count: int
) -> Plan:
    stages = tuple(
        Stage(mesh=mesh, operators=names)
        for mesh, names in zip(mesh_of, [("first",), ("mine",), ("last", "loss")], strict=True)
    )
    return Plan(
        graph=graph, stages=stages, strategies={"mine": strategy}, num_micro_batches=count, optimizer=optimizer,
        fused=False,  # an operator is priced alone
    )  # fmt: skip


def own_instructions(group: GroupProgram, strategy: Strategy) -> Iterator[Instruction]:
    """What the ranks of the middle stage run in a step, without what brings tensors from and to other operators."""
    crossing = {
        line.token for block in group.blocks for line in block.body.instructions if line.kind in (Kind.SEND, Kind.RECV)
        and not line.channel.endswith(":within")
    }  # fmt: skip
    passed = {"before": "d:before", "after": "after" if strategy.out is None else "?"}
    for block in group.blocks:
        for line in block.body.instructions:
            name = line.name.removeprefix("token:")
            if line.token in crossing or line.waits in crossing:
                continue
            if any(name.startswith(f"{tensor}@") for tensor in passed.values()) and line.part == "C":
                continue
            yield line


def random_case(seed: int, most_ranks: int) -> tuple[random.Random, Graph, list[Layout], Strategy]:
    """A graph, the meshes of its three stages, and a strategy of the operator in the middle."""
    rng = random.Random(seed)
    graph = GRAPHS[seed % len(GRAPHS)]
    width = rng.choice([each for each in (1, 2, 4, 8) if 3 * each <= most_ranks])
    first, middle, last = (meshes(range(at * width, (at + 1) * width)) for at in range(3))
    mesh = rng.choice(middle)
    strategy = rng.choice(strategies(graph.spec(graph.by_name["mine"]), mesh))
    if rng.random() < 0.4:
        axes = [axis for axis in mesh.alias_name if mesh.size((axis,)) > 1]
        where = [rng.choice([None, 0, 1]) for _ in axes]
        out = tuple(tuple(axis for axis, dim in zip(axes, where, strict=True) if dim == at) for at in (0, 1))
        strategy = Strategy(dims=strategy.dims, out=out)
    return rng, graph, [first[0], mesh, last[0]], strategy


@pytest.mark.parametrize("machine_name", ["h200-x8", "h200-x32"])
@pytest.mark.parametrize("seed", range(40))
def test_an_operator_costs_what_its_lowered_instructions_cost(seed: int, machine_name: str) -> None:
    machine = Machine.load(machine_name)
    rng, graph, mesh_of, strategy = random_case(seed, machine.num_devices)
    optimizer, count = rng.choice(OPTIMIZERS), rng.choice([1, 2, 4])
    plan = in_the_middle(graph, mesh_of, strategy, optimizer, count)
    group, micro = lower(plan).groups[1], plan.slice_graph
    cost = instruction_cost(machine, group.mesh, plan.num_ranks)
    expected = sum(cost(line, group.values) for line in own_instructions(group, strategy))
    costs = OperatorCosts(micro=micro, mesh=group.mesh, num_micro_batches=count, optimizer=optimizer, cost=cost)
    found = costs.seconds(micro.by_name["mine"], strategy)
    assert found.compute_s + found.others_s == pytest.approx(expected, rel=1e-12)
    assert expected > 0.0


@pytest.mark.parametrize("machine_name", ["h200-x8", "h200-x32"])
def test_gathered_statistics_with_equal_keys_cost_the_same(machine_name: str) -> None:
    """Whichever mesh their axes belong to."""
    machine = executing(Machine.load(machine_name), "graph")
    graph = Graph(
        name="normed", batch_size=64, loss="loss",
        operators=(
            Operator(name="statistics", kind="batch_statistics", inputs=("x",), outputs=("s",)),
            Operator(name="norm", kind="batch_norm", inputs=("x", "s", "w", "w"), outputs=("z",), attrs={"eps": 1e-5}),
            Operator(name="loss", kind="mse_loss", inputs=("z", "y"), outputs=("loss",)),
        ),
        tensors={
            name: Tensor(name=name, shape=shape, kind=kind)
            for name, shape, kind in (
                ("x", (64, 64), "input"), ("y", (64, 64), "input"), ("s", (2, 64), "activation"),
                ("z", (64, 64), "activation"), ("w", (64,), "parameter"), ("loss", (), "activation"),
            )
        },
    )  # fmt: skip
    operator, spec = graph.by_name["statistics"], graph.spec(graph.by_name["statistics"])
    costs: dict[object, set[float]] = {}
    for mesh in meshes(range(machine.num_devices), ordered=True):
        cost = instruction_cost(machine, mesh, machine.num_devices)
        own = OperatorCosts(micro=graph, mesh=mesh, num_micro_batches=1, optimizer=Optimizer(), cost=cost)
        keys = CostKeys(graph, mesh, 1, Optimizer(), cost.group_key)
        for strategy in strategies(spec, mesh):
            costs.setdefault(keys.of(operator, spec, strategy), set()).add(sum(own.seconds(operator, strategy)[:2]))
    assert {len(each) for each in costs.values()} == {1} and len(costs) > 4


@pytest.mark.parametrize("graph", GRAPHS[1:4:2], ids=lambda graph: graph.name)
def test_levels_with_equal_keys_cost_the_same(graph: Graph) -> None:
    """A level makes no difference to parameters that are small, or that every rank has a part of its own of."""
    machine, mesh, operator = Machine.load("h200-x8"), Layout((4, 2), ("d0", "d1"), range(8)), graph.by_name["mine"]
    spec, cost = graph.spec(operator), instruction_cost(machine, mesh, machine.num_devices)
    costs: dict[object, set[float]] = {}
    count = 0
    for level, threshold in itertools.product(range(4), (64, 1 << 20)):
        optimizer = Optimizer(parallel_level=level, threshold_bytes=threshold)
        own = OperatorCosts(micro=graph, mesh=mesh, num_micro_batches=2, optimizer=optimizer, cost=cost)
        keys = CostKeys(graph, mesh, 2, optimizer, cost.group_key)
        for strategy in strategies(spec, mesh):
            count += 1
            costs.setdefault(keys.of(operator, spec, strategy), set()).add(sum(own.seconds(operator, strategy)[:2]))
    assert {len(each) for each in costs.values()} == {1} and len(costs) < 0.8 * count
