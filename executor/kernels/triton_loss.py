"""The cross entropy in one pass over the logits each way, in Triton: imported only where a GPU runs it.

The forward reads a row of logits once, in its own dtype, and keeps the running maximum and the sum of exponentials
relative to it in single precision (Milakov and Gimelshein 2018, arXiv 1805.02867). The backward reads it once and
writes the gradient once. Nothing of the size of the logits is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["label_gradient", "log_sum_and_logit"]

_BLOCK = 4096
"""Logits of a row that a program holds at once."""


@triton.jit
def _read(x, label, sums, logit, num_classes, row_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = x + row * row_stride
    highest = tl.full((), float("-inf"), sums.dtype.element_ty)
    total = tl.full((), 0.0, sums.dtype.element_ty)
    for first in range(0, num_classes, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(start + column, mask=column < num_classes, other=float("-inf")).to(sums.dtype.element_ty)
        higher = tl.maximum(highest, tl.max(value, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # a row of nothing but -inf sums to 0
        total = total * tl.exp(highest - shift) + tl.sum(tl.exp(value - shift), 0)
        highest = higher
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(sums + row, tl.log(total) + shift)
    at = tl.load(label + row)
    inside = (at >= 0) & (at < num_classes)
    tl.store(logit + row, tl.load(start + at, mask=inside, other=0.0).to(sums.dtype.element_ty))


@triton.jit
def _write(tensors, y, num_classes, row_stride, HAS_IGNORED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    x, label, sums, factor, ignored = tensors[0], tensors[1], tensors[2], tensors[3], tensors[4]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < num_classes
    value = tl.load(x + row * row_stride + column, mask=mask, other=float("-inf")).to(sums.dtype.element_ty)
    at = tl.load(label + row)
    times = tl.load(factor)
    if HAS_IGNORED:
        times = tl.where(tl.load(ignored + row) != 0, 0.0, times)
    made = (tl.exp(value - tl.load(sums + row)) - tl.where(column == at, 1.0, 0.0)) * times
    tl.store(y + row * num_classes + column, made.to(y.dtype.element_ty), mask=mask)


def _rows(x: Tensor) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def log_sum_and_logit(x: Tensor, label: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum of exponentials of every row of logits, and the logit of its label.

    Args:
        x: [b.., classes].
        label: [b..], integers; where it is not a class of `x` its logit is 0.
        dtype: dtype of the results [b..], and of the sums.
    """
    flat = _rows(x)
    sums = torch.empty(x.shape[:-1], dtype=dtype, device=x.device)
    logit = torch.empty_like(sums)
    if flat.shape[0]:
        _read[(flat.shape[0],)](
            flat, label.contiguous(), sums, logit, flat.shape[1], flat.stride(0),
            BLOCK=min(_BLOCK, triton.next_power_of_2(flat.shape[1])), num_warps=8,
        )  # fmt: skip
    return sums, logit


def label_gradient(x: Tensor, label: Tensor, sums: Tensor, factor: Tensor, ignored: Tensor | None) -> Tensor:
    """(exp(x - sums) - one at the label) factor, in the dtype of `x`; 0 in rows that are `ignored`.

    Args:
        x: logits [b.., classes].
        label: [b..], integers; one that is not a class of `x` stands nowhere.
        sums: [b..], logarithms of sums of exponentials, over these classes or more.
        factor: a scalar on the device.
        ignored: [b..], boolean, or None.
    """
    flat, sums = _rows(x), sums.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(_BLOCK, triton.next_power_of_2(flat.shape[1]))
    if flat.shape[0]:
        _write[(flat.shape[0], triton.cdiv(flat.shape[1], block))](
            (flat, label.contiguous(), sums, factor, sums if ignored is None else ignored.contiguous()), y,
            flat.shape[1], flat.stride(0), HAS_IGNORED=ignored is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return y
