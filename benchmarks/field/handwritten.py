"""Networks of many kinds as people write them, that capture was not written for, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["HANDWRITTEN"]

BATCH, LENGTH, VOCAB, WIDTH, CLASSES = 64, 16, 64, 32, 10


class Classifier(nn.Module):
    """A network and the cross entropy of its classes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels)


class SinusoidalPositions(nn.Module):
    """The positions of Vaswani et al. (2017), made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device).unsqueeze(1)
        rates = torch.exp(torch.arange(0, WIDTH, 2, device=ids.device) * (-math.log(10_000.0) / WIDTH))
        positions = torch.zeros(ids.shape[1], WIDTH, device=ids.device)
        positions[:, 0::2] = torch.sin(at * rates)
        positions[:, 1::2] = torch.cos(at * rates)
        x = self.net(self.table(ids) * math.sqrt(WIDTH) + positions, src_key_padding_mask=ids == 0)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class TemporalConvolutions(nn.Module):
    """A TCN (Bai et al., 2018): causal dilated convolutions with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(8 if at == 0 else 16, 16, 3, dilation=2**at) for at in range(3))
        self.skip, self.head = nn.Conv1d(8, 16, 1), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            y = F.relu(layer(F.pad(x, (2 * 2**at, 0))))
            x = y + (self.skip(x) if at == 0 else x)
        return F.cross_entropy(self.head(x[:, :, -1]), labels)


class PointNet(nn.Module):
    """PointNet (Qi et al., 2017) with its input transform and the regulariser of it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveMaxPool1d(1))
        self.matrix = nn.Linear(16, 9)
        self.net = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 1))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        identity = torch.eye(3, device=points.device)
        matrix = self.matrix(self.turn(points.transpose(1, 2)).flatten(1)).view(-1, 3, 3) + identity
        x = self.net((points @ matrix).transpose(1, 2)).max(-1).values
        rest = (matrix @ matrix.transpose(1, 2) - identity).pow(2).sum((1, 2)).mean()
        return F.cross_entropy(self.head(x), labels) + 0.001 * rest


class DenseGraph(nn.Module):
    """A graph convolution (Kipf and Welling, 2017) by a dense adjacency, and attention over neighbours (GAT)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.left, self.right, self.head = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        edges = edges.sigmoid() + torch.eye(edges.shape[-1], device=edges.device)
        degree = edges.sum(-1).clamp(min=1).rsqrt()
        spread = degree.unsqueeze(-1) * edges * degree.unsqueeze(-2)
        x = self.second(F.relu(spread @ self.first(nodes)))
        scores = F.leaky_relu(self.left(x) + self.right(x).transpose(1, 2), 0.2)
        scores = scores.masked_fill(edges < 0.5, -1e9)
        x = F.elu(scores.softmax(-1) @ x)
        return F.cross_entropy(self.head(x.mean(1)), labels)


class Translator(nn.Module):
    """LSTM to LSTM with Bahdanau's attention, fed its own words by teacher forcing."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.reader = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, 16, bidirectional=True, batch_first=True)
        self.cell, self.score = nn.LSTMCell(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        read, _ = self.reader(self.table(source))
        hidden = cell = torch.zeros(source.shape[0], WIDTH, device=source.device)
        made = []
        for step in range(4):
            wide = hidden.unsqueeze(1).expand(-1, read.shape[1], -1)
            weights = torch.tanh(self.score(torch.cat([read, wide], -1))).softmax(1)
            hidden, cell = self.cell(
                torch.cat([self.table(target[:, step]), (weights * read).sum(1)], -1), (hidden, cell)
            )
            made.append(self.head(hidden))
        return F.cross_entropy(torch.stack(made, 1).flatten(0, 1), labels.flatten())


class RadianceField(nn.Module):
    """NeRF (Mildenhall et al., 2020): positions as sines, an MLP with a skip, colours along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(39, 64), nn.Linear(64 + 39, 64)
        self.density, self.colour = nn.Linear(64, 1), nn.Linear(64, 3)

    def forward(self, origin: Tensor, direction: Tensor, colour: Tensor) -> Tensor:
        at = torch.linspace(0.1, 1.0, 8, device=origin.device)
        points = origin[:, None] + direction[:, None] * at[None, :, None]
        bands = 2.0 ** torch.arange(6, device=origin.device)
        angles = points[..., None] * bands
        x = torch.cat([points, angles.sin().flatten(2), angles.cos().flatten(2)], -1)
        y = F.relu(self.second(torch.cat([F.relu(self.first(x)), x], -1)))
        opaque = 1 - torch.exp(-F.softplus(self.density(y)).squeeze(-1) * 0.1)
        clear = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-10], -1), -1)[:, :-1]
        made = ((opaque * clear).unsqueeze(-1) * torch.sigmoid(self.colour(y))).sum(1)
        return F.mse_loss(made, colour)


class MaskedConv(nn.Conv2d):
    """A convolution that sees only what comes before (PixelCNN)."""

    def __init__(self, *sizes: int, first: bool, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        mask = torch.ones_like(self.weight)
        middle = self.kernel_size[0] // 2
        mask[:, :, middle, middle + (0 if first else 1) :] = 0
        mask[:, :, middle + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, self.stride, self.padding)


class PixelCNN(nn.Module):
    """PixelCNN (van den Oord et al., 2016): a class for each of 16 grey values of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            MaskedConv(1, 16, 5, first=True, padding=2), nn.ReLU(), MaskedConv(16, 16, 3, first=False, padding=1),
            nn.ReLU(), nn.Conv2d(16, 16, 1),
        )  # fmt: skip

    def forward(self, images: Tensor, values: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(images), values)


class DenoisingUNet(nn.Module):
    """A U-Net of two levels with a time embedding, attention, group norms and residual blocks (Ho et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.begin, self.end = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.blocks = nn.ModuleList(_ResidualBlock(before, after) for before, after in ((16, 16), (16, 32), (48, 16)))
        self.down, self.up = nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm, self.attention = nn.GroupNorm(4, 32), nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, noisy: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10_000) * torch.arange(8, device=noisy.device) / 8)
        angles = times[:, None].float() * rates
        time = self.time(torch.cat((angles.cos(), angles.sin()), -1))
        first = self.blocks[0](self.begin(noisy), time)
        x = self.blocks[1](self.down(first), time)
        flat = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attention(flat, flat, flat)[0].transpose(1, 2).reshape(x.shape)
        x = self.up(F.interpolate(x, scale_factor=2, mode="nearest"))
        return F.mse_loss(self.end(self.blocks[2](torch.cat((x, first), 1), time)), noise)


class _ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(4, before), nn.GroupNorm(4, after)])
        self.time, self.drop = nn.Linear(32, after), nn.Dropout2d(0.1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[..., None, None]
        return self.skip(x) + self.second(self.drop(F.silu(self.norms[1](y))))


class DroppedGRU(nn.Module):
    """A GRU of two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(VOCAB, WIDTH), nn.GRU(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        made, _ = self.net(self.table(ids))
        return F.cross_entropy(self.head(made).flatten(0, 1), labels.flatten())


class MixedPrecision(nn.Module):
    """An autocast in the forward, and a norm outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.net(x)
        return F.cross_entropy(self.head(self.norm(y.float() + x)), labels)


class Memory(nn.Module):
    """Cross attention of learned queries (Perceiver, Q-Former), with temperature and cosine scores."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(4, WIDTH) * 0.1)
        self.kv, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(4 * WIDTH, CLASSES)
        self.heat = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q = F.normalize(self.queries, dim=-1).expand(x.shape[0], -1, -1)
        scores = torch.baddbmm(torch.zeros(1, 1, 1, device=x.device), q, F.normalize(k, dim=-1).mT) * self.heat.exp()
        return F.cross_entropy(self.head((scores.softmax(-1) @ v).flatten(1)), labels)


class Hyper(nn.Module):
    """A network whose weights another one makes for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.head = nn.Linear(8, WIDTH * 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, task: Tensor, labels: Tensor) -> Tensor:
        weights = self.maker(task).view(-1, WIDTH, 16)
        return F.cross_entropy(self.head(torch.bmm(x.unsqueeze(1), weights).squeeze(1).relu()), labels)


class Nonlinear(nn.Module):
    """Most activations that torch has, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        kinds: list[nn.Module] = [
            nn.Mish(), nn.CELU(), nn.ELU(), nn.SELU(), nn.Softsign(), nn.Softplus(), nn.Hardtanh(), nn.Hardsigmoid(),
            nn.LogSigmoid(), nn.Softshrink(), nn.Hardshrink(), nn.Tanhshrink(), nn.ReLU6(), nn.Threshold(0.1, 0.2),
            nn.PReLU(WIDTH), nn.GELU("tanh"), nn.Softmin(-1), nn.RMSNorm(WIDTH),
        ]  # fmt: skip
        self.net = nn.Sequential(*(each for kind in kinds for each in (nn.Linear(WIDTH, WIDTH), kind)))
        self.pair, self.head = nn.Bilinear(WIDTH, WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.net(x)
        return F.cross_entropy(self.head(self.pair(x, y)), labels)


class Convolutions(nn.Module):
    """Depthwise, grouped, dilated and transposed convolutions, pooling of all kinds, pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Conv2d(8, 8, 3, padding="same", groups=8, padding_mode="reflect")
        self.start, self.point = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 1, groups=2)
        self.norm, self.shuffle = nn.InstanceNorm2d(16, affine=True), nn.PixelShuffle(2)
        self.up, self.local = nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1), nn.LocalResponseNorm(2)
        self.pools = nn.ModuleList([nn.AvgPool2d(4), nn.MaxPool2d(4), nn.LPPool2d(2, 4), nn.AdaptiveAvgPool2d(16)])
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.point(self.depth(self.start(images))))
        x = self.local(self.up(self.shuffle(x)))
        x = torch.cat([pool(x) for pool in self.pools], 1)
        return F.cross_entropy(self.head(F.adaptive_max_pool2d(x, 2).flatten(1)), labels)


def _convolutions() -> nn.Module:
    net = Convolutions()
    net(torch.randn(2, 3, 16, 16), torch.zeros(2, dtype=torch.long))  # the lazy layer takes its size
    return net


_ROWS = ((BATCH, WIDTH), ((BATCH,), "int64"))
_SMALL = ((BATCH, 3, 16, 16), ((BATCH,), "int64"))
_WORDS = (((BATCH, LENGTH), "int64"), ((BATCH, LENGTH), "int64"))
_STEPS = ((BATCH, LENGTH, WIDTH), ((BATCH,), "int64"))

HANDWRITTEN: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "sinusoidal positions, padding": lambda: (SinusoidalPositions(), (_WORDS[0], _ROWS[1])),
    "TCN": lambda: (TemporalConvolutions(), ((BATCH, 8, 32), _ROWS[1])),
    "PointNet": lambda: (PointNet(), ((BATCH, 24, 3), _ROWS[1])),
    "dense graph": lambda: (DenseGraph(), ((BATCH, 6, 8), (BATCH, 6, 6), _ROWS[1])),
    "LSTM to LSTM with attention": lambda: (Translator(), (*_WORDS, ((BATCH, 4), "int64"))),
    "NeRF": lambda: (RadianceField(), ((BATCH, 3),) * 3),
    "PixelCNN": lambda: (PixelCNN(), ((BATCH, 1, 12, 12), ((BATCH, 12, 12), "int64"))),
    "denoising U-Net": lambda: (DenoisingUNet(), (_SMALL[0], _SMALL[1], _SMALL[0])),
    "GRU with dropout": lambda: (DroppedGRU(), _WORDS),
    "autocast": lambda: (MixedPrecision(), _ROWS),
    "learned queries": lambda: (Memory(), _STEPS),
    "hypernetwork": lambda: (Hyper(), (_ROWS[0], (BATCH, 8), _ROWS[1])),
    "activations": lambda: (Nonlinear(), _ROWS),
    "convolutions and pools": lambda: (_convolutions(), _SMALL),
}  # fmt: skip
"""Name -> what makes it."""
