"""Strategies in words, and the alternatives to those of a plan."""

from __future__ import annotations

from plans.layout import TensorLayout
from plans.plan import Plan, Strategy
from search.operators.refine import cheapest
from search.operators.stage import StageSearch
from search.result import Alternative

__all__ = ["alternatives", "describe_strategy"]

_EVERY = 1 << 30


def describe_strategy(strategy: Strategy) -> str:
    """A strategy in one line.

    >>> describe_strategy(Strategy(dims={"b0": ("d0",), "n": ("d1",)}))
    'b0 over d0, n over d1'
    """
    parts = [f"{dim} over {'.'.join(axes)}" for dim, axes in strategy.dims.items() if axes]
    text = ", ".join(parts) or "replicated"
    if strategy.mesh is not None:
        text += f" of {strategy.mesh!r}"
    if strategy.out is not None:
        out = strategy.out if strategy.mesh is None else TensorLayout(mesh=strategy.mesh, dims=strategy.out)
        text += f", handed on as {out}"
    return text


def alternatives(search: StageSearch, best: Plan) -> list[Alternative]:
    """The strategies of every operator of the best plan, and the extra cost of the best answer with each.

    Args:
        search: of its stages.
        best: the plan.
    """
    found = []
    for stage in best.stages:
        costs = search.costs(stage.operators, stage.mesh)
        every = cheapest(costs.question(), _EVERY).found
        for position, operator in enumerate(costs.operators):
            kept = best.strategy(operator)
            least: dict[int, float] = {}
            for answer in every:
                least.setdefault(answer.values[position], answer.cost_s)
            for value, cost_s in sorted(least.items()):
                strategy = costs.choices[position][value]
                found.append(
                    Alternative(
                        subject=operator.name, change=describe_strategy(strategy), extra_s=cost_s - every[0].cost_s,
                        chosen=strategy == kept,
                    )
                )  # fmt: skip
    return found
