"""Small networks with the losses and the random numbers that people write, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["OBJECTIVES"]

BATCH, LENGTH, VOCAB, WIDTH, CLASSES = 64, 16, 64, 32, 10


class Codebook(nn.Module):
    """A VQ-VAE (van den Oord et al., 2017): the nearest code, straight-through gradients, a commitment loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.codes = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encode(x)
        apart = y.pow(2).sum(-1, keepdim=True) - 2 * y @ self.codes.weight.t() + self.codes.weight.pow(2).sum(-1)
        code = self.codes(apart.argmin(-1))
        loss = F.mse_loss(code, y.detach()) + 0.25 * F.mse_loss(y, code.detach())
        return F.mse_loss(self.decode(y + (code - y).detach()), x) + loss


class Flow(nn.Module):
    """A normalising flow of affine couplings (Dinh et al., 2017): the negative log likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        spread = torch.zeros(x.shape[0], device=x.device)
        for net in self.nets:
            one, two = x.chunk(2, 1)
            scale, shift = net(one).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([two * scale.exp() + shift, one], 1)
            spread = spread + scale.sum(1)
        prior = torch.distributions.Normal(torch.zeros(8, device=x.device), torch.ones(8, device=x.device))
        return -(prior.log_prob(x).sum(1) + spread).mean()


class Siamese(nn.Module):
    """One network on three samples; a triplet loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.PReLU(), nn.Linear(64, 16))

    def forward(self, anchor: Tensor, same: Tensor, other: Tensor) -> Tensor:
        one, two, three = (F.normalize(self.net(each), dim=-1) for each in (anchor, same, other))
        return F.triplet_margin_loss(one, two, three, margin=0.5)


class Contrast(nn.Module):
    """A contrastive loss of pairs (Hadsell et al., 2006) with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.SELU(), nn.Linear(64, 16))

    def forward(self, left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        apart = F.pairwise_distance(self.net(left), self.net(right))
        return (same * apart.pow(2) + (1 - same) * F.relu(1.0 - apart).pow(2)).mean()


class ManyTasks(nn.Module):
    """Three heads; the losses are weighted by learned uncertainties (Kendall et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU())
        self.heads = nn.ModuleDict(
            {"class": nn.Linear(64, CLASSES), "value": nn.Linear(64, 1), "mask": nn.Linear(64, 4)}
        )
        self.spread = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, label: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        y = self.trunk(x)
        losses = torch.stack([
            F.cross_entropy(self.heads["class"](y), label),
            F.mse_loss(self.heads["value"](y).squeeze(-1), value),
            F.binary_cross_entropy_with_logits(self.heads["mask"](y), mask.sigmoid()),
        ])  # fmt: skip
        return (losses * torch.exp(-self.spread) + self.spread).sum()


class Averaged(nn.Module):
    """A student whose teacher is a moving average in buffers (BYOL, data2vec), read but not changed."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.guess = nn.Linear(WIDTH, 16), nn.Linear(16, 16)
        self.register_buffer("average", self.net.weight.detach().clone())

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        wanted = F.normalize(F.linear(two, self.average), dim=-1)
        return 2 - 2 * F.cosine_similarity(self.guess(self.net(one)), wanted, dim=-1).mean()


class Reversal(torch.autograd.Function):
    """Identity with a negative gradient (domain adversarial training)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g.neg() * ctx.weight, None


class Adversary(nn.Module):
    """Classes and, through a reversed gradient, domains."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.domains = nn.Linear(WIDTH, 64), nn.Linear(64, CLASSES), nn.Linear(64, 2)

    def forward(self, x: Tensor, labels: Tensor, domain: Tensor) -> Tensor:
        y = F.relu(self.trunk(x))
        other = F.cross_entropy(self.domains(Reversal.apply(y, 0.3)), domain % 2)
        return F.cross_entropy(self.classes(y), labels) + other


class Connectionist(nn.Module):
    """A recurrent network with a CTC loss; every sample has full length."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.GRU(8, 16, bidirectional=True, batch_first=True), nn.Linear(32, CLASSES + 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        chances = self.head(self.net(x)[0]).log_softmax(-1).transpose(0, 1)
        times = torch.full((x.shape[0],), x.shape[1], dtype=torch.long, device=x.device)
        lengths = torch.full((x.shape[0],), labels.shape[1], dtype=torch.long, device=x.device)
        return F.ctc_loss(chances, labels + 1, times, lengths, zero_infinity=True)


class Balanced(nn.Module):
    """Experts with Switch's loss of balance over all tokens of the batch (Fedus et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, CLASSES)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) * 0.1) for shape in ((WIDTH, 64), (64, WIDTH)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        chances = self.gate(x).softmax(-1)
        weight, chosen = chances.max(-1)
        every = torch.einsum("btf,efd->bted", F.relu(torch.einsum("btd,edf->btef", x, self.up)).sum(2), self.down)
        mask = F.one_hot(chosen, 4).to(x.dtype)
        y = (every * mask.unsqueeze(-1)).sum(2) * weight.unsqueeze(-1)
        balance = 4 * (mask.mean((0, 1)) * chances.mean((0, 1))).sum()
        return F.cross_entropy(self.head((x + y).mean(1)), labels) + 0.01 * balance


class Focal(nn.Module):
    """A focal loss (Lin et al., 2017) written out, with a Dice loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Hardswish(), nn.Conv2d(8, 1, 1))

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        made, masks = self.net(images).squeeze(1), masks.sigmoid()
        each = F.binary_cross_entropy_with_logits(made, masks, reduction="none")
        focal = (0.25 * (1 - torch.exp(-each)) ** 2 * each).mean()
        chance = made.sigmoid().flatten(1)
        overlap = (chance * masks.flatten(1)).sum(1)
        dice = 1 - (2 * overlap + 1) / (chance.sum(1) + masks.flatten(1).sum(1) + 1)
        return focal + dice.mean()


class Policy(nn.Module):
    """PPO's clipped objective with an entropy and a value (Schulman et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, state: Tensor, action: Tensor, before: Tensor, gain: Tensor, wanted: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(state))
        choice = torch.distributions.Categorical(logits=self.actor(x))
        ratio = (choice.log_prob(action % 4) - before).exp()
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return F.mse_loss(self.critic(x).squeeze(-1), wanted) - clipped - 0.01 * choice.entropy().mean()


class Preference(nn.Module):
    """DPO (Rafailov et al., 2023) of sums of log probabilities against a frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.reference = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)).requires_grad_(False)

    def forward(self, good: Tensor, bad: Tensor) -> Tensor:
        def score(ids: Tensor, logits: Tensor) -> Tensor:
            chances = logits[:, :-1].log_softmax(-1)
            return torch.gather(chances, 2, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)

        own = score(good, self.head(self.table(good))) - score(bad, self.head(self.table(bad)))
        with torch.no_grad():
            other = score(good, self.reference(good)) - score(bad, self.reference(bad))
        return -F.logsigmoid(0.1 * (own - other)).mean()


class NoisyVAE(nn.Module):
    """A variational autoencoder that draws its noise itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 16), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        made = self.decode(mean + torch.randn_like(mean) * (0.5 * spread).exp())
        divergence = -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1).mean()
        return F.mse_loss(made, x) + 0.1 * divergence


class NoisyDiffusion(nn.Module):
    """Draws times and noise in the forward, as most training code of diffusion models does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.times = nn.Linear(WIDTH + 8, WIDTH), nn.Embedding(100, 8)
        self.register_buffer("kept", torch.linspace(0.999, 0.01, 100))

    def forward(self, x: Tensor) -> Tensor:
        times = torch.randint(0, 100, (x.shape[0],), device=x.device)
        noise = torch.randn(x.shape, device=x.device)
        kept = self.kept[times].unsqueeze(1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy, self.times(times)], -1)), noise)


class Gumbel(nn.Module):
    """Discrete latents by Gumbel softmax, noise on the input and a random mask."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noisy = x + 0.1 * torch.empty_like(x).uniform_(-1, 1)
        code = F.gumbel_softmax(self.encode(noisy), tau=0.7, hard=False)
        mask = (torch.rand(x.shape, device=x.device) < 0.5).float()
        return (((self.decode(code) - x) ** 2) * mask).mean()


_ROWS = ((BATCH, WIDTH), ((BATCH,), "int64"))
_SMALL = ((BATCH, 3, 16, 16), ((BATCH,), "int64"))
_WORDS = (((BATCH, LENGTH), "int64"), ((BATCH, LENGTH), "int64"))
_STEPS = ((BATCH, LENGTH, WIDTH), ((BATCH,), "int64"))

OBJECTIVES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "VQ-VAE": lambda: (Codebook(), (_ROWS[0],)),
    "normalising flow": lambda: (Flow(), ((BATCH, 8),)),
    "siamese, triplets": lambda: (Siamese(), (_ROWS[0],) * 3),
    "siamese, pairs": lambda: (Contrast(), (_ROWS[0], _ROWS[0], (BATCH,))),
    "many tasks": lambda: (ManyTasks(), (*_ROWS, (BATCH,), (BATCH, 4))),
    "VAE with its own noise": lambda: (NoisyVAE(), (_ROWS[0],)),
    "diffusion with its own noise": lambda: (NoisyDiffusion(), (_ROWS[0],)),
    "Gumbel softmax, random mask": lambda: (Gumbel(), (_ROWS[0],)),
    "moving average": lambda: (Averaged(), (_ROWS[0],) * 2),
    "gradient reversal": lambda: (Adversary(), (*_ROWS, _ROWS[1])),
    "CTC loss": lambda: (Connectionist(), ((BATCH, 12, 8), ((BATCH, 4), "int64"))),
    "balance of experts": lambda: (Balanced(), _STEPS),
    "focal and Dice": lambda: (Focal(), (_SMALL[0], (BATCH, 16, 16))),
    "PPO": lambda: (Policy(), ((BATCH, 8), ((BATCH,), "int64"), (BATCH,), (BATCH,), (BATCH,))),
    "DPO": lambda: (Preference(), _WORDS),
}  # fmt: skip
"""Name -> what makes it."""
