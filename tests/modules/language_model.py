"""A small language model, and batches for it: `file.py:function` of commands in tests."""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BATCH, LENGTH, VOCAB = 8, 6, 50


class LanguageModel(nn.Module):
    """Predicts the next of VOCAB words from the last one; forward gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.hidden(self.table(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def model():
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return LanguageModel(), (ids, ids)


def batches(count=3):
    """An epoch of `count` batches."""
    for number in range(count):
        text = np.random.default_rng(number).integers(0, VOCAB, (BATCH, LENGTH + 1))
        yield text[:, :-1].copy(), text[:, 1:].copy()


def endless():
    for number in itertools.count():
        text = torch.from_numpy(np.random.default_rng(number).integers(0, VOCAB, (BATCH, LENGTH + 1)))
        yield {"labels": text[:, 1:], "ids": text[:, :-1]}


def too_short():
    yield tuple(each[:, :-1] for each in next(batches()))


def too_large():
    yield tuple(each + 10 for each in next(batches()))


def none():
    return []


WORDS = list(batches(2))


class Sentences(torch.utils.data.Dataset):
    """20 samples with numbers; sample n is n, n + 1, ..."""

    def __len__(self):
        return 20

    def __getitem__(self, number):
        ids = torch.arange(number, number + LENGTH) % VOCAB
        return ids, (ids + 1) % VOCAB


class Table:
    """The same samples as a dataset of Hugging Face gives them: lists by name."""

    def __len__(self):
        return 20

    def __getitem__(self, number):
        return {name: ids.tolist() for name, ids in zip(("ids", "labels"), Sentences()[number], strict=True)}


class Stream(torch.utils.data.IterableDataset):
    """The same samples, one after the other."""

    def __iter__(self):
        return map(Sentences().__getitem__, range(20))


def loader():
    return torch.utils.data.DataLoader(Sentences(), batch_size=BATCH, drop_last=True)
