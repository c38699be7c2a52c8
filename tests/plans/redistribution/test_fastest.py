"""Least time under machines' prices, against a shortest path over all layouts and steps, made without its code."""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from costmodels import Machine
from plans.layout import Layout, TensorLayout
from plans.lower.emit import step_instructions
from plans.redistribution import Step, StepKind, max_received_bytes, pieces, redistribute
from plans.redistribution.greedy import by_gathering, by_moving, by_transfer
from plans.redistribution.load import load
from plans.redistribution.search import least_s
from plans.redistribution.space import Space
from search.operators.pricing import StepSeconds, instruction_cost, without_copies
from tests.plans.redistribution.cases import random_case, random_layout
from tests.plans.redistribution.mindspore import elements, mindspore_steps
from tests.plans.redistribution.test_exact import all_layouts, steps_between
from tests.pretend.redistribution import apply_steps, split

CUBE = Layout((2, 2, 2), ("a", "b", "c"))


def seconds(steps: tuple[Step, ...], shape: tuple[int, ...], price: StepSeconds) -> float:
    return sum(price(step, shape, 4) for step in steps)


def price_on(machine: str) -> StepSeconds:
    return StepSeconds(Machine.load(machine), 8, "float32")


def fastest_to_all(
    start: TensorLayout, edges: dict[TensorLayout, list[tuple[TensorLayout, Step, float]]]
) -> Iterator[tuple[TensorLayout, float]]:
    """Dijkstra over (layout, whether a transfer was made)."""
    best, queue, count, closed = {(start, False): 0.0}, [(0.0, 0, start, False)], itertools.count(1), set()
    while queue:
        paid, _, here, fetched = heapq.heappop(queue)
        if (here, fetched) in closed:
            continue
        closed.add((here, fetched))
        for there, step, step_s in edges[here]:
            is_transfer = step.kind is StepKind.TRANSFER
            state = (there, fetched or is_transfer)
            if not (fetched and is_transfer) and paid + step_s < best.get(state, np.inf):
                best[state] = paid + step_s
                heapq.heappush(queue, (paid + step_s, next(count), *state))
    for target in {layout for layout, _ in best}:
        yield target, min(best.get((target, fetched), np.inf) for fetched in (False, True))


@pytest.mark.parametrize(
    ("machine", "shape"), [("h200-x8", (4096, 8192)), ("ascend-910b2-x8", (16, 16)), ("cpu-2core-x8", (4096, 8192))]
)
def test_least_time_is_exact(machine: str, shape: tuple[int, ...]) -> None:
    price = price_on(machine)
    layouts = [each for each in all_layouts(CUBE, 2) if each.is_even(shape)]
    edges = {
        one: [
            (two, step, price(step, shape, 4))
            for two in layouts
            for step in steps_between(one, two)
            if step.kind is not StepKind.TRANSFER or load(one, two, shape).num_peers
        ]
        for one in layouts
    }
    rng = np.random.default_rng(0)
    for start in rng.choice(np.array(layouts, dtype=object), 3, replace=False):
        for target, expected_s in fastest_to_all(start, edges):
            steps = redistribute(start, target, shape, price=price, even=True)
            assert seconds(steps, shape, price) == pytest.approx(expected_s, rel=1e-9), (f"{start}", f"{target}", steps)


@pytest.mark.parametrize("uneven", [False, True])
def test_sequences_of_least_time_are_right(uneven: bool) -> None:
    rng = np.random.default_rng(5)
    price = price_on("ascend-910b2-x8")
    for _ in range(60):
        case = random_case(rng, relation="same", uneven=uneven, max_ranks=8)
        if max(case.source.mesh.rank_list) > 7:
            continue
        steps = redistribute(case.source, case.target, case.shape, price=price, even=not uneven)
        terms = [rng.integers(-9, 9, case.shape).astype(float) for _ in case.source.mesh.groups(())]
        terms = terms[: case.source.mesh.size(case.source.partial)]
        parts = apply_steps(steps, split(case.source, terms), case.shape)
        whole = np.sum(terms, axis=0)
        for group in case.target.mesh.groups(case.target.partial):
            window = tuple(slice(low, high) for low, high in case.target.region(group[0], case.shape))
            assert np.array_equal(np.sum([parts[rank] for rank in group], axis=0), whole[window])


MATRICES = [(8,), (2, 4), (4, 2), (2, 2, 2), (3, 2), (4, 4), (2, 2, 2, 2), (2, 2, 2, 2, 2)]


@pytest.mark.parametrize("machine", [None, "h200-x32", "ascend-910b2-x32"])
def test_never_above_the_greedy_sequences(machine: str | None) -> None:
    """Neither above those between layouts, nor above MindSpore's on prime factors (under a price: between layouts)."""
    rng = np.random.default_rng(6)
    price = None if machine is None else StepSeconds(Machine.load(machine), 32, "float32")

    def cost(steps: tuple[Step, ...], shape: tuple[int, ...]) -> float:
        return sum(max_received_bytes(step, shape) if price is None else price(step, shape, 4) for step in steps)

    for at in range(40):
        matrix = MATRICES[at % len(MATRICES)]
        mesh = Layout(matrix, ("a", "b", "c", "d", "e")[: len(matrix)])
        num_dims = int(rng.integers(1, 3))
        source, target = random_layout(rng, mesh, num_dims, 0.2), random_layout(rng, mesh, num_dims, 0.0)
        shape = tuple(int(rng.integers(1, 300)) * mesh.num_ranks for _ in range(num_dims))
        ours = cost(redistribute(source, target, shape, price=price, even=True), shape) * (1 - 1e-9)
        space = Space(mesh, target, shape)
        for greedy in (by_gathering, by_moving, by_transfer):
            moves = greedy(space, space.state(source), space.state(target))
            if all(move.kind is not StepKind.TRANSFER or space.received(move) for move in moves):
                assert ours <= cost(tuple(space.step(move) for move in moves), shape)
        theirs = mindspore_steps(source, target, shape)
        if price is None:
            assert ours <= 4 * elements(theirs)
        elif not any(each.reshapes for each in theirs):
            each_s = [price.local_s(each.kind, each.mesh, each.axes, each.touched * 4, 4) for each in theirs]
            assert ours <= sum(each_s)


@pytest.mark.parametrize("machine", ["h200-x8", "ascend-910b2-x8", "cpu-2core-x8"])
def test_a_price_is_that_of_the_lowered_instructions(machine: str) -> None:
    price, shape = price_on(machine), (2048, 4096)
    cost = instruction_cost(price.machine, CUBE, 8)
    rng = np.random.default_rng(7)
    layouts = [each for each in all_layouts(CUBE, 2) if each.is_even(shape)]
    for one, two in itertools.product(rng.choice(np.array(layouts, dtype=object), 8, replace=False), layouts):
        for step in steps_between(one, two):
            lowered_s = sum(cost(without_copies(each)) for each in step_instructions(step, shape, "float32"))
            assert price(step, shape, 4) == pytest.approx(lowered_s, rel=1e-12)
            if step.kind is StepKind.TRANSFER:
                busiest = load(one, two, shape)
                args = (busiest.num_peers, busiest.num_elements * 4)
                assert price.transfer_s(*args, busiest.pairs, CUBE.rank_list) == pytest.approx(lowered_s, rel=1e-9)
                floors_s = price.transfer_floors_s(np.array([args[1]]), np.array([max(1, args[0])]), 7, False)
                assert not args[0] or lowered_s * 0.1 <= floors_s[0] <= lowered_s * (1 + 1e-12)
            else:
                sizes = [4 * int(np.prod(layout.local_shape(shape))) for layout in (one, two)]
                size = sum(sizes) if step.kind is StepKind.SLICE else max(sizes)
                local_s = price.local_s(step.kind, CUBE, frozenset(step.axes), size, 4)
                assert local_s == pytest.approx(lowered_s, rel=1e-9)


def test_the_load_is_that_of_the_pieces() -> None:
    rng = np.random.default_rng(8)
    for _ in range(100):
        case = random_case(rng, partial=False, max_ranks=16)
        busiest = load(case.source, case.target, case.shape)
        moved = [each for each in pieces(case.source, case.target, case.shape) if not each.is_local]
        assert busiest.pairs == {(each.src_rank, each.dst_rank) for each in moved}
        peers: list[int] = []
        sizes: list[int] = []
        for end in (0, 1):
            ranks = {pair[end] for pair in busiest.pairs}
            peers += [sum(pair[end] == rank for pair in busiest.pairs) for rank in ranks]
            sizes += [
                sum(each.num_elements for each in moved if (each.src_rank, each.dst_rank)[end] == rank)
                for rank in ranks
            ]
        assert busiest.num_peers == max(peers, default=0)
        assert busiest.num_elements == max(sizes, default=0)


def test_a_slow_tier_is_looked_at() -> None:
    """The bound on transfers that leave a node is below what they cost, and the answer agrees with no bound at all."""
    machine = Machine.load("h100-sxm-x1024")
    price = StepSeconds(machine, 16, "float32")

    class Blind(StepSeconds):
        __slots__ = ()

        def domains(self, ranks: object) -> None:
            return None

    blind = Blind(machine, 16, "float32")
    mesh, rng = Layout((2, 2, 4), ("a", "b", "c")), np.random.default_rng(9)
    for _ in range(8):
        source, target = random_layout(rng, mesh, 2, 0.1), random_layout(rng, mesh, 2, 0.0)
        shape = (16 * int(rng.integers(1, 64)), 16 * int(rng.integers(1, 64)))
        with_bound, without = (redistribute(source, target, shape, price=each, even=True) for each in (price, blind))
        assert seconds(with_bound, shape, price) == pytest.approx(seconds(without, shape, price), rel=1e-9)


def test_seconds_are_known_without_pricing_the_pieces() -> None:
    """No step is lowered while planning (a transfer has one instruction per piece) nor needed for its seconds."""
    machine = Machine.load("h200-x64")

    class Aggregate(StepSeconds):
        __slots__ = ()

        def __call__(self, step: Step, shape: tuple[int, ...], itemsize: int) -> float:
            raise AssertionError(f"priced {step}")

    fast, price = Aggregate(machine, 64, "float32"), StepSeconds(machine, 64, "float32")
    mesh, rng = Layout((4, 2, 8), ("a", "b", "c")), np.random.default_rng(12)
    for _ in range(12):
        source, target = random_layout(rng, mesh, 2, 0.1), random_layout(rng, mesh, 2, 0.0)
        shape = (64 * int(rng.integers(1, 64)), 64 * int(rng.integers(1, 64)))
        steps = redistribute(source, target, shape, price=fast, even=True)
        known_s = least_s(source, target, shape, 4, fast)
        assert seconds(steps, shape, price) == pytest.approx(known_s, rel=1e-8, abs=1e-12)


def test_even_keeps_every_layout_even() -> None:
    mesh = Layout((2, 3), ("a", "b"))
    source, target = mesh("a", "b"), mesh("None", ("b", "a"))
    for price in (None, price_on("h200-x8")):
        for step in redistribute(source, target, (4, 6), price=price, even=True):
            assert step.after.is_even((4, 6)), step
