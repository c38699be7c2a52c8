"""Rules for attention and the loss: transposed heads, repeated heads, flattened dims."""

from __future__ import annotations

from collections.abc import Sequence

from plans.model.graph import Attr, Operator
from plans.model.whole.rewrite import New, Rule, View
from plans.model.whole.views import same_view

__all__ = ["HEAD_RULES", "SWAPPED"]

SWAPPED = (0, 2, 1, 3)
"""The order of dims that exchanges heads and length."""


def _shared(view: View, operator: Operator) -> Sequence[New] | None:
    """Keys and values that are repeated for the heads of queries which they serve."""
    if operator.kind != "attention" or len(view.shape(operator.inputs[0])) != 4:
        return None
    heads_at = 1 if operator.attrs.get("layout", "bhsd") == "bhsd" else 2
    found = [_unrepeated(view, name, heads_at) for name in operator.inputs[1:3]]
    if None in found:
        return None
    made = view.tensors[operator.outputs[0]]
    inputs = (operator.inputs[0], *(name for name in found if name), *operator.inputs[3:])
    return [New(kind="attention", inputs=inputs, shape=made.shape, dtype=made.dtype, attrs=operator.attrs)]


def _unrepeated(view: View, name: str, heads_at: int) -> str | None:
    """The tensor that `name` repeats head by head; heads are its dim `heads_at`."""
    flat = view.made(name, "reshape")
    wide = flat and view.made(flat.inputs[0], "expand")
    if flat is None or wide is None or len(view.shape(flat.inputs[0])) != 5:
        return None
    shape, repeated = view.shape(flat.inputs[0]), heads_at + 1
    own = (*shape[:repeated], *shape[repeated + 1 :])
    source = wide.inputs[0]
    while (before := view.made(source, "reshape")) is not None and view.shape(source) != own:
        source = before.inputs[0]
    joined = (*own[:heads_at], own[heads_at] * shape[repeated], *own[repeated:])
    is_repeated = view.shape(wide.inputs[0]) == (*shape[:repeated], 1, *shape[repeated + 1 :])
    return source if is_repeated and view.shape(source) == own and view.shape(name) == joined else None


def _batch_length_heads(view: View, operator: Operator) -> Sequence[New] | None:
    """Attention between exchanges of heads and length: it takes the length first."""
    if operator.kind != "permute" or operator.attrs.get("dims") != SWAPPED:
        return None
    attention = view.made(operator.inputs[0], "attention")
    if attention is None or "layout" in attention.attrs:
        return None
    before = [view.made(name, "permute") for name in attention.inputs[:3]]
    readers = view.readers[attention.outputs[0]]
    if len(readers) > 1 or any(swap is None or swap.attrs.get("dims") != SWAPPED for swap in before):
        return None
    made = view.tensors[operator.outputs[0]]
    attrs: dict[str, Attr] = {"layout": "bshd", **attention.attrs}
    inputs = (*(swap.inputs[0] for swap in before if swap), *attention.inputs[3:])
    return [New(kind="attention", inputs=inputs, shape=made.shape, dtype=made.dtype, attrs=attrs)]


def _loss(view: View, operator: Operator) -> Sequence[New] | None:
    """A loss of flattened rows: it accepts any rows."""
    if operator.kind not in ("cross_entropy", "count_labels"):
        return None
    count = 2 if operator.kind == "cross_entropy" else 1
    before = [view.made(name, "reshape") for name in operator.inputs[:count]]
    if any(each is None for each in before):
        return None
    sources = [maker.inputs[0] for maker in before if maker]
    shapes = [view.shape(name) for name in sources]
    labels = shapes[-1]
    if count == 2 and shapes[0] != (*labels, view.shape(operator.inputs[0])[-1]):
        return None
    made = view.tensors[operator.outputs[0]]
    inputs = (*sources, *operator.inputs[count:])
    return [New(kind=operator.kind, inputs=inputs, shape=made.shape, dtype=made.dtype, attrs=operator.attrs)]


HEAD_RULES: tuple[Rule, ...] = (_shared, _batch_length_heads, _shared, same_view, _loss)
