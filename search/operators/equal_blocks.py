"""Plans in which equal blocks have equal strategies.

The additive cost is a sum over blocks, so ties and near ties are broken in each block separately, and equal layers may
get different strategies. Simulation decides whether using one block's strategies for all of them is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import msgspec

from plans.model.blocks import block_of
from plans.model.graph import Graph, Operator
from plans.plan import Plan, Stage, Strategy

__all__ = ["alike_plans"]

_MOST_WAYS = 3
"""Ways of splitting a kind of block that are tried, the most frequent ones."""


def alike_plans(plan: Plan, pinned: Collection[str] = ()) -> Iterator[Plan]:
    """Plans in which all equal blocks are split in the same way, one per stage, kind of block and split.

    Args:
        plan: any plan.
        pinned: operators whose strategies stay.
    """
    for stage in plan.stages:
        for blocks in _kinds(plan.graph, stage):
            ways = Counter(tuple(plan.strategy(operator) for operator in block) for block in blocks)
            if len(ways) == 1:
                continue
            for way, _ in ways.most_common(_MOST_WAYS):
                changed = {
                    operator.name: strategy
                    for block in blocks
                    for operator, strategy in zip(block, way, strict=True)
                    if operator.name not in pinned
                }
                every = {
                    name: strategy
                    for name, strategy in {**plan.strategies, **changed}.items()
                    if strategy != Strategy()
                }
                yield msgspec.structs.replace(plan, strategies=every, redistributions=(), prediction=None)


def _kinds(graph: Graph, stage: Stage) -> list[list[list[Operator]]]:
    """The blocks of a stage, grouped by equal operators, without groups of one block."""
    blocks: dict[str, list[Operator]] = {}
    for name in stage.operators:
        operator = graph.by_name[name]
        blocks.setdefault(block_of(operator), []).append(operator)
    kinds: dict[object, list[list[Operator]]] = {}
    for block in blocks.values():
        signature = tuple(
            (operator.kind, tuple(graph.spec(operator).sizes.items()), len(operator.inputs)) for operator in block
        )
        kinds.setdefault(signature, []).append(block)
    return [same for same in kinds.values() if len(same) > 1]
