"""Networks that take derivatives, join batches or scan a sequence, that capture was not written for, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.field.blocks import LanguageModel

__all__ = ["DERIVED"]

BATCH, LENGTH, VOCAB, WIDTH, CLASSES = 64, 16, 64, 32, 10


class Critic(nn.Module):
    """A Wasserstein critic with a gradient penalty (Gulrajani et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(WIDTH, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
        self.generator = nn.Linear(8, WIDTH)

    def forward(self, real: Tensor, noise: Tensor, share: Tensor) -> Tensor:
        with torch.no_grad():
            fake = self.generator(noise)
        between = torch.lerp(fake, real, share.sigmoid()).requires_grad_(True)
        score = self.critic(between)
        (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty


class HeatEquation(nn.Module):
    """A physics-informed network (Raissi et al., 2019): the residual of u_t = 0.1 u_xx and the values at the edge."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, point: Tensor, edge: Tensor) -> Tensor:
        point = point.requires_grad_(True)
        u = self.net(point)
        first = torch.autograd.grad(u.sum(), point, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), point, create_graph=True)[0]
        return ((first[:, 1] - 0.1 * second[:, 0]) ** 2).mean() + F.mse_loss(u, edge)


class Forces(nn.Module):
    """An energy of atoms whose forces are its derivative by their places (Schuett et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))
        self.register_buffer("centres", torch.linspace(0, 3, 8))

    def forward(self, places: Tensor, energy: Tensor, forces: Tensor) -> Tensor:
        places.requires_grad_(True)
        apart = (places[:, :, None] - places[:, None]).pow(2).sum(-1).add(1e-3).sqrt()
        made = self.pair(torch.exp(-((apart.unsqueeze(-1) - self.centres) ** 2))).sum((1, 2, 3))
        pushed = -torch.autograd.grad(made.sum(), places, create_graph=True)[0]
        return F.mse_loss(made, energy) + 10 * F.l1_loss(pushed, forces)


class TwoViews(nn.Module):
    """SimSiam (Chen and He, 2021): both views in one batch, gradients through one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, WIDTH)
        )
        self.guess = nn.Linear(WIDTH, WIDTH)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        seen = self.net(torch.cat([one, two], dim=0))
        first, second = seen.chunk(2)
        guessed = self.guess(seen)
        from_one, from_two = guessed[: one.size(0)], guessed[one.size(0) :]
        near = F.cosine_similarity(from_one, second.detach()).mean()
        return -0.5 * (near + F.cosine_similarity(from_two, first.detach()).mean())


class Answers(nn.Module):
    """DPO as TRL writes it: chosen and rejected answers in one batch, (loss, reward) returned."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True)

    def forward(self, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        ids = torch.cat([chosen, rejected])
        chances = self.head(self.layer(self.table(ids)))[:, :-1].log_softmax(-1)
        scores = torch.gather(chances, 2, ids[:, 1:].unsqueeze(2)).squeeze(2).sum(-1)
        good, bad = scores.split(chosen.shape[0])
        return {"loss": -F.logsigmoid(0.1 * (good - bad)).mean(), "reward": good.detach()}


class BalancedLayers(nn.Module):
    """Two layers of experts; the balance loss over all layers as Mixtral of transformers states it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x, routed = self.table(ids), []
        for gate, experts in zip(self.gates, self.experts, strict=True):
            rows = x.view(-1, WIDTH)
            routed.append(gate(rows))
            weights, chosen = torch.topk(F.softmax(routed[-1], dim=1, dtype=torch.float), 2, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
            parts = [
                expert(rows) * (weights * (chosen == number)).sum(-1, keepdim=True)
                for number, expert in enumerate(experts)  # type: ignore[arg-type]
            ]
            x = x + sum(parts).view(x.shape)  # type: ignore[union-attr]
        chances = F.softmax(torch.cat(routed, dim=0), dim=-1)
        counted = F.one_hot(torch.topk(chances, 2, dim=-1)[1], 4)
        balance = (counted.float().mean(dim=0) * chances.mean(dim=0).unsqueeze(0)).sum() * 4
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)) + 0.02 * balance


class TimeMixing(nn.Module):
    """RWKV's time mixing (Peng et al., 2023), step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.linspace(-3, 1, WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.mix = nn.Parameter(torch.full((3, 1, 1, WIDTH), 0.5))
        self.key, self.value, self.gate, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        before = self.shift(x)
        keys, values, gates = (
            layer(x * mix + before * (1 - mix))
            for layer, mix in zip((self.key, self.value, self.gate), self.mix, strict=True)
        )
        above, below, largest = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), torch.full_like(x[:, 0], -1e38)
        made = []
        for step in range(x.shape[1]):
            key, value = keys[:, step], values[:, step]
            now = torch.maximum(largest, self.first + key)
            kept, new = torch.exp(largest - now), torch.exp(self.first + key - now)
            made.append((kept * above + new * value) / (kept * below + new))
            now = torch.maximum(largest - self.decay.exp(), key)
            kept, new = torch.exp(largest - self.decay.exp() - now), torch.exp(key - now)
            above, below, largest = kept * above + new * value, kept * below + new, now
        return self.out(torch.sigmoid(gates) * torch.stack(made, dim=1))


class SelectiveScan(nn.Module):
    """Mamba (Gu and Dao, 2023) with its scan as a loop."""

    def __init__(self, states: int = 4, rank: int = 4) -> None:
        super().__init__()
        inside = 2 * WIDTH
        self.sizes, self.inside = (rank, states, states), inside
        self.start, self.end = nn.Linear(WIDTH, 2 * inside, bias=False), nn.Linear(inside, WIDTH, bias=False)
        self.conv = nn.Conv1d(inside, inside, 4, groups=inside, padding=3)
        self.select, self.step = nn.Linear(inside, sum(self.sizes), bias=False), nn.Linear(rank, inside)
        self.rates = nn.Parameter(torch.log(torch.arange(1.0, states + 1).repeat(inside, 1)))
        self.skip = nn.Parameter(torch.ones(inside))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x, gate = self.start(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        step, enters, leaves = self.select(x).split(self.sizes, dim=-1)
        step = F.softplus(self.step(step))
        decay = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(self.rates)))
        new = torch.einsum("bld,bln,bld->bldn", step, enters, x)
        state, made = torch.zeros(batch, self.inside, self.sizes[1], device=x.device), []
        for at in range(length):
            state = decay[:, at] * state + new[:, at]
            made.append(torch.einsum("bdn,bn->bd", state, leaves[:, at]))
        return self.end((torch.stack(made, dim=1) + x * self.skip) * F.silu(gate))


class StateSpace(nn.Module):
    """S4D (Gu et al., 2022): a diagonal state space in the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.log_step = nn.Parameter(torch.randn(WIDTH, 4, 2)), nn.Parameter(torch.rand(WIDTH) - 3)
        self.log_decay = nn.Parameter(torch.full((WIDTH, 4), math.log(0.5)))
        self.turns, self.skip = (
            nn.Parameter(math.pi * torch.arange(4.0).repeat(WIDTH, 1)),
            nn.Parameter(torch.ones(WIDTH)),
        )
        self.mix = nn.Sequential(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(-2))

    def forward(self, x: Tensor) -> Tensor:
        u, length = x.transpose(1, 2), x.shape[1]
        rates = -torch.exp(self.log_decay) + 1j * self.turns
        steps = rates * torch.exp(self.log_step).unsqueeze(-1)
        weights = torch.view_as_complex(self.out) * (torch.exp(steps) - 1.0) / rates
        powers = torch.exp(steps.unsqueeze(-1) * torch.arange(length, device=x.device))
        kernel = 2 * torch.einsum("hn,hnl->hl", weights, powers).real
        spectrum = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length] + u * self.skip.unsqueeze(-1)
        made: Tensor = self.mix(F.gelu(y)).transpose(1, 2)
        return made


class RelativeAttention(nn.Module):
    """Transformer-XL's attention (Dai et al., 2019), sequence first, with its relative shift."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.where = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.by_content, self.by_place = (nn.Parameter(torch.zeros(4, 8)) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        length, batch, _ = x.shape
        at = torch.arange(length - 1, -1, -1.0, device=x.device)
        angles = torch.outer(at, 1 / 10_000 ** (torch.arange(0.0, WIDTH, 2.0, device=x.device) / WIDTH))
        places = self.where(torch.cat([angles.sin(), angles.cos()], dim=-1)).view(length, 4, 8)
        q, k, v = (part.view(length, batch, 4, 8) for part in self.qkv(x).chunk(3, dim=-1))
        moved = torch.einsum("ibnd,jnd->ijbn", q + self.by_place, places)
        moved = torch.cat([torch.zeros((length, 1, batch, 4), device=x.device), moved], dim=1)
        moved = moved.view(length + 1, length, batch, 4)[1:].view(length, length, batch, 4)
        scores = (torch.einsum("ibnd,jbnd->ijbn", q + self.by_content, k) + moved) * 8**-0.5
        later = torch.ones(length, length, device=x.device).triu(1).bool()
        scores = scores.masked_fill(later[:, :, None, None], float("-inf")).softmax(dim=1)
        return self.out(torch.einsum("ijbn,jbnd->ibnd", scores, v).flatten(2)).transpose(0, 1)


class Turned(nn.Module):
    """A spatial transformer (Jaderberg et al., 2015) before a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 8, 7), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 6))
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, CLASSES)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        turn = self.look(images).view(-1, 2, 3) + torch.eye(2, 3, device=images.device)
        grid = F.affine_grid(turn, list(images.size()), align_corners=False)
        return F.cross_entropy(self.net(F.grid_sample(images, grid, align_corners=False)), labels)


_WORDS = (((BATCH, LENGTH), "int64"), ((BATCH, LENGTH), "int64"))
_SMALL = ((BATCH, 3, 16, 16), ((BATCH,), "int64"))

DERIVED: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "WGAN-GP": lambda: (Critic(), ((BATCH, WIDTH), (BATCH, 8), (BATCH, 1))),
    "heat equation": lambda: (HeatEquation(), ((BATCH, 2), (BATCH, 1))),
    "energy and forces": lambda: (Forces(), ((BATCH, 6, 3), (BATCH,), (BATCH, 6, 3))),
    "two views": lambda: (TwoViews(), (_SMALL[0], _SMALL[0])),
    "chosen and rejected": lambda: (Answers(), _WORDS),
    "balance of layers": lambda: (BalancedLayers(), _WORDS),
    "RWKV, written out": lambda: (LanguageModel(TimeMixing), _WORDS),
    "Mamba, written out": lambda: (LanguageModel(SelectiveScan), _WORDS),
    "state space": lambda: (LanguageModel(StateSpace), _WORDS),
    "Transformer-XL": lambda: (LanguageModel(RelativeAttention), _WORDS),
    "spatial transformer": lambda: (Turned(), _SMALL),
}  # fmt: skip
"""Name -> what makes it."""
