"""Blocks: the repeated parts of a model, recognised by the names of its modules."""

from __future__ import annotations

from plans.model.graph import Operator

__all__ = ["block_of"]


def block_of(operator: Operator) -> str:
    """The block that an operator belongs to: its module up to the first number, or all of it where it has none.

    An operator without a module is a separate block.

    >>> make = lambda module: Operator(name="q.linear", kind="linear", inputs=(), outputs=(), module=module)
    >>> [block_of(make(module)) for module in ("model.layers.3.attention.q", "model.embed", "")]
    ['model.layers.3', 'model.embed', 'q.linear']
    """
    parts = operator.module.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return operator.module or operator.name
