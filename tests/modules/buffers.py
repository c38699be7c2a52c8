"""Modules whose forward changes buffers, in double precision: name -> (makes the module, makes a batch)."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.modules.data import WIDTH, linear, vectors


class Buffers(nn.Module):
    """`forward(parts, x)` against the labels, by MSE, with buffers of its own."""

    def __init__(self, forward, parts=(), **buffers):
        super().__init__()
        self.function = forward
        for name, part in dict(parts).items():
            setattr(self, name, part)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x, label):
        return F.mse_loss(self.function(self, x), label)


def normalised(m, x):
    """Running statistics that are changed, set anew, and read after it."""
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        m.spread = 0.9 * m.spread + 0.1 * x.std(0) + 0.1 * x.var(0, unbiased=False)
    return m.fc((x - m.mean) / (m.spread + 1e-5).sqrt())


def annealed(m, x):
    """A counter; a number that is read before it changes, also by the backward."""
    m.step += 1
    made = m.fc(x) * m.factor * (m.step / 8).clamp(max=1.0)
    m.factor = m.factor * 0.9
    return made + m.factor


class Codebook(nn.Module):
    """Codes that follow moving averages of what chose them (van den Oord et al., 2017, appendix A.1)."""

    def __init__(self, count=6, decay=0.9):
        super().__init__()
        self.decay, self.count = decay, count
        self.inside, self.out = linear(), linear()
        codes = torch.randn(count, WIDTH)
        for name, value in (("codes", codes), ("sizes", torch.ones(count)), ("sums", codes.clone())):
            self.register_buffer(name, value)

    def forward(self, x, label):
        z = self.inside(x)
        ids = (z.square().sum(1, keepdim=True) - 2 * z @ self.codes.t() + self.codes.square().sum(1)).argmin(1)
        chosen, hot = self.codes[ids], F.one_hot(ids, self.count).to(z.dtype)
        with torch.no_grad():
            self.sizes.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
            self.sums.mul_(self.decay).add_(hot.t() @ z, alpha=1 - self.decay)
            self.codes.copy_(self.sums / (self.sizes + 1e-5).unsqueeze(1))
        loss = 0.25 * F.mse_loss(z, chosen.detach())
        return loss + F.mse_loss(self.out(z + (chosen - z).detach()), label)


class OfItsLoss(nn.Module):
    """Keeps a part of what it saw, and a moving average of its loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(linear(), nn.GELU(), linear())
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(2, WIDTH))

    def forward(self, x, label):
        loss = F.mse_loss(self.net(x), label)
        self.seen.lerp_(loss.detach(), 0.1)
        self.rows[1] = x.mean(0)
        return loss


class Distilled(nn.Module):
    """A frozen teacher that follows its student (Grill et al., 2020), in the two ways in which that is written."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(linear(), nn.GELU(), linear())
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x, label):
        for number, (old, new) in enumerate(zip(self.teacher.parameters(), self.student.parameters(), strict=True)):
            if number % 2:
                old.data = old.data * 0.9 + new.data * 0.1
            else:
                old.data.mul_(0.9).add_(new.detach(), alpha=0.1)
        return F.mse_loss(self.student(x), self.teacher(label))


BUFFERS = {
    "running statistics, own": (
        lambda: Buffers(normalised, {"fc": linear()}, mean=torch.zeros(WIDTH), spread=torch.ones(WIDTH)), vectors
    ),
    "counter": (
        lambda: Buffers(annealed, {"fc": linear()}, step=torch.tensor(0), factor=torch.tensor(2.0)), vectors
    ),
    "codebook of moving averages": (Codebook, vectors),
    "teacher of moving averages": (Distilled, vectors),
    "average of the loss": (OfItsLoss, vectors),
    "spectral norms": (
        lambda: Buffers(
            lambda m, x: m.down(torch.tanh(m.up(x))),
            {"up": parametrizations.spectral_norm(linear()), "down": nn.utils.spectral_norm(linear())},
        ), vectors
    ),
}  # fmt: skip
