"""Counts over all samples: how many tokens each expert gets.

`histc` and `scatter_add` combine the samples in one call. Here each value is compared with every bin, and the matches
are summed over the samples, which micro-batches and ranks can do part by part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from executor.capture.calls.functional import called_as

__all__ = ["count_by_sums"]

aten = torch.ops.aten


def count_by_sums(graph: fx.Graph, grown: Mapping[str, int]) -> None:
    """Write histograms and sums by index over all samples as sums of comparisons, in place.

    Args:
        graph: exported for a batch.
        grown: call -> the dim of its result that is the batch, possibly flattened with other dims.
    """
    for target, written in ((aten.histc.default, _histogram), (aten.scatter_add.default, _sums_by_index)):
        for node in graph.find_nodes(op="call_function", target=target):
            if node.name in grown or not any(each.name in grown for each in node.all_input_nodes):
                continue
            with graph.inserting_before(node):
                made = written(graph, node)
            if made is not None:
                node.replace_all_uses_with(made)
                graph.erase_node(node)


def _histogram(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """sum_i [floor((x_i - low) bins / (high - low)) = b]; the upper end belongs to the last bin (`torch.histc`)."""

    def call(target: Any, *args: Any) -> fx.Node:
        return called_as(graph, node, target, args)

    given: Any = node.args
    named = dict(zip(_HISTC, given[1:], strict=False)) | dict(node.kwargs)
    bins, low, high = ({**_HISTC, **named}[name] for name in _HISTC)
    if low == high:
        return None  # the ends are the least and the largest value
    places = call(aten.div.Tensor, call(aten.mul.Tensor, call(aten.sub.Tensor, given[0], float(low)), bins), high - low)
    last = call(aten.eq.Scalar, places, bins)
    bin_of = call(aten.masked_fill.Scalar, call(aten.floor.default, places), last, bins - 1)
    return _summed(graph, node, bin_of, bins, None)


_HISTC: dict[str, Any] = {"bins": 100, "min": 0, "max": 0}
"""The settings of `torch.histc` and their defaults."""


def _sums_by_index(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """start_b + sum_i [index_i = b] source_i of vectors."""
    start, index, source = node.all_input_nodes
    if start.meta["val"].dim() != 1 or index.meta["val"].shape != source.meta["val"].shape:
        return None
    sums = _summed(graph, node, index, start.meta["val"].shape[0], source)
    return called_as(graph, node, aten.add.Tensor, (start, sums))


def _summed(graph: fx.Graph, node: fx.Node, bin_of: fx.Node, bins: int, weights: fx.Node | None) -> fx.Node:
    """The number (the sum of the weights) of the values in every bin."""

    def call(target: Any, *args: Any) -> fx.Node:
        return called_as(graph, node, target, args)

    value = node.meta["val"]
    kept = value.dtype if value.is_floating_point() else torch.float32
    every = call(aten.arange.default, bins)
    matches = call(aten.to.dtype, call(aten.eq.Tensor, call(aten.reshape.default, bin_of, [-1, 1]), every), kept)
    if weights is not None:
        matches = call(aten.mul.Tensor, matches, call(aten.reshape.default, weights, [-1, 1]))
    return call(aten.to.dtype, call(aten.sum.dim_IntList, matches, [0]), value.dtype)
