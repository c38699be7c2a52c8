"""The search against a shortest path over all layouts and all steps between them, made without its code."""

import heapq
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from plans.layout import Layout, TensorLayout
from plans.redistribution import Step, StepKind, max_received_bytes, redistribute

SHAPE = (240, 240)


def all_layouts(mesh: Layout, num_dims: int) -> list[TensorLayout]:
    """Every way to give each axis to a dim (in every order), to partial sums or to nobody."""
    found = {}
    for order in itertools.permutations(mesh.alias_name):
        for places in itertools.product(range(num_dims + 2), repeat=len(order)):
            dims = tuple(tuple(a for a, at in zip(order, places, strict=True) if at == dim) for dim in range(num_dims))
            summed = {a for a, at in zip(order, places, strict=True) if at == num_dims}
            partial = tuple(axis for axis in mesh.alias_name if axis in summed)
            found[dims, partial] = TensorLayout(mesh=mesh, dims=dims, partial=partial)
    return list(found.values())


def steps_between(one: TensorLayout, two: TensorLayout) -> list[Step]:
    """Every step that leads from one layout to the other."""
    dims = [dim for dim in range(len(one.dims)) if one.dims[dim] != two.dims[dim]]
    summed = tuple(axis for axis in one.partial if axis not in two.partial)
    if set(two.partial) - set(one.partial):
        return []

    def grown(less: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
        return more[len(less) :] if len(more) > len(less) and more[: len(less)] == less else ()

    found = []
    if summed and not dims:
        found.append(Step(kind=StepKind.ALL_REDUCE, axes=summed, before=one, after=two))
    if len(dims) == 1:
        (dim,) = dims
        more, less = grown(one.dims[dim], two.dims[dim]), grown(two.dims[dim], one.dims[dim])
        if summed and set(more) == set(summed):
            found.append(Step(kind=StepKind.REDUCE_SCATTER, axes=more, dim=dim, before=one, after=two))
        if not summed and more:
            found.append(Step(kind=StepKind.SLICE, axes=more, dim=dim, before=one, after=two))
        if not summed and less:
            found.append(Step(kind=StepKind.ALL_GATHER, axes=less, dim=dim, before=one, after=two))
    if len(dims) == 2 and not summed:
        for dim, to_dim in itertools.permutations(dims):
            axes = grown(one.dims[to_dim], two.dims[to_dim])
            if axes and axes == grown(two.dims[dim], one.dims[dim]):
                found.append(Step(kind=StepKind.ALL_TO_ALL, axes=axes, dim=dim, to_dim=to_dim, before=one, after=two))
    if not summed and one != two:
        found.append(Step(kind=StepKind.TRANSFER, before=one, after=two))
    return found


def cheapest(
    cost: Callable[[Step], float], layouts: list[TensorLayout], start: TensorLayout
) -> dict[TensorLayout, float]:
    best, queue, count = {start: 0.0}, [(0.0, 0, start)], itertools.count(1)
    closed = set()
    while queue:
        paid, _, here = heapq.heappop(queue)
        if here in closed:
            continue
        closed.add(here)
        for there in layouts:
            for step in () if there in closed else steps_between(here, there):
                now = paid + cost(step)
                if now < best.get(there, np.inf):
                    best[there] = now
                    heapq.heappush(queue, (now, next(count), there))
    return best


@pytest.mark.parametrize("matrix", [(2, 3), (2, 2, 2)])
def test_least_bytes_is_exact(matrix: tuple[int, ...]) -> None:
    layouts = all_layouts(Layout(matrix, ("a", "b", "c")[: len(matrix)]), 2)
    rng = np.random.default_rng(0)
    for start in rng.choice(np.array(layouts, dtype=object), 12, replace=False):
        best = cheapest(lambda step: max_received_bytes(step, SHAPE), layouts, start)
        for target in layouts:
            if target in best and rng.random() < 0.5:
                steps = redistribute(start, target, SHAPE)
                assert sum(max_received_bytes(step, SHAPE) for step in steps) == best[target], (start, target, steps)


@pytest.mark.parametrize(
    ("matrix", "shape"), [((2, 3), (7, 5)), ((2, 2), (1, 7)), ((3, 2), (2, 9)), ((4, 2), (5, 3)), ((2, 2, 2), (5, 6))]
)
def test_least_bytes_is_exact_for_uneven_dims(matrix: tuple[int, ...], shape: tuple[int, ...]) -> None:
    layouts = all_layouts(Layout(matrix, ("a", "b", "c")[: len(matrix)]), 2)
    rng = np.random.default_rng(2)
    summed = [each for each in layouts if each.partial]
    for start in rng.choice(
        np.array(summed, dtype=object), min(12 if len(matrix) < 3 else 3, len(summed)), replace=False
    ):
        best = cheapest(lambda step: max_received_bytes(step, shape), layouts, start)
        for target in layouts:
            if target in best:
                steps = redistribute(start, target, shape)
                brought = sum(max_received_bytes(step, shape) for step in steps)
                assert brought == best[target], (f"{start}", f"{target}", steps)


def test_terms_of_a_sum_move_first_where_parts_are_uneven() -> None:
    """A reduce-scatter pads its chunks: after it 108 bytes have come to a rank, 72 if the terms go where they fit."""
    mesh = Layout((2, 4), ("a", "b"))
    source = TensorLayout(mesh=mesh, dims=((), ("b",), ()), partial=("a",))
    steps = redistribute(source, mesh("b", "None", "a"), (21, 1, 2))
    assert [str(step.kind) for step in steps] == ["transfer", "reduce_scatter"]
    assert sum(max_received_bytes(step, (21, 1, 2)) for step in steps) == 72


class Links:
    """Nodes of two ranks with fast links inside and slow ones between; transfers run at half the rate."""

    def __call__(self, step: Step, shape: tuple[int, ...], itemsize: int) -> float:
        if step.kind is StepKind.SLICE:
            return 1e-7
        transfer = step.kind is StepKind.TRANSFER
        groups = [step.before.mesh.rank_list] if transfer else step.before.mesh.groups(step.axes)
        slow = any(len({rank // 2 for rank in group}) > 1 for group in groups)
        return 2e-6 + max_received_bytes(step, shape, itemsize) / (1e8 if slow else 1e9) * (2 if transfer else 1)

    def floor_s(self, num_bytes: int) -> float:
        return 2e-6 + num_bytes / 1e9 if num_bytes else 0.0


def test_least_time_is_exact_on_a_two_tier_machine() -> None:
    """Transfers go only to the target or one collective before it; under this price no other transfer pays."""
    links = Links()
    layouts = all_layouts(Layout((2, 2, 2), ("a", "b", "c")), 2)
    rng = np.random.default_rng(1)
    for start in rng.choice(np.array(layouts, dtype=object), 12, replace=False):
        best = cheapest(lambda step: links(step, SHAPE, 4), layouts, start)
        for target in layouts:
            if target in best and rng.random() < 0.3:
                steps = redistribute(start, target, SHAPE, price=links)
                assert sum(links(step, SHAPE, 4) for step in steps) == pytest.approx(best[target], rel=1e-9)
                plain = redistribute(start, target, SHAPE, price=links.__call__)
                assert sum(links(step, SHAPE, 4) for step in plain) == pytest.approx(best[target], rel=1e-9)


def test_one_rank_pairs_over_slow_links_slice_first() -> None:
    """A price decides: replicas inside a node share what crosses the slow links, then gather over the fast ones."""
    mesh = Layout((2, 2), ("node", "inside"))
    source, target = mesh("node", "None"), mesh("None", "node")
    by_bytes = redistribute(source, target, (4096, 4096))
    by_time = redistribute(source, target, (4096, 4096), price=Links())
    assert [str(step.kind) for step in by_bytes] == ["all_to_all"]
    assert [str(step.kind) for step in by_time] == ["slice", "all_to_all", "all_gather"]
