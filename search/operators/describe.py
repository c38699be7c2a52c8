"""Strategies in words."""

from __future__ import annotations

from plans.layout import TensorLayout
from plans.plan import Strategy

__all__ = ["describe_strategy"]


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
