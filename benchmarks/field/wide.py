"""Models as people write them, in widths at which the choice of layouts is not a trivial one; without weights in
memory.

    graph = captured("Llama", 2)

`Llama` is written as llama2.c writes it, with real rotary positions and norms of single operators; `Swin` is a vision
transformer of shifted windows; `UNet` is one of diffusion, whose blocks all read the embedding of the time.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from executor.capture.capture import capture
from plans.model.graph import Graph

__all__ = ["MODELS", "Llama", "Swin", "UNet", "captured"]

_Shapes = tuple[object, ...]


class _Norm(nn.Module):
    """A root mean square norm of single operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2, self.first, self.second = nn.Linear(2 * width, width, bias=False), _Norm(width), _Norm(width)

    @staticmethod
    def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        real, imaginary = x.float().reshape((*x.shape[:-1], -1, 2)).unbind(-1)
        cos, sin = cos[None, :, None, :], sin[None, :, None, :]
        turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)
        return turned.flatten(3).type_as(x)

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, heads, size = x.shape
        times = self.heads // self.kv_heads
        return x[:, :, :, None, :].expand(batch, length, heads, times, size).reshape(batch, length, self.heads, size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        y = self.first(x)
        q = self.wq(y).view(batch, length, self.heads, self.size)
        k, v = (w(y).view(batch, length, self.kv_heads, self.size) for w in (self.wk, self.wv))
        q, k = self._turned(q, cos, sin), self._turned(k, cos, sin)
        q, k, v = q.transpose(1, 2), self._repeated(k).transpose(1, 2), self._repeated(v).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))
        y = self.second(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """A stack of blocks of width 2,048."""

    LENGTH, VOCAB = 1024, 32_000

    def __init__(self, num_blocks: int = 2, width: int = 2048, heads: int = 16, kv_heads: int = 8) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(self.VOCAB, width), nn.Linear(width, self.VOCAB, bias=False)
        self.blocks = nn.ModuleList(_LlamaBlock(width, heads, kv_heads) for _ in range(num_blocks))
        self.norm = _Norm(width)
        size = width // heads
        angles = torch.outer(torch.arange(self.LENGTH).float(), 1e-4 ** (torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    @classmethod
    def inputs(cls) -> _Shapes:
        """What it is called with."""
        tokens = ((4, cls.LENGTH), "int64")
        return tokens, tokens


class _SwinBlock(nn.Module):
    def __init__(self, width: int, heads: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.heads, self.window, self.shifted = heads, window, shifted
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @staticmethod
    def _rolled(x: torch.Tensor, by: int) -> torch.Tensor:
        for dim in (1, 2):
            x = torch.cat([x.narrow(dim, by, x.shape[dim] - by), x.narrow(dim, 0, by)], dim)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, high, wide, width = x.shape
        window, half = self.window, self.window // 2
        y = self.first(x)
        if self.shifted:
            y = self._rolled(y, half)
        y = y.view(batch, high // window, window, wide // window, window, width).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(-1, window * window, width)
        q, k, v = (
            each(y).view(-1, window * window, self.heads, width // self.heads).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = (q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5).softmax(-1) @ v
        y = self.o(y.transpose(1, 2).reshape(-1, window * window, width))
        y = y.view(batch, high // window, wide // window, window, window, width).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(batch, high, wide, width)
        if self.shifted:
            y = self._rolled(y, high - half)
        x = x + y
        return x + self.down(F.gelu(self.up(self.second(x))))


class Swin(nn.Module):
    """Four stages with the given numbers of blocks; the width doubles from stage to stage."""

    SIDE = 256

    def __init__(self, *depths: int, width: int = 192, window: int = 8) -> None:
        super().__init__()
        depths = depths or (2, 2, 18, 2)
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.stages = nn.ModuleList(
            nn.ModuleList(_SwinBlock(width << at, 4 << at, window, number % 2 == 1) for number in range(depth))
            for at, depth in enumerate(depths)
        )
        self.merge = nn.ModuleList(
            nn.Linear(4 * (width << at), 2 * (width << at), bias=False) for at in range(len(depths) - 1)
        )
        self.head = nn.Linear(width << (len(depths) - 1), 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).permute(0, 2, 3, 1)
        for at, stage in enumerate(self.stages):
            for block in stage:  # type: ignore[union-attr]
                x = block(x)
            if at < len(self.merge):
                batch, high, wide, width = x.shape
                x = x.view(batch, high // 2, 2, wide // 2, 2, width).permute(0, 1, 3, 2, 4, 5)
                x = self.merge[at](x.reshape(batch, high // 2, wide // 2, 4 * width))
        return F.cross_entropy(self.head(x.mean((1, 2))), labels)

    @classmethod
    def inputs(cls) -> _Shapes:
        """What it is called with."""
        return ((64, 3, cls.SIDE, cls.SIDE), "float32"), ((64,), "int64")


class _UNetBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, padding=1)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.norms = nn.ModuleList([nn.LayerNorm(before), nn.LayerNorm(after)])
        self.skip, self.time = nn.Conv2d(before, after, 1), nn.Linear(128, after)

    def _normed(self, number: int, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = F.silu(self.norms[number](x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return made

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(self._normed(0, x)) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(self._normed(1, y))


class UNet(nn.Module):
    """Four levels down and up again, with the given number of blocks each."""

    SIDE = 64

    def __init__(self, depth: int = 8, width: int = 320) -> None:
        super().__init__()
        self.depth, self.levels = depth, (1, 2, 4, 8)
        self.start, widths, now = nn.Conv2d(4, width, 3, padding=1), [width], width
        self.early, self.late = nn.Linear(128, 128), nn.Linear(128, 128)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for times in self.levels:
            for _ in range(depth):
                self.down.append(_UNetBlock(now, width * times))
                now = width * times
                widths.append(now)
        self.middle = _UNetBlock(now, now)
        for times in reversed(self.levels):
            for _ in range(depth):
                self.up.append(_UNetBlock(now + widths.pop(), width * times))
                now = width * times
        self.end = nn.Conv2d(now, 4, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        time = self.late(F.silu(self.early(time)))
        x, kept = self.start(x), []
        for at, block in enumerate(self.down):
            if at and at % self.depth == 0:
                x = F.avg_pool2d(x, 2)
            x = block(x, time)
            kept.append(x)
        x = self.middle(x, time)
        for at, block in enumerate(self.up):
            if at and at % self.depth == 0:
                batch, width, high, wide = x.shape
                x = x[:, :, :, None, :, None].expand(batch, width, high, 2, wide, 2)
                x = x.reshape(batch, width, 2 * high, 2 * wide)
            x = block(torch.cat([x, kept.pop()], 1), time)
        return F.mse_loss(self.end(x), noise)

    @classmethod
    def inputs(cls) -> _Shapes:
        """What it is called with."""
        images = ((32, 4, cls.SIDE, cls.SIDE), "float32")
        return images, ((32, 128), "float32"), images


MODELS: dict[str, type[Llama] | type[Swin] | type[UNet]] = {"Llama": Llama, "Swin": Swin, "U-Net": UNet}
"""Name -> class."""


def captured(name: str, *sizes: int) -> Graph:
    """The graph of a model; `sizes`: blocks of Llama, depths of Swin, blocks of a level of U-Net."""
    made = MODELS[name]
    with torch.device("meta"):
        module = made(*sizes)
    return capture(module, made.inputs())  # type: ignore[arg-type]
