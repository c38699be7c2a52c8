"""Networks of well-known papers as people write them, that capture was not written for, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.field.handwritten import BATCH, CLASSES, LENGTH, VOCAB, WIDTH, Classifier

__all__ = ["CLASSICS", "CONTRASTIVE"]


class DCGAN(nn.Module):
    """Generator and discriminator of Radford et al. (2015), one step of the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(8, 32, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(16, 32, 4, 2, 1, bias=False),
            nn.BatchNorm2d(32), nn.LeakyReLU(0.2, True), nn.Conv2d(32, 1, 4),
        )  # fmt: skip
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = self.generator(noise[:, :, None, None]).detach()
        scores = self.discriminator(real).view(-1)
        loss: Tensor = self.criterion(scores, torch.full_like(scores, 0.9))
        made = self.discriminator(fake).view(-1)
        loss = loss + self.criterion(made, torch.zeros_like(made))
        return loss


class Perceiver(nn.Module):
    """Latents that read the inputs again and again by the same weights (Jaegle et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, WIDTH) * 0.02)
        self.read = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.think = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        at = torch.linspace(-1, 1, x.size(1), device=x.device)[:, None] * torch.arange(1, WIDTH // 2 + 1) * math.pi
        x = x + torch.cat([at.sin(), at.cos()], -1)
        latents = self.latents.unsqueeze(0).repeat(x.size(0), 1, 1)
        for _ in range(3):
            latents = latents + self.read(self.norm(latents), x, x, need_weights=False)[0]
            latents = self.think(latents)
        return F.cross_entropy(self.head(latents.mean(dim=1)), labels)


class SparseExperts(nn.Module):
    """The two experts that a router prefers, each of which adds its tokens in place (nanoMoE, early Mixtral)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            mixed += share * expert(x)
        return F.cross_entropy(self.head((x + mixed).mean(1)), labels)


class SelectedExperts(SparseExperts):
    """The same, each expert on the rows of the tokens that chose it."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(self.gate(rows).softmax(-1), 2)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            mixed.index_add_(0, token, expert(rows[token]) * weights[token, place, None])
        return F.cross_entropy(self.head((rows + mixed).view_as(x).mean(1)), labels)


class NeuralODE(nn.Module):
    """Four steps of Runge-Kutta of a learned field (Chen et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH + 1, 64), nn.Tanh(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def slope(self, at: float, y: Tensor) -> Tensor:
        made: Tensor = self.field(torch.cat([y, torch.full_like(y[:, :1], at)], dim=1))
        return made

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        step = 0.25
        for each in range(4):
            at = each * step
            first = self.slope(at, x)
            second = self.slope(at + step / 2, x + step / 2 * first)
            third = self.slope(at + step / 2, x + step / 2 * second)
            x = x + step / 6 * (first + 2 * second + 2 * third + self.slope(at + step, x + step * third))
        return F.cross_entropy(self.head(x), labels)


class ConvLSTM(nn.Module):
    """A recurrent network of convolutions (Shi et al., 2015) that predicts the next frames."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Conv2d(1 + 8, 4 * 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, frames: Tensor) -> Tensor:
        batch, steps, _, height, width = frames.shape
        hidden = cell = frames.new_zeros(batch, 8, height, width)
        losses = []
        for step in range(steps - 1):
            i, f, o, g = torch.split(self.gates(torch.cat([frames[:, step], hidden], 1)), 8, dim=1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
            losses.append(F.mse_loss(self.out(hidden), frames[:, step + 1]))
        return torch.stack(losses).mean()


class CrossNetwork(nn.Module):
    """Deep and cross network (Wang et al., 2017) for rows of categories and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(16, 8) for _ in range(3))
        self.cross = nn.ParameterList(nn.Parameter(torch.randn(32, 1) * 0.1) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.0), nn.Linear(64, 16), nn.ReLU())
        self.head = nn.Linear(48, 1)

    def forward(self, categories: Tensor, numbers: Tensor, clicked: Tensor) -> Tensor:
        start = torch.cat([*(table(categories[:, at]) for at, table in enumerate(self.tables)), numbers], dim=-1)
        x = start
        for weight in self.cross:
            x = start * (x @ weight) + x
        chance = torch.sigmoid(self.head(torch.cat([x, self.deep(start)], -1))).squeeze(-1)
        return F.binary_cross_entropy(chance, (clicked > 4).float())


class Retention(nn.Module):
    """Attention without a softmax whose weights decay with the distance, by head (RetNet: Sun et al., 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.gate, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        rates = 1 - 2.0 ** (-5 - torch.arange(4, device=x.device))
        at = torch.arange(ids.size(1), device=x.device)
        decay = (rates[:, None, None] ** (at[:, None] - at[None, :]).clamp(min=0)).tril()
        y = ((q @ k.transpose(-1, -2)) * decay / math.sqrt(q.size(-1)) @ v).transpose(1, 2).flatten(2)
        y = self.norm(y.flatten(0, 1)).view_as(x)
        x = x + self.out(F.silu(self.gate(x)) * y)
        return F.cross_entropy(self.head(x).view(-1, VOCAB), labels.view(-1))


class SineNetwork(nn.Module):
    """SIREN (Sitzmann et al., 2020): colours of places by sines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)])
        with torch.no_grad():
            self.layers[0].weight.uniform_(-0.5, 0.5)

    def forward(self, places: Tensor, colours: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            places = torch.sin(30 * layer(places))
        return ((self.layers[-1](places) - colours) ** 2).mean()


class DiffusionTransformer(nn.Module):
    """A block of DiT (Peebles and Xie, 2022): norms that the time and the class scale and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.places = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 16, WIDTH))
        self.classes, self.time = nn.Embedding(CLASSES + 1, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(approximate="tanh"), nn.Linear(64, WIDTH))
        self.pixels = nn.Linear(WIDTH, 3 * 16)
        nn.init.zeros_(self.modulate[1].weight)

    def forward(self, images: Tensor, classes: Tensor, noise: Tensor, at: Tensor) -> Tensor:
        kept = torch.cos(at.clamp(0, 1) * math.pi / 2).view(-1, 1, 1, 1)
        noisy = kept * images + (1 - kept**2).clamp_min(1e-4).sqrt() * noise
        rates = torch.exp(-math.log(10_000) * torch.arange(WIDTH // 2, dtype=torch.float32) / (WIDTH // 2))
        angles = at[:, None] * rates[None]
        given = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1)) + self.classes(classes)
        x = self.patch(noisy).flatten(2).transpose(1, 2) + self.places
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulate(given)[:, None].chunk(6, dim=-1)
        y = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(y).reshape(x.size(0), 16, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + gate * self.out(y)
        x = x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)
        made = self.pixels(x).view(-1, 4, 4, 4, 4, 3)
        made = torch.einsum("nhwpqc->nchpwq", made).reshape(images.shape)
        return F.mse_loss(made, noise)


class Padded(nn.Module):
    """torch's Transformer on rows with padding, whose labels are smoothed (Vaswani et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH, padding_idx=0)
        self.net = nn.Transformer(WIDTH, 4, 1, 1, 64, 0.0, batch_first=True)
        self.criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, wanted = target[:, :-1], target[:, 1:]
        mask = self.net.generate_square_subsequent_mask(read.size(1))
        made = self.net(
            self.table(source) * math.sqrt(WIDTH), self.table(read) * math.sqrt(WIDTH), tgt_mask=mask,
            src_key_padding_mask=source == 0, tgt_key_padding_mask=read == 0, memory_key_padding_mask=source == 0,
        )  # fmt: skip
        loss: Tensor = self.criterion((made @ self.table.weight.T).transpose(1, 2), wanted)
        return loss


class DQN(nn.Module):
    """Double Q-learning against a frozen network (van Hasselt et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        self.frozen = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)).requires_grad_(False)

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, following: Tensor, ended: Tensor) -> Tensor:
        value = self.online(state).gather(1, (action % 4).unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            best = self.online(following).argmax(1, keepdim=True)
            wanted = reward + 0.99 * self.frozen(following).gather(1, best).squeeze(1) * (ended < 5).float()
        return F.smooth_l1_loss(value, wanted)


class Tower(nn.Module):
    """Policy and value of AlphaZero's residual tower (Silver et al., 2017), with a penalty on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip
        self.policy = nn.Sequential(nn.Conv2d(16, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 64, 64))
        self.value = nn.Sequential(nn.Conv2d(16, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1), nn.Tanh())

    def forward(self, board: Tensor, chances: Tensor, winner: Tensor) -> Tensor:
        x = self.start(board)
        x = F.relu(x + self.block(x))
        policy = -(chances.softmax(1) * F.log_softmax(self.policy(x), dim=1)).sum(dim=1).mean()
        value = F.mse_loss(self.value(x).squeeze(-1), winner)
        return policy + value + 1e-4 * sum(each.pow(2).sum() for each in self.parameters())


def _volumes() -> nn.Module:
    """A small V-Net (Milletari et al., 2016) of volumes."""
    return Classifier(
        nn.Sequential(
            nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8), nn.PReLU(), nn.Conv3d(8, 16, 2, 2), nn.PReLU(),
            nn.ConvTranspose3d(16, 8, 2, 2), nn.Conv3d(8, CLASSES, 1),
        )
    )  # fmt: skip


class TwoTowers(nn.Module):
    """Queries and documents, each against all others of the batch (Karpukhin et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.documents = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        scores = self.queries(queries) @ self.documents(documents).T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class NormalizedViews(nn.Module):
    """SimCLR (Chen et al., 2020): two views of each sample against all others."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        views = F.normalize(torch.cat([self.net(one), self.net(other)]), dim=1)
        scores = (views @ views.t() / 0.5).masked_fill(torch.eye(len(views), dtype=torch.bool), float("-inf"))
        matching = torch.arange(len(views)).roll(len(one))
        return F.cross_entropy(scores, matching)


class BarlowTwins(nn.Module):
    """The correlation of two views over the batch (Zbontar et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 16))
        self.norm = nn.BatchNorm1d(16, affine=False)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        shared = self.norm(self.net(one)).T @ self.norm(self.net(other)) / len(one)
        on = (torch.diagonal(shared) - 1).pow(2).sum()
        return on + 0.005 * (shared - torch.diag(torch.diagonal(shared))).pow(2).sum()


_ROWS = ((BATCH, WIDTH), ((BATCH,), "int64"))
_SMALL = ((BATCH, 3, 16, 16), ((BATCH,), "int64"))
_WORDS = (((BATCH, LENGTH), "int64"), ((BATCH, LENGTH), "int64"))
_STEPS = ((BATCH, LENGTH, WIDTH), ((BATCH,), "int64"))

CLASSICS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "DCGAN, discriminator": lambda: (DCGAN(), (_SMALL[0], (BATCH, 8))),
    "Perceiver": lambda: (Perceiver(), _STEPS),
    "top-2 experts": lambda: (SparseExperts(), _STEPS),
    "neural ODE": lambda: (NeuralODE(), _ROWS),
    "ConvLSTM": lambda: (ConvLSTM(), ((BATCH, 4, 1, 8, 8),)),
    "deep and cross": lambda: (CrossNetwork(), (((BATCH, 3), "int64"), (BATCH, 8), ((BATCH,), "int64"))),
    "RetNet": lambda: (Retention(), _WORDS),
    "SIREN": lambda: (SineNetwork(), ((BATCH, 2), (BATCH, 3))),
    "DiT": lambda: (DiffusionTransformer(), (_SMALL[0], _SMALL[1], _SMALL[0], (BATCH,))),
    "Transformer with padding": lambda: (Padded(), _WORDS),
    "double DQN": lambda: (DQN(), ((BATCH, 8), ((BATCH,), "int64"), (BATCH,), (BATCH, 8), ((BATCH,), "int64"))),
    "AlphaZero": lambda: (Tower(), ((BATCH, 3, 8, 8), (BATCH, 64), (BATCH,))),
    "V-Net": lambda: (_volumes(), ((BATCH, 1, 8, 8, 8), ((BATCH, 8, 8, 8), "int64"))),
}  # fmt: skip
"""Name -> what makes it."""

CONTRASTIVE: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "two towers": lambda: (TwoTowers(), (_ROWS[0], _ROWS[0])),
    "SimCLR": lambda: (NormalizedViews(), (_ROWS[0], _ROWS[0])),
    "Barlow Twins": lambda: (BarlowTwins(), (_ROWS[0], _ROWS[0])),
    "experts on selected rows": lambda: (SelectedExperts(), _STEPS),
}  # fmt: skip
"""Name -> what makes a module that no plan can train: samples or shapes depend on each other."""
