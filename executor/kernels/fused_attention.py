"""Attention that keeps the logarithms of its sums of exponentials, and its backward from them.

torch has several kernels: flash and cuDNN for half precision on a GPU, a memory-efficient one for single precision, a
flash kernel for CPUs. `torch._fused_sdp_choice` says which one `scaled_dot_product_attention` would take; the same
kernel is called here directly, because that function keeps the logarithms to itself. Where there is none (heads of q
and v of unequal size, other devices) both ways are computed by their formulas (Dao 2023, FlashAttention-2, section 3).

All tensors are [b, heads, length, size], the logarithms [b, heads, length]; heads of k and v serve equal numbers of
heads of q in a row. `first` is the offset of a causal mask: row i reads the columns up to i + first; None: all.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from executor.kernels.chips import is_gpu

__all__ = ["attend", "attend_backward", "lower_mask"]

_aten = torch.ops.aten

_ROWS = 32
"""The memory-efficient kernel's logarithms are padded to a multiple of this (kAlignLSE in mem_eff_attention)."""

_WIDEST = 128
"""cuDNN's backward takes heads up to this size on every GPU that it supports."""


class _Kernel(Enum):
    CPU = "cpu"
    FLASH = "flash"
    FLASH_AT_THE_END = "flash, mask in the lower right corner"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    FORMULA = "formula"


def lower_mask(rows: int, columns: int, first: int, device: torch.device) -> Tensor:
    """The boolean mask whose row i is true up to column i + first."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril_(first)


def attend(q: Tensor, k: Tensor, v: Tensor, first: int | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v, and the logarithm of the sum of exponentials of every row."""
    kernel, causal = _kernel(q, k, v, first), first is not None
    if kernel is _Kernel.CPU:
        causal, mask = _cpu_mask(q, k, first)
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if kernel is _Kernel.FLASH:
        size, scale = q.shape[-1], _scale(q, scale)
        made = _aten._scaled_dot_product_flash_attention(*map(_eights, (q, k, v)), 0.0, causal, False, scale=scale)
        return made[0][..., :size], made[1]
    if kernel is _Kernel.FLASH_AT_THE_END:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        made = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=scale
        )
        return made[0].transpose(1, 2), made[1]
    if kernel is _Kernel.EFFICIENT:
        made = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return made[0], made[1][..., : q.shape[2]]
    if kernel is _Kernel.CUDNN:
        made = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return made[0], made[1].view(q.shape[:3])
    scores = _scores(q, k, first, scale)
    sums = torch.logsumexp(scores, -1)
    out = scores.sub_(sums.unsqueeze(-1)).exp_() @ _repeated(q, v).to(scores.dtype)
    return out.to(q.dtype), sums


def attend_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *, first: int | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from the gradient of the output, by the kernel that computed `out` and `sums`."""
    kernel, causal = _kernel(q, k, v, first), first is not None
    if kernel is _Kernel.CPU:
        causal, mask = _cpu_mask(q, k, first)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale
        )
    rows, keys, size, sizes = q.shape[2], k.shape[2], q.shape[-1], (None, None, q.shape[2], k.shape[2])
    if kernel is _Kernel.FLASH:
        scale, (g, q, k, v, out) = _scale(q, scale), map(_eights, (g, q, k, v, out))
        made = _aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, sums, *sizes, 0.0, causal, *_no_random_state(q.device), scale=scale
        )
        return made[0][..., :size], made[1][..., :size], made[2][..., :size]
    if kernel is _Kernel.FLASH_AT_THE_END:
        g, q, k, v, out = (tensor.transpose(1, 2) for tensor in (g, q, k, v, out))
        made = _aten._flash_attention_backward(
            g, q, k, v, out, sums, None, None, rows, keys, 0.0, True, *_no_random_state(q.device), scale=scale
        )
        return made[0].transpose(1, 2), made[1].transpose(1, 2), made[2].transpose(1, 2)
    if kernel is _Kernel.EFFICIENT:
        if missing := -rows % _ROWS:  # of a row that is not there every weight is exp(score - inf) = 0
            sums = F.pad(sums, (0, missing), value=torch.inf)
        made = _aten._scaled_dot_product_efficient_attention_backward(
            g, q, k, v, None, out, sums, *_no_random_numbers(q.device), 0.0, [True, True, True, False], causal,
            scale=scale,
        )  # fmt: skip
        return made[:3]
    if kernel is _Kernel.CUDNN:
        return _aten._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, out, sums.unsqueeze(-1), *_no_random_numbers(q.device), None, *sizes, 0.0, causal, scale=scale
        )
    return _backward_by_formula(g, q, k, v, out, sums, first, scale)


def _kernel(q: Tensor, k: Tensor, v: Tensor, first: int | None) -> _Kernel:
    """The kernel of both ways: a function of shapes, strides and dtypes alone, so that the backward finds it again."""
    rows, keys, equal = q.shape[2], k.shape[2], q.shape[-1] == v.shape[-1]
    if q.device.type == "cpu":
        return _Kernel.CPU if equal and q.numel() and k.numel() else _Kernel.FORMULA
    if not is_gpu(q):
        return _Kernel.FORMULA
    if first is not None and (first or rows != keys):
        at_the_end = q.dtype.itemsize == 2 and first == keys - rows and equal and q.shape[-1] % 8 == 0
        return _Kernel.FLASH_AT_THE_END if at_the_end and q.shape[-1] <= 2 * _WIDEST else _Kernel.FORMULA
    grouped = q.shape[1] != k.shape[1]
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, first is not None, scale=None, enable_gqa=grouped)
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        if max(q.shape[-1], v.shape[-1]) <= _WIDEST:
            return _Kernel.CUDNN
        return _Kernel.FLASH if equal else _Kernel.FORMULA if grouped else _Kernel.EFFICIENT
    if choice == SDPBackend.FLASH_ATTENTION.value:
        return _Kernel.FLASH
    return _Kernel.EFFICIENT if choice == SDPBackend.EFFICIENT_ATTENTION.value else _Kernel.FORMULA


def _cpu_mask(q: Tensor, k: Tensor, first: int | None) -> tuple[bool, Tensor | None]:
    """Whether to use torch's own causal mask, and any other one as numbers to add."""
    if first is None or not first:  # torch's own begins in the upper left corner
        return first is not None, None
    mask = lower_mask(q.shape[2], k.shape[2], first, q.device)
    return False, torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _eights(x: Tensor) -> Tensor:
    """Flash attention takes sizes that 8 divides; zeros change nothing."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x


@cache
def _no_random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """The random state that flash attention's backward requires, but does not read without dropout."""
    with torch.inference_mode(False):
        state = torch.zeros(2, dtype=torch.int64, device=device).view(torch.uint64)
    return state, state


@cache
def _no_random_numbers(device: torch.device) -> tuple[Tensor, Tensor]:
    """The same, seed and offset, of the other kernels."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)


# -- by formula --------------------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize == 2 else x


def _repeated(q: Tensor, x: Tensor) -> Tensor:
    repeats = q.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


def _scores(q: Tensor, k: Tensor, first: int | None, scale: float | None) -> Tensor:
    scores = (_wide(q) * _scale(q, scale)) @ _wide(_repeated(q, k)).transpose(-1, -2)
    if first is not None:
        scores.masked_fill_(~lower_mask(q.shape[2], k.shape[2], first, q.device), -torch.inf)
    return scores


def _backward_by_formula(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    first, scale = rest
    weights = _scores(q, k, first, scale).sub_(sums.unsqueeze(-1)).exp_()
    wide = _wide(g)
    to_v = weights.transpose(-1, -2) @ wide
    inner = (wide * out).sum(-1, keepdim=True)
    to_scores = (wide @ _wide(_repeated(q, v)).transpose(-1, -2)).sub_(inner).mul_(weights).mul_(_scale(q, scale))
    to_q, to_k = to_scores @ _wide(_repeated(q, k)), to_scores.transpose(-1, -2) @ _wide(q)
    return to_q.to(q.dtype), _summed(to_k, k), _summed(to_v, v)


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """Summed over the heads of q that a head serves."""
    repeats = gradient.shape[1] // like.shape[1]
    return (gradient if repeats == 1 else gradient.unflatten(1, (-1, repeats)).sum(2)).to(like.dtype)
