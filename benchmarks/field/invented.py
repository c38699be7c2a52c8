"""Research code of kinds that no list has: taggers, agents, world models, speech, flows, functions of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.field.blocks import LanguageModel

__all__ = ["INVENTED"]

BATCH, LENGTH, VOCAB, WIDTH, CLASSES, HEADS = 64, 16, 64, 32, 10, 4


class Tagger(nn.Module):
    """A recurrent tagger with a conditional random field (Lample et al., 2016); label scores by sample and label."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, 16, bidirectional=True, batch_first=True)
        self.head, self.start = nn.Linear(32, CLASSES), nn.Parameter(torch.randn(CLASSES))
        self.moves = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, ids: Tensor, tags: Tensor) -> Tensor:
        mask, sample, tags = ids.ne(0), torch.arange(len(ids)), tags % CLASSES
        scores = self.head(self.net(self.table(ids))[0])
        path = self.start[tags[:, 0]] + scores[sample, 0, tags[:, 0]]
        every = self.start + scores[:, 0]
        for at in range(1, ids.shape[1]):
            move = self.moves[tags[:, at - 1], tags[:, at]] + scores[sample, at, tags[:, at]]
            path = path + move * mask[:, at]
            longer = torch.logsumexp(every.unsqueeze(2) + self.moves + scores[:, at].unsqueeze(1), 1)
            every = torch.where(mask[:, at].unsqueeze(1), longer, every)
        return (torch.logsumexp(every, 1) - path).mean()


class Pointer(nn.Module):
    """A pointer network (Vinyals et al., 2015): the input that a step points at is the next step's."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.cell = nn.LSTM(2, 16, batch_first=True), nn.LSTMCell(2, 16)
        self.query, self.key, self.score = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.randn(16))
        self.go = nn.Parameter(torch.zeros(2))

    def forward(self, places: Tensor, order: Tensor) -> Tensor:
        order, keys = order % places.shape[1], self.net(places)
        state, step = (keys[1][0][0], keys[1][1][0]), self.go.expand(len(places), -1)
        used = torch.zeros(places.shape[:2], dtype=torch.bool, device=places.device)
        loss = torch.zeros((), device=places.device)
        for at in range(places.shape[1]):
            state = self.cell(step, state)
            scores = torch.tanh(self.query(state[0]).unsqueeze(1) + self.key(keys[0])) @ self.score
            loss = loss + F.cross_entropy(scores.masked_fill(used, -1e4), order[:, at])
            used = used.scatter(1, order[:, at : at + 1], True)
            step = places[torch.arange(len(places)), order[:, at]]
        return loss / places.shape[1]


class SoftActorCritic(nn.Module):
    """A soft actor-critic (Haarnoja et al., 2018): two critics, their targets, a policy and its temperature."""

    def __init__(self) -> None:
        super().__init__()

        def net(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))

        self.critics, self.policy = nn.ModuleList([net(10, 1), net(10, 1)]), net(8, 4)
        self.targets = nn.ModuleList([net(10, 1), net(10, 1)]).requires_grad_(False)
        self.temperature = nn.Parameter(torch.zeros(()))

    def acted(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.policy(state).chunk(2, -1)
        normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
        draw = normal.rsample()
        chance = normal.log_prob(draw) - torch.log(1 - draw.tanh().pow(2) + 1e-6)
        return draw.tanh(), chance.sum(-1)

    @staticmethod
    def worst(critics: nn.ModuleList, state: Tensor, action: Tensor) -> Tensor:
        one, two = (critic(torch.cat([state, action], -1)).squeeze(-1) for critic in critics)
        return torch.min(one, two)

    def forward(self, state: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        with torch.no_grad():
            next_action, chance = self.acted(after)
            value = self.worst(self.targets, after, next_action) - self.temperature.exp() * chance
            wanted = reward + 0.99 * value
        both = torch.cat([state, action], -1)
        loss = sum((F.mse_loss(critic(both).squeeze(-1), wanted) for critic in self.critics), torch.zeros(()))
        own, chance = self.acted(state)
        policy = (self.temperature.exp().detach() * chance - self.worst(self.critics, state, own)).mean()
        return loss + policy - (self.temperature * (chance + 2).detach()).mean()


class WorldModel(nn.Module):
    """A recurrent world model with discrete states (Hafner et al., 2023), straight-through and two divergences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.inner = nn.GRUCell(16, 16), nn.Linear(18, 16)
        self.prior, self.posterior, self.decode = nn.Linear(16, 16), nn.Linear(28, 16), nn.Linear(32, 12)

    def forward(self, seen: Tensor, action: Tensor) -> Tensor:
        hidden, state = seen.new_zeros(len(seen), 16), seen.new_zeros(len(seen), 16)
        loss = torch.zeros((), device=seen.device)
        for at in range(seen.shape[1]):
            hidden = self.cell(F.elu(self.inner(torch.cat([state, action[:, at]], -1))), hidden)
            prior = self.prior(hidden).unflatten(-1, (4, 4)).softmax(-1)
            posterior = self.posterior(torch.cat([hidden, seen[:, at]], -1)).unflatten(-1, (4, 4)).softmax(-1)
            chosen = F.one_hot(posterior.argmax(-1), 4).float()
            state = (chosen + posterior - posterior.detach()).flatten(1)
            made = self.decode(torch.cat([hidden, state], -1))
            dynamic, representation = (
                torch.distributions.kl_divergence(*(torch.distributions.Categorical(probs=each) for each in pair))
                for pair in ((posterior.detach(), prior), (posterior, prior.detach()))
            )
            terms = (made - seen[:, at]).pow(2).sum(-1) + 0.8 * dynamic.sum(-1) + 0.2 * representation.sum(-1)
            loss = loss + terms.mean()
        return loss / seen.shape[1]


class Separation(nn.Module):
    """Conv-TasNet (Luo and Mesgarani, 2019): two speakers, scored in decibels in the better order."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv1d(1, 16, 8, 4, bias=False), nn.ConvTranspose1d(16, 1, 8, 4, bias=False)
        self.masks = nn.Sequential(
            nn.GroupNorm(1, 16, eps=1e-8), nn.Conv1d(16, 32, 1), nn.PReLU(), nn.Conv1d(32, 32, 3, padding=1, groups=32),
            nn.PReLU(), nn.Conv1d(32, 32, 1),
        )  # fmt: skip

    @staticmethod
    def decibels(made: Tensor, wanted: Tensor) -> Tensor:
        made, wanted = (each - each.mean(-1, keepdim=True) for each in (made, wanted))
        along = (made * wanted).sum(-1, keepdim=True) * wanted / (wanted.pow(2).sum(-1, keepdim=True) + 1e-8)
        return 10 * torch.log10(along.pow(2).sum(-1) / ((made - along).pow(2).sum(-1) + 1e-8) + 1e-8)

    def forward(self, mixed: Tensor, speakers: Tensor) -> Tensor:
        hidden = F.relu(self.encode(mixed.unsqueeze(1)))
        masks = self.masks(hidden).sigmoid().unflatten(1, (2, 16))
        made = self.decode((masks * hidden.unsqueeze(1)).flatten(0, 1)).view(-1, *speakers.shape[1:])
        orders = [self.decibels(each, speakers).mean(1) for each in (made, made.flip(1))]
        return -torch.maximum(*orders).mean()


class Distilled(nn.Module):
    """A language model distilled at a temperature: the divergence of all tokens, divided by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB)).eval().requires_grad_(False)
        self.student = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (self.teacher(ids) / 2).softmax(-1).flatten(0, 1)
        made = self.student(ids).flatten(0, 1)
        divergence = F.kl_div((made / 2).log_softmax(-1), wanted, reduction="batchmean") * 4
        return 0.5 * divergence + 0.5 * F.cross_entropy(made, labels.flatten())


class _Rotated(torch.autograd.Function):
    """Queries and keys turned by their positions in one call, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return tuple(each * cos + _turned(each) * sin for each in (q, k))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *(each * cos - _turned(each * sin) for each in gradients), None, None


def _turned(x: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([-two, one], -1)


class Rotary(nn.Module):
    """Attention whose positions are an autograd function with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        angles = torch.outer(torch.arange(LENGTH).float(), 1e4 ** (-torch.arange(4) / 4)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        q, k = _Rotated.apply(q, k, self.cos, self.sin)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Documents(nn.Module):
    """Flex attention within documents of packed rows, with a learned bias of the distance and capped scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.qkv, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.zeros(HEADS, LENGTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        document = (ids == 3).cumsum(1)
        mask = create_block_mask(
            lambda b, h, i, j: (i >= j) & (document[b, i] == document[b, j]), len(ids), None, LENGTH, LENGTH
        )

        def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return 20 * torch.tanh((value + self.bias[h, (i - j) % LENGTH]) / 20)

        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.table(ids)).chunk(3, -1))
        made = flex_attention(q, k, v, score, mask)
        return F.cross_entropy(self.head(made.transpose(1, 2).flatten(2)).flatten(0, 1), labels.flatten())


class Adapted(nn.Module):
    """Two gradient steps for every task, differentiated through (Finn et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(8, 16) * 0.1), nn.Parameter(torch.randn(16, 1) * 0.1)

    def forward(self, x: Tensor, y: Tensor, query: Tensor, answer: Tensor) -> Tensor:
        weights = [each.expand(len(x), -1, -1) for each in (self.first, self.last)]
        for _ in range(2):
            loss = (torch.tanh(x @ weights[0]) @ weights[1] - y).pow(2).mean((1, 2)).sum()
            gradients = torch.autograd.grad(loss, weights, create_graph=True)
            weights = [each - 0.1 * slope for each, slope in zip(weights, gradients, strict=True)]
        return F.mse_loss(torch.tanh(query @ weights[0]) @ weights[1], answer)


class Glow(nn.Module):
    """A step of Glow (Kingma and Dhariwal, 2018): scales, an invertible 1x1 convolution, an affine coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Parameter(torch.eye(16) + 0.1 * torch.randn(16, 16)), nn.Parameter(torch.zeros(16))
        self.net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))

    def forward(self, image: Tensor) -> Tensor:
        x = F.pixel_unshuffle(image, 2) * self.scale.exp()[:, None, None]
        shared = 16 * (self.scale.sum() + torch.linalg.slogdet(self.mix)[1])
        kept, changed = F.conv2d(x, self.mix[:, :, None, None]).chunk(2, 1)
        shift, scale = self.net(kept).chunk(2, 1)
        scale = torch.sigmoid(scale + 2)
        made = torch.cat([kept, (changed + shift) * scale], 1)
        likelihood = -0.5 * (made.pow(2) + math.log(2 * math.pi)).sum((1, 2, 3)) + scale.log().sum((1, 2, 3)) + shared
        return -likelihood.mean() / image[0].numel()


_WORDS = (((BATCH, LENGTH), "int64"), ((BATCH, LENGTH), "int64"))

INVENTED: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "conditional random field": lambda: (Tagger(), (((BATCH, 8), "int64"), ((BATCH, 8), "int64"))),
    "pointer network": lambda: (Pointer(), ((BATCH, 6, 2), ((BATCH, 6), "int64"))),
    "soft actor-critic": lambda: (SoftActorCritic(), ((BATCH, 8), (BATCH, 2), (BATCH,), (BATCH, 8))),
    "world model": lambda: (WorldModel(), ((BATCH, 5, 12), (BATCH, 5, 2))),
    "speakers": lambda: (Separation(), ((BATCH, 128), (BATCH, 2, 128))),
    "distillation of tokens": lambda: (Distilled(), _WORDS),
    "function of two results": lambda: (LanguageModel(Rotary), _WORDS),
    "flex attention in documents": lambda: (Documents(), _WORDS),
    "gradient steps inside": lambda: (Adapted(), ((BATCH, 5, 8), (BATCH, 5, 1), (BATCH, 5, 8), (BATCH, 5, 1))),
    "Glow": lambda: (Glow(), ((BATCH, 4, 8, 8),)),
}  # fmt: skip
"""Name -> what makes it."""
