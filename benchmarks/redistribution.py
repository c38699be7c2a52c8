"""Redistribution in numbers: right values, bytes against DTensor and MindSpore, and planning time.

    python -m benchmarks.redistribution                       # all of it, some minutes
    python -m benchmarks.redistribution --values 500 --oracle 0 --bytes 500

* values: random meshes up to 64 ranks, all relations of meshes, uneven dims, partial sums; every rank's part compared
  with direct slicing, on pretend ranks.
* oracle: the same values from torch's DTensor (LocalTensorMode; even splits, one mesh). Needs torch.
* bytes: received per rank (the rank that receives most, summed over steps) by our least-bytes sequence, by the sequence
  of DTensor's own planner, and by MindSpore's greedy inference (written here from the description of
  `redistribution_operator_infer.cc`; sums are all-reduced first, as it has no partial state).
* times: planning on 3-axis meshes, first and cached, for least bytes and for a two-tier price.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.redistribution_cases import MESHES, Case, order_case, random_case, random_layout
from plans.layout import Layout, TensorLayout
from plans.redistribution import Step, StepKind, max_received_bytes, redistribute
from plans.redistribution.pretend import apply_steps, split


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000, help="cases on pretend ranks")
    parser.add_argument("--oracle", type=int, default=300, help="cases against DTensor")
    parser.add_argument("--bytes", type=int, default=2_000, help="cases for the comparison of bytes")
    parser.add_argument("--times", type=int, default=300, help="cases for planning times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"values": check_values(options.values, options.seed)}
    if options.oracle:
        result["oracle"] = check_oracle(options.oracle, options.seed)
    if options.bytes:
        result["bytes_random"] = compare_bytes(options.bytes, options.seed, random_even_case)
        result["bytes_order_change"] = compare_bytes(options.bytes // 4, options.seed, lambda rng: order_case(rng))
    if options.times:
        result["planning"] = planning_times(options.times, options.seed)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)
    return result


def check_values(count: int, seed: int) -> dict[str, int]:
    """Every rank must hold its slice of the sum of the terms, exactly."""
    rng = np.random.default_rng(seed)
    kinds: dict[str, int] = {}
    wrong = 0
    for _ in range(count):
        case = random_case(rng)
        steps = redistribute(case.source, case.target, case.shape)
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
    return {"cases": count, "wrong": wrong, **kinds}


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
    """One mesh with ranks in order, even splits: what all three can do."""
    matrix = MESHES[int(rng.integers(len(MESHES)))]
    mesh = Layout(matrix, [f"a{axis}" for axis in range(len(matrix))])
    num_dims = int(rng.integers(1, 4))
    source, target = random_layout(rng, mesh, num_dims, 0.15), random_layout(rng, mesh, num_dims, 0.0)
    shape = tuple(2 * math.lcm(a, b) for a, b in zip(source.split_counts, target.split_counts, strict=True))
    return Case(source=source, target=target, shape=shape, relation="same")


def compare_bytes(count: int, seed: int, make: Callable[[np.random.Generator], Case]) -> dict[str, Any]:
    """Bytes received by the worst rank, as a share of the whole tensor; cases that move nothing are left out."""
    rng = np.random.default_rng(seed)
    by_planner: dict[str, list[float]] = {"ours": [], "dtensor": [], "mindspore": []}
    cases = [make(rng) for _ in range(count)]
    dtensor = _dtensor_elements(cases)
    above = {"dtensor": 0, "mindspore": 0}
    for case, theirs in zip(cases, dtensor, strict=True):
        steps = redistribute(case.source, case.target, case.shape, itemsize=1)
        ours = sum(max_received_bytes(step, case.shape, 1) for step in steps)
        greedy = mindspore_elements(case.source, case.target, case.shape)
        above["mindspore"] += ours > greedy
        above["dtensor"] += theirs is not None and ours > theirs
        if ours or greedy or theirs:
            whole = math.prod(case.shape)
            by_planner["ours"].append(ours / whole)
            by_planner["mindspore"].append(greedy / whole)
            by_planner["dtensor"].append(math.nan if theirs is None else theirs / whole)
    table = {}
    ours_array = np.array(by_planner["ours"])
    for name, values in by_planner.items():
        array = np.array(values)
        known = ~np.isnan(array)
        if known.any():
            table[name] = {
                "mean": float(array[known].mean()),
                **{f"p{at}": float(np.percentile(array[known], at)) for at in (10, 50, 90, 100)},
                "mean_over_ours": float(array[known].mean() / ours_array[known].mean()),
            }
    return {"cases": len(ours_array), "ours_above": above, "share_of_tensor": table}


def _dtensor_elements(cases: list[Case]) -> list[int | None]:
    try:
        from benchmarks.redistribution_dtensor import device_mesh, pretend_world, received_elements
    except ImportError:
        return [None] * len(cases)
    found: list[int | None] = [None] * len(cases)
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
                mesh = meshes.setdefault(case.source.mesh, None) or device_mesh(case.source.mesh)
                meshes[case.source.mesh] = mesh
                found[at] = received_elements(case.source, case.target, case.shape, mesh)[0]
    return found


def mindspore_elements(source: TensorLayout, target: TensorLayout, shape: Sequence[int]) -> int:
    """Elements each rank receives in MindSpore's greedy inference.

    Axes and dims are first cut into prime factors, so that each factor of a dim has at most one axis. Then, until both
    agree: slice factors whose axis is free; all-to-all for an axis that sits at another factor; gather axes
    that the target does not have; if nothing applies, gather the first factor that differs. Where the factors of a dim
    cannot be aligned, the whole tensor is gathered and sliced.
    """
    mesh = source.mesh
    local = math.prod(source.local_shape(shape))
    received = 0
    if source.partial:
        members = mesh.size(source.partial)
        received += 2 * (members - 1) * -(-local // members)
    now: list[tuple[str, int] | None] = []
    goal: list[tuple[str, int] | None] = []
    sizes: dict[tuple[str, int], int] = {}
    for mine, theirs in zip(source.dims, target.dims, strict=True):
        own, wanted = _factors(mesh, mine, sizes), _factors(mesh, theirs, sizes)
        if any(sizes[a] != sizes[b] for a, b in zip(own, wanted, strict=False)):
            return received + math.prod(shape) - local if source.dims != target.dims else received
        length = max(len(own), len(wanted))
        now += [*own, *[None] * (length - len(own))]
        goal += [*wanted, *[None] * (length - len(wanted))]
    while now != goal:
        pending = [at for at in range(len(now)) if now[at] != goal[at]]
        sliced = [at for at in pending if now[at] is None and goal[at] not in now]
        moved = [at for at in pending if now[at] is None and goal[at] in now]
        absent = [at for at in pending if now[at] is not None and now[at] not in goal]
        if sliced:
            at = sliced[0]
            now[at] = goal[at]
            local //= sizes[now[at]]  # type: ignore[index]
        elif moved:
            at = moved[0]
            size = sizes[goal[at]]  # type: ignore[index]
            received += (size - 1) * local // size
            now[now.index(goal[at])] = None
            now[at] = goal[at]
        else:
            at = (absent or [at for at in pending if now[at] is not None])[0]
            size = sizes[now[at]]  # type: ignore[index]
            received += (size - 1) * local
            local *= size
            now[at] = None
    return received


def _factors(mesh: Layout, axes: Sequence[str], sizes: dict[tuple[str, int], int]) -> list[tuple[str, int]]:
    found = []
    for axis in axes:
        rest, prime, at = mesh.size((axis,)), 2, 0
        while rest > 1:
            if rest % prime:
                prime += 1
                continue
            sizes[axis, at] = prime
            found.append((axis, at))
            rest, at = rest // prime, at + 1
    return found


class TwoTiers:
    """Nodes of eight ranks; transfers at half the rate. A stand-in for a machine's price."""

    def __call__(self, step: Step, shape: tuple[int, ...], itemsize: int) -> float:
        if step.kind is StepKind.SLICE:
            return 1e-6
        transfer = step.kind is StepKind.TRANSFER
        groups = [step.before.mesh.rank_list] if transfer else step.before.mesh.groups(step.axes)
        slow = any(len({rank // 8 for rank in group}) > 1 for group in groups)
        return 1e-5 + max_received_bytes(step, shape, itemsize) / (5e10 if slow else 4e11) * (2 if transfer else 1)

    def floor_s(self, num_bytes: int) -> float:
        return 1e-5 + num_bytes / 4e11 if num_bytes else 0.0


def planning_times(count: int, seed: int) -> dict[str, dict[str, float]]:
    """First and cached planning on meshes with three axes."""
    rng = np.random.default_rng(seed)
    matrices = [matrix for matrix in MESHES if len(matrix) == 3]
    found = {}
    for name, price in (("least bytes", None), ("two-tier price", TwoTiers())):
        first, cached = [], []
        for _ in range(count):
            matrix = matrices[int(rng.integers(len(matrices)))]
            mesh = Layout(matrix, ("dp", "sp", "mp"))
            num_dims = int(rng.integers(2, 5))
            source, target = random_layout(rng, mesh, num_dims, 0.15), random_layout(rng, mesh, num_dims, 0.0)
            counts = zip(source.split_counts, target.split_counts, strict=True)
            shape = tuple(int(rng.integers(1, 10_000)) * math.lcm(a, b) for a, b in counts)
            begin = time.perf_counter()
            redistribute(source, target, shape, price=price)
            middle = time.perf_counter()
            redistribute(source, target, shape, price=price)
            first.append(middle - begin)
            cached.append(time.perf_counter() - middle)
        found[name] = {
            "first_median_s": float(np.median(first)),
            "first_p99_s": float(np.percentile(first, 99)),
            "first_max_s": max(first),
            "cached_median_s": float(np.median(cached)),
            "cached_p99_s": float(np.percentile(cached, 99)),
        }
    return found


def show(result: dict[str, Any]) -> None:
    print(f"values on pretend ranks: {result['values']}")
    if "oracle" in result:
        print(f"values against DTensor: {result['oracle']}")
    for key in ("bytes_random", "bytes_order_change"):
        if key in result:
            each = result[key]
            print(f"\n{key}: {each['cases']} cases that move something; ours above: {each['ours_above']}")
            print(f"{'received / tensor':18}{'mean':>8}{'p10':>8}{'p50':>8}{'p90':>8}{'max':>8}{'mean / ours':>13}")
            for name, row in each["share_of_tensor"].items():
                numbers = "".join(f"{row[column]:8.3f}" for column in ("mean", "p10", "p50", "p90", "p100"))
                print(f"{name:18}{numbers}{row['mean_over_ours']:13.2f}")
    for name, row in result.get("planning", {}).items():
        print(f"\nplanning, 3 axes, {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
