"""RMS norms in parts: x / sqrt(mean x^2 + eps), times a weight, in single precision or not."""

from __future__ import annotations

from collections.abc import Sequence

from plans.model.graph import Attr, Operator
from plans.model.whole.rewrite import New, Rule, View

__all__ = ["NORM_RULES"]

_WIDER = {"bfloat16": ("float32",), "float16": ("float32",), "float32": ("float32",), "float64": ("float64",)}
"""dtype -> those in which a norm of it may be computed."""


def _bare(view: View, operator: Operator) -> Sequence[New] | None:
    """x * rsqrt(mean(x^2) + eps), or x / sqrt(mean(x^2) + eps)."""
    if operator.kind not in ("mul", "div") or len(operator.inputs) != 2:
        return None
    x, scale = operator.inputs
    orders = ((x, scale), (scale, x)) if operator.kind == "mul" else ((x, scale),)
    for x, scale in orders:
        eps = _inverse_root(view, x, scale, "rsqrt" if operator.kind == "mul" else "sqrt")
        if eps is not None:
            attrs: dict[str, Attr] = {"eps": eps}
            tensor = view.tensors[x]
            return [New(kind="rms_norm", inputs=(x,), shape=tensor.shape, dtype=tensor.dtype, attrs=attrs)]
    return None


def _inverse_root(view: View, x: str, scale: str, kind: str) -> float | None:
    """eps, where `scale` is the (inverse) root of mean(x^2) + eps over the last dim."""
    root = view.made(scale, kind)
    added = root and view.made(root.inputs[0], "add")
    mean = added and view.made(added.inputs[0], "reduce_mean")
    if root is None or added is None or mean is None or len(added.inputs) != 1:
        return None
    last = len(view.shape(x)) - 1
    if tuple(mean.attrs.get("dims", ())) != (last,) or not mean.attrs.get("keepdim"):  # type: ignore[arg-type]
        return None
    square = view.makers.get(mean.inputs[0])
    if square is None or set(square.inputs) != {x}:
        return None
    is_square = square.kind == "pow" and square.attrs.get("exponent") == 2
    is_product = square.kind == "mul" and len(square.inputs) == 2
    return float(added.attrs["number"]) if is_square or is_product else None  # type: ignore[arg-type]


def _narrow(view: View, operator: Operator) -> Sequence[New] | None:
    """cast(norm(cast(x))) back to the dtype of x: a norm of half precision is computed in single anyway."""
    norm = view.made(operator.inputs[0], "rms_norm") if operator.kind == "cast" else None
    before = norm and view.made(norm.inputs[0], "cast")
    if norm is None or before is None or len(norm.inputs) != 1:
        return None
    x, made = view.tensors[before.inputs[0]], view.tensors[operator.outputs[0]]
    if x.dtype != made.dtype or view.tensors[norm.inputs[0]].dtype not in _WIDER.get(x.dtype, ()):
        return None
    return [New(kind="rms_norm", inputs=(x.name,), shape=x.shape, dtype=x.dtype, attrs=norm.attrs)]


def _weighted(view: View, operator: Operator) -> Sequence[New] | None:
    """A bare norm times a weight of its last dim."""
    if operator.kind != "mul" or len(operator.inputs) != 2:
        return None
    for made, weight in (operator.inputs, operator.inputs[::-1]):
        norm, tensor = view.made(made, "rms_norm"), view.tensors[weight]
        if norm is None or len(norm.inputs) != 1 or tensor.kind not in ("parameter", "constant"):
            continue
        x = view.tensors[norm.inputs[0]]
        if tensor.shape == x.shape[-1:] and tensor.dtype == x.dtype and len(view.readers[made]) == 1:
            return [New(kind="rms_norm", inputs=(x.name, weight), shape=x.shape, dtype=x.dtype, attrs=norm.attrs)]
    return None


NORM_RULES: tuple[Rule, ...] = (_bare, _narrow, _weighted)
