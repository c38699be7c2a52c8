"""A decoder block like Llama's in plain torch, and a model of a few such blocks, to measure other software stacks with.

With tiny sizes the device has nearly nothing to do and only the host's time remains. With real sizes a block shows how
well the sum of single kernels predicts it. The code is independent of any published model code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "Decoder", "Sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a decoder.

    >>> Sizes(hidden=64, heads=4, ffn=128, vocab=64).head_dim
    16
    """

    hidden: int = 64
    heads: int = 4
    ffn: int = 128
    vocab: int = 64
    blocks: int = 2

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads


class Block(nn.Module):
    """Norm, attention with rotary positions, norm, gated feed-forward; x [batch, sequence, hidden] in and out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, ffn = sizes.hidden, sizes.ffn
        self.head_dim = sizes.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=1e-6), nn.RMSNorm(hidden, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """One block; `turns` [2, sequence, head_dim] holds cosines and sines."""
        h = self.norm1(x)
        q, k, v = (self._heads(linear(h)) for linear in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(_turned(q, turns), _turned(k, turns), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def _heads(self, x: Tensor) -> Tensor:
        """Number of heads that match the features of this rank."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head; ids [batch, sequence] -> logits. `sequence` fixes the positions."""

    turns: Tensor

    def __init__(self, sizes: Sizes, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.register_buffer("turns", turns(sequence, sizes.head_dim), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, sequence, vocab]."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.turns)
        out: Tensor = self.head(self.norm(x))
        return out


def turns(sequence: int, head_dim: int) -> Tensor:
    """Cosines and sines of rotary positions (Su et al. 2021), [2, sequence, head_dim]."""
    speeds = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(sequence).float(), speeds).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-right, left], -1) * turns[1]
