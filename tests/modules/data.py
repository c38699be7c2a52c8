"""Data and layers of the modules that tests capture, in double precision."""

import torch
from torch import nn

BATCH, LENGTH, WIDTH, WORDS = 8, 6, 8, 12


def vectors():
    return drawn(BATCH, WIDTH), drawn(BATCH, WIDTH)


def sequences():
    return drawn(BATCH, LENGTH, WIDTH), drawn(BATCH, LENGTH, WIDTH)


def tokens():
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))


def images():
    return drawn(BATCH, 2, 8, 8), torch.randint(0, 10, (BATCH,), generator=torch.Generator().manual_seed(3))


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def linear(inside=WIDTH, out=WIDTH):
    return nn.Linear(inside, out)


def parameter(*shape):
    return nn.Parameter(torch.randn(shape) * 0.5)
