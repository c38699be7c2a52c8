"""Numbers that a forward takes out of tensors whose values follow from shapes, as in `if mask.all():`.

Tensors have no values while a module is exported. Values that depend on no input, parameter or buffer are computed from
the calls that were recorded so far; libraries check masks of ones in this way, when they are given no other mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from executor.capture.calls.masks import run_on_cpu

__all__ = ["numbers_from_shapes", "places_from_shapes", "recorded"]

_TAKEN_BY = ("__bool__", "__float__", "__int__", "item")
_MOST_ELEMENTS = 2**22


@contextlib.contextmanager
def numbers_from_shapes() -> Iterator[None]:
    """Within this context numbers can be taken out of tensors whose values follow from shapes alone."""
    with contextlib.ExitStack() as stack:
        for name in _TAKEN_BY:
            stack.enter_context(mock.patch.object(Tensor, name, _from_shapes(getattr(Tensor, name))))
        yield


def _from_shapes(take: Any) -> Any:
    def taken(self: Tensor) -> Any:
        value = _value(self)
        if value is None:
            return take(self)
        with _disable_current_modes():
            return take(value)

    return taken


def recorded(tensor: Tensor) -> fx.Node | None:
    """The call that made a tensor, while calls are recorded."""
    mode = get_proxy_mode()
    if mode is None or tensor.device.type != "meta":
        return None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _value(tensor: Tensor) -> Tensor | None:
    """The values of a tensor on the CPU, where they follow from shapes alone."""
    node = recorded(tensor)
    with _disable_current_modes():
        return None if node is None else _values(node.graph).get(node)


def places_from_shapes(mask: Tensor) -> list[int] | None:
    """The indices of the True elements of a mask, flattened, where they follow from shapes alone."""
    value = _value(mask)
    with _disable_current_modes():
        return None if value is None else value.flatten().nonzero().squeeze(-1).tolist()


def _values(graph: fx.Graph) -> dict[fx.Node, Tensor]:
    """The values on the CPU that follow from shapes alone, after all calls of a graph and their changes in place."""
    made: dict[fx.Node, Tensor] = {}
    unknown: set[int] = set()

    def known(node: fx.Node) -> bool:
        return node in made and _memory(made[node]) not in unknown

    with torch.device("cpu"):
        for node in graph.nodes:
            if not isinstance(node.target, torch._ops.OpOverload):
                continue
            read, size = node.all_input_nodes, getattr(node.meta.get("val"), "shape", torch.Size())
            is_random = torch.Tag.nondeterministic_seeded in node.target.tags
            if is_random or size.numel() > _MOST_ELEMENTS or not all(map(known, read)):
                if node.target._schema.is_mutable:
                    unknown.update(_memory(made[each]) for each in read if each in made)
                continue
            value = run_on_cpu(node, made)
            if isinstance(value, Tensor):
                made[node] = value
    return {node: value for node, value in made.items() if known(node)}


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
