"""The four models; each function gives the module, whose forward returns the loss, and example inputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LENGTH", "VOCAB", "convolutions", "gpt", "llama", "perceptron"]

VOCAB, LENGTH = 256, 64
"""Tokens are bytes; a sample has LENGTH of them."""


class Classifier(nn.Module):
    """Cross entropy of a network's logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of x [batch, ...] and labels [batch]."""
        return F.cross_entropy(self.network(x), labels)


def perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Three layers on the 8x8 digits of scikit-learn."""
    network = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 10))
    return Classifier(network), (torch.zeros(64, 64), torch.zeros(64, dtype=torch.int64))


def convolutions() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two convolutions with batch norms and two layers on MNIST images of 28x28."""
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return Classifier(network), (torch.zeros(64, 1, 28, 28), torch.zeros(64, dtype=torch.int64))


class Block(nn.Module):
    """Attention and two layers, each behind its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] -> the same shape."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT that reads text letter by letter."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of tokens and labels [batch, length]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _letters() -> tuple[Tensor, Tensor]:
    return torch.zeros(16, LENGTH, dtype=torch.int64), torch.zeros(16, LENGTH, dtype=torch.int64)


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Four blocks of width 64."""
    return GPT(), _letters()


class NextLetter(nn.Module):
    """The loss of a causal model of transformers for labels that are the following tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of tokens and labels [batch, length]."""
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """`LlamaForCausalLM` of transformers: four blocks of width 64, four heads that share two of keys and values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    return NextLetter(LlamaForCausalLM(config)), _letters()
