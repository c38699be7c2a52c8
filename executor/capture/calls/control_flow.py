"""Numbers that a forward takes out of tensors whose values follow from shapes, as in `if mask.all():`.

Tensors have no values while a module is exported. Values that depend on no input, parameter or buffer are computed from
the calls that were recorded so far; libraries check masks of ones in this way, when they are given no other mask.
Checks, `assert` and `if ...: raise`, are taken to pass: a plan leaves them out.
"""

from __future__ import annotations

import contextlib
import dis
import operator
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from executor.capture.calls.masks import run_on_cpu

__all__ = ["drop_checks", "numbers_from_shapes", "places_from_shapes", "recorded", "value_from_shapes"]

_TAKEN_BY = ("__bool__", "__float__", "__index__", "__int__", "item")
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
        value = value_from_shapes(self)
        if value is None:
            held = None if take.__name__ != "__bool__" or recorded(self) is None else _passing(sys._getframe(1))
            return take(self) if held is None else held
        with _disable_current_modes():
            return take(value)

    return taken


def _passing(frame: FrameType) -> bool | None:
    """The truth value with which a check that a frame makes passes; None for other decisions."""
    codes = list(dis.get_instructions(frame.f_code))
    at = next((at for at, code in enumerate(codes) if code.offset == frame.f_lasti), None)
    if at is None or not codes[at].opname.startswith("POP_JUMP"):
        return None
    target = next(place for place, code in enumerate(codes) if code.offset == codes[at].argval)
    otherwise, jumping = _raises(codes[at + 1 :]), _raises(codes[target:])
    jumps_if = "TRUE" in codes[at].opname
    return None if otherwise == jumping else jumps_if == otherwise


def _raises(codes: Sequence[dis.Instruction]) -> bool:
    """Whether instructions raise an error before they do anything else."""
    for code in codes:
        if code.opname == "RAISE_VARARGS":
            return True
        if any(word in code.opname for word in ("JUMP", "RETURN", "FOR_ITER", "STORE", "YIELD")):
            return False
    return False


_CHECKS = ("_assert_scalar.default", "_assert_async.msg", "_assert_async.default", "sym_constrain_range.default")
_COMPARISONS = (operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne)


def drop_checks(graph: fx.Graph) -> None:
    """Remove checks of numbers that were taken out of tensors, `assert lengths.max().item() <= 8`, and what nothing
    reads, in place.
    """
    for node in reversed(graph.nodes):
        if str(node.target).removeprefix("aten.") in _CHECKS or (not node.users and _has_no_effect(node)):
            graph.erase_node(node)


def _has_no_effect(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return node.target in _COMPARISONS
    schema = node.target._schema
    return bool(schema.returns) and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def recorded(tensor: Tensor) -> fx.Node | None:
    """The call that made a tensor, while calls are recorded."""
    mode = get_proxy_mode()
    if mode is None or tensor.device.type != "meta":
        return None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def value_from_shapes(tensor: Tensor) -> Tensor | None:
    """The values of a tensor on the CPU, where they follow from shapes alone."""
    node = recorded(tensor)
    with _disable_current_modes():
        return None if node is None else _values(node.graph).get(node)


def places_from_shapes(mask: Tensor) -> list[int] | None:
    """The indices of the True elements of a mask, flattened, where they follow from shapes alone."""
    value = value_from_shapes(mask)
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
