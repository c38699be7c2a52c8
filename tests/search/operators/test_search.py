"""The search against brute force: elimination, cost tables, whole plans."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest

from costmodels import Machine
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import Graph, Operator, Tensor
from plans.model.mlp import mlp_graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy, plan_to_json
from plans.program import Instruction, Kind, Value
from search import search, uniform_plan
from search.operators.additive import StageCosts
from search.operators.eliminate import Table, best_assignment, min_marginals
from search.operators.pricing import instruction_cost
from search.operators.space import factorisations, strategies
from search.operators.stages import balanced_cuts
from simulator import simulate


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.load("h200-x8")


class CollectivesCounted:
    """A price: every collective costs a second, all else nothing."""

    fused = False

    def __call__(self, instruction: Instruction, values: Mapping[str, Value] | None = None) -> float:
        return 1.0 if instruction.kind is Kind.COLLECTIVE else 0.0

    def parts(self, instruction: Instruction, values: Mapping[str, Value] | None = None) -> tuple[float, float]:
        return 0.0, 0.0

    def group_key(self, mesh: Layout, axes: tuple[str, ...]) -> object:
        return mesh, axes


def brute_force(sizes: list[int], tables: list[Table]) -> float:
    return min(
        sum(table.costs[tuple(values[variable] for variable in table.variables)] for table in tables)
        for values in itertools.product(*(range(size) for size in sizes))
    )


@pytest.mark.parametrize("seed", range(200))
def test_elimination_equals_brute_force(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = [int(size) for size in random.integers(1, 5, random.integers(1, 7))]
    tables = [Table((variable,), random.random(size)) for variable, size in enumerate(sizes)]
    for _ in range(random.integers(0, 8)):
        scope = tuple(int(v) for v in random.permutation(len(sizes))[: random.integers(1, min(4, len(sizes) + 1))])
        costs = random.random([sizes[variable] for variable in scope])
        costs[costs > 0.95] = np.inf
        tables.append(Table(scope, costs))
    expected = brute_force(sizes, tables)
    if not np.isfinite(expected):
        with pytest.raises(TwofoldError, match="no combination"):
            best_assignment(sizes, tables)
        return
    total, values = best_assignment(sizes, tables)
    reached = sum(table.costs[tuple(values[variable] for variable in table.variables)] for table in tables)
    assert total == pytest.approx(expected, rel=1e-12)
    assert reached == pytest.approx(expected, rel=1e-12)


def test_min_marginals_are_the_best_with_a_value_fixed() -> None:
    random = np.random.default_rng(7)
    sizes = [3, 2, 4]
    tables = [Table((0, 1), random.random((3, 2))), Table((2, 1), random.random((4, 2))), Table((2,), random.random(4))]
    for variable, row in enumerate(min_marginals(sizes, tables)):
        for value, (total, values) in enumerate(row):
            pinned = np.full(sizes[variable], np.inf)
            pinned[value] = 0
            assert total == pytest.approx(brute_force(sizes, [*tables, Table((variable,), pinned)]))
            assert values[variable] == value


def test_factorisations_multiply_to_the_number() -> None:
    for number in (1, 6, 8, 12, 24, 36, 1000):
        found = factorisations(number)
        assert len(set(found)) == len(found)
        assert all(np.prod(factors, dtype=int) == number and len(factors) <= 3 for factors in found)
    by_hand = {tuple(sorted(c, reverse=True)) for c in itertools.product(range(1, 13), repeat=3) if np.prod(c) == 12}
    assert {tuple(f for f in factors if f > 1) for factors in by_hand} == set(factorisations(12))


def test_strategies_divide_and_use_each_axis_once() -> None:
    graph = mlp_graph([12, 9, 6], 10)
    mesh = Layout((2, 3), ("a", "b"))
    spec = graph.spec(graph.operators[0])  # 10 x 12 times 9 x 12
    found = {tuple(sorted(strategy.dims.items())) for strategy in strategies(spec, mesh)}
    assert (("b0", ("a",)), ("n", ("b",))) in found
    assert (("k", ("a", "b")),) in found
    assert not any(("n", ("a",)) in strategy for strategy in found)  # 9 % 2 != 0
    assert not any(("b0", ("b",)) in strategy for strategy in found)  # 10 % 3 != 0


@pytest.mark.parametrize("seed", range(30))
def test_balanced_cuts_minimise_the_slowest_stage(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = list(random.integers(1, 20, random.integers(2, 8)).astype(float))
    stages = int(random.integers(1, len(costs) + 1))
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    )
    ranges = balanced_cuts(costs, stages)
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])] and ranges[-1][1] == len(costs)
    assert max(sum(costs[start:end]) for start, end in ranges) == best


def diamond(batch: int) -> Graph:
    """x -> linear -> relu, and relu + linear again: a tensor with two readers and a branch that joins."""
    tensors = {
        "x": Tensor(name="x", shape=(batch, 8), kind="input"),
        "y": Tensor(name="y", shape=(batch, 8), kind="input"),
        "w1": Tensor(name="w1", shape=(8, 8), kind="parameter"),
        "w2": Tensor(name="w2", shape=(8, 8), kind="parameter"),
        **{name: Tensor(name=name, shape=(batch, 8)) for name in ("a", "b", "c", "d")},
        "loss": Tensor(name="loss", shape=()),
    }
    operators = (
        Operator(name="one", kind="linear", inputs=("x", "w1"), outputs=("a",)),
        Operator(name="act", kind="relu", inputs=("a",), outputs=("b",)),
        Operator(name="two", kind="linear", inputs=("b", "w2"), outputs=("c",)),
        Operator(name="join", kind="add", inputs=("b", "c"), outputs=("d",)),
        Operator(name="loss", kind="mse_loss", inputs=("d", "y"), outputs=("loss",)),
    )
    return Graph(name="diamond", batch_size=batch, tensors=tensors, operators=operators, loss="loss")


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_stage_minimum_equals_brute_force_on_a_branching_graph(machine: Machine, shape: tuple[int, ...]) -> None:
    graph = diamond(8)
    mesh = Layout(shape, ("d0", "d1")[: len(shape)])
    costs = StageCosts(
        micro=graph, operators=graph.operators[:4], mesh=mesh, num_micro_batches=2,
        optimizer=Optimizer(parallel_level=1),
        full_batch=True, cost=instruction_cost(machine, mesh, mesh.num_ranks),
    )  # fmt: skip
    costs.choices[:] = [choices[:12] for choices in costs.choices]  # keeps brute force small
    tables = costs.problem().tables()
    assert best_assignment(costs.sizes, tables)[0] == pytest.approx(brute_force(costs.sizes, tables), rel=1e-12)


def test_a_tensor_with_two_readers_is_paid_once_per_layout(machine: Machine) -> None:
    graph = diamond(8)
    mesh = Layout((2,), ("d0",))
    costs = StageCosts(
        micro=graph, operators=graph.operators, mesh=mesh, num_micro_batches=1, optimizer=Optimizer(), full_batch=True,
        cost=CollectivesCounted(),
    )  # fmt: skip
    split, whole = Strategy(dims={"d0": ("d0",)}), Strategy()
    act, two, join = (costs.choices[number].index(each) for number, each in ((1, split), (2, whole), (3, whole)))
    tensors = costs.tensors

    def paid_s(readers: Sequence[Operator]) -> np.ndarray:
        edge = tensors.edge_of("b", graph.operators[1], readers, False)
        return edge.table(edge.costs(tensors.seconds(edge))).costs

    assert paid_s(graph.operators[2:3])[act, two] == paid_s(graph.operators[2:4])[act, two, join] == 1.0


def test_sums_there_and_back_between_the_same_layouts_are_paid_twice() -> None:
    """A sum forward and a sum of the gradient are two, as the program has them."""
    tensors = {name: Tensor(name=name, shape=(8, 8), kind="input") for name in "xy"}
    tensors |= {name: Tensor(name=name, shape=(8, 8), kind="parameter") for name in ("w1", "w2")}
    tensors |= {"a": Tensor(name="a", shape=(8, 8)), "b": Tensor(name="b", shape=(8, 8))}
    tensors["loss"] = Tensor(name="loss", shape=())
    operators = (
        Operator(name="one", kind="linear", inputs=("x", "w1"), outputs=("a",)),
        Operator(name="two", kind="linear", inputs=("a", "w2"), outputs=("b",)),
        Operator(name="loss", kind="mse_loss", inputs=("b", "y"), outputs=("loss",)),
    )
    graph, mesh = (
        Graph(name="two", batch_size=8, tensors=tensors, operators=operators, loss="loss"),
        Layout((2,), ("d",)),
    )
    costs = StageCosts(
        micro=graph, operators=operators, mesh=mesh, num_micro_batches=1, optimizer=Optimizer(), full_batch=True,
        cost=CollectivesCounted(),
    )  # fmt: skip
    chosen = {"one": Strategy(dims={"k": ("d",)}), "two": Strategy(dims={"n": ("d",)}), "loss": Strategy()}
    values = [choices.index(chosen[each.name]) for choices, each in zip(costs.choices, operators, strict=True)]
    paid = next(table.costs[values[0], values[1]] for table in costs.problem().tables() if table.variables == (0, 1))
    stages = (Stage(mesh=mesh, operators=("one", "two", "loss")),)
    program = lower(Plan(graph=graph, stages=stages, strategies={n: s for n, s in chosen.items() if s.dims}))
    calls = [instruction for _, instruction in program.groups[0].walk() if instruction.call == "all_reduce"]
    sums = [each.name for each in calls if each.name.startswith(("a@", "d:a@"))]
    assert paid == 2.0 == len(sums), (paid, [each.name for each in calls])


def small(machine: Machine, **options: object) -> tuple[Plan, list[Plan]]:
    found = search(mlp_graph([64, 32, 8], 16), machine, num_devices=4, num_micro_batches=2, **options)  # type: ignore[arg-type]
    return found.best, list(found.plans)


def test_best_plan_is_within_one_percent_of_all_plans_simulated(machine: Machine) -> None:
    """Two operators and the loss on two devices: every plan is simulated one by one."""
    graph = mlp_graph([64, 32], 16)
    mesh = Layout((2,), ("d0",))
    found = search(graph, machine, num_devices=2, num_micro_batches=2)
    template, micro = found.best, graph.with_batch(8)
    every = []
    for picked in itertools.product(*(strategies(micro.spec(operator), mesh) for operator in micro.operators)):
        chosen = {operator.name: strategy for operator, strategy in zip(micro.operators, picked, strict=True)}
        every.append(simulate(msgspec.structs.replace(template, strategies=chosen), machine).step_interval_s)
    assert found.best.prediction is not None
    assert found.best.prediction.step_s <= 1.01 * min(every)


def test_plans_are_ranked_and_carry_their_prediction(machine: Machine) -> None:
    best, plans = small(machine)
    times = [plan.prediction.step_s for plan in plans if plan.prediction is not None]
    assert times == sorted(times) and len(times) == len(plans)
    assert best.prediction is not None
    assert simulate(best, machine).step_interval_s == best.prediction.step_s


def test_pinned_strategies_are_kept(machine: Machine) -> None:
    kept = Strategy(dims={"k": ("d0",)})
    best, _ = small(machine, pinned={"layer1.linear": kept})
    assert best.strategies["layer1.linear"] == kept


def test_lower_bound_is_below_every_plan(machine: Machine) -> None:
    found = search(mlp_graph([512, 512, 512, 8], 64), machine, num_devices=8, num_stages=2, num_micro_batches=4)
    assert 0 < found.lower_bound_s <= min(plan.prediction.step_s for plan in found.plans if plan.prediction)
    assert found.gap >= 0
    assert all((entry.extra_s or 0.0) >= 0 for entry in found.alternatives)


def test_memory_limit_is_hard_and_names_what_would_fit(machine: Machine) -> None:
    graph = mlp_graph([256, 256, 256], 32)
    options = {"num_devices": 4, "num_micro_batches": 2}
    with pytest.raises(TwofoldError, match="the smallest found that would is") as caught:
        search(graph, machine, memory_limit_bytes=1000, **options)  # type: ignore[arg-type]
    smallest = int(str(caught.value).split("smallest found that would is ")[1].split(" bytes")[0].replace(",", ""))
    found = search(graph, machine, memory_limit_bytes=smallest, **options)  # type: ignore[arg-type]
    assert found.best.prediction is not None and found.best.prediction.peak_bytes <= smallest
    with pytest.raises(TwofoldError, match="the smallest found that would is"):
        search(graph, machine, memory_limit_bytes=smallest - 1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 8, "num_stages": 3, "widths": "even"}, "3 pipeline stages do not divide 8 devices"),
        ({"num_devices": 2, "num_stages": 3}, "3 pipeline stages on 2 devices"),
        ({"num_stages": 2, "widths": (4, 5)}, r"widths \[4, 5\]"),
        ({"num_stages": 2, "widths": (4, 2, 2)}, "list 3 stages, but there are 2"),
        ({"widths": "odd"}, "widths='odd'"),
        ({"num_micro_batches": 5}, "5 micro-batches do not divide the batch of 16"),
        ({"interleave": 0}, "interleave must be .* not 0"),
        ({"interleave": "2"}, "interleave must be .* not '2'"),
        ({"num_devices": 9}, "9 devices requested"),
        ({"schedule": "1f2b"}, "1f2b"),
        ({"schedule": "zb_v", "num_stages": 2}, r"'zb_v' puts 2 chunks on every rank.*give one of 1f1b, gpipe, zb_h1"),
        ({"num_stages": 2, "stages": [["layer1.linear"]]}, "operators are given for 1 stages"),
    ],
)
def test_bad_questions_are_refused(machine: Machine, options: dict[str, object], message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        search(mlp_graph([16, 8], 16), machine, **options)  # type: ignore[arg-type]


def test_same_answer_whatever_the_hash_seed() -> None:
    code = (
        "from costmodels import Machine; from plans.model.mlp import mlp_graph; from plans.plan import plan_to_json;"
        "from search import search; import hashlib;"
        "found = search(mlp_graph([64, 32, 8], 16), Machine.load('h200-x8'), num_devices=4, num_micro_batches=2);"
        "print(hashlib.sha256(plan_to_json(found.best)).hexdigest())"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "PYTHONPATH": "."},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(answers) == 1 and len(answers.pop()) == 65


def test_uniform_plan_follows_the_degrees(machine: Machine) -> None:
    graph = mlp_graph([64, 128, 64, 8], 32)
    plan = uniform_plan(graph, machine, dp=2, tp=2, pp=2, micro_batch=4, zero=1)
    assert plan.num_ranks == 8 and plan.num_micro_batches == 4 and plan.optimizer.parallel_level == 1
    for name, strategy in plan.strategies.items():
        if name.endswith("linear"):
            assert strategy.dims["b0"] == ("dp",)
            assert ("tp",) in (strategy.dims.get("n"), strategy.dims.get("k"))
    assert plan_to_json(plan)
    with pytest.raises(TwofoldError, match=r"dp\(4\) \* tp\(4\) = 16 ranks"):
        uniform_plan(graph, machine, dp=4, tp=4)


def test_data_parallelism_splits_the_batch_wherever_it_is(machine: Machine) -> None:
    """Of a batch norm the output is not as long as the batch, and of a permuted tensor the first dim is not the batch;
    what does not depend on the batch stays whole."""
    shapes = {"x": (64, 8, 4), "c": (4, 8), "p": (8, 64, 4), "s": (2, 8), "y": (8, 64, 4), "l": (), "v": (4, 8)}
    kinds = {"x": "input", "c": "constant"}
    graph = Graph(
        name="norm", batch_size=64, loss="l",
        tensors={name: Tensor(name=name, shape=shape, kind=kinds.get(name, "activation"), dtype="float32")
                 for name, shape in shapes.items()},
        operators=(
            Operator(name="moved", kind="permute", inputs=("x",), outputs=("p",), attrs={"dims": (1, 0, 2)}),
            Operator(name="relu", kind="relu", inputs=("p",), outputs=("y",)),
            Operator(name="statistics", kind="batch_statistics", inputs=("x",), outputs=("s",)),
            Operator(name="table", kind="relu", inputs=("c",), outputs=("v",)),
            Operator(name="loss", kind="mse_loss", inputs=("y", "p"), outputs=("l",)),
        ),
    )  # fmt: skip
    plan = uniform_plan(graph, machine, dp=8)
    split = {name: strategy.dims for name, strategy in plan.strategies.items()}
    assert set(split) == {"moved", "relu", "statistics", "loss"}
    assert all(graph.spec(graph.by_name[name]).sizes[dim] == 64 for name, dims in split.items() for dim in dims)
