"""Llama as people write it in torch: norms in parts, rotary positions by tables, keys and values repeated."""

import torch
import torch.nn.functional as F
from torch import nn

from plans.model.transformer import Rope, TransformerConfig


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float() if x.dtype == torch.bfloat16 else x
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, size, inner = config.hidden, config.head_size, config.inner
        self.config, self.first, self.second = config, Norm(width), Norm(width)
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, config.kv_heads * size, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)

    def turned(self, x, cos, sin):
        if self.config.rope.angles == "frequencies":
            first, second = x.chunk(2, -1)
            return x * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)
        wide = x.float() if x.dtype == torch.bfloat16 else x
        if self.config.rope.interleaved:
            real, imaginary = wide.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        else:
            real, imaginary = wide.chunk(2, -1)
        cos, sin = (table.view(1, x.shape[1], 1, -1) for table in (cos, sin))
        parts = real * cos - imaginary * sin, imaginary * cos + real * sin
        return (torch.stack(parts, -1).flatten(3) if self.config.rope.interleaved else torch.cat(parts, -1)).type_as(x)

    def repeated(self, x):
        batch, length, heads, size = x.shape
        times = self.config.num_heads // heads
        return x[:, :, :, None, :].expand(batch, length, heads, times, size).reshape(batch, length, heads * times, size)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        y = self.first(x)
        q, k, v = (w(y).view(batch, length, -1, self.config.head_size) for w in (self.wq, self.wk, self.wv))
        q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        q, k, v = (each.transpose(1, 2) for each in (q, self.repeated(k), self.repeated(v)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).contiguous().view(batch, length, width))
        y = self.second(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class PlainLlama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm, self.head = Norm(config.hidden), nn.Linear(config.hidden, config.vocab, bias=False)
        rates = config.rope.base ** (-torch.arange(0, config.head_size, 2) / config.head_size)
        angles = torch.outer(torch.arange(config.seq), rates)
        self.angles, self.float_loss = config.rope.angles, config.float_loss
        if self.angles == "frequencies":
            self.register_buffer("frequencies", rates)
        else:
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())

    def turns(self, x):
        """Cosines and sines of the positions, from tables or made as Hugging Face's models make them."""
        if self.angles != "frequencies":
            return self.cos, self.sin
        positions = torch.arange(x.shape[1], device=x.device)[None, :, None]
        angles = positions.float() * self.frequencies.float()[None, None, :]
        twice = torch.cat((angles, angles), -1)
        return twice.cos().to(x.dtype), twice.sin().to(x.dtype)

    def forward(self, ids, labels):
        x = self.table(ids)
        cos, sin = self.turns(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy((logits.float() if self.float_loss else logits).flatten(0, 1), labels.flatten())


SMALL = TransformerConfig(
    num_layers=4, hidden=32, num_heads=4, num_kv_heads=2, ffn=48, vocab=64, seq=16, dtype="float32",
    rope=Rope(interleaved=True, angles="tables"),
)  # fmt: skip


def plain(config):
    """The module on meta, in the dtype of the configuration."""
    with torch.device("meta"):
        return PlainLlama(config).to(getattr(torch, config.dtype))


def examples(config, batch):
    return (((batch, config.seq), "int64"),) * 2
