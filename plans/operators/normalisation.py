"""Softmax, layer norm and RMS norm: what they normalise over stays whole, all other dims can be split."""

from __future__ import annotations

import math

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, declares, unary
from plans.operators.spec import Gradient, Kept, OperatorSpec

__all__: list[str] = []


@declares("softmax", "log_softmax")
def _softmax(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Over the dim attrs "dim" (counted from the end where negative), which stays whole; the gradient reads y."""
    whole = attrs["dim"] % max(1, len(inputs[0]))
    return unary(
        kind, inputs[0], Gradient(needs=("y0",), flops=4 * math.prod(inputs[0])), whole=(whole,), flops_per_element=5
    )


@declares("layer_norm", "rms_norm")
def _norm(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """x normalised over its last attrs "num_dims" dims (1 by default), times a weight, plus a bias (layer norm only).

    attrs "eps" is added to the variance (the mean square). The forward keeps the mean (layer norm only) and the scale
    1 / sqrt(variance + eps) of every row for the gradients.
    """
    count = attrs.get("num_dims", 1)
    shape = inputs[0]
    if any(each != shape[len(shape) - count :] for each in inputs[1:]) or len(inputs) > (3 if kind[0] == "l" else 2):
        raise TwofoldError(f"{kind} over the last {count} dims of {shape} cannot take weights {list(inputs[1:])}")
    dims = tuple(f"b{at}" if at < len(shape) - count else f"_n{at}" for at in range(len(shape)))
    size = math.prod(shape)
    kept = tuple(Kept(dims=dims[: len(shape) - count]) for _ in range(2 if kind == "layer_norm" else 1))
    known = tuple(f"k{at}" for at in range(len(kept)))
    gradients = {0: Gradient(needs=("x0", "x1", *known) if len(inputs) > 1 else ("x0", *known), flops=8 * size)}
    if len(inputs) > 1:
        gradients[1] = Gradient(needs=("x0", *known), flops=3 * size)
    if len(inputs) > 2:
        gradients[2] = Gradient(flops=size)
    weight = dims[len(shape) - count :]
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, shape, strict=True)), inputs=(dims, *(weight for _ in inputs[1:])),
        outputs=(dims,), splittable=frozenset(dim for dim in dims if dim.startswith("b")), flops=8 * size,
        gradients=gradients, kept=kept,
    )  # fmt: skip
