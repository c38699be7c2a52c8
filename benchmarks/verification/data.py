"""Data that installed packages ship, cut into samples to train on and samples to test with."""

from __future__ import annotations

from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from torch.utils.data import TensorDataset

from executor.data.digits import ArrayDataset, load_digits

__all__ = ["digits_test", "digits_train", "images_test", "images_train", "text_in"]

TESTED = 5
"""One sample of this many is tested with."""


def _cut(x: torch.Tensor, labels: torch.Tensor, *, tested: bool) -> TensorDataset:
    """Samples of a random order: the same for both parts."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(x)))
    chosen = order[: len(x) // TESTED] if tested else order[len(x) // TESTED :]
    return TensorDataset(x[chosen], labels[chosen])


def _digits(tested: bool) -> TensorDataset:
    from sklearn.datasets import load_digits as digits_of_scikit_learn

    x, labels = digits_of_scikit_learn(return_X_y=True)
    return _cut(torch.from_numpy(x).float() / 16, torch.from_numpy(labels).long(), tested=tested)


def digits_train() -> TensorDataset:
    """1,438 digits of 8x8 pixels."""
    return _digits(tested=False)


def digits_test() -> TensorDataset:
    """359 other digits."""
    return _digits(tested=True)


def _images(tested: bool) -> TensorDataset:
    dataset = ArrayDataset.of(load_digits())
    x, labels = dataset.take(np.arange(len(dataset.images)))
    return _cut(torch.from_numpy(x), torch.from_numpy(labels), tested=tested)


def images_train() -> TensorDataset:
    """4,000 images of MNIST."""
    return _images(tested=False)


def images_test() -> TensorDataset:
    """1,000 other images."""
    return _images(tested=True)


def text_in(folder: Path) -> tuple[str, str]:
    """Write the topics of Python's help as rows of bytes: the first nine tenths, and the rest to test with."""
    folder.mkdir(parents=True, exist_ok=True)
    text = np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
    cut, paths = len(text) * 9 // 10, (folder / "train.npy", folder / "test.npy")
    for path, part in zip(paths, (text[:cut], text[cut:]), strict=True):
        np.save(path, part)
    return str(paths[0]), str(paths[1])
