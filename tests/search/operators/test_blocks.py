"""Graphs of equal blocks: eliminated once, and split alike."""

from __future__ import annotations

import numpy as np
import pytest

from plans.layout import Layout
from plans.model.transformer import transformer
from plans.plan import Plan, Stage, Strategy
from search.operators.eliminate import Memory, Table, best_assignment
from search.operators.equal_blocks import alike_plans


def blocks(count: int, seed: int, size: int = 3) -> tuple[list[int], list[Table]]:
    """A chain of equal blocks: x -> a -> b -> next x, with x read by b, too."""
    rng = np.random.default_rng(seed)
    inner, joined, own = rng.random((size, size)), rng.random((size, size, size)), rng.random(size)
    tables = [Table((3 * at,), own) for at in range(count + 1)]
    for at in range(count):
        x, a, b, after = 3 * at, 3 * at + 1, 3 * at + 2, 3 * at + 3
        tables += [Table((x, a), inner), Table((a, b), inner), Table((x, b, after), joined)]
    return [size] * (3 * count + 1), tables


def by_matrices(tables: list[Table], count: int) -> float:
    """The same minimum by products of the blocks' own matrices."""
    own, inner, joined = tables[0].costs, tables[-3].costs, tables[-1].costs
    block = (inner[:, :, None, None] + inner[None, :, :, None] + joined[:, None, :, :]).min(axis=(1, 2))
    total = own
    for _ in range(count):
        total = (total[:, None] + block).min(axis=0) + own
    return float(total.min())


@pytest.mark.parametrize("seed", range(4))
def test_chains_of_equal_blocks_have_the_minimum_of_their_matrices(seed: int) -> None:
    sizes, tables = blocks(9, seed)
    total, values = best_assignment(sizes, tables)
    assert total == pytest.approx(by_matrices(tables, 9), rel=1e-12)
    reached = sum(table.costs[tuple(values[variable] for variable in table.variables)] for table in tables)
    assert reached == pytest.approx(total, rel=1e-12)


def test_the_inside_of_equal_blocks_is_joined_once() -> None:
    joins = []
    for count in (8, 16):
        memory = Memory()
        best_assignment(*blocks(count, 0), memory)
        joins.append(len(memory.joins))
    assert joins[1] - joins[0] <= 2 * 8  # of a further block x and b, which part it from the next, but not a


def test_what_changed_is_joined_again_and_nothing_else() -> None:
    sizes, tables = blocks(6, 1)
    memory = Memory()
    best_assignment(sizes, tables, memory)
    before = dict(memory.joins)
    tables[0] = Table(tables[0].variables, tables[0].costs + 1.0)
    total, _ = best_assignment(sizes, tables, memory)
    assert total == pytest.approx(best_assignment(sizes, tables)[0], rel=1e-12)
    assert set(before) & set(memory.joins)


def test_plans_that_split_equal_blocks_equally_are_tried() -> None:
    """Two layers split in two ways: each of the two for both; operators outside of them keep theirs."""
    graph = transformer("llama-3-8b", batch_size=4, seq=256, num_layers=3)
    mesh = Layout((2,), ("d0",))
    split = Strategy(dims={"n": ("d0",)})
    plan = Plan(
        graph=graph, stages=(Stage(mesh=mesh, operators=tuple(each.name for each in graph.operators)),),
        strategies={"layers.1.attention.wq": split, "output": split},
    )  # fmt: skip
    whole, alike = alike_plans(plan)
    assert whole.strategies == {"output": split}
    assert alike.strategies == {**{f"layers.{layer}.attention.wq": split for layer in range(3)}, "output": split}
    assert not list(alike_plans(alike))
    pinned = [f"layers.{layer}.attention.wq" for layer in range(3)]
    assert all(each.strategies == plan.strategies for each in alike_plans(plan, pinned))
