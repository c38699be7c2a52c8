"""Sums and means over dims: a split dim that is summed over leaves partial sums."""

from __future__ import annotations

import math

from plans.operators.registry import Attrs, Shapes, declares
from plans.operators.spec import Gradient, OperatorSpec

__all__: list[str] = []


@declares("reduce_sum", "reduce_mean")
def _reduce(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Over the dims attrs "dims"; attrs "keepdim" leaves them with size 1."""
    shape, over = inputs[0], {dim % max(1, len(inputs[0])) for dim in attrs["dims"]}
    dims = tuple(f"d{position}" for position in range(len(shape)))
    sizes = dict(zip(dims, shape, strict=True))
    out = []
    for position, dim in enumerate(dims):
        if position not in over:
            out.append(dim)
        elif attrs.get("keepdim"):
            out.append(f"_k{position}")
            sizes[out[-1]] = 1
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(dims,), outputs=(tuple(out),), splittable=frozenset(dims),
        flops=math.prod(shape), gradients={0: Gradient(flops=math.prod(shape))},
        located=tuple(dim for position, dim in enumerate(dims) if position in over),
    )  # fmt: skip
