"""The decoder that torch's parts run: plain torch, its parameters named as in the graph of `tf.transformer`.

Rotary positions are x cos + (-b, a) sin in the model's dtype, as Hugging Face applies them; the executor turns in
single precision and rounds once. That is the cheaper form for torch's eager mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.experts import Experts
from benchmarks.peers.weights import SharedWeights
from plans.model.transformer import TransformerConfig

__all__ = ["Decoder", "cross_entropy", "filled"]


class Attention(nn.Module):
    """Causal self-attention; x [batch, seq, hidden] in and out, however many heads the weights here have."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        wide = config.num_heads * config.head_size
        self.head_dim = config.head_size
        self.wq, self.wk, self.wv = (nn.Linear(config.hidden, wide, bias=config.qkv_bias) for _ in range(3))
        self.wo = nn.Linear(wide, config.hidden, bias=config.out_bias)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """`turns` [2, seq, 1, head_dim] holds cosines and sines; None: no rotary positions."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        if turns is not None:
            q, k = _turned(q, turns), _turned(k, turns)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return made


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * turns[0] + torch.cat([-b, a], -1) * turns[1]


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x), or w2(gelu(w1 x)) where the MLP is not gated."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden, config.inner, bias=config.mlp_bias)
        self.w2 = nn.Linear(config.inner, config.hidden, bias=config.mlp_bias)
        self.w3 = nn.Linear(config.hidden, config.inner, bias=config.mlp_bias) if config.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, hidden] in and out."""
        inner = self.w1(x)
        made: Tensor = self.w2(F.gelu(inner) if self.w3 is None else F.silu(inner) * self.w3(x))
        return made


class Block(nn.Module):
    """Norm, attention, norm, MLP or experts, with residual sums; x [batch, seq, hidden] in and out."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = _norm(config), _norm(config)
        self.attention = Attention(config)
        self.feed_forward: nn.Module = FeedForward(config) if config.experts is None else Experts(config)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        """One block."""
        x = x + self.attention(self.attention_norm(x), turns)
        made: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return made


def _norm(config: TransformerConfig) -> nn.Module:
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.hidden, eps=config.norm_eps)


class Decoder(nn.Module):
    """All of a decoder, or a chunk of it for a pipeline; tokens or hidden states in, hidden states or logits out.

    Args:
        config: sizes.
        layers: numbers of the blocks that are here; all by default.
        first, last: whether the embedding, and norm and head, are here.
    """

    def __init__(
        self, config: TransformerConfig, layers: Sequence[int] | None = None, *, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.turns: Tensor | None = None  # no buffer: nothing broadcasts it in a step
        numbers = range(config.num_layers) if layers is None else layers
        learned = first and config.position == "learned"
        self.tok_embeddings = nn.Embedding(config.vocab, config.hidden) if first else None
        self.pos_embeddings = nn.Embedding(config.seq, config.hidden) if learned else None
        self.layers = nn.ModuleDict({str(number): Block(config) for number in numbers})
        self.norm = _norm(config) if last else None
        self.output = nn.Linear(config.hidden, config.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens [batch, seq] where the embedding is here, else hidden states [batch, seq, hidden]."""
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        if self.pos_embeddings is not None:
            x = x + self.pos_embeddings.weight[: x.shape[1]]
        for block in self.layers.values():
            x = block(x, self.turns)
        if self.output is not None and self.norm is not None:
            x = self.output(self.norm(x))
        return x


def filled(model: Decoder, config: TransformerConfig, weights: SharedWeights, device: torch.device) -> Decoder:
    """The model, built on the meta device, in its dtype on `device` with these weights."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.tensor(name, device))
    if config.position == "rope":
        model.turns = _turns(config).to(device, dtype)
    return model


def _turns(config: TransformerConfig) -> Tensor:
    """Cosines and sines [2, seq, 1, head_dim] (Su et al. 2021, arXiv 2104.09864), pairs as halves of a head."""
    speeds = config.rope.base ** (-torch.arange(0, config.head_size, 2, dtype=torch.float64) / config.head_size)
    angles = torch.outer(torch.arange(config.seq, dtype=torch.float64), speeds).repeat(1, 2).unsqueeze(1)
    return torch.stack([angles.cos(), angles.sin()])


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens, in single precision."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
