"""Scaled-dot-product attention by torch's own kernel; its three gradients by autograd of it alone.

torch picks the kernel (flash where it can). A rank with rows [first, first + rows) of a split causal query reads only
keys up to its last row, so that its mask ends in the lower right corner, which flash attention knows. Weights that are
dropped rule flash out: which ones is a function of their position, and torch's kernels draw their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from executor.kernels.place import by_autograd, num_parts, offset
from executor.kernels.random import kept_now

__all__ = ["ATTENTION_RULES"]

Attrs = Mapping[str, Any]


def attention(context: OpContext, attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T scale + mask) v; heads of k and v serve equal numbers of heads of q in a row."""
    if attrs.get("layout") == "bshd":  # as views: torch's kernels take them so, and flash makes its output so
        q, k, v = (each.transpose(-2, -3) for each in (q, k, v))
        return _heads_first(context, attrs, q, k, v, mask).transpose(-2, -3).contiguous()
    return _heads_first(context, attrs, q, k, v, mask).contiguous()


def _heads_first(context: OpContext, attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    causal, rows, keys = attrs.get("causal", False), q.shape[-2], k.shape[-2]
    kept = _kept_weights(context, attrs, q, keys) if attrs.get("p", 0) > 0 else None
    if causal and num_parts(context, attrs, "s") > 1:
        first = offset(context, attrs, "s", rows)
        keys, causal = min(keys, first + rows), False
        k, v = k[..., :keys, :], v[..., :keys, :]
        if mask is None and kept is None and keys == first + rows:
            return _at_the_end(attrs, q, k, v)
        lower = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril_(first)
        mask = lower if mask is None else _both(lower, mask[..., :keys] if mask.shape[-1] > 1 else mask)
    elif causal and mask is not None:
        lower = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril_()
        mask, causal = _both(lower, mask), False
    grouped = q.shape[-3] != k.shape[-3]
    if kept is not None:
        return _dropped(attrs, q, k, v, mask, causal, kept[..., : k.shape[-2]])
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=attrs.get("scale"), enable_gqa=grouped
    )


def _at_the_end(attrs: Attrs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention for the last rows of a square score matrix: keys beyond a row's position are masked."""
    rows, keys, scale = q.shape[-2], k.shape[-2], attrs.get("scale")
    grouped = q.shape[-3] != k.shape[-3]
    if rows == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    from torch.nn.attention.bias import causal_lower_right  # it imports the compiler, which takes two seconds

    mask = (
        causal_lower_right(rows, keys) if q.dtype.itemsize == 2  # a mask by its kind leaves torch the choice of flash
        else torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril_(keys - rows)
    )  # fmt: skip
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _both(lower: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return lower & mask
    return mask.masked_fill(~lower, -torch.inf)


def _dropped(attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kept: Tensor) -> Tensor:
    """Attention computed by its formula, with dropout of the softmax weights."""
    repeats = q.shape[-3] // k.shape[-3]
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril_()
    scores = (q * attrs.get("scale", q.shape[-1] ** -0.5)) @ k.repeat_interleave(repeats, -3).transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1) * kept
    return (weights @ v.repeat_interleave(repeats, -3)).mul(1 / (1 - attrs["p"]) if attrs["p"] < 1 else 0)


def _kept_weights(context: OpContext, attrs: Attrs, q: Tensor, keys: int) -> Tensor:
    """Which of this rank's weights are kept, by their position in the whole batch."""
    num_heads, rows = q.shape[-3], q.shape[-2]
    first_of = [offset(context, attrs, f"b{at}", size) for at, size in enumerate(q.shape[:-3])]
    sizes = [size * num_parts(context, attrs, f"b{at}") for at, size in enumerate(q.shape[:-3])]
    # heads are (h, r): a part of r stands in one h alone
    parts, part = num_parts(context, attrs, "r"), offset(context, attrs, "r", 1)
    first_head = (offset(context, attrs, "h", 1) * parts + part) * num_heads
    first_row = offset(context, attrs, "s", rows)
    region = [(low, low + size) for low, size in zip(first_of, q.shape[:-3], strict=True)]
    region += [(first_head, first_head + num_heads), (first_row, first_row + rows), (0, keys)]
    shape = [*sizes, num_heads * num_parts(context, attrs, "h") * parts, rows * num_parts(context, attrs, "s"), keys]
    return kept_now(context, attrs, region, shape, q.device)


def attention_grads(context: OpContext, attrs: Attrs, g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    return by_autograd(lambda *fresh: attention(context, attrs, *fresh), inputs, (0, 1, 2), g)


def _attention_grad(which: int) -> Callable[..., Tensor]:
    def one(context: OpContext, attrs: Attrs, g: Tensor, *inputs: Tensor) -> Tensor:
        return by_autograd(lambda *fresh: attention(context, attrs, *fresh), inputs, (which,), g)[0]

    return one


ATTENTION_RULES: Mapping[str, Rule] = {
    "attention.forward": attention,
    "attention.grad012": attention_grads,
    **{f"attention.grad{which}": _attention_grad(which) for which in range(3)},
}
