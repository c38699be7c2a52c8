"""Rotary position embedding (RoPE)."""

from __future__ import annotations

import math

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, declares
from plans.operators.spec import Gradient, OperatorSpec

__all__: list[str] = []


@declares("rope")
def _rope(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """x[b.., s, heads, d] with the pairs of its first attrs "rotary" elements of d turned by angles of the position s.

    Pair i of a row at position p is turned by p * base^(-2 i / rotary) (Su et al. 2021, arXiv 2104.09864, eq. 15).
    attrs: "base"; "interleaved": pairs are (2i, 2i + 1), else (i, i + rotary / 2); "scaling" "linear" or "llama3" with
    "factor", "low_factor", "high_factor" and "original_seq". The gradient is the inverse turn and reads nothing. d
    stays whole; a part of s knows where it begins.
    """
    shape = inputs[0]
    rotary = attrs.get("rotary", shape[-1])
    if len(shape) < 3 or rotary % 2 or not 0 < rotary <= shape[-1]:
        raise TwofoldError(f"rope turns pairs of the first {rotary} elements of [.., length, heads, size], not {shape}")
    dims = (*(f"b{at}" for at in range(len(shape) - 3)), "s", "h", "_d")
    flops = 3 * math.prod(shape[:-1]) * rotary
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, shape, strict=True)), inputs=(dims,), outputs=(dims,), flops=flops,
        splittable=frozenset(dims[:-1]), gradients={0: Gradient(flops=flops)}, located=("s",),
    )  # fmt: skip
