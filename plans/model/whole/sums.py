"""Sums and scales of blocks, rewritten in the order of named transformers."""

from __future__ import annotations

from collections.abc import Sequence

from plans.model.graph import Attr, Operator
from plans.model.whole.rewrite import New, Rule, View

__all__ = ["SUM_RULES"]


def _stream_first(view: View, operator: Operator) -> Sequence[New] | None:
    """(mlp + attention) + x for what both were made from: (x + attention) + mlp."""
    if operator.kind != "add" or len(operator.inputs) != 2:
        return None
    for made, x in (operator.inputs, operator.inputs[::-1]):
        inner = view.made(made, "add")
        if inner is None or len(inner.inputs) != 2 or len(view.readers[made]) > 1 or x in inner.inputs:
            continue
        attended = [_attends(view, name, x) for name in inner.inputs]
        if attended.count(True) != 1 or attended.count(False) != 1:
            continue
        attention, mlp = inner.inputs if attended[0] else inner.inputs[::-1]
        tensor = view.tensors[operator.outputs[0]]
        if view.shape(x) == view.shape(mlp) == view.shape(attention) == tensor.shape:
            return [
                New(kind="add", inputs=(x, attention), shape=tensor.shape, dtype=tensor.dtype),
                New(kind="add", inputs=(0, mlp), shape=tensor.shape, dtype=tensor.dtype),
            ]
    return None


def _times_one(view: View, operator: Operator) -> str | None:
    """A tensor times 1, or divided by it, is the tensor."""
    is_plain = operator.kind in ("mul", "div") and len(operator.inputs) == 1 and set(operator.attrs) == {"number"}
    return operator.inputs[0] if is_plain and operator.attrs["number"] == 1 else None


def _multiplied(view: View, operator: Operator) -> Sequence[New] | None:
    """A tensor divided by a number: times one over it."""
    number = operator.attrs.get("number")
    if operator.kind != "div" or set(operator.attrs) != {"number"} or not isinstance(number, int | float) or not number:
        return None
    made = view.tensors[operator.outputs[0]]
    if len(operator.inputs) != 1 or not made.differentiable:
        return None
    attrs: dict[str, Attr] = {"number": 1 / number}
    return [New(kind="mul", inputs=operator.inputs, shape=made.shape, dtype=made.dtype, attrs=attrs)]


def _attends(view: View, name: str, x: str) -> bool | None:
    """Whether there is an attention between `x` and a tensor that is made from it; None where it is not."""
    waiting, seen, found, reached = [name], {name}, False, False
    while waiting:
        each = waiting.pop()
        if each == x:
            reached = True
            continue
        maker = view.makers.get(each)
        if maker is None:
            continue
        found = found or maker.kind == "attention"
        if len(seen) > _BRANCH:
            return None
        new = [source for source in maker.inputs if source not in seen]
        seen.update(new)
        waiting += new
    return found if reached else None


_BRANCH = 100
"""Tensors that one branch of a block has at most."""


def _counted_from(view: View, operator: Operator) -> Sequence[New] | None:
    """0, 1, 2, ... plus a number: counted from there."""
    count = view.made(operator.inputs[0], "arange") if operator.kind == "add" and len(operator.inputs) == 1 else None
    number = operator.attrs.get("number")
    if count is None or not isinstance(number, int):
        return None
    made, start = view.tensors[operator.outputs[0]], int(count.attrs["start"]) + number  # type: ignore[arg-type]
    if made.dtype != view.tensors[count.outputs[0]].dtype:
        return None
    attrs: dict[str, Attr] = {**count.attrs, "start": start}
    return [New(kind="arange", inputs=(), shape=made.shape, dtype=made.dtype, attrs=attrs)]


def _positions(view: View, operator: Operator) -> Sequence[New] | None:
    """x + rows [1 or batch, length, width] of a table at 0, 1, 2, ...: rows [length, width]."""
    if operator.kind != "add" or len(operator.inputs) != 2:
        return None
    for x, added in (operator.inputs, operator.inputs[::-1]):
        rows = view.made(added, "embedding")
        counted = _count(view, rows.inputs[0]) if rows is not None else None
        if rows is None or counted is None or len(view.shape(added)) != 3 or len(view.shape(x)) != 3:
            continue
        made, shape = view.tensors[operator.outputs[0]], view.shape(added)[1:]
        if view.shape(counted) != shape[:1]:
            continue
        return [
            New(
                kind="embedding", inputs=(counted, rows.inputs[1]), shape=shape, dtype=made.dtype, attrs=rows.attrs,
                module=rows.module,
            ),
            New(kind="add", inputs=(x, 0), shape=made.shape, dtype=made.dtype),
        ]  # fmt: skip
    return None


def _count(view: View, name: str) -> str | None:
    """The positions that ids are, of every sample the same: counted, or added to zeros of the batch's size."""
    name = view.behind(name, "reshape", "cast")
    summed = view.made(name, "add")
    if summed is not None and len(summed.inputs) == 2:
        zeros = [view.made(each, "fill") for each in summed.inputs]
        if zeros[0] is None or zeros[0].attrs.get("value") != 0:
            return None
        name = view.behind(summed.inputs[1], "reshape", "cast")
    return name if view.made(name, "arange") else None


def _scores(view: View, operator: Operator) -> Sequence[New] | None:
    """Attention of queries that were multiplied by a number: its scores are."""
    if operator.kind != "attention" or "scale" not in operator.attrs:
        return None
    queries, chain, news = operator.inputs[0], list[Operator](), list[New]()
    while (maker := view.makers.get(queries)) is not None and maker.kind in ("reshape", "permute"):
        chain.append(maker)
        queries = maker.inputs[0]
    if maker is None or maker.kind != "mul" or len(maker.inputs) != 1:
        return None
    for each in reversed(chain):
        before: str | int = len(news) - 1 if news else maker.inputs[0]
        made = view.tensors[each.outputs[0]]
        news.append(New(kind=each.kind, inputs=(before,), shape=made.shape, dtype=made.dtype, attrs=each.attrs))
    scale = float(operator.attrs["scale"]) * float(maker.attrs["number"])  # type: ignore[arg-type]
    attrs: dict[str, Attr] = operator.attrs | {"scale": scale}
    made = view.tensors[operator.outputs[0]]
    first: str | int = len(news) - 1 if news else maker.inputs[0]
    return [
        *news,
        New(
            kind="attention", inputs=(first, *operator.inputs[1:]), shape=made.shape, dtype=made.dtype, attrs=attrs
        ),
    ]  # fmt: skip


SUM_RULES: tuple[Rule, ...] = (_times_one, _multiplied, _stream_first, _counted_from, _positions, _scores)
