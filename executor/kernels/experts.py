"""Dispatch of tokens to their experts and back, with a fixed capacity (`plans.operators.experts`).

The number of tokens per expert is never copied to the host. Tokens beyond the capacity are written to one extra row,
which is then removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext, Rule

__all__ = ["EXPERT_RULES", "choices", "places"]

Attrs = Mapping[str, Any]


def choices(attrs: Attrs, logits: Tensor) -> Tensor:
    """The experts that each token chose, the best first: [b, s, k]."""
    return torch.topk(logits, attrs["top_k"], dim=-1).indices


def places(attrs: Attrs, chosen: Tensor, num_experts: int) -> Tensor:
    """The row of [experts, b x capacity] to which each choice goes: [b, s, k]; one beyond the last row if it is
    dropped.
    """
    (batch, seq, top_k), capacity = chosen.shape, attrs["capacity"]
    # choices in the order in which they take places: all first ones, then all second ones
    flat = chosen.transpose(1, 2).reshape(batch, top_k * seq)
    ordered, order = torch.sort(flat, dim=1, stable=True)
    counts = torch.zeros(batch, num_experts, dtype=torch.int64, device=chosen.device)
    counts.scatter_add_(1, flat, torch.ones_like(flat))
    begin = counts.cumsum(1) - counts
    numbers = torch.arange(top_k * seq, device=chosen.device).expand_as(flat)
    position = torch.empty_like(flat).scatter_(1, order, numbers - begin.gather(1, ordered))
    sample = torch.arange(batch, device=chosen.device).unsqueeze(1)
    row = (flat * batch + sample) * capacity + position
    row = row.masked_fill(position >= capacity, num_experts * batch * capacity)
    return row.view(batch, top_k, seq).transpose(1, 2)


def weights(attrs: Attrs, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weight of each choice: [b, s, k], in at least float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if attrs.get("weights", "chosen") == "all":
        return torch.softmax(wide, -1).gather(-1, chosen)
    return torch.softmax(wide.gather(-1, chosen), -1)


def _spread(rows: Tensor, source: Tensor, count: int, factor: Tensor | None = None) -> Tensor:
    """[count, h]: row rows[b, s, k] is source[b, s], times factor[b, s, k]; others are zeros."""
    made = source.new_zeros(count + 1, source.shape[-1])
    flat = source.reshape(-1, source.shape[-1])
    for number in range(rows.shape[-1]):
        part = flat if factor is None else (flat * factor[..., number].reshape(-1, 1)).to(source.dtype)
        made.index_copy_(0, rows[..., number].reshape(-1), part)
    return made[:-1]


def _collected(rows: Tensor, routed: Tensor, number: int) -> Tensor:
    """[b, s, h]: the row of choice `number` of each token; zeros if the choice was dropped."""
    at = rows[..., number]
    flat, last = routed.reshape(-1, routed.shape[-1]), routed.shape[0] * routed.shape[1]
    found = flat.index_select(0, at.reshape(-1).clamp(max=last - 1)).view(*at.shape, -1)
    return found.masked_fill((at == last).unsqueeze(-1), 0)


def dispatch(context: OpContext, attrs: Attrs, x: Tensor, logits: Tensor) -> Tensor:
    """Copy every token to its places at its experts."""
    num_experts = logits.shape[-1]
    rows = places(attrs, choices(attrs, logits), num_experts)
    count = num_experts * x.shape[0] * attrs["capacity"]
    return _spread(rows, x, count).view(num_experts, -1, x.shape[-1])


def dispatch_grad(context: OpContext, attrs: Attrs, g: Tensor, logits: Tensor) -> Tensor:
    """dL/dx: the sum of the gradients of a token's places."""
    rows = places(attrs, choices(attrs, logits), logits.shape[-1])
    made = _collected(rows, g, 0)
    for number in range(1, attrs["top_k"]):
        made = made + _collected(rows, g, number)
    return made


def combine(context: OpContext, attrs: Attrs, routed: Tensor, logits: Tensor) -> Tensor:
    """The weighted sum of the outputs of a token's experts."""
    chosen = choices(attrs, logits)
    rows, share = places(attrs, chosen, logits.shape[-1]), weights(attrs, logits, chosen)
    made = _collected(rows, routed, 0) * share[..., :1]
    for number in range(1, attrs["top_k"]):
        made = made + _collected(rows, routed, number) * share[..., number : number + 1]
    return made.to(routed.dtype)


def combine_grad_routed(context: OpContext, attrs: Attrs, g: Tensor, logits: Tensor) -> Tensor:
    """dL/dx[place] = weight x dL/dy of its token."""
    chosen = choices(attrs, logits)
    rows = places(attrs, chosen, logits.shape[-1])
    count = logits.shape[-1] * g.shape[0] * attrs["capacity"]
    return _spread(rows, g, count, weights(attrs, logits, chosen)).view(logits.shape[-1], -1, g.shape[-1])


def combine_grad_logits(context: OpContext, attrs: Attrs, g: Tensor, routed: Tensor, logits: Tensor) -> Tensor:
    """dL/dlogits through the weights; linear in the products g y, so that parts of h may be added later."""
    chosen = choices(attrs, logits)
    rows, share = places(attrs, chosen, logits.shape[-1]), weights(attrs, logits, chosen)
    wide = g.to(share.dtype)
    products = [(wide * _collected(rows, routed, number)).sum(-1) for number in range(attrs["top_k"])]
    to_share = torch.stack(products, -1)
    if attrs.get("weights", "chosen") == "all":
        whole = torch.softmax(logits.to(share.dtype), -1)
        spread = torch.zeros_like(whole).scatter_(-1, chosen, to_share)
        return (whole * (spread - (whole * spread).sum(-1, keepdim=True))).to(logits.dtype)
    inner = share * (to_share - (share * to_share).sum(-1, keepdim=True))
    return torch.zeros_like(logits).scatter_(-1, chosen, inner.to(logits.dtype))


EXPERT_RULES: Mapping[str, Rule] = {
    "dispatch.forward": dispatch,
    "dispatch.grad0": dispatch_grad,
    "combine.forward": combine,
    "combine.grad0": combine_grad_routed,
    "combine.grad1": combine_grad_logits,
}
