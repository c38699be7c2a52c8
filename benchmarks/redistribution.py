"""Redistribution in numbers: right values, bytes and seconds against DTensor and MindSpore, and planning time.

    python -m benchmarks.redistribution                       # all of it, some minutes
    python -m benchmarks.redistribution --values 500 --oracle 0 --compare 500
    python -m benchmarks.redistribution --save                # and write benchmarks/results/redistribution.json

* values: random meshes up to 64 ranks, all relations of meshes, uneven dims, partial sums; every rank's part compared
  with direct slicing, on pretend ranks, for both objectives.
* oracle: the same values from torch's DTensor (LocalTensorMode; even splits, one mesh). Needs torch.
* compare: on one random set of up to 64 ranks and five axes, bytes received per rank (the rank that receives most,
  summed over steps) of the sequences of least bytes, and seconds on a machine of those of least time, each against the
  sequence of DTensor's own planner and of MindSpore's greedy inference (`redistribution_mindspore`).
* planning: first and cached, on 3-axis meshes, for least bytes and least time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.redistribution_cases import MESHES, Case, order_case, random_case, random_layout
from benchmarks.redistribution_mindspore import Done, elements, mindspore_steps
from costmodels import Machine
from plans.layout import Layout
from plans.redistribution import StepPrice, max_received_bytes, redistribute
from search.operators.pricing import StepSeconds

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the oracle of the tests

from pretend_redistribution import apply_steps, split

RESULTS = Path(__file__).with_name("results")
ITEMSIZE = 4


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000, help="cases on pretend ranks")
    parser.add_argument("--oracle", type=int, default=300, help="cases against DTensor")
    parser.add_argument("--compare", type=int, default=2_000, help="cases for the comparison of bytes and seconds")
    parser.add_argument("--times", type=int, default=1000, help="cases for planning times")
    parser.add_argument("--machines", nargs="+", default=["h200-x64", "ascend-910b2-x64"], help="for least time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/redistribution.json")
    options = parser.parse_args(arguments)
    prices = {name: StepSeconds(Machine.load(name), 64, "float32") for name in options.machines}
    result: dict[str, Any] = {"environment": environment()}
    if options.times:  # first, while no cache is warm
        result["planning"] = planning_times(options.times, options.seed, prices)
    if options.values:
        result["values"] = check_values(options.values, options.seed, prices[options.machines[0]])
    if options.oracle:
        result["oracle"] = check_oracle(options.oracle, options.seed)
    if options.compare:
        result["random"] = compare(options.compare, options.seed, random_even_case, prices)
        result["order_change"] = compare(options.compare // 4, options.seed, lambda rng: order_case(rng), {})
    if options.save:
        RESULTS.joinpath("redistribution.json").write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return result


def environment() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.redistribution {' '.join(sys.argv[1:])}".strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def check_values(count: int, seed: int, price: StepPrice) -> dict[str, Any]:
    """Every rank must hold its slice of the sum of the terms, exactly, for both objectives (every other case each)."""
    rng = np.random.default_rng(seed)
    kinds: dict[str, int] = {}
    wrong, by_objective = 0, {"least bytes": 0, "least time": 0}
    for at in range(count):
        case = random_case(rng)
        ranks = [*case.source.mesh.rank_list, *case.target.mesh.rank_list]
        timed = at % 2 == 1 and max(ranks) < 64  # the machine has 64 devices
        by_objective["least time" if timed else "least bytes"] += 1
        steps = redistribute(case.source, case.target, case.shape, price=price if timed else None)
        terms = [
            rng.integers(-99, 99, case.shape).astype(float) for _ in range(case.source.mesh.size(case.source.partial))
        ]
        parts = apply_steps(steps, split(case.source, terms), case.shape)
        whole = np.sum(terms, axis=0)
        right = True
        for group in case.target.mesh.groups(case.target.partial):
            window = tuple(slice(low, high) for low, high in case.target.region(group[0], case.shape))
            right &= np.array_equal(np.sum([parts[rank] for rank in group], axis=0), whole[window])
        wrong += not right
        for step in steps:
            kinds[str(step.kind)] = kinds.get(str(step.kind), 0) + 1
    return {"cases": count, "wrong": wrong, "objectives": by_objective, "steps": kinds}


def check_oracle(count: int, seed: int) -> dict[str, int]:
    """The same parts from DTensor."""
    from benchmarks.redistribution_dtensor import pretend_world, redistributed

    rng = np.random.default_rng(seed)
    wrong = 0
    per_world = {8: count // 2, 16: count // 4}
    per_world[12] = count - sum(per_world.values())
    for num_ranks, cases in per_world.items():
        matrices = [matrix for matrix in MESHES if math.prod(matrix) == num_ranks] or [(3, 2, 2)]
        with pretend_world(num_ranks):
            for at in range(cases):
                matrix = matrices[at % len(matrices)]
                mesh = Layout(matrix, [f"a{axis}" for axis in range(len(matrix))])
                num_dims = int(rng.integers(1, 4))
                source, target = random_layout(rng, mesh, num_dims, 0.2), random_layout(rng, mesh, num_dims, 0.0)
                shape = tuple(math.lcm(a, b) for a, b in zip(source.split_counts, target.split_counts, strict=True))
                terms = [rng.integers(-9, 9, shape).astype(float) for _ in range(mesh.size(source.partial))]
                parts = split(source, terms)
                ours = apply_steps(redistribute(source, target, shape), parts, shape)
                theirs = redistributed(source, target, parts, shape)
                wrong += not all(np.array_equal(ours[rank], theirs[rank]) for rank in mesh.rank_list)
    return {"cases": count, "wrong": wrong}


def random_even_case(rng: np.random.Generator) -> Case:
    """One mesh with ranks in order and dims that all axes cut evenly, so that all three can do it and none has to pad.

    Tensors of 1 KB (or as small as they can be) to 4 GB, evenly in the log.
    """
    matrix = MESHES[int(rng.integers(len(MESHES)))] if rng.random() < 0.85 else (2, 2, 2, 2, 2)
    mesh = Layout(matrix, [f"a{axis}" for axis in range(len(matrix))])
    num_dims = int(rng.integers(1, 4))
    source, target = random_layout(rng, mesh, num_dims, 0.15), random_layout(rng, mesh, num_dims, 0.0)
    return Case(source=source, target=target, shape=sized(rng, [mesh.num_ranks] * num_dims), relation="same")


def sized(rng: np.random.Generator, counts: Sequence[int]) -> tuple[int, ...]:
    """A shape of multiples of `counts`, of about 2^8 to 2^30 elements."""
    shape = list(counts)
    rest = 2.0 ** rng.uniform(8, 30) / math.prod(shape)
    for at in rng.permutation(len(shape))[:-1].tolist():
        factor = max(1, int(rest ** rng.uniform(0.2, 0.8)))
        shape[at] *= factor
        rest /= factor
    shape[int(rng.integers(len(shape)))] *= max(1, int(rest))
    return tuple(shape)


def compare(
    count: int, seed: int, make: Callable[[np.random.Generator], Case], prices: dict[str, StepSeconds]
) -> dict[str, Any]:
    """Ours, DTensor's and MindSpore's sequence by both objectives; cases that move nothing are left out of the tables.

    Bytes are those of the worst rank as a share of the full tensor; seconds are as a share of ours. MindSpore also
    goes through parts that are no layout of the tensor (`Done.reshapes`), where steps cannot follow; where ours is
    above one of those, that is counted apart.
    """
    rng = np.random.default_rng(seed)
    cases = [make(rng) for _ in range(count)]
    theirs: dict[str, list[list[Done] | None]] = {
        "dtensor": _dtensor(cases),
        "mindspore": [mindspore_steps(case.source, case.target, case.shape) for case in cases],
    }
    found: dict[str, Any] = {"cases": count, "more than 3 axes": sum(_num_axes(case) > 3 for case in cases)}

    def ours_bytes(case: Case) -> float:
        steps = redistribute(case.source, case.target, case.shape, itemsize=1)
        return sum(max_received_bytes(step, case.shape, 1) for step in steps)

    shares = [math.prod(case.shape) for case in cases]
    found["least bytes"] = _table(cases, theirs, ours_bytes, lambda case, steps: float(elements(steps)), shares)
    for name, price in prices.items():

        def ours_s(case: Case, price: StepSeconds = price) -> float:
            steps = redistribute(case.source, case.target, case.shape, price=price, even=True, itemsize=ITEMSIZE)
            return sum(price(step, case.shape, ITEMSIZE) for step in steps)

        def greedy_s(case: Case, steps: Sequence[Done], price: StepSeconds = price) -> float:
            return sum(price.local_s(step.kind, step.mesh, step.axes, step.touched * ITEMSIZE, ITEMSIZE)
                       for step in steps)  # fmt: skip

        found[f"least time, {name}"] = _table(cases, theirs, ours_s, greedy_s, None)
    return found


def _num_axes(case: Case) -> int:
    mesh = case.source.mesh
    return sum(mesh.size((axis,)) > 1 for axis in mesh.alias_name)


def _table(
    cases: Sequence[Case],
    theirs: dict[str, list[list[Done] | None]],
    ours_of: Callable[[Case], float],
    cost_of: Callable[[Case, Sequence[Done]], float],
    wholes: Sequence[int] | None,
) -> dict[str, Any]:
    """Distributions of cost per planner: over the full tensor where `wholes` are given, else over ours."""
    ours = np.array([ours_of(case) for case in cases])
    table: dict[str, Any] = {}
    per_planner = {"ours": ours}
    for name, sequences in theirs.items():
        per_planner[name] = np.array(
            [math.nan if steps is None else cost_of(case, steps) for case, steps in zip(cases, sequences, strict=True)]
        )
    moving = np.max(np.nan_to_num(np.array(list(per_planner.values()))), axis=0) > 0
    for name, costs in per_planner.items():
        known = moving & ~np.isnan(costs)
        if not known.any():
            continue
        above = known & (ours > costs * (1 + 1e-9))
        if wholes is None:
            known &= ours > 0
            values = costs[known] / ours[known]
        else:
            values = costs[known] / np.array(wholes)[known]
        table[name] = {
            "cases": int(known.sum()),
            "mean": float(values.mean()),
            **{f"p{at}": float(np.percentile(values, at)) for at in (10, 50, 90, 100)},
            "mean_over_ours": float(costs[known].mean() / ours[known].mean()),
            "ours_above": int(above.sum()),
            "of_those_through_no_layout": sum(
                any(step.reshapes for step in theirs[name][at] or ()) for at in np.flatnonzero(above).tolist()
            )
            if name in theirs
            else 0,
        }
    return table


def _dtensor(cases: list[Case]) -> list[list[Done] | None]:
    try:
        from benchmarks.redistribution_dtensor import device_mesh, dtensor_steps, pretend_world
    except ImportError:
        return [None] * len(cases)
    found: list[list[Done] | None] = [None] * len(cases)
    by_ranks: dict[int, list[int]] = {}
    for at, case in enumerate(cases):
        by_ranks.setdefault(case.source.mesh.num_ranks, []).append(at)
    for num_ranks, members in by_ranks.items():
        with pretend_world(num_ranks):
            meshes: dict[Layout, Any] = {}
            for at in members:
                case = cases[at]
                if case.source.mesh.rank_list != tuple(range(num_ranks)):
                    continue  # a pretend world has ranks 0, 1, 2, ...
                if case.source.mesh not in meshes:
                    meshes[case.source.mesh] = device_mesh(case.source.mesh)
                found[at] = dtensor_steps(case.source, case.target, case.shape, meshes[case.source.mesh])
    return found


def planning_times(count: int, seed: int, prices: dict[str, StepSeconds]) -> dict[str, dict[str, float]]:
    """First and cached planning on meshes with three axes; the first cases fill tables that all later ones share.

    As lowering asks (through even layouts only), and for least bytes also as `redistribute` does by default.
    """
    matrices = [matrix for matrix in MESHES if len(matrix) == 3]
    asked: list[tuple[str, StepPrice | None, bool]] = [("least bytes", None, True)]
    asked += [(f"least time, {name}", price, True) for name, price in prices.items()]
    asked += [("least bytes, uneven layouts too", None, False)]
    asked += [(f"least time, {name}, uneven layouts too", price, False) for name, price in prices.items()]
    found = {}
    for name, price, even in asked:
        rng = np.random.default_rng(seed)
        first, cached = [], []
        for _ in range(count):
            matrix = matrices[int(rng.integers(len(matrices)))]
            mesh = Layout(matrix, ("dp", "sp", "mp"))
            num_dims = int(rng.integers(2, 5))
            source, target = random_layout(rng, mesh, num_dims, 0.15), random_layout(rng, mesh, num_dims, 0.0)
            counts = [math.lcm(a, b) for a, b in zip(source.split_counts, target.split_counts, strict=True)]
            shape = sized(rng, counts)
            begin = time.perf_counter()
            redistribute(source, target, shape, price=price, even=even)
            middle = time.perf_counter()
            redistribute(source, target, shape, price=price, even=even)
            first.append(middle - begin)
            cached.append(time.perf_counter() - middle)
        found[name] = {
            "first_median_s": float(np.median(first)),
            "first_p99_s": float(np.percentile(first, 99)),
            "first_max_s": max(first),
            "first_above_5ms": sum(each > 5e-3 for each in first) / count,
            "cached_median_s": float(np.median(cached)),
            "cached_p99_s": float(np.percentile(cached, 99)),
        }
    return found


def show(result: dict[str, Any]) -> None:
    for name, row in result.get("planning", {}).items():
        print(f"planning, 3 axes, {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    if "values" in result:
        print(f"values on pretend ranks: {result['values']}")
    if "oracle" in result:
        print(f"values against DTensor: {result['oracle']}")
    for key in ("random", "order_change"):
        for objective, table in result.get(key, {}).items():
            if not isinstance(table, dict):
                continue
            unit = "received / tensor" if objective == "least bytes" else "seconds / ours"
            print(f"\n{key}, {objective}")
            print(
                f"{unit:18}{'mean':>8}{'p10':>8}{'p50':>8}{'p90':>8}{'max':>9}{'mean / ours':>13}{'ours above':>12}"
                f"{'(no layout)':>12}"
            )
            for name, row in table.items():
                numbers = (
                    "".join(f"{row[column]:8.3f}" for column in ("mean", "p10", "p50", "p90")) + f"{row['p100']:9.2f}"
                )
                print(
                    f"{name:18}{numbers}{row['mean_over_ours']:13.2f}{row['ours_above']:12}{row['of_those_through_no_layout']:12}"
                )


if __name__ == "__main__":
    main()
