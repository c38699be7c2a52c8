"""Dropout in one pass over the tensor, in Triton: imported only where a GPU runs it.

The bits are those of `executor.kernels.random`: splitmix64 of an element's position in the full batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["MOST_RUNS", "dropped"]

MOST_RUNS = 3
"""Dims, of those whose neighbours in memory are not neighbours in the whole, that the kernel counts along."""

_BLOCK = 1024

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _drop(  # type: ignore[no-untyped-def]
    tensors, sizes, strides, ends, scale, LEAST: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    x, y, base = tensors[0], tensors[1], tensors[2]
    first, count = ends[0], ends[1]
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < count
    rest = element // sizes[2]
    position = first + element % sizes[2] * strides[2] + rest % sizes[1] * strides[1] + rest // sizes[1] * strides[0]
    z = tl.load(base).to(tl.uint64) + position.to(tl.uint64) * _GOLDEN
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    z = z ^ (z >> 31)
    value = tl.load(x + element, mask=mask, other=0.0).to(tl.float32) * scale
    kept = (z >> SHIFT).to(tl.int64) >= LEAST
    tl.store(y + element, tl.where(kept, value, 0.0).to(y.dtype.element_ty), mask=mask)


def dropped(
    x: Tensor, base: Tensor, runs: Sequence[tuple[int, int]], first: int, *, least: int, shift: int, scale: float
) -> Tensor:
    """`x` times `scale` where it is kept, else 0, as a new contiguous tensor.

    Args:
        x: in at most single precision.
        base: scalar on the device, where the random numbers start.
        runs: (elements, distance in the whole from one to the next) of at most `MOST_RUNS` dims, whose product is the
            number of elements of `x`.
        first: position in the whole of the first element.
        least: a number that is smaller drops its element.
        shift: by which the 64 random bits are shifted right to make that number.
        scale: 1 / (1 - p).
    """
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    every = [*[(1, 0)] * (MOST_RUNS - len(runs)), *runs]
    sizes, strides = zip(*every, strict=True)
    if x.numel():
        _drop[(triton.cdiv(x.numel(), _BLOCK),)](
            (x, y, base), sizes, strides, (first, x.numel()), scale, LEAST=least, SHIFT=shift, BLOCK=_BLOCK
        )
    return y
