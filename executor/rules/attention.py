"""Scaled-dot-product attention by torch's own kernel; its three gradients by autograd of it alone.

torch picks the kernel (flash where it can). A rank with rows [first, first + rows) of a split causal query reads only
keys up to its last row, and masks those: that rules flash attention out on this path. Not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.rules.place import by_autograd, num_parts, offset
from executor.rules.site import Rule, Site

__all__ = ["ATTENTION_RULES"]

Attrs = Mapping[str, Any]


def attention(site: Site, attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T scale + mask) v; heads of k and v serve equal numbers of heads of q in a row."""
    causal, rows, keys = attrs.get("causal", False), q.shape[-2], k.shape[-2]
    if causal and num_parts(site, attrs, "s") > 1:
        first = offset(site, attrs, "s", rows)
        keys, causal = min(keys, first + rows), False
        k, v = k[..., :keys, :], v[..., :keys, :]
        lower = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril_(first)
        mask = lower if mask is None else _both(lower, mask[..., :keys] if mask.shape[-1] > 1 else mask)
    elif causal and mask is not None:
        lower = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril_()
        mask, causal = _both(lower, mask), False
    grouped = q.shape[-3] != k.shape[-3]
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=attrs.get("scale"), enable_gqa=grouped
    )
    return output.contiguous()


def _both(lower: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return lower & mask
    return mask.masked_fill(~lower, -torch.inf)


def attention_grads(site: Site, attrs: Attrs, g: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """dL/dq, dL/dk and dL/dv."""
    return by_autograd(lambda *fresh: attention(site, attrs, *fresh), inputs, (0, 1, 2), g)


def _attention_grad(which: int) -> Callable[..., Tensor]:
    def one(site: Site, attrs: Attrs, g: Tensor, *inputs: Tensor) -> Tensor:
        return by_autograd(lambda *fresh: attention(site, attrs, *fresh), inputs, (which,), g)[0]

    return one


ATTENTION_RULES: Mapping[str, Rule] = {
    "attention.forward": attention,
    "attention.grad012": attention_grads,
    **{f"attention.grad{which}": _attention_grad(which) for which in range(3)},
}
