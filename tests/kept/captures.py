"""The graphs of captured modules for `tests.kept`: which operators a module becomes.

That they compute what the module computes is tested elsewhere; a module may become other operators that compute the
same, such as one that no device has a kernel for.
"""

from __future__ import annotations

from collections import Counter

from executor.capture.capture import capture
from plans.model.graph import Graph
from tests.kept.lines import Case, hash_of
from tests.modules.modules import MODULES, ONE_RANK, made

__all__ = ["CAPTURES", "graph_line"]

OF_TORCH = ("own gradients", "rows of masks, losses", "columns of masks, losses")
"""Modules with calls that versions of torch record in different ways."""


def graph_line(graph: Graph) -> str:
    """How many operators of each kind, then the hash of the graph."""
    kinds = Counter(operator.kind for operator in graph.operators)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    operators = [[each.kind, each.inputs, each.outputs, each.attrs, each.module] for each in graph.operators]
    tensors = [[each.name, each.shape, each.dtype, each.kind] for each in graph.tensors.values()]
    whole = hash_of([operators, tensors, graph.parts, graph.later, graph.recompute])
    return f"{counts} | {whole}"


def a_capture(name: str) -> Case:
    return lambda: graph_line(capture(*made(name)))


CAPTURES: dict[str, Case] = {
    f"captured {name}": a_capture(name) for name in (*MODULES, *ONE_RANK) if name not in OF_TORCH
}
"""Name of a case -> what makes its line."""
