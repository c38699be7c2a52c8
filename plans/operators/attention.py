"""Scaled-dot-product attention: softmax(q k^T scale + mask) v."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, declares
from plans.operators.spec import Dim, Gradient, Kept, OperatorSpec, factors

__all__ = ["heads_first"]


@declares("attention")
def _attention(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[b.., heads, s, e] of q[b.., heads, s, d], k[b.., heads, t, d], v[b.., heads, t, e] and a mask[.., s, t].

    attrs "causal" (row i reads columns up to i), "scale" (1 / sqrt(d) by default). The mask, a fourth input, is boolean
    (true takes part) or added, and broadcast. b, heads and s can be split; t, d and e stay whole. With fewer heads of k
    and v than of q, each serves r heads in a row: the heads of q are (h, r), those of k and v are h.

    A part of a causal s reads keys only as far as its last row. Parts do not cost the same then; prices take the mean.

    With attrs "layout" "bshd" the heads are after the lengths: q[b.., s, heads, d] and so on, the mask as before.

    With attrs "p" and "seed" the weights of the softmax are dropped as `dropout` drops: by their position among those
    of the full batch, [b.., heads, s, t].

    Without a mask and without dropout the forward keeps the logarithms of the sums of exponentials, [b.., heads, s] in
    either layout, and the gradients make the weights of the softmax from them (Dao 2023, FlashAttention-2, section
    3.1). With one of them the gradients make the forward again.
    """
    q, k, v = heads_first(inputs[:3], attrs)
    if len(q) < 3 or len(q) != len(k) or k[:-1] != v[:-1] or q[:-3] != k[:-3] or q[-1] != k[-1] or q[-3] % k[-3]:
        raise TwofoldError(
            f"attention takes q, k, v of matching shapes [.., heads, length, size], not {q}, {k} and {v}"
        )
    repeats = q[-3] // k[-3]
    batch = tuple(f"b{position}" for position in range(len(q) - 3))
    sizes = dict(zip(batch, q, strict=False)) | {"h": k[-3], "s": q[-2], "_t": k[-2], "_d": q[-1], "_e": v[-1]}
    heads: Dim = "h"
    if repeats > 1:
        heads, sizes["r"] = ("h", "r"), repeats
    operands: list[tuple[Dim, ...]] = [(*batch, heads, "s", "_d"), (*batch, "h", "_t", "_d"), (*batch, "h", "_t", "_e")]
    operands, (output,) = heads_first(operands, attrs), heads_first([(*batch, heads, "s", "_e")], attrs)
    if len(inputs) == 4:
        operands.append(_mask(inputs[3], (*batch, heads, "s", "_t"), sizes))
    scores = math.prod(q[:-1]) * k[-2]
    share = 0.5 * (1 + 1 / q[-2]) if attrs.get("causal") and q[-2] == k[-2] else 1.0
    product = int(2 * scores * q[-1] * share), int(2 * scores * v[-1] * share)
    forward = sum(product)
    needs = tuple(f"x{index}" for index in range(len(inputs)))
    keeps = len(inputs) == 3 and not attrs.get("p")
    if keeps:
        needs += ("y0", "k0")
    # the scores (d), or all of the forward, are recomputed; then the gradients of the scores (e), q (d), k (d), v (e)
    again = product[0] if keeps else forward
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=tuple(operands), outputs=(output,), flops=forward,
        splittable=frozenset(dim for dim in sizes if not dim.startswith("_")),
        gradients={
            0: Gradient(needs=needs, flops=again + sum(product), remade_flops=again),
            1: Gradient(needs=needs, flops=product[0]), 2: Gradient(needs=needs, flops=product[1]),
        },
        located=(*batch, *factors(heads), "s") if "p" in attrs else ("s",), joint=(0, 1, 2),
        kept=(Kept(dims=(*batch, heads, "s")),) if keeps else (),
    )  # fmt: skip


def heads_first(shapes: Sequence[tuple[Any, ...]], attrs: Attrs) -> list[tuple[Any, ...]]:
    """Shapes (or dims) of q, k, v or of the output as [.., heads, length, size], whatever attrs "layout" says.

    Kept sums [b.., heads, s] have a dim less than the others and stay.

    >>> heads_first([(2, 64, 8, 16), (2, 8, 64)], {"layout": "bshd"})
    [(2, 8, 64, 16), (2, 8, 64)]
    """
    if attrs.get("layout", "bhsd") == "bhsd":
        return list(shapes)
    if attrs["layout"] != "bshd":
        raise TwofoldError(f"attention has no layout {attrs['layout']!r}; it has bhsd and bshd")
    rank = max(map(len, shapes), default=0)
    return [(*shape[:-3], shape[-2], shape[-3], shape[-1]) if len(shape) == rank else shape for shape in shapes]


def _mask(shape: tuple[int, ...], against: tuple[Dim, ...], sizes: dict[str, int]) -> tuple[Dim, ...]:
    dims: list[Dim] = []
    offset = len(against) - len(shape)
    for position, size in enumerate(shape):
        dim = against[offset + position]
        whole = math.prod(sizes[name] for name in ((dim,) if isinstance(dim, str) else dim))
        if size == whole:
            dims.append(dim)
        elif size == 1:
            dims.append(f"_m{position}")
            sizes[f"_m{position}"] = 1
        else:
            raise TwofoldError(f"an attention mask of the shape {shape} cannot be broadcast: {size} against {whole}")
    return tuple(dims)
