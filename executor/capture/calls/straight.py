"""Normalises exported graphs: nested graphs are inlined, and tensors without elements are removed.

Code under `torch.no_grad` is exported as a separate graph. Its nodes are moved into the outer graph and marked, because
a plan computes gradients of all trained values. Zeros that start a sum are dropped. Tensors without elements, such as
an empty cache or the unrotated part of a head, are removed from concatenations. If a module moves a dim in front of the
batch only to split it, as with queries, keys and values, the dim is split at its original place instead.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from executor.capture.calls.functional import called_as

__all__ = ["NO_GRADIENT", "drop_empty", "drop_zeros", "inline_nested", "keep_batch_first", "name_alike", "take_stacked"]

NO_GRADIENT = "twofold_no_gradient"
"""Key in the `meta` of nodes inside no_grad."""


def inline_nested(exported: ExportedProgram) -> None:
    """Put nested graphs of no_grad into the graph, in place."""
    _inline_all(exported.graph_module)
    exported.graph.lint()


def _inline_all(owner: fx.GraphModule) -> None:
    """The innermost first, since the names of nested graphs are those of the module around them."""
    for node in list(owner.graph.nodes):
        if (call := _nested(owner, node)) is not None:
            _inline_all(call[0])
            _inline(owner.graph, node, *call)


def _nested(owner: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, tuple[Any, ...]] | None:
    """The nested graph that a node runs, and its arguments; None for other nodes."""
    if str(node.target) != "wrap_with_set_grad_enabled":
        return None
    inner = node.args[1]
    assert isinstance(inner, fx.Node)
    return getattr(owner, str(inner.target)), node.args[2:]


def _inline(graph: fx.Graph, node: fx.Node, inner: fx.GraphModule, arguments: tuple[Any, ...]) -> None:
    without = node.args[0] is False
    placed = dict(zip(inner.graph.find_nodes(op="placeholder"), arguments, strict=True))
    results: tuple[Any, ...] = ()
    with graph.inserting_before(node):
        for each in inner.graph.nodes:
            if each.op == "output":
                results = fx.map_arg(each.args[0], lambda made: placed[made])
            elif each.op != "placeholder":
                copy = placed[each] = graph.node_copy(each, lambda read: placed[read])
                if without:
                    copy.meta[NO_GRADIENT] = True
    for user in list(node.users):
        assert user.target is operator.getitem, user
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


_SAME = {
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg", "absolute": "abs",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne", "clip": "clamp",
    "concat": "cat", "concatenate": "cat", "swapaxes": "transpose", "swapdims": "transpose",
}  # fmt: skip
"""Other names of torch's functions -> the names that they are captured under."""


def name_alike(exported: ExportedProgram) -> None:
    """Give calls by another name of a function that of the function itself, in place."""
    for node in exported.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        own = _SAME.get(name.removesuffix("_"))
        if own is not None:
            packet = getattr(torch.ops.aten, own + "_" * name.endswith("_"))
            overload = "int" if own == "transpose" else node.target._overloadname
            node.target = getattr(packet, overload, node.target)


def drop_empty(exported: ExportedProgram) -> None:
    """Remove tensors without elements from concatenations, and then their calls, in place."""
    graph = exported.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        parts = node.args[0]
        assert isinstance(parts, tuple | list)
        full = [part for part in parts if not _is_empty(part)]
        if len(full) == 1 < len(parts):
            node.replace_all_uses_with(full[0])
            graph.erase_node(node)
        elif full:
            node.update_arg(0, full)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and _is_empty(node) and not node.users:
            graph.erase_node(node)


def _is_empty(node: Any) -> bool:
    made = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(made, torch.Tensor) and any(type(size) is int and size == 0 for size in made.shape)


def drop_zeros(graph: fx.Graph) -> None:
    """Remove additions of zeros, with which a sum over layers begins, in place."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        operands = [each for each in node.args[:2] if isinstance(each, fx.Node)]
        rest = [each for each in operands if not _is_zeros(each)]
        value = node.meta["val"]
        if len(operands) == 2 and len(rest) == 1 and not node.kwargs and rest[0].meta["val"].shape == value.shape:
            with graph.inserting_before(node):
                same_dtype = rest[0].meta["val"].dtype == value.dtype
                own = rest[0] if same_dtype else called_as(graph, node, aten.to.dtype, (rest[0], value.dtype))
            node.replace_all_uses_with(own)
            graph.erase_node(node)


def _is_zeros(node: fx.Node) -> bool:
    aten = torch.ops.aten
    made = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
    return node.target in made or (node.target is aten.full.default and bool(node.args[1] == 0))


_PARTS = (torch.ops.aten.unbind.int, torch.ops.aten.select.int)


def keep_batch_first(exported: ExportedProgram) -> None:
    """Take parts of a dim before it is permuted to the front, in place."""
    graph = exported.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.permute.default):
        source, dims = node.args[0], [dim % len(node.args[1]) for dim in node.args[1]]
        along = [user.args[1] if len(user.args) > 1 else 0 for user in node.users]
        if dims[0] == 0 or any(user.target not in _PARTS for user in node.users) or any(along):
            continue
        rest = [dim - (dim > dims[0]) for dim in dims[1:]]
        for user in list(node.users):
            with graph.inserting_before(user):
                made = called_as(graph, user, user.target, (source, dims[0], *user.args[2:]))
            parts = list(user.users) if user.target is _PARTS[0] else [user]
            for part in parts:
                with graph.inserting_before(part):
                    own = made
                    if user.target is _PARTS[0]:
                        own = called_as(graph, part, part.target, (made, part.args[1]))
                    turned = called_as(graph, node, node.target, (own, rest))
                part.replace_all_uses_with(turned)
                graph.erase_node(part)
            if user.target is _PARTS[0]:
                graph.erase_node(user)
        graph.erase_node(node)


def take_stacked(exported: ExportedProgram) -> None:
    """Take a part of a stack as it was before, such as the last state of one layer, in place."""
    graph = exported.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.select.int):
        stack, dim, index = node.args
        if not isinstance(stack, fx.Node) or stack.target is not torch.ops.aten.stack.default:
            continue
        parts, rank = list(stack.args[0]), len(node.meta["val"].shape) + 1  # type: ignore[arg-type]
        along = stack.args[1] if len(stack.args) > 1 else 0
        if dim % rank == along % rank:  # type: ignore[operator]
            node.replace_all_uses_with(parts[index])
            graph.erase_node(node)
