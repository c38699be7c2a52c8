"""A mixture of experts in plain torch, routed as in the graph: a fixed capacity per sample, late choices dropped.

Tokens are copied to the places of their experts and back by row; since no two tokens share a place, the gradient of
either copy is the other one, and nothing is added by atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plans.model.transformer import TransformerConfig

__all__ = ["Experts"]


class Experts(nn.Module):
    """Router and experts, whose MLPs are batched products; x [batch, seq, hidden] in and out."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.experts is not None and config.gated and not config.experts.num_shared
        assert config.experts.weights == "chosen" and not config.experts.num_dense_layers
        count, ffn = config.experts.num_experts, config.experts.ffn
        self.top_k, self.num_experts = config.experts.top_k, count
        self.capacity = config.experts.capacity(config.seq)
        self.router = nn.Linear(config.hidden, count, bias=False)
        self.experts = nn.ModuleDict({
            "w1": _Weight(count, config.hidden, ffn), "w2": _Weight(count, ffn, config.hidden),
            "w3": _Weight(count, config.hidden, ffn),
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Weighted sums of the chosen experts' outputs."""
        logits = self.router(x)
        best, chosen = torch.topk(logits, self.top_k, dim=-1)
        share = torch.softmax(best.float(), -1)
        rows = self._places(chosen)
        count = self.num_experts * x.shape[0] * self.capacity
        routed = _Spread.apply(x.flatten(0, 1), rows, count).view(self.num_experts, -1, x.shape[-1])
        w1, w2, w3 = (self.experts[name].weight for name in ("w1", "w2", "w3"))
        made = (F.silu(routed @ w1) * (routed @ w3)) @ w2
        found = _Collect.apply(made.flatten(0, 1), rows).view(*chosen.shape, -1)
        return (found * share.unsqueeze(-1)).sum(-2).to(x.dtype)

    @torch.no_grad()
    def _places(self, chosen: Tensor) -> Tensor:
        """The row of each choice [batch x seq, k] among expert, sample, place; one more than the last where none is
        left. All first choices take places before all second ones."""
        batch, seq, top_k = chosen.shape
        flat = chosen.transpose(1, 2).reshape(batch, top_k * seq)
        ordered, order = torch.sort(flat, dim=1, stable=True)
        counts = torch.zeros(batch, self.num_experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(1, flat, torch.ones_like(flat))
        begin = counts.cumsum(1) - counts
        numbers = torch.arange(top_k * seq, device=chosen.device).expand_as(flat)
        position = torch.empty_like(flat).scatter_(1, order, numbers - begin.gather(1, ordered))
        sample = torch.arange(batch, device=chosen.device).unsqueeze(1)
        row = (flat * batch + sample) * self.capacity + position
        row = row.masked_fill(position >= self.capacity, self.num_experts * batch * self.capacity)
        return row.view(batch, top_k, seq).transpose(1, 2).reshape(batch * seq, top_k)


class _Weight(nn.Module):
    """One matrix per expert, [experts, in, out]."""

    def __init__(self, count: int, features: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, features, width))


class _Spread(torch.autograd.Function):
    """[tokens, h] -> [count, h]: row rows[t, k] is token t, others are zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(rows)
        made = x.new_zeros(count + 1, x.shape[-1])
        for choice in rows.unbind(1):
            made.index_copy_(0, choice, x)
        return made[:-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return _rows_of(gradients[0], rows).sum(1), None, None


class _Collect(torch.autograd.Function):
    """[count, h] -> [tokens, k, h]: row rows[t, k], zeros where a choice has no place."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = made.shape[0]
        return _rows_of(made, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        made = gradients[0].new_zeros(ctx.count + 1, gradients[0].shape[-1])
        made.index_copy_(0, rows.flatten(), gradients[0].flatten(0, 1))
        return made[:-1], None


def _rows_of(source: Tensor, rows: Tensor) -> Tensor:
    found = source.index_select(0, rows.flatten().clamp(max=source.shape[0] - 1)).view(*rows.shape, -1)
    return found.masked_fill((rows == source.shape[0]).unsqueeze(-1), 0)
