"""Norms written in parts: x / sqrt(mean x^2 + eps), or the same of x - mean x, times w or 1 + w, in any precision."""

from __future__ import annotations

from collections.abc import Sequence

from plans.model.graph import Attr, Operator
from plans.model.whole.rewrite import New, Rule, View

__all__ = ["NORM_RULES"]

_WIDER = {"bfloat16": ("float32",), "float16": ("float32",), "float32": ("float32",), "float64": ("float64",)}
"""dtype -> those in which a norm of it may be computed."""


_NORMS = ("rms_norm", "layer_norm")


def _bare(view: View, operator: Operator) -> Sequence[New] | None:
    """x * rsqrt(mean(x^2) + eps), or x / sqrt(mean(x^2) + eps); a layer norm where x is y - mean(y)."""
    if operator.kind not in ("mul", "div") or len(operator.inputs) != 2:
        return None
    x, scale = operator.inputs
    orders = ((x, scale), (scale, x)) if operator.kind == "mul" else ((x, scale),)
    for x, scale in orders:
        found = _inverse_root(view, scale, "rsqrt" if operator.kind == "mul" else "sqrt")
        if found is None:
            continue
        squared, attrs = found
        y = _centred(view, x)
        if y is not None and y == _centred(view, squared):
            kind, source = "layer_norm", view.tensors[y]
        elif squared == x:
            kind, source = "rms_norm", view.tensors[x]
        else:
            continue
        return [New(kind=kind, inputs=(source.name,), shape=source.shape, dtype=source.dtype, attrs=attrs)]
    return None


def _inverse_root(view: View, scale: str, kind: str) -> tuple[str, dict[str, Attr]] | None:
    """(x, eps as a setting), where `scale` is the (inverse) root of mean(x^2) + eps over the last dim."""
    root = view.made(scale, kind)
    added = root and view.made(root.inputs[0], "add")
    if root is None or added is None or len(added.inputs) != 1:
        return None
    square = view.makers.get(_averaged(view, added.inputs[0]) or "")
    if square is None or len(set(square.inputs)) != 1:
        return None
    is_square = square.kind == "pow" and square.attrs.get("exponent") == 2
    is_product = square.kind == "mul" and len(square.inputs) == 2
    return (square.inputs[0], {"eps": float(added.attrs["number"])}) if is_square or is_product else None  # type: ignore[arg-type]


def _averaged(view: View, name: str) -> str | None:
    """The tensor whose mean over the last dim (kept) another is."""
    mean = view.made(name, "reduce_mean")
    if mean is None or not mean.attrs.get("keepdim"):
        return None
    last = len(view.shape(mean.inputs[0])) - 1
    return mean.inputs[0] if tuple(mean.attrs.get("dims", ())) == (last,) else None  # type: ignore[arg-type]


def _centred(view: View, name: str) -> str | None:
    """y, where a tensor is y - mean(y) over the last dim."""
    difference = view.made(name, "sub")
    if difference is None or len(difference.inputs) != 2:
        return None
    y, mean = difference.inputs
    return y if _averaged(view, mean) == y else None


def _narrow(view: View, operator: Operator) -> Sequence[New] | None:
    """cast(norm(cast(x))) back to the dtype of x, and of its weight: half precision is normalised in single anyway."""
    norm = view.makers.get(operator.inputs[0]) if operator.kind == "cast" else None
    if norm is None or norm.kind not in _NORMS:
        return None
    before = [view.made(name, "cast") for name in norm.inputs]
    if any(each is None for each in before):
        return None
    names = tuple(maker.inputs[0] for maker in before if maker)
    made, wide = view.tensors[operator.outputs[0]], view.tensors[norm.inputs[0]]
    if any(view.tensors[name].dtype != made.dtype for name in names) or wide.dtype not in _WIDER.get(made.dtype, ()):
        return None
    return [New(kind=norm.kind, inputs=names, shape=made.shape, dtype=made.dtype, attrs=norm.attrs)]


def _weighted(view: View, operator: Operator) -> Sequence[New] | None:
    """A bare norm times a weight of its last dim."""
    if operator.kind != "mul" or len(operator.inputs) != 2:
        return None
    for made, weight in (operator.inputs, operator.inputs[::-1]):
        norm, source = view.makers.get(made), view.tensors[view.behind(_unshifted(view, weight)[0], "cast")]
        if norm is None or norm.kind not in _NORMS or len(norm.inputs) != 1:
            continue
        if source.kind not in ("parameter", "constant") or len(view.readers[made]) > 1:
            continue
        x = view.tensors[norm.inputs[0]]
        if source.shape == x.shape[-1:] and view.tensors[weight].dtype == x.dtype:
            return [New(kind=norm.kind, inputs=(x.name, weight), shape=x.shape, dtype=x.dtype, attrs=norm.attrs)]
    return None


def _unshifted(view: View, weight: str) -> tuple[str, float]:
    """(w, number), where a weight is w + number."""
    added = view.made(weight, "add")
    if added is None or len(added.inputs) != 1 or not isinstance(number := added.attrs["number"], int | float):
        return weight, 0.0
    return added.inputs[0], float(number)


def _shifted(view: View, operator: Operator) -> Sequence[New] | None:
    """A norm with a weight that is a number plus a parameter: Gemma's, whose weights begin at 0."""
    if operator.kind not in _NORMS or len(operator.inputs) < 2 or "offset" in operator.attrs:
        return None
    x, weight, *bias = operator.inputs
    source, number = _unshifted(view, weight)
    if not number or view.tensors[view.behind(source, "cast")].kind not in ("parameter", "constant"):
        return None
    made = view.tensors[operator.outputs[0]]
    attrs: dict[str, Attr] = {**operator.attrs, "offset": number}
    return [New(kind=operator.kind, inputs=(x, source, *bias), shape=made.shape, dtype=made.dtype, attrs=attrs)]


NORM_RULES: tuple[Rule, ...] = (_bare, _narrow, _weighted, _shifted, _narrow)
"""The cast back is before the weight, or behind it."""
