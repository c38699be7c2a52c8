"""Rotary position embedding (RoPE)."""

from __future__ import annotations

import math

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, declares
from plans.operators.spec import Gradient, OperatorSpec

__all__: list[str] = []

_ANGLES: tuple[tuple[tuple[str, ...], ...], ...] = ((), (("_pairs",),), (("s", "_pairs"), ("s", "_pairs")))
"""The dims of the inputs with angles, by the number of these inputs."""


@declares("rope")
def _rope(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """x[b.., s, heads, d] with the pairs of its first attrs "rotary" elements of d turned by angles of the position s.

    Pair i of a row at position p is turned by p * base^(-2 i / rotary) (Su et al. 2021, arXiv 2104.09864, eq. 15).
    attrs: "base"; "interleaved": pairs are (2i, 2i + 1), else (i, i + rotary / 2); "scaling" "linear" or "llama3" with
    "factor", "low_factor", "high_factor" and "original_seq". The gradient is the inverse turn and reads nothing. d
    stays whole; a part of s knows where it begins.

    A model that has angles of its own gives them instead: as a second input with radians per position of each pair,
    or as a second and a third with the cosine and the sine of every position and pair. Gradients read them too.
    """
    shape = inputs[0]
    rotary = 2 * inputs[1][-1] if len(inputs) > 1 else attrs.get("rotary", shape[-1])
    if len(shape) < 3 or rotary % 2 or not 0 < rotary <= shape[-1]:
        raise TwofoldError(
            f"rope rotates pairs of the first {rotary} elements of [.., length, heads, size], not {shape}"
        )
    dims = (*(f"b{at}" for at in range(len(shape) - 3)), "s", "h", "_d")
    flops = 3 * math.prod(shape[:-1]) * rotary
    sizes, given = dict(zip(dims, shape, strict=True)), _ANGLES[len(inputs) - 1]
    if given:
        sizes["_pairs"] = rotary // 2
    if any(tuple(sizes[dim] for dim in own) != tuple(table) for own, table in zip(given, inputs[1:], strict=True)):
        raise TwofoldError(f"rope of {shape} cannot take angles of the shapes {list(inputs[1:])}")
    needs = tuple(f"x{at}" for at in range(1, len(inputs)))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(dims, *given), outputs=(dims,), flops=flops,
        splittable=frozenset(dims[:-1]), gradients={0: Gradient(needs=needs, flops=flops)}, located=("s",),
    )  # fmt: skip
