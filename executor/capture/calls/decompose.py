"""Rewrites calls that contain the number of samples as a constant.

Torch's decompositions follow the shapes of their inputs. A factor k / len(x) becomes a factor k and a division by
len(x), which makes a sum over the samples a mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from executor.capture.calls.functional import called_as, copied, on_meta
from executor.capture.calls.masks import shape_only

__all__ = ["BY_SAMPLES", "decompose_sized", "divide_by_samples", "square_norms"]

BY_SAMPLES = "twofold_by_samples"
"""Key in the `meta` of divisions by the number of samples."""

aten = torch.ops.aten
_PRODUCTS, _QUOTIENTS = (aten.mul.Tensor, aten.mul.Scalar), (aten.div.Tensor, aten.div.Scalar)


def decompose_sized(graph: fx.Graph, double: fx.Graph, rules: Collection[str]) -> None:
    """Replace calls that hold the number of samples by torch's decompositions of them, in place.

    Args:
        graph: exported for a batch.
        double: the same for twice as many samples; it shows which numbers follow the batch.
        rules: the calls that have a rule, which knows what their numbers mean.

    Values that follow from shapes alone stay as they are: they are computed for one sample.
    """
    from_shapes = shape_only(graph)
    for one, other in zip(list(graph.nodes), list(double.nodes), strict=False):
        if one.name != other.name:
            return
        known = one.target in decomposition_table and str(one.target) not in rules and one not in from_shapes
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
        return decomposition_table[node.target](*args, **kwargs)

    with torch.device("meta"):
        traced = make_fx(simpler)(*on_meta(read))
    with node.graph.inserting_before(node):
        (result,) = copied(node.graph, node, traced.graph, read)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)


def square_norms(graph: fx.Graph) -> None:
    """Write the square of a Euclidean norm of all elements as a sum of squares, in place: the samples add to it."""
    for node in graph.find_nodes(op="call_function", target=aten.pow.Tensor_Scalar):
        norm, exponent = node.args
        is_norm = isinstance(norm, fx.Node) and norm.target is aten.linalg_vector_norm.default
        if exponent != 2 or not is_norm or len(norm.args) > 2 or norm.kwargs or norm.args[1:] not in ((), (2,)):
            continue
        with graph.inserting_before(node):
            squares = called_as(graph, node, aten.mul.Tensor, (norm.args[0], norm.args[0]))
            node.replace_all_uses_with(called_as(graph, node, aten.sum.default, (squares,)))
        graph.erase_node(node)
        if not norm.users:
            graph.erase_node(norm)


def divide_by_samples(graph: fx.Graph, double: fx.Graph, batch_size: int) -> None:
    """Write products with k / len(x), and quotients by k len(x), with divisions by len(x), in place.

    Args:
        graph: exported for a batch of `batch_size`.
        double: the same for twice as many samples; it shows which numbers follow the batch.
    """
    for one, other in zip(list(graph.nodes), list(double.nodes), strict=False):
        if one.name != other.name:
            return
        if one.target not in (*_PRODUCTS, *_QUOTIENTS) or len(one.args) != 2:
            continue
        (_, small), (_, large) = one.args, other.args
        if not isinstance(small, int | float) or not isinstance(large, int | float) or isinstance(small, bool):
            continue
        is_product = one.target in _PRODUCTS
        factor = small * batch_size if is_product else small / batch_size
        follows = large * 2 * batch_size if is_product else large / (2 * batch_size)
        if small != large and math.isclose(factor, follows, rel_tol=1e-12):
            factor = float(f"{factor:.12g}")  # 2 / 7 * 7 is not 2
            for node, size in ((one, batch_size), (other, 2 * batch_size)):
                with node.graph.inserting_before(node):
                    mean = called_as(node.graph, node, aten.div.Tensor, (node.args[0], size))
                    mean.meta[BY_SAMPLES] = True
                    if factor != 1:
                        mean = called_as(node.graph, node, node.target, (mean, factor))
                node.replace_all_uses_with(mean)
                node.graph.erase_node(node)
