"""Where the tokens of a mixture of experts go, and the copies to there and back, in plain torch.

The number of tokens per expert is never copied to the host. Tokens beyond the capacity are written to one extra row,
which is then removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["PlainRouting", "Routing", "choices", "places"]

Attrs = Mapping[str, Any]


class Routing(Protocol):
    """The routing of the tokens of one call: tokens are [b, s, h], routed rows [experts, b x capacity, h]."""

    def spread(self, source: Tensor, *, weighted: bool) -> Tensor:
        """Routed rows: copies of tokens, times the weights of the choices if `weighted`; unused rows are zeros."""

    def collected(self, routed: Tensor, *, weighted: bool) -> Tensor:
        """Tokens: the sums of their routed rows, times the weights of the choices if `weighted`."""

    def logits_gradient(self, g: Tensor, routed: Tensor) -> Tensor:
        """The gradient of the logits [b, s, experts] through the weights of `collected(routed, weighted=True)`, whose
        gradient is `g`. It is linear in the products g routed, so that parts of h may be added later.
        """


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


class PlainRouting:
    """`Routing` in plain torch: every choice is a pass of its own.

    Args:
        attrs: "top_k", "capacity" and "weights" as `plans.operators.experts` declares them.
        logits: of the router, [b, s, experts].
    """

    def __init__(self, attrs: Attrs, logits: Tensor) -> None:
        self._logits, self._of_all = logits, attrs.get("weights", "chosen") == "all"
        self._chosen = choices(attrs, logits)
        rows = places(attrs, self._chosen, logits.shape[-1])
        self._rows = [row.reshape(-1) for row in rows.unbind(-1)]
        self._num_rows = logits.shape[-1] * logits.shape[0] * attrs["capacity"]

    def spread(self, source: Tensor, *, weighted: bool) -> Tensor:
        """Routed rows, written choice by choice."""
        made = source.new_zeros(self._num_rows + 1, source.shape[-1])
        flat = source.reshape(-1, source.shape[-1])
        weights = self._weights().flatten(0, 1).unsqueeze(-1).unbind(1) if weighted else None
        for number, rows in enumerate(self._rows):
            part = flat if weights is None else (flat * weights[number]).to(source.dtype)
            made.index_copy_(0, rows, part)
        return made[:-1].view(self._logits.shape[-1], -1, source.shape[-1])

    def collected(self, routed: Tensor, *, weighted: bool) -> Tensor:
        """Tokens, added choice by choice: in the dtype of the weights if `weighted`, else in that of `routed`."""
        parts = self._parts(routed)
        if weighted:
            weights = self._weights().unsqueeze(-1).unbind(2)
            parts = [part * weight for part, weight in zip(parts, weights, strict=True)]
        made = parts[0]
        for part in parts[1:]:
            made = made + part
        return made.to(routed.dtype)

    def logits_gradient(self, g: Tensor, routed: Tensor) -> Tensor:
        """Through products g routed in the dtype of the weights."""
        weights = self._weights()
        wide = g.to(weights.dtype)
        to_weights = torch.stack([(wide * part).sum(-1) for part in self._parts(routed)], -1)
        if self._of_all:
            whole = torch.softmax(self._logits.to(weights.dtype), -1)
            spread = torch.zeros_like(whole).scatter_(-1, self._chosen, to_weights)
            return (whole * (spread - (whole * spread).sum(-1, keepdim=True))).to(self._logits.dtype)
        inner = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True))
        return torch.zeros_like(self._logits).scatter_(-1, self._chosen, inner.to(self._logits.dtype))

    def _weights(self) -> Tensor:
        """The weight of each choice: [b, s, k], in at least float32."""
        wide = self._logits if self._logits.dtype == torch.float64 else self._logits.float()
        if self._of_all:
            return torch.softmax(wide, -1).gather(-1, self._chosen)
        return torch.softmax(wide.gather(-1, self._chosen), -1)

    def _parts(self, routed: Tensor) -> list[Tensor]:
        """[b, s, h] for each choice: its row for each token, zeros if the choice was dropped."""
        flat = routed.reshape(-1, routed.shape[-1])
        parts = (
            flat.index_select(0, rows.clamp(max=self._num_rows - 1)).masked_fill((rows == self._num_rows)[:, None], 0)
            for rows in self._rows
        )
        return [part.view(*self._chosen.shape[:2], -1) for part in parts]
