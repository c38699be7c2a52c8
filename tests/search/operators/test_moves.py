"""Bounds of redistributions against their prices, and the answers that are found with few prices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.search.exact import random_problem
from costmodels import Machine
from plans.layout import Layout, TensorLayout
from plans.optimizer import Optimizer
from search.operators.additive import StageCosts
from search.operators.eliminate import best_assignment, min_marginals
from search.operators.moves import Moves
from search.operators.pricing import instruction_cost, redistribution_choice
from search.operators.refine import cheapest
from search.operators.space import finest, meshes

MACHINES = ("h200-x8", "ascend-910b2-x8", "cpu-2core-x8", "a100-80gb-x16")


def layouts(mesh: Layout, num_dims: int) -> list[TensorLayout]:
    """Every way to give each axis to a dim, to sums, or to none."""
    found = []
    for given in itertools.product(range(-2, num_dims), repeat=len(mesh.alias_name)):
        dims = tuple(
            tuple(a for a, at in zip(mesh.alias_name, given, strict=True) if at == dim) for dim in range(num_dims)
        )
        partial = tuple(a for a, at in zip(mesh.alias_name, given, strict=True) if at == -2)
        found.append(TensorLayout(mesh=mesh, dims=dims, partial=partial))
    return found


SMALL = (((2, 2), (8, 4096)), ((2, 3), (12, 24)), ((8,), (64, 8)), ((2, 2, 2), (64,)))
TIERED = (((4, 3), (12, 24)), ((2, 2, 3), (144,)), ((2, 2, 4), (16, 64)))


@pytest.mark.parametrize(
    ("machine", "sizes", "shape"),
    [(name, *case) for name in MACHINES[:3] for case in SMALL] + [(MACHINES[3], *case) for case in (*SMALL, *TIERED)],
)
def test_bounds_are_below_prices(machine: str, sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    target, count = Machine.load(machine), int(np.prod(sizes))
    mesh = Layout(sizes, ("d0", "d1", "d2")[: len(sizes)])
    choice = redistribution_choice(target, count)
    moves = Moves(choice.seconds, choice.price_of)  # type: ignore[arg-type]
    every = layouts(mesh, len(shape))
    moves.add(shape, "float32", every)
    bounds = moves.table(shape, "float32").copy()
    draw = np.random.default_rng(count)
    pairs = [(one, two) for one, two in itertools.product(range(len(every)), repeat=2) if not every[two].partial]
    for one, two in (pairs[at] for at in draw.permutation(len(pairs))[:150]):
        priced = choice.seconds(every[one], every[two], shape, "float32")
        assert bounds[one, two] <= priced * (1 + 1e-12), (every[one], every[two])
        assert moves.price(every[one], every[two], shape, "float32") == pytest.approx(priced, rel=1e-12)
    assert np.mean(bounds[[one for one, _ in pairs], [two for _, two in pairs]]) > 0


@pytest.mark.parametrize("seed", range(12))
def test_few_prices_give_the_answers_of_all_prices(seed: int) -> None:
    graph, machine = random_problem(seed, 6), Machine.load(MACHINES[seed % len(MACHINES)])
    mesh = meshes(range((4, 6, 8)[seed % 3]))[-1]
    choice = redistribution_choice(machine, mesh.num_ranks)

    def costs(moves: Moves | None) -> StageCosts:
        return StageCosts(
            micro=graph, operators=graph.operators, mesh=mesh, num_micro_batches=2, optimizer=Optimizer(),
            full_batch=True, cost=instruction_cost(machine, mesh, mesh.num_ranks), choice=choice, moves=moves,
        )  # fmt: skip

    bounded, priced = costs(Moves(choice.seconds, choice.price_of)), costs(None)  # type: ignore[arg-type]
    found = cheapest(bounded.question(), 4).found
    tables = priced.problem().tables()
    assert found[0].cost_s == pytest.approx(best_assignment(priced.sizes, tables)[0], rel=1e-9)
    every = {values: total for row in min_marginals(priced.sizes, tables) for total, values in row}
    assert [each.cost_s for each in found] == pytest.approx(sorted(every.values())[: len(found)], rel=1e-9)


@pytest.mark.parametrize("count", [6, 8, 12, 16, 24, 1000])
def test_what_is_no_finest_mesh_is_a_coarser_form_of_one(count: int) -> None:
    every = meshes(range(count))
    kept = finest(every)
    for mesh in every:
        if mesh not in kept:
            cuts = set(np.cumprod(mesh.device_matrix).tolist())
            assert any(cuts <= set(np.cumprod(other.device_matrix).tolist()) for other in kept)
    for one, other in itertools.permutations(kept, 2):  # the converse
        assert not set(np.cumprod(one.device_matrix).tolist()) < set(np.cumprod(other.device_matrix).tolist())
