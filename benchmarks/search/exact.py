"""How exact the search is, against oracles that share none of its algorithm.

    python -m benchmarks.search.exact                 # all of it, some minutes
    python -m benchmarks.search.exact --save          # and write benchmarks/results/search_exact.json

* every strategy: random problems of up to 4 operators on up to 8 devices, in one or two stages, with branches and
  tensors that several operators read: the least additive cost over meshes and strategies, against every combination of
  strategies priced one by one (each redistribution asked for again, no tables).
* integer programming: longer chains and branches of random cost tables against scipy's `milp` (HiGHS).
* every plan: problems with few combinations, each of which is simulated whole; how far the chosen plan's step is above
  the least.
* every tangled plan: the same for branches that meet again and inputs that several layers share.
* every shape: stages, boundaries and widths searched, against each of them searched on its own.
* hash seeds: the chosen plan in processes with different PYTHONHASHSEED.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks import FOLDER
from costmodels import Machine, executing
from plans.model.graph import Graph, Operator, Tensor
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy, plan_to_json
from search import search
from search.attach_prediction import predicted
from search.operators.additive import StageCosts
from search.operators.eliminate import Table, best_assignment
from search.operators.pricing import instruction_cost, redistribution_choice
from search.operators.space import meshes, strategies
from simulator import simulate

RESULTS = FOLDER / "results"
MACHINES = ("h200-x8", "ascend-910b2-x8", "cpu-2core-x8")
MAX_COMBINATIONS = 1500


def random_problem(seed: int, most_operators: int = 4) -> Graph:
    """Linear layers, relus and sums of earlier values, most with several readers, then a loss."""
    rng = np.random.default_rng(seed)
    batch, width = int(rng.choice([4, 8, 12])), int(rng.choice([4, 6, 8, 512]))
    tensors = {"x": Tensor(name="x", shape=(batch, width), kind="input")}
    tensors["y"] = Tensor(name="y", shape=(batch, width), kind="input")
    operators, values = [], ["x"]
    for number in range(int(rng.integers(1, most_operators))):
        kind = "linear" if number == 0 else str(rng.choice(["linear", "relu", "add"]))
        inputs = [str(rng.choice(values[-2:]))]
        if kind == "add":
            inputs.append(str(rng.choice(values)))
        if kind == "linear":
            inputs.append(f"w{number}")
            tensors[f"w{number}"] = Tensor(name=f"w{number}", shape=(width, width), kind="parameter")
        made = f"v{number}"
        tensors[made] = Tensor(name=made, shape=(batch, width))
        operators.append(Operator(name=f"op{number}", kind=kind, inputs=tuple(inputs), outputs=(made,)))
        values.append(made)
    needed, live = {values[-1]}, []
    for operator in reversed(operators):
        if operator.outputs[0] in needed:
            needed |= set(operator.inputs)
            live.append(operator)
    operators = live[::-1]
    if all(operator.kind != "linear" for operator in operators):
        return random_problem(seed + 1_000_003, most_operators)
    tensors = {name: tensor for name, tensor in tensors.items() if name in needed or name in ("x", "y")}
    tensors["loss"] = Tensor(name="loss", shape=())
    operators.append(Operator(name="loss", kind="mse_loss", inputs=(values[-1], "y"), outputs=("loss",)))
    return Graph(name=f"random {seed}", batch_size=batch, tensors=tensors, operators=tuple(operators), loss="loss")


def against_every_strategy(seed: int) -> tuple[float, float, int]:
    """The search's least additive cost of all stages, that of every combination, and how many there were."""
    rng = np.random.default_rng(10_000 + seed)
    graph = random_problem(seed)
    machine = Machine.load(MACHINES[seed % len(MACHINES)])
    names = [operator.name for operator in graph.operators]
    num_stages = 2 if len(names) > 1 and seed % 2 else 1
    width = int(rng.choice([1, 2, 3, 4, 6, 8] if num_stages == 1 else [1, 2, 3, 4]))
    cut = int(rng.integers(1, len(names))) if num_stages == 2 else len(names)
    optimizer = Optimizer(parallel_level=int(rng.integers(0, 2)), threshold_bytes=64)
    found_s = least_s = 0.0
    count = 0
    for number, stage in enumerate([names[:cut], names[cut:]][:num_stages]):
        ranks = range(number * width, (number + 1) * width)
        found, least = [], []
        for mesh in meshes(ranks):
            costs = StageCosts(
                micro=graph, operators=[operator for operator in graph.operators if operator.name in stage], mesh=mesh,
                num_micro_batches=2, optimizer=optimizer, full_batch=bool(seed % 3),
                cost=instruction_cost(machine, mesh, num_stages * width),
                choice=redistribution_choice(machine, num_stages * width),
            )  # fmt: skip
            while math.prod(costs.sizes) > MAX_COMBINATIONS:  # keep brute force small: a random part of the strategies
                largest = costs.sizes.index(max(costs.sizes))
                kept = sorted(rng.permutation(len(costs.choices[largest]))[: max(1, max(costs.sizes) // 2)].tolist())
                costs.choices[largest] = [costs.choices[largest][at] for at in kept]
            found.append(best_assignment(costs.sizes, costs.problem().tables())[0])
            combinations = list(itertools.product(*costs.choices))
            count += len(combinations)
            own_s = {
                (operator.name, strategy): sum(costs.own.seconds(operator, strategy)[:2])
                for operator, choices in zip(costs.operators, costs.choices, strict=True) for strategy in choices
            }  # fmt: skip
            least.append(min(_priced(costs, picked, own_s) for picked in combinations))
        found_s += min(found)
        least_s += min(least)
    return found_s, least_s, count


def _priced(costs: StageCosts, picked: Sequence[Strategy], own_s: Mapping[tuple[str, Strategy], float]) -> float:
    """The additive cost of one combination: its operators, and each tensor's moves to every layout asked for, once."""
    strategy = {operator.name: each for operator, each in zip(costs.operators, picked, strict=True)}
    total = 0.0
    moves: set[tuple[Any, Any, str, str]] = set()  # there and back are two, also between the same layouts
    gradients = costs.micro.needs_gradient()
    arrived: dict[str, Any] = {}
    for operator in costs.operators:
        spec, mine = costs.micro.spec(operator), strategy[operator.name]
        mesh = mine.mesh or costs.mesh
        total += own_s[operator.name, mine]
        for index, name in enumerate(operator.inputs):
            tensor = costs.micro.tensors[name]
            wanted = spec.input_layout(index, mesh, mine.dims)
            back = spec.gradient_layout(index, mesh, mine.dims)
            if name not in arrived:
                if tensor.kind == "constant" or (tensor.kind == "input" and costs.full_batch):
                    continue  # whole everywhere: every rank takes its part
                arrived[name] = wanted  # a parameter, a part of the batch, another stage's value: in the first layout
            source = arrived[name]
            moves.add((source, wanted, name, "there"))
            if name in gradients and tensor.kind != "parameter" and _is_shared(costs, name):
                moves.add((back, source.without_partial(), name, "back"))
        for index, name in enumerate(operator.outputs):
            arrived[name] = mine.output_layout(spec, index, mesh)
    assert costs.moves is not None
    for source, target, name, _ in moves:
        tensor = costs.micro.tensors[name]
        total += costs.num_micro_batches * costs.moves.seconds(source, target, tensor.shape, tensor.dtype)
    return total


def _is_shared(costs: StageCosts, name: str) -> bool:
    """Whether a tensor's gradient is moved in the stage: what one operator alone reads from outside goes back as is."""
    inside = any(name in operator.outputs for operator in costs.operators)
    return inside or len({operator.name for operator in costs.operators if name in operator.inputs}) > 1


def against_milp(seed: int, num_variables: int) -> tuple[float, float]:
    """Elimination and scipy's milp on a chain with branches: one binary per cell of every table."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(2, 6, num_variables)]
    tables = [Table((at,), rng.random(size)) for at, size in enumerate(sizes)]
    for at in range(1, num_variables):
        other = at - 1 if rng.random() < 0.7 else int(rng.integers(max(0, at - 4), at))
        tables.append(Table((other, at), rng.random((sizes[other], sizes[at]))))
    for _ in range(num_variables // 4):
        at = int(rng.integers(2, num_variables))
        scope = (at - 2, at - 1, at)
        tables.append(Table(scope, rng.random([sizes[each] for each in scope])))
    found = best_assignment(sizes, tables)[0]
    starts = np.cumsum([0, *sizes, *(table.costs.size for table in tables)])
    costs = np.concatenate([np.zeros(sum(sizes)), *(table.costs.ravel() for table in tables)])
    rows: list[int] = []
    columns: list[int] = []
    entries: list[float] = []
    bounds: list[float] = []
    for variable, size in enumerate(sizes):  # one value each
        rows += [len(bounds)] * size
        columns += range(starts[variable], starts[variable] + size)
        entries += [1.0] * size
        bounds.append(1.0)
    for number, table in enumerate(tables):  # the cells of a table with a value add up to whether it is taken
        cells = np.arange(table.costs.size).reshape(table.costs.shape) + starts[len(sizes) + number]
        for dim, variable in enumerate(table.variables):
            for value in range(sizes[variable]):
                mine = np.take(cells, value, axis=dim).ravel().tolist()
                rows += [len(bounds)] * (len(mine) + 1)
                columns += [*mine, int(starts[variable]) + value]
                entries += [*[1.0] * len(mine), -1.0]
                bounds.append(0.0)
    matrix = coo_array((entries, (rows, columns)), shape=(len(bounds), len(costs))).tocsr()
    integral = np.concatenate([np.ones(sum(sizes)), np.zeros(len(costs) - sum(sizes))])
    answer = milp(
        costs, constraints=LinearConstraint(matrix, bounds, bounds), integrality=integral, bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    assert answer.success, answer.message
    return found, float(answer.fun)


def by_integer_programming(costs: StageCosts) -> float:
    """The least additive cost of a stage by scipy's milp, from layouts alone, without tables or edges.

    One binary per operator and strategy. Per tensor and reader one variable for every two layouts, of the maker and of
    the reader, whose sums are those of the strategies; and one per move, at least as large as what a reader asks of it.
    """
    program = _Program()
    taken = [[program.variable(sum(costs.own.seconds(operator, choice)[:2]), 1.0) for choice in choices]
             for operator, choices in zip(costs.operators, costs.choices, strict=True)]  # fmt: skip
    for mine in taken:
        program.equal(dict.fromkeys(mine, 1.0), 1.0)
    place = {operator.name: at for at, operator in enumerate(costs.operators)}
    gradients = costs.micro.needs_gradient()
    for name, tensor in costs.micro.tensors.items():
        around = [op for op in costs.operators if name in op.outputs]
        readers = [op for op in costs.operators if name in op.inputs]
        fed = tensor.kind == "constant" or (tensor.kind == "input" and costs.full_batch)
        if not readers or (not around and (fed or len(readers) < 2)):
            continue
        wanted = name in gradients and tensor.kind != "parameter"
        first = (around or readers)[0]
        made: dict[Any, list[int]] = {}
        for number, strategy in enumerate(costs.choices[place[first.name]]):
            spec, mesh = costs.micro.spec(first), strategy.mesh or costs.mesh
            if around:
                source = strategy.output_layout(spec, first.outputs.index(name), mesh)
            else:
                source = spec.input_layout(first.inputs.index(name), mesh, strategy.dims)
            made.setdefault(source, []).append(taken[place[first.name]][number])
        moves: dict[tuple[Any, Any, str], int] = {}

        def move(source: Any, target: Any, way: str, tensor: Tensor = tensor, moves: Any = moves) -> int:
            if (source, target, way) not in moves:
                seconds = 0.0
                if source != target:
                    assert costs.moves is not None
                    seconds = costs.moves.price(source, target, tensor.shape, tensor.dtype) * costs.num_micro_batches
                moves[source, target, way] = program.variable(seconds)
            return moves[source, target, way]

        for reader in readers:
            for index in [at for at, each in enumerate(reader.inputs) if each == name]:
                asked: dict[Any, list[int]] = {}
                for number, strategy in enumerate(costs.choices[place[reader.name]]):
                    spec, mesh = costs.micro.spec(reader), strategy.mesh or costs.mesh
                    both = (
                        spec.input_layout(index, mesh, strategy.dims), spec.gradient_layout(index, mesh, strategy.dims)
                    )  # fmt: skip
                    asked.setdefault(both, []).append(taken[place[reader.name]][number])
                pairs = {(source, both): program.variable(0.0) for source in made for both in asked}
                for source, mine in made.items():
                    program.equal({pairs[source, both]: 1.0 for both in asked} | dict.fromkeys(mine, -1.0), 0.0)
                for both, mine in asked.items():
                    program.equal({pairs[source, both]: 1.0 for source in made} | dict.fromkeys(mine, -1.0), 0.0)
                for source in made:
                    for target in {there for there, _ in asked}:
                        uses = {pairs[source, both]: 1.0 for both in asked if both[0] == target}
                        program.at_most(uses | {move(source, target, "there"): -1.0}, 0.0)
                    arrives = source.without_partial()
                    for back in {back for _, back in asked} if wanted else ():
                        uses = {pairs[source, both]: 1.0 for both in asked if both[1] == back}
                        program.at_most(uses | {move(back, arrives, f"back of {source}"): -1.0}, 0.0)
    return program.least()


class _Program:
    """A mixed-integer program that grows variable by variable and row by row."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integral: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self, cost: float, integral: float = 0.0) -> int:
        self.costs.append(cost)
        self.integral.append(integral)
        return len(self.costs) - 1

    def equal(self, row: dict[int, float], value: float) -> None:
        self.rows.append((row, value, value))

    def at_most(self, row: dict[int, float], value: float) -> None:
        self.rows.append((row, -math.inf, value))

    def least(self) -> float:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        entries = [(at, column, value) for at, (row, *_) in enumerate(self.rows) for column, value in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.costs))).tocsr()
        scale = 1.0 / max(self.costs)
        answer = milp(
            np.array(self.costs) * scale, integrality=np.array(self.integral), bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, [low for _, low, _ in self.rows], [high for *_, high in self.rows]),
            options={"mip_rel_gap": 1e-7},
        )  # fmt: skip
        assert answer.success, answer.message
        return float(answer.fun) / scale


def against_every_plan(seed: int) -> tuple[float, float, int]:
    """The step of the plan that `search` chooses, the least over all plans of its space, and how many those are."""
    graph = random_problem(seed, most_operators=3)
    machine = Machine.load(MACHINES[seed % len(MACHINES)])
    names = tuple(operator.name for operator in graph.operators)
    num_stages = 2 if seed % 2 else 1
    num_devices = 2 * num_stages
    num_micro_batches = 2
    cut = [names] if num_stages == 1 else [names[:1], names[1:]]
    options: dict[str, Any] = {"num_devices": num_devices, "num_stages": num_stages, "stages": cut}
    found = search(graph, machine, num_micro_batches=num_micro_batches, **options)
    micro = graph.with_batch(graph.batch_size // num_micro_batches)
    stages = [
        Stage(mesh=meshes(range(2 * number, 2 * number + 2))[0], operators=tuple(each))
        for number, each in enumerate(cut)
    ]
    mesh_of = {name: stage.mesh for stage in stages for name in stage.operators}
    offered = [strategies(micro.spec(operator), mesh_of[operator.name]) for operator in micro.operators]
    template = msgspec.structs.replace(found.best, redistributions=(), prediction=None)
    least_s, count = math.inf, 0
    for picked in itertools.product(*offered):
        chosen = dict(zip(names, picked, strict=True))
        plan: Plan = msgspec.structs.replace(template, strategies=chosen)
        least_s = min(least_s, simulate(plan, machine).step_interval_s)
        count += 1
    assert found.best.prediction is not None
    return found.best.prediction.step_s, least_s, count


def against_every_shape(seed: int, num_devices: int = 4) -> tuple[float, float, int]:
    """Stages, boundaries and widths searched, against each of them searched on its own; and how many there were."""
    graph, machine = random_problem(seed, 6), Machine.load(MACHINES[seed % len(MACHINES)])
    options: dict[str, Any] = {"num_devices": num_devices, "num_micro_batches": 2 - seed % 2, "top_k": 1}
    found = search(graph, machine, num_stages=None, **options).best.prediction
    assert found is not None
    names = [operator.name for operator in graph.operators]
    least_s, count = math.inf, 0
    for number in range(1, min(num_devices, len(names)) + 1):
        for cuts in itertools.combinations(range(1, len(names)), number - 1):
            stages = [names[start:end] for start, end in itertools.pairwise((0, *cuts, len(names)))]
            for widths in itertools.product(range(1, num_devices + 1), repeat=number):
                if sum(widths) <= num_devices:
                    alone = search(graph, machine, num_stages=number, stages=stages, widths=widths, **options)
                    assert alone.best.prediction is not None
                    least_s, count = min(least_s, alone.best.prediction.step_s), count + 1
    return found.step_s, least_s, count


def tangled_problem(seed: int) -> Graph:
    """Branches that meet again and inputs that several layers share; narrow and wide."""
    rng = np.random.default_rng(5000 + seed)
    batch, width = int(rng.choice([4, 6, 8, 64])), int(rng.choice([6, 8, 64, 1024, 4096]))
    tensors = {name: Tensor(name=name, shape=(batch, width), kind="input") for name in "xy"}
    operators: list[Operator] = []

    def made(kind: str, *inputs: str) -> str:
        number = len(operators)
        if kind == "linear":
            tensors[f"w{number}"] = Tensor(name=f"w{number}", shape=(width, width), kind="parameter")
            inputs = (*inputs, f"w{number}")
        tensors[f"v{number}"] = Tensor(name=f"v{number}", shape=(batch, width))
        operators.append(Operator(name=f"op{number}", kind=kind, inputs=inputs, outputs=(f"v{number}",)))
        return f"v{number}"

    first = made("linear", "x")
    second = {0: lambda: made("linear", first), 1: lambda: made("linear", "x"), 2: lambda: made("relu", first)}
    other = second[int(rng.integers(3))]()
    end = made("add", other, made("linear", first) if rng.random() < 0.3 else first)
    tensors["loss"] = Tensor(name="loss", shape=())
    operators.append(Operator(name="loss", kind="mse_loss", inputs=(end, "y"), outputs=("loss",)))
    return Graph(name=f"tangled {seed}", batch_size=batch, tensors=tensors, operators=tuple(operators), loss="loss")


def against_every_tangled_plan(seed: int, most: int = 600) -> tuple[float, float, int]:
    """As `against_every_plan` for branches and shared inputs; every redistribution by its fastest steps."""
    graph, machine = tangled_problem(seed), Machine.load(MACHINES[seed % len(MACHINES)])
    count = 1 + seed % 2
    micro = graph.with_batch(graph.batch_size // count)
    for num_devices in (4, 2):
        mesh = meshes(range(num_devices))[-1]
        offered = [strategies(micro.spec(operator), mesh) for operator in micro.operators]
        if math.prod(map(len, offered)) <= most:
            break
    found = search(graph, machine, num_devices=num_devices, num_micro_batches=count).best
    names = tuple(operator.name for operator in micro.operators)
    template = msgspec.structs.replace(
        found, stages=(Stage(mesh=mesh, operators=names),), redistributions=(), prediction=None
    )
    least_s, number = math.inf, 0
    for picked in itertools.product(*offered):
        chosen = dict(zip(names, picked, strict=True))
        plan = predicted(msgspec.structs.replace(template, strategies=chosen), executing(machine, found.execution))
        assert plan.prediction is not None
        least_s, number = min(least_s, plan.prediction.step_s), number + 1
    assert found.prediction is not None
    return found.prediction.step_s, least_s, number


def answers_by_hash_seed(seeds: Sequence[str]) -> set[str]:
    """Digests of the chosen plan in processes with these PYTHONHASHSEEDs."""
    code = "from benchmarks.search.exact import digest; print(digest())"
    return {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True, text=True, check=True, cwd=FOLDER.parent,
        ).stdout.strip()
        for seed in seeds
    }  # fmt: skip


def digest() -> str:
    machine = Machine.load("h200-x8")
    plans = [search(random_problem(seed), machine, num_devices=4, num_micro_batches=2).best for seed in range(4)]
    return hashlib.sha256(b"".join(plan_to_json(plan) for plan in plans)).hexdigest()


def _ratios(rows: Sequence[tuple[float, float, int]], what: str) -> dict[str, Any]:
    ratios = [chosen / least for chosen, least, _ in rows] or [1.0]
    return {
        "problems": len(rows),
        what: sum(count for _, _, count in rows),
        "above_by_1_percent": sum(ratio > 1.01 for ratio in ratios),
        "largest_ratio": max(ratios),
        "mean_ratio": float(np.mean(ratios)),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=240, help="against every combination of strategies")
    parser.add_argument("--programs", type=int, default=40, help="against integer programming")
    parser.add_argument("--plans", type=int, default=24, help="against all plans simulated")
    parser.add_argument("--tangled", type=int, default=40, help="against all plans with branches simulated")
    parser.add_argument("--shapes", type=int, default=36, help="against all stages, boundaries and widths")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/search_exact.json")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    rows = [against_every_strategy(seed) for seed in range(options.problems)]
    programs = [against_milp(seed, num_variables=20) for seed in range(options.programs)]
    plans = [against_every_plan(seed) for seed in range(options.plans)]
    tangled = [against_every_tangled_plan(seed) for seed in range(options.tangled)]
    shaped = [against_every_shape(seed) for seed in range(options.shapes)]
    result = {
        "environment": {
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python -m benchmarks.search.exact {' '.join(sys.argv[1:])}".strip(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "every strategy": {
            "problems": len(rows),
            "combinations": sum(count for _, _, count in rows),
            "different": sum(not math.isclose(found, least, rel_tol=1e-9) for found, least, _ in rows),
        },
        "integer programming": {
            "programs": len(programs),
            "different": sum(not math.isclose(found, least, rel_tol=1e-6) for found, least in programs),
        },
        "every plan": _ratios(plans, "plans"),
        "every tangled plan": _ratios(tangled, "plans"),
        "every shape": _ratios(shaped, "shapes"),
        "hash_seeds": {"processes": 4, "answers": len(answers_by_hash_seed(["0", "1", "2", "3"]))},
        "seconds": time.perf_counter() - began,
    }
    if options.save:
        RESULTS.joinpath("search_exact.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return result


if __name__ == "__main__":
    main()
