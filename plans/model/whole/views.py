"""Rules for operators that only rearrange elements: flattened rows, parts of permuted tensors, repeated views."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plans.model.graph import Attr, Operator
from plans.model.whole.rewrite import New, Rule, View

__all__ = ["CUT_RULES", "ROW_RULES", "same_view"]

_BY_ROW = ("linear", "layer_norm", "rms_norm", "gelu", "relu", "silu", "cast", "mul", "add", "dropout")
"""Kinds that treat all rows in the same way: the same rows in another shape give the same result. A dropout drops
elements by their number in the full tensor, which is the same in both shapes."""


def _everything(view: View, operator: Operator) -> str | None:
    """All elements of a dim are the tensor."""
    if operator.kind != "narrow" or view.shape(operator.inputs[0]) != view.shape(operator.outputs[0]):
        return None
    return operator.inputs[0]


def _unflattened(view: View, operator: Operator) -> Sequence[New] | None:
    """An operator of rows [batch x length, width]: of [batch, length, width], and its result flattened."""
    if operator.kind not in _BY_ROW or any(len(view.shape(name)) > 2 for name in operator.inputs):
        return None
    made, leads, news = view.tensors[operator.outputs[0]], set[tuple[int, ...]](), list[New]()
    inputs: list[str | int] = []
    for name in operator.inputs:
        tensor = view.tensors[name]
        if tensor.kind in ("parameter", "constant"):
            inputs.append(name)
            continue
        lead = _lead(view, name)
        if lead is None:
            return None
        leads.add(lead)
        shape = (*lead, tensor.shape[-1])
        inputs.append(len(news))
        news.append(New(kind="reshape", inputs=(name,), shape=shape, dtype=tensor.dtype))
    if len(leads) != 1 or len(made.shape) != 2:
        return None
    shape = (*leads.pop(), made.shape[-1])
    news.append(
        New(kind=operator.kind, inputs=tuple(inputs), shape=shape, dtype=made.dtype, attrs=operator.attrs)
    )  # fmt: skip
    return [*news, New(kind="reshape", inputs=(len(news) - 1,), shape=made.shape, dtype=made.dtype)]


def _lead(view: View, name: str) -> tuple[int, ...] | None:
    """The dims that were flattened to the rows of a tensor [rows, width]."""
    flat = view.made(name, "reshape")
    if flat is None or len(view.shape(name)) != 2:
        return None
    source, rows = view.shape(flat.inputs[0]), view.shape(name)[0]
    count = next((count for count in range(2, len(source)) if math.prod(source[:count]) == rows), None)
    return None if count is None else source[:count]


def same_view(view: View, operator: Operator) -> Sequence[New] | str | None:
    """A view of a view is a view of what that was; or that itself, where it had the same shape."""
    if operator.kind != "reshape":
        return None
    made, source = view.tensors[operator.outputs[0]], view.behind(operator.inputs[0], "reshape")
    if view.shape(source) == made.shape:
        return source
    if source == operator.inputs[0]:
        return None
    return [New(kind="reshape", inputs=(source,), shape=made.shape, dtype=made.dtype)]


def _cut_first(view: View, operator: Operator) -> Sequence[New] | None:
    """A part of a permuted tensor: the part, permuted."""
    turned = view.made(operator.inputs[0], "permute") if operator.kind == "narrow" else None
    if turned is None:
        return None
    order: tuple[int, ...] = tuple(turned.attrs["dims"])  # type: ignore[arg-type]
    made, dim = view.tensors[operator.outputs[0]], order[int(operator.attrs["dim"])]  # type: ignore[arg-type]
    shape = tuple(made.shape[order.index(at)] for at in range(len(order)))
    attrs: dict[str, Attr] = {**operator.attrs, "dim": dim}
    return [
        New(kind="narrow", inputs=turned.inputs, shape=shape, dtype=made.dtype, attrs=attrs),
        New(kind="permute", inputs=(0,), shape=made.shape, dtype=made.dtype, attrs=turned.attrs),
    ]


def _normalised_first(view: View, operator: Operator) -> Sequence[New] | None:
    """The norm of rows of a permuted tensor: the norm, permuted."""
    turned = view.made(operator.inputs[0], "permute") if operator.kind in ("rms_norm", "layer_norm") else None
    if turned is None or operator.attrs.get("num_dims", 1) != 1:
        return None
    order: tuple[int, ...] = tuple(turned.attrs["dims"])  # type: ignore[arg-type]
    made, source = view.tensors[operator.outputs[0]], turned.inputs[0]
    if order[-1] != len(order) - 1:
        return None
    inputs, shape = (source, *operator.inputs[1:]), view.shape(source)
    return [
        New(kind=operator.kind, inputs=inputs, shape=shape, dtype=made.dtype, attrs=operator.attrs),
        New(kind="permute", inputs=(0,), shape=made.shape, dtype=made.dtype, attrs=turned.attrs),
    ]


def _made_before(view: View, operator: Operator) -> str | None:
    """The same view of the same tensor once more."""
    if operator.kind not in ("narrow", "permute", "reshape"):
        return None
    for other in view.readers[operator.inputs[0]]:
        if other is operator:
            return None
        is_same = (other.kind, other.inputs, other.attrs) == (operator.kind, operator.inputs, operator.attrs)
        if is_same and view.shape(other.outputs[0]) == view.shape(operator.outputs[0]):
            return other.outputs[0]
    return None


ROW_RULES: tuple[Rule, ...] = (_everything, _unflattened, same_view, _normalised_first)
CUT_RULES: tuple[Rule, ...] = (_cut_first, _made_before)
