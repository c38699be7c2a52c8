"""Elements that are selected per sample: `x[torch.arange(len(x)), chosen]`.

Reads become gathers and writes become scatters along a dim of all places of a sample, which keep the batch apart. Rows
that are repeated for several experts each, `x[torch.arange(len(x)).repeat_interleave(2)]`, and added up again by
`index_add`, become an expansion and a sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from executor.capture.calls.functional import called_as
from executor.capture.calls.masks import shape_only, value_of

__all__ = ["choose_in_samples"]

aten = torch.ops.aten


def choose_in_samples(graph: fx.Graph, grown: Mapping[str, int]) -> None:
    """Write reads and writes whose first index counts the samples as gathers and scatters, in place.

    Args:
        graph: exported for a batch.
        grown: call -> the dim of its result that is the batch.
    """
    known, grown = shape_only(graph), dict(grown)
    _repeat_rows(graph, known, grown)
    for target in (aten.index.Tensor, aten.index_put.default):
        for node in graph.find_nodes(op="call_function", target=target):
            if node in known:
                continue
            whole, indices, *written = node.args
            if grown.get(whole.name) == 0 and _count_samples(indices, known, grown, is_written=bool(written)):
                with graph.inserting_before(node):
                    made = _gathered(graph, node, whole, indices, grown, *written)
                grown[made.name] = 0
                node.replace_all_uses_with(made)
                graph.erase_node(node)


def _repeat_rows(graph: fx.Graph, known: Collection[fx.Node], grown: dict[str, int]) -> None:
    """Write rows that are read several times in a row, or added up again, without an index, in place."""
    for node in list(graph.nodes):
        given: Any = node.args
        if node.target is aten.index.Tensor and len(given[1]) == 1:
            whole, (index,), source = given[0], given[1], None
        elif node.target is aten.index_add.default and len(given) == 4 and given[1] == 0 and not node.kwargs:
            whole, _, index, source = given
        else:
            continue
        if index not in known or grown.get(node.name) != 0:
            continue
        count = _repeats(index, whole.meta["val"].shape[0])
        if count is None:
            continue
        with graph.inserting_before(node):
            if source is None:
                made = _expanded(graph, node, whole, count)
            else:
                made = called_as(graph, node, aten.add.Tensor, (whole, _added_up(graph, node, source, count)))
        grown[made.name] = 0
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _expanded(graph: fx.Graph, node: fx.Node, whole: fx.Node, count: int) -> fx.Node:
    """Every row several times."""
    size, *rest = whole.meta["val"].shape
    apart = called_as(graph, node, aten.unsqueeze.default, (whole, 1))
    wide = called_as(graph, node, aten.expand.default, (apart, [size, count, *rest]))
    return called_as(graph, node, aten.reshape.default, (wide, [size * count, *rest]))


def _added_up(graph: fx.Graph, node: fx.Node, rows: fx.Node, count: int) -> fx.Node:
    """The sum of every `count` rows."""
    if count == 1:
        return rows
    size, *rest = rows.meta["val"].shape
    apart = called_as(graph, node, aten.reshape.default, (rows, [size // count, count, *rest]))
    return called_as(graph, node, aten.sum.dim_IntList, (apart, [1]))


def _repeats(index: fx.Node, rows: int) -> int | None:
    """How many times an index has each of the rows, in order."""
    found = value_of(index)
    if found is None or found.dim() != 1 or found.dtype != torch.int64 or found.numel() % rows:
        return None
    count = found.numel() // rows
    return count if torch.equal(found, torch.arange(rows).repeat_interleave(count)) else None


def _count_samples(
    indices: Any, known: Collection[fx.Node], grown: Mapping[str, int], *, is_written: bool
) -> bool:  # fmt: skip
    """Whether the first index is 0, 1, 2, ... along the first dim of the indexed tensor."""
    first, given = indices[0], [each for each in indices if each is not None]
    if len(given) == 1 and is_written:
        return False
    values: list[Tensor] = [each.meta["val"] for each in given]
    if first not in known or any(value.dtype not in (torch.int64, torch.int32) for value in values):
        return False
    if grown.get(first.name) != 0 or values[0].dim() != max(value.dim() for value in values):
        return False
    count = value_of(first)
    return count is not None and torch.equal(count.flatten(), torch.arange(count.shape[0]))


def _gathered(
    graph: fx.Graph, node: fx.Node, whole: fx.Node, indices: list[fx.Node | None], grown: Mapping[str, int],
    value: fx.Node | None = None, adds: bool = False,
) -> fx.Node:  # fmt: skip
    """The elements at `indices`; given a `value`, the tensor with that value written there."""

    def call(target: Any, *args: Any) -> fx.Node:
        return called_as(graph, node, target, args)

    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    order = [*given, *(dim for dim in range(whole.meta["val"].dim()) if dim not in given)]
    turned = call(aten.permute.default, whole, order) if order != sorted(order) else whole
    shape: torch.Size = turned.meta["val"].shape
    sizes, rest = shape[1 : len(given)], shape[len(given) :]
    chosen = torch.broadcast_shapes(*(index.meta["val"].shape for index in given.values()))
    if not sizes and value is None:
        return turned
    at = None
    for index, size in zip(list(given.values())[1:], sizes, strict=True):
        own = call(aten.remainder.Scalar, index, size)  # -1 is the last
        at = own if at is None else call(aten.add.Tensor, call(aten.mul.Tensor, at, size), own)
    rows = [shape[0], chosen[1:].numel(), rest.numel()]
    samples = call(aten.reshape.default, turned, [shape[0], sizes.numel(), rest.numel()])
    of_samples = any(grown.get(index.name) == 0 for index in given.values() if index is not indices[0])
    if of_samples:
        at = call(aten.reshape.default, call(aten.expand.default, at, list(chosen)), [*rows[:2], 1])
        at = call(aten.expand.default, at, rows)
    else:  # the same places in every sample
        at = call(aten.reshape.default, call(aten.expand.default, at, [1, *chosen[1:]]), [rows[1]])
    if value is None:
        made = call(
            *((aten.gather.default, samples, 1, at) if of_samples else (aten.index_select.default, samples, 1, at))
        )
        return call(aten.reshape.default, made, [*chosen, *rest])
    value = call(aten.reshape.default, call(aten.expand.default, value, [*chosen, *rest]), rows)
    if of_samples:
        made = call(aten.scatter_add.default if adds else aten.scatter.src, samples, 1, at, value)
    else:
        made = call(aten.index_put.default, samples, [None, at], value, adds)
    made = call(aten.reshape.default, made, list(shape))
    return call(aten.permute.default, made, [order.index(dim) for dim in range(len(order))])
