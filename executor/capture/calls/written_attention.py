"""Attention that a module writes out, softmax(q k^T scale + mask) v, as one call of torch's attention.

The mask must hide nothing or all later tokens. With any other mask the attention stays as written, as does attention
whose scores are read elsewhere or that has no heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from executor.capture.calls.buffers import MOST_ELEMENTS
from executor.capture.calls.functional import called_as
from executor.capture.calls.masks import calls_of, hides_later, shape_only, value_of

__all__ = ["join_attention"]

aten = torch.ops.aten

_HIDDEN = -1e4
"""A score of at most this is hidden: its share of the softmax is zero in single precision."""

_ASSERTED = aten._assert_tensor_metadata.default
"""A check that accompanies casts; its result is not read."""


def join_attention(exported: ExportedProgram, masks: Mapping[str, Tensor]) -> None:
    """Replace every attention that is written out by one call of torch's attention, in place.

    Args:
        exported: of a module.
        masks: values of its buffers by name.
    """
    graph, named = exported.graph, exported.graph_signature.inputs_to_buffers
    held = {
        node: masks[named[node.name]]
        for node in graph.find_nodes(op="placeholder") if named.get(node.name) in masks
    }  # fmt: skip
    known = _Known(held, shape_only(graph, held))
    for node in graph.find_nodes(op="call_function", target=aten.matmul.default):
        found = _written(node, known)
        if found is None:
            continue
        with graph.inserting_before(node):
            arguments = (found.q, found.k, found.v, None, found.dropout, found.is_causal)
            made = called_as(
                graph, node, aten.scaled_dot_product_attention.default, arguments, {"scale": found.scale}
            )  # fmt: skip
        node.replace_all_uses_with(made)
        for call in found.calls:
            for user in [user for user in call.users if user.target is _ASSERTED]:
                graph.erase_node(user)
            if not call.users:
                graph.erase_node(call)


class _Known(NamedTuple):
    """Buffers whose values are known, and the calls that follow from these and from shapes."""

    buffers: Mapping[fx.Node, Tensor]
    nodes: frozenset[fx.Node]


@dataclass(slots=True, eq=False)
class _Attention:
    """The operands of a written-out attention, and its calls, the last one first."""

    v: Any
    q: Any = None
    k: Any = None
    scale: float = 1.0
    dropout: float = 0.0
    is_causal: bool = False
    calls: list[fx.Node] = field(default_factory=list)


def _written(product: fx.Node, known: _Known) -> _Attention | None:
    arguments: Any = product.args
    weights, values = arguments[:2]
    if len(product.meta["val"].shape) != 4 or not isinstance(values, fx.Node):
        return None
    found = _Attention(v=values, calls=[product])
    node = _before_casts(weights, found)
    if node is not None and node.target is aten.dropout.default:
        arguments = node.args
        found.dropout = float(arguments[1]) if arguments[2] else 0.0
        found.calls.append(node)
        node = _before_casts(node.args[0], found)
    if node is None or node.target is not aten.softmax.int or node.args[1] not in (-1, 3):
        return None
    found.calls.append(node)
    takes_part = torch.ones((), dtype=torch.bool)
    node = _before_casts(node.args[0], found)
    while node is not None and node.target is not aten.matmul.default:
        step = _step(node, known)
        if step is None:
            return None
        source, factor, part = step
        found.scale *= factor
        takes_part = takes_part & part
        found.calls.append(node)
        node = _before_casts(source, found)
    if node is None or not _reads_heads(node, found):
        return None
    if any(sum(user.target is not _ASSERTED for user in call.users) > 1 for call in found.calls[1:-1]):
        return None
    least = product.meta["val"].dtype.itemsize
    if any(call.meta["val"].dtype.itemsize < least for call in found.calls):
        return None  # a part of it is less precise
    shape = (*found.q.meta["val"].shape[-2:-1], *found.k.meta["val"].shape[-2:-1])
    later = hides_later(torch.broadcast_to(takes_part, torch.broadcast_shapes(takes_part.shape, shape)))
    found.is_causal = bool(later)
    return None if later is None else found


def _before_casts(value: Any, found: _Attention) -> fx.Node | None:
    """A value before casts and copies."""
    while isinstance(value, fx.Node) and value.target in _CASTS:
        found.calls.append(value)
        value = value.args[0]
    return value if isinstance(value, fx.Node) else None


_CASTS = {
    aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default, aten.contiguous.default,
    aten.clone.default,
}  # fmt: skip


def _step(node: fx.Node, known: _Known) -> tuple[Any, float, Tensor] | None:
    """The scores before a call, the factor that it applies, and which scores it keeps."""
    everything = torch.ones((), dtype=torch.bool)
    target, args = node.target, node.args
    if target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        number = _number(args[1], known)
        if number is None or number <= 0:
            return None
        return args[0], 1 / number if target in (aten.div.Tensor, aten.div.Scalar) else number, everything
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        hidden, number = _value(args[1], known), _number(args[2], known)
        return None if hidden is None or number is None or number > _HIDDEN else (args[0], 1.0, ~hidden.bool())
    if target in (aten.where.self, aten.where.ScalarOther):
        part, other = _value(args[0], known), _value(args[2], known)
        return None if part is None or other is None or (other > _HIDDEN).any() else (args[1], 1.0, part.bool())
    if target is aten.add.Tensor and not node.kwargs:
        added = _value(args[1], known)
        if added is None or not ((added == 0) | (added <= _HIDDEN)).all():
            return None
        return args[0], 1.0, added == 0
    return None


def _reads_heads(scores: fx.Node, found: _Attention) -> bool:
    """Whether scores are q k^T of heads [batch, heads, length, size]."""
    arguments: Any = scores.args
    q, turned = arguments[:2]
    if not isinstance(q, fx.Node) or not isinstance(turned, fx.Node):
        return False
    dims: Any = turned.args[1:]
    if turned.target is aten.transpose.int:
        is_turned = {dim % 4 for dim in dims} == {2, 3}
    elif turned.target is aten.permute.default:
        is_turned = [dim % 4 for dim in dims[0]] == [0, 1, 3, 2]
    else:
        is_turned = turned.target is aten.mT.default
    if not is_turned or not isinstance(turned.args[0], fx.Node):
        return False
    found.q, found.k = q, turned.args[0]
    found.calls += [scores, turned]
    shapes = [each.meta["val"].shape for each in (found.q, found.k, found.v)]
    return all(len(shape) == 4 for shape in shapes) and shapes[0][:2] == shapes[1][:2] == shapes[2][:2]


def _number(value: Any, known: _Known) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    tensor = _value(value, known)
    return float(tensor) if tensor is not None and tensor.numel() == 1 and not math.isnan(float(tensor)) else None


def _value(value: Any, known: _Known) -> Tensor | None:
    """A number, or a value that follows from shapes and known buffers, on the CPU; None for any other."""
    if isinstance(value, int | float):
        return torch.tensor(value)
    if not isinstance(value, fx.Node) or value not in known.nodes or len(calls_of(value)[0]) > _MOST_CALLS:
        return None
    return value_of(value, known.buffers, MOST_ELEMENTS)


_MOST_CALLS = 200
"""Calls that make a mask at most."""
