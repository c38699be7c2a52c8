"""Rewrites calls that contain the number of samples as a constant into calls that follow the shapes of their inputs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from executor.capture.functional import copied, on_meta

__all__ = ["decompose_sized"]


def decompose_sized(graph: fx.Graph, double: fx.Graph, rules: Collection[str]) -> None:
    """Replace calls that hold the number of samples by torch's decompositions of them, in place.

    Args:
        graph: exported for a batch.
        double: the same for twice as many samples; it shows which numbers follow the batch.
        rules: the calls that have a rule, which knows what their numbers mean.
    """
    for one, other in zip(list(graph.nodes), list(double.nodes), strict=False):
        if one.name != other.name:
            return
        known = one.target in decomposition_table and str(one.target) not in rules
        if known and one.all_input_nodes and _numbers(one) != _numbers(other):
            for node in (one, other):
                _decompose(node)


def _numbers(node: fx.Node) -> list[object]:
    return [each for each in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(each, int | float)]


def _decompose(node: fx.Node) -> None:
    read = node.all_input_nodes
    flat, structure = pytree.tree_flatten((node.args, node.kwargs))

    def simpler(*values: torch.Tensor) -> object:
        given = [values[read.index(each)] if isinstance(each, fx.Node) else each for each in flat]
        args, kwargs = pytree.tree_unflatten(given, structure)
        return decomposition_table[node.target](*args, **kwargs)  # type: ignore[index]

    with torch.device("meta"):
        traced = make_fx(simpler)(*on_meta(read))
    with node.graph.inserting_before(node):
        (result,) = copied(node.graph, node, traced.graph, read)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
