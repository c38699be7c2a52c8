"""Modules whose forward keeps, freezes, copies, chooses or writes down more than tensors, for `modules`."""

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.modules.data import BATCH, WIDTH, drawn, linear, sequences


class Tables(nn.Module):
    """Keeps a mask in a new buffer, angles in attributes and a ramp in a dict, made in the first forward."""

    def __init__(self):
        super().__init__()
        self.fc, self.angles, self.ramps = linear(), None, {}
        self.register_buffer("bias", None)

    def forward(self, x, label):
        length = x.shape[1]
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)
        if self.bias is None:
            self.bias = -torch.arange(length, dtype=x.dtype).expand(length, -1).sub(3).abs()
        if self.angles is None or self.angles.shape[0] < length:
            self.angles = torch.outer(torch.arange(length, dtype=x.dtype), 0.1 ** torch.arange(WIDTH, dtype=x.dtype))
        if length not in self.ramps:
            self.ramps[length] = torch.linspace(0, 1, length, dtype=x.dtype)
        turned = x * self.angles.cos() + x.flip(-1) * self.angles.sin()
        scores = (turned @ turned.mT + self.bias).masked_fill(self.mask, -1e9).softmax(-1)
        return F.mse_loss(self.fc(scores @ x) * self.ramps[length][:, None], label)


class Switched(nn.Module):
    """A generator behind a discriminator that is frozen for it, and a copy that nobody trains."""

    def __init__(self):
        super().__init__()
        self.make, self.judge = linear(), linear(out=1)

    def forward(self, x, label):
        self.judge.requires_grad_(False)
        made = self.make(x)
        fooled = -self.judge(made).mean()
        for parameter in self.judge.parameters():
            parameter.requires_grad = True
        before = copy.deepcopy(self.make)(x)
        return fooled + (self.judge(made.detach()) - self.judge(label)).tanh().mean() + F.mse_loss(made, before + 1)


class AtLeastOne(nn.Module):
    """The sum over the rows of a mask by their number or 1: some micro-batches have none."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, label):
        losses, mask = (self.fc(x) - label).square(), x[..., 0] > 1
        chosen, few = losses[mask], losses[mask][:, 0]
        return chosen.sum() / max(chosen.numel(), 1) + few.sum() / max(1, len(few)) + losses.mean()


class Written(nn.Module):
    """Numbers in lists, ranges and arrays, as values and as indices; checks of the data."""

    def __init__(self):
        super().__init__()
        self.fc = linear()

    def forward(self, x, label):
        assert not x.isnan().any() and (label < 3).all(), "checked by nobody in a plan"
        assert label.max().item() < 3
        made = self.fc(x) * torch.tensor([1.0, 2, 3, 4] + [1] * (WIDTH - 4), dtype=x.dtype)
        made = made + torch.from_numpy(np.linspace(0, 1, WIDTH)).to(x.dtype)
        weights = torch.as_tensor(np.array([[0.25, 0.5, 2.0]] * WIDTH), dtype=x.dtype)
        chances = (made @ weights).log_softmax(-1)
        return -(chances[range(len(x)), label] + chances[np.arange(len(x)), 0]).mean() - chances[:, [2, 0]].mean()


def vectors_of_three():
    return drawn(BATCH, WIDTH), torch.arange(BATCH) % 3


def rare():
    """Sequences of which few samples have a row above 1."""
    x, label = sequences()
    x[2:] = -x[2:].abs()
    return x, label


FORWARDS = {
    "tables kept from shapes": (Tables, sequences),
    "gradients switched off and on": (Switched, sequences),
    "rows of masks, at least one": (AtLeastOne, rare),
    "numbers written down": (Written, vectors_of_three),
}
"""name -> (makes the module, makes a batch)."""
