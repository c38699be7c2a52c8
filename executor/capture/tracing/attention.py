"""torch's own attention layer, captured with the batch as the first dim.

`nn.MultiheadAttention` (and the transformer layers of torch, which are made of it) moves the batch behind the sequence,
merges it with the heads and splits the projected tensor into query, key and value along dim 0. While a module is
exported, the layer computes the same formula as one attention operator, with the batch first and a dim for the heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import transformer

__all__ = ["batch_first_attention"]

_FORWARD = nn.MultiheadAttention.forward


@contextlib.contextmanager
def batch_first_attention() -> Iterator[None]:
    """Within this context `nn.MultiheadAttention` computes with the batch as dim 0.

    And the transformer layers do not look into a mask to find out whether it is causal: it is applied unchanged.
    """

    def as_stated(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)

    with (
        mock.patch.object(nn.MultiheadAttention, "forward", _forward),
        mock.patch.object(transformer, "_detect_is_causal_mask", as_stated),
    ):
        yield


def _forward(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Same result as torch.nn.functional.multi_head_attention_forward; rare forms are passed on to it."""
    given: Any = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
    if query.dim() != 3 or self.bias_k is not None or self.add_zero_attn or (is_causal and attn_mask is None):
        return _FORWARD(self, query, key, value, *given)
    if self.batch_first:
        return _attended(self, query, key, value, *given)
    turned = {id(tensor): tensor.transpose(0, 1) for tensor in (query, key, value)}  # one of them may be all three
    made, weights = _attended(self, turned[id(query)], turned[id(key)], turned[id(value)], *given)
    return made.transpose(0, 1), weights


def _attended(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """The attention of [batch, length, width]."""
    batch, length, width = query.shape
    heads = self.num_heads
    q, k, v = (
        part.view(batch, part.shape[1], heads, width // heads).transpose(1, 2)
        for part in _projected(self, query, key, value)
    )
    # torch drops the flag as soon as it has to look at weights or a mask of padding, and applies the mask instead
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(q, attn_mask, key_padding_mask, heads)
    dropout = self.dropout if self.training else 0.0
    if not need_weights:
        made = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        return self.out_proj(made.transpose(1, 2).reshape(batch, length, width)), None
    scores = (q * (width // heads) ** -0.5) @ k.transpose(-2, -1)
    weights = (scores if mask is None else scores + mask).softmax(-1)
    # [batch x heads, queries, keys], as torch has them where it drops some
    weights = F.dropout(weights.flatten(0, 1), dropout).view(weights.shape) if dropout else weights
    out = self.out_proj((weights @ v).transpose(1, 2).reshape(batch, length, width))
    return out, weights.mean(1) if average_attn_weights else weights


def _projected(self: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
    bias = self.in_proj_bias
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if self.in_proj_weight is not None:
        if query is key and key is value:
            return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        weights = self.in_proj_weight.chunk(3)
    return tuple(F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))


def _mask(q: Tensor, attn_mask: Tensor | None, padding: Tensor | None, heads: int) -> Tensor | None:
    """Combine both masks into one that is added to the scores."""
    total = None
    if attn_mask is not None:
        total = _added(attn_mask, q.dtype)
        if total.dim() == 3:  # [batch x heads, queries, keys]
            total = total.view(q.shape[0], heads, *total.shape[1:])
    if padding is not None:
        padding = _added(padding, q.dtype)[:, None, None, :]
        total = padding if total is None else total + padding
    return total


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask of excluded positions to numbers that are added to the scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
