"""The parts of a transformer's graph: embedding, blocks, head."""

from __future__ import annotations

from dataclasses import dataclass

from plans.errors import TwofoldError
from plans.model.graph import Graph

__all__ = ["Parts", "is_transformer", "parts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Names of operators in graph order: what comes before the blocks, each block, and what comes after them."""

    embedding: tuple[str, ...]
    blocks: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]


def is_transformer(graph: Graph) -> bool:
    """Whether `graph` has the modules of a graph that `transformer` built."""
    modules = {operator.module for operator in graph.operators}
    return {"tok_embeddings", "layers.0.attention.wo", "output"} <= modules


def parts_of(graph: Graph) -> Parts:
    """Cut the graph of a transformer into its parts.

    Raises:
        TwofoldError: a graph that `transformer` did not build.

    >>> from plans.model.transformer import transformer
    >>> parts = parts_of(transformer("gpt2", num_layers=3))
    >>> len(parts.blocks), parts.head
    (3, ('norm', 'output', 'output.cast', 'loss'))
    """
    if not is_transformer(graph):
        raise TwofoldError(
            f"graph {graph.name!r} was not built by tf.transformer: it has no tok_embeddings, layers.0, output"
        )
    embedding: list[str] = []
    blocks: dict[str, list[str]] = {}
    head: list[str] = []
    for operator in graph.operators:
        if operator.module.startswith("layers."):
            blocks.setdefault(operator.module.split(".", 2)[1], []).append(operator.name)
        else:
            (head if blocks else embedding).append(operator.name)
    return Parts(embedding=tuple(embedding), blocks=tuple(map(tuple, blocks.values())), head=tuple(head))
