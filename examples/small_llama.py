"""A small Llama in plain torch, for the tour of docs/index.md: `build` is what --model names.

twofold plan examples/small_llama.py:build --machine h200-x4 --global-batch 16
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, INNER, WORDS, LENGTH = 128, 4, 4, 352, 512, 64


class Attention(nn.Module):
    """Causal attention with rotary positions; x [batch, length, width] in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`cos` and `sin` [length, half of the features of a head]."""
        q, k, v = (linear(x).unflatten(-1, (HEADS, -1)) for linear in (self.query, self.key, self.value))
        q, k = (turned(each, cos, sin).transpose(1, 2) for each in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of x [batch, length, heads, features]."""
    first, second = x.chunk(2, -1)
    cos, sin = (table.view(1, x.shape[1], 1, -1) for table in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up, self.gate = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, length, width] in and out."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class SmallLlama(nn.Module):
    """Tokens and labels [batch, length] in, the mean cross entropy out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        angles = torch.arange(LENGTH)[:, None] / 10_000 ** (torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def build() -> tuple[nn.Module, tuple[tuple[tuple[int, int], str], ...]]:
    """The module and the shapes and dtypes of its inputs."""
    return SmallLlama(), (((16, LENGTH), "int64"), ((16, LENGTH), "int64"))
