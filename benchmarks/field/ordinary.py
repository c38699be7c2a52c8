"""Modules in the styles that people use: each a function that gives (module with its loss, inputs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["BATCH_MIXING", "ORDINARY"]

BATCH, LENGTH, VOCAB, WIDTH, CLASSES = 64, 16, 64, 32, 10


class Mixer(nn.Module):
    """An MLP-Mixer with einsum and a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.tokens = nn.Parameter(torch.randn(16, 16) * 0.1)
        self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.first, self.second, self.head = nn.GroupNorm(4, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.first(self.patches(images)).flatten(2)
        x = x + torch.einsum("bct,ts->bcs", x, self.tokens)
        x = x.transpose(1, 2)
        x = x + self.channels(self.second(x))
        return F.cross_entropy(self.head(x.mean(1)), labels)


class UNet(nn.Module):
    """A U-Net with transposed convolutions, interpolation, batch norms and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(32, CLASSES, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.down(images)
        y = self.middle(x)
        wide = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return F.cross_entropy(self.out(torch.cat([x, self.up(y), wide], 1)), labels)


class WideAndDeep(nn.Module):
    """Embedding bags beside dense features; log-odds against clicks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(VOCAB, 1, mode="sum")
        self.deep = nn.EmbeddingBag(VOCAB, WIDTH, mode="mean")
        self.net = nn.Sequential(nn.Linear(WIDTH + 8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
        made = self.wide(ids) + self.net(torch.cat([self.deep(ids), dense], 1))
        return F.binary_cross_entropy_with_logits(made.squeeze(1), clicks)


class DLRM(nn.Module):
    """Meta's recommender: a table for each feature, products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCAB, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, ids: Tensor, clicks: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked = [table(ids[:, at : at + 1]) for at, table in enumerate(self.tables)]
        all_of_them = torch.stack([x, *looked], 1)
        products = torch.bmm(all_of_them, all_of_them.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        made = self.top(torch.cat([x, products[:, rows, columns]], 1))
        return F.binary_cross_entropy(made.squeeze(1), clicks)


class Seq2Seq(nn.Module):
    """A GRU reads, a GRU cell writes with attention over what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell, self.head = nn.GRUCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        read, last = self.reader(self.table(source))
        state, made = last[0], []
        for step in range(4):
            weights = torch.softmax((read @ state.unsqueeze(-1)).squeeze(-1), -1)
            seen = (weights.unsqueeze(1) @ read).squeeze(1)
            state = self.cell(torch.cat([self.table(target[:, step]), seen], -1), state)
            made.append(self.head(state))
        return F.cross_entropy(torch.stack(made, 1).transpose(1, 2), labels)


class Tagger(nn.Module):
    """A bidirectional LSTM of two layers that tags every word, with class weights and padding ignored."""

    def __init__(self, kind: Callable[..., nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.net = kind(WIDTH, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, CLASSES)
        self.register_buffer("weights", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        made, _ = self.net(self.table(ids))
        made = self.head(made).flatten(0, 1)
        return F.cross_entropy(made, tags.flatten(), weight=self.weights, label_smoothing=0.05)


class GraphConvolution(nn.Module):
    """Messages along edges of a small graph for each sample, summed where they arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.own, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor, wanted: Tensor) -> Tensor:
        wide = sources.unsqueeze(-1).expand(-1, -1, 8)
        sent = self.message(nodes).gather(1, wide)
        arrived = torch.zeros_like(nodes).scatter_add(1, targets.unsqueeze(-1).expand(-1, -1, 8), sent)
        made = F.relu(self.own(nodes) + arrived)
        return F.smooth_l1_loss(self.head(made).squeeze(-1), wanted)


class Diffusion(nn.Module):
    """Predicts the noise of an image at a time, whose embedding scales and shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.norm, self.last = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.Conv2d(16, 3, 3, padding=1),
        )
        self.register_buffer("kept", torch.linspace(0.999, 0.01, 100))

    def forward(self, images: Tensor, times: Tensor, noise: Tensor) -> Tensor:
        kept = self.kept[times].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * images + (1 - kept).sqrt() * noise
        rates = torch.exp(-torch.arange(8, device=images.device) / 8 * 4.0)
        angles = times[:, None].to(images.dtype) * rates[None]
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1)).chunk(2, -1)
        x = self.norm(self.first(noisy)) * (1 + scale[:, :, None, None]) + shift[:, :, None, None]
        return F.mse_loss(self.last(F.silu(x)), noise)


class Checkpointed(nn.Module):
    """Blocks under torch.utils.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.head(x), labels)


class Generator(nn.Module):
    """The other step of a GAN: the generator against a frozen judge, with transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.judge = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Flatten(), nn.Linear(128, 1)
        ).requires_grad_(False)

    def forward(self, noise: Tensor, wanted: Tensor) -> Tensor:
        made = self.judge(self.make(noise.view(-1, 8, 1, 1)))
        return F.binary_cross_entropy_with_logits(made, wanted)


class Pair(nn.Module):
    """CLIP's loss: every image against every text of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        one, two = F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1)
        scores = one @ two.t() * 10.0
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class OwnAttention(nn.Module):
    """Attention written out, with a mask of padding, ALiBi and a window of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 96), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = self.qkv(x).view(len(x), -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        at = torch.arange(ids.shape[1], device=ids.device)
        apart = at[:, None] - at[None]
        slopes = 2.0 ** -torch.arange(1, 5, device=ids.device)
        scores = q @ k.transpose(-2, -1) / 8**0.5 - slopes[:, None, None] * apart.abs()
        hidden = (apart < 0) | (apart > 4) | (ids == 0)[:, None, None, :]
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        made = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return F.cross_entropy(self.out(made).flatten(0, 1), labels.flatten(), ignore_index=0)


class Routed(nn.Module):
    """A mixture of experts by weights chosen for every token and bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) * 0.1) for shape in ((WIDTH, 64), (64, WIDTH)))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        ids = chosen.reshape(-1)
        many = tokens.repeat_interleave(2, 0).unsqueeze(1)
        made = torch.bmm(F.silu(torch.bmm(many, self.up[ids])), self.down[ids]).squeeze(1)
        made = (made.view(-1, 2, WIDTH) * weights.unsqueeze(-1)).sum(1)
        return F.cross_entropy(self.head(tokens + made), labels.flatten())


class Doubling(torch.autograd.Function):
    """x squared with a separate gradient: that of a straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class StraightThrough(nn.Module):
    """Rounds what is between two layers; its own autograd function passes the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.second(Doubling.apply(self.first(x))), labels)


class Sorted(nn.Module):
    """sort, topk, cumsum, where, clamp, one_hot and pad within a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + 4 + CLASSES, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.net(x)
        ordered = torch.where(y > 0, y.sort(-1).values, y.cumsum(-1).clamp(-1, 1))
        best = y.topk(4, -1).values
        known = F.one_hot(labels, CLASSES).to(y.dtype).roll(1, -1)
        return F.cross_entropy(self.head(torch.cat([F.pad(ordered[:, :-2], (1, 1)), best, known], -1)), labels)


_SMALL = ((BATCH, 3, 16, 16), ((BATCH,), "int64"))
_WORDS = (((BATCH, LENGTH), "int64"), ((BATCH, LENGTH), "int64"))
_ROWS = ((BATCH, WIDTH), ((BATCH,), "int64"))
_CLICKS = ((BATCH, 8), ((BATCH, 3), "int64"), (BATCH,))

ORDINARY: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "MLP-Mixer": lambda: (Mixer(), _SMALL),
    "U-Net, own": lambda: (UNet(), (_SMALL[0], ((BATCH, 16, 16), "int64"))),
    "wide and deep": lambda: (WideAndDeep(), _CLICKS),
    "DLRM": lambda: (DLRM(), _CLICKS),
    "seq2seq": lambda: (Seq2Seq(), (*_WORDS, ((BATCH, 4), "int64"))),
    "LSTM tagger": lambda: (Tagger(), _WORDS),
    "GRU tagger": lambda: (Tagger(nn.GRU), _WORDS),
    "graph convolution": lambda: (
        GraphConvolution(), ((BATCH, 6, 8), ((BATCH, 12), "int64"), ((BATCH, 12), "int64"), (BATCH, 6))
    ),
    "diffusion": lambda: (Diffusion(), (_SMALL[0], _SMALL[1], _SMALL[0])),
    "checkpointed blocks": lambda: (Checkpointed(), _ROWS),
    "GAN, generator": lambda: (Generator(), ((BATCH, 8), (BATCH, 1))),
    "own attention": lambda: (OwnAttention(), _WORDS),
    "experts by bmm": lambda: (Routed(), ((BATCH, LENGTH, WIDTH), ((BATCH, LENGTH), "int64"))),
    "straight-through function": lambda: (StraightThrough(), _ROWS),
    "sort, topk, cumsum": lambda: (Sorted(), _ROWS),
}  # fmt: skip
"""Name -> what makes it."""

BATCH_MIXING = (Pair, ((BATCH, WIDTH), (BATCH, WIDTH)))
"""A module that no plan can train, and its inputs."""
