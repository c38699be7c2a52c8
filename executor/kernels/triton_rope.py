"""Rotary positions in one pass over the tensor, in Triton: imported only where a GPU runs it.

Each program turns the pairs of some heads at one position; cosines and sines of the position are read once for all of
them. The arithmetic is that of the tables (single precision for half, double for double), rounded once at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["turned"]

_HEADS = 32
"""Most heads of one program: with 64 pairs each, 16 pairs a thread."""


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    tensors, sizes, strides, sign,
    INTERLEAVED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    x, y, cos, sin = tensors[0], tensors[1], tensors[2], tensors[3]
    length, heads, half, dim = sizes[0], sizes[1], sizes[2], sizes[3]
    place = tl.program_id(0).to(tl.int64)
    batch, row = place // length, place % length
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_PAIRS)
    mask = (head < heads)[:, None] & (pair < half)[None, :]
    c = tl.load(cos + row * half + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + row * half + pair, mask=pair < half, other=0.0)[None, :] * sign
    if INTERLEAVED:
        first = 2 * pair
        second = 2 * pair + 1
    else:
        first = pair
        second = pair + half
    source = x + batch * strides[0] + row * strides[1] + (head.to(tl.int64) * strides[2])[:, None]
    target = y + (place * heads + head)[:, None] * dim
    a = tl.load(source + first[None, :], mask=mask, other=0.0).to(c.dtype)
    b = tl.load(source + second[None, :], mask=mask, other=0.0).to(c.dtype)
    tl.store(target + first[None, :], (a * c - b * s).to(y.dtype.element_ty), mask=mask)
    tl.store(target + second[None, :], (b * c + a * s).to(y.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:  # what is not turned is copied
        rest = 2 * half + tl.arange(0, BLOCK_REST)
        kept = (head < heads)[:, None] & (rest < dim)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=kept, other=0.0), mask=kept)


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int, *, interleaved: bool) -> Tensor:
    """The pairs of `x` turned by the angles of its positions, as a new contiguous tensor.

    Args:
        x: [.., length, heads, dim].
        cos, sin: [length, 1, pairs], contiguous, in single precision (double of a double `x`).
        sign: 1 turns forward, -1 back.
        interleaved: pairs are (2i, 2i + 1), else (i, i + pairs).
    """
    length, heads, dim = x.shape[-3:]
    pairs = cos.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    if x.stride(-1) != 1:
        x = x.contiguous()
    flat = x.reshape(-1, length, heads, dim)  # a view unless leading dims cannot be joined
    block_heads = min(_HEADS, triton.next_power_of_2(heads))
    rest = dim - 2 * pairs
    _turn[(flat.shape[0] * length, triton.cdiv(heads, block_heads))](
        (flat, y, cos, sin), (length, heads, pairs, dim), flat.stride()[:3], sign,
        INTERLEAVED=interleaved, BLOCK_HEADS=block_heads, BLOCK_PAIRS=triton.next_power_of_2(pairs),
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip
    return y
