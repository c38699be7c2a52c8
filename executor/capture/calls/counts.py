"""Recognition of buffers that contain whole numbers, such as the positions and segments of BERT."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from executor.capture.calls.functional import called_as
from executor.capture.calls.masks import shape_only, value_of

__all__ = ["state_counts"]

aten = torch.ops.aten
_TAKE_NUMBERS = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)


def state_counts(exported: ExportedProgram, numbers: Mapping[str, Tensor]) -> None:
    """Compute positions that are counted and constant tensors by `arange` and `full`, and write single numbers into the
    calls that read them. In place.

    Args:
        exported: of a module.
        numbers: values of its buffers by name. Those that the forward writes in are not looked at.
    """
    graph, named = exported.graph, exported.graph_signature.inputs_to_buffers
    changed = {node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.twofold.assign.default)}
    held = {
        node: numbers[named[node.name]]
        for node in graph.find_nodes(op="placeholder") if named.get(node.name) in numbers and node not in changed
    }  # fmt: skip
    if not held:
        return
    known = shape_only(graph, held)
    for node in _last_known(graph, known - shape_only(graph) - held.keys(), known):
        value = value_of(node, held)
        if value is not None and value.is_floating_point() and not value.dim():
            for user in [user for user in node.users if user.target in _TAKE_NUMBERS]:
                user.args = tuple(float(value) if argument is node else argument for argument in user.args)
            continue
        if value is None or value.dtype != torch.int64 or not value.numel():
            continue
        with graph.inserting_before(node):
            made = _made(graph, node, value)
        if made is not None:
            node.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _last_known(graph: fx.Graph, nodes: Collection[fx.Node], known: Collection[fx.Node]) -> list[fx.Node]:
    """The buffers that are read by a call whose value is unknown."""
    return [node for node in graph.nodes if node in nodes and any(user not in known for user in node.users)]


def _made(graph: fx.Graph, node: fx.Node, value: Tensor) -> fx.Node | None:
    """A call that creates a value: one number everywhere, or start, start + 1, ... in every row."""
    settings = {"dtype": value.dtype, "device": torch.device("cpu")}
    first, shape = int(value.flatten()[0]), list(value.shape)
    if bool((value == first).all()):
        return called_as(graph, node, aten.full.default, (shape, first), settings)
    if not torch.equal(value, (torch.arange(shape[-1]) + first).expand(shape)):
        return None
    counted = called_as(graph, node, aten.arange.start, (first, first + shape[-1]), settings)
    row = called_as(graph, node, aten.view.default, (counted, [1] * (len(shape) - 1) + shape[-1:]))
    return row if list(row.meta["val"].shape) == shape else called_as(graph, node, aten.expand.default, (row, shape))
