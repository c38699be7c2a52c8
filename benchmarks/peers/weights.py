"""The weights and tokens that both sides start from.

A weight is a window into one row of random numbers, whose rows overlap: made in no time, on the host and on a device
alike, and the same numbers in both places. They are kept in half precision, which halves what the host copies, with the
eight significant bits of bfloat16, so that neither dtype rounds them and master weights start from them too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plans.model.graph import Graph

__all__ = ["SharedWeights", "tokens_of"]

_LENGTH = 2**20
_BFLOAT16_BITS = 0xFFF8
"""Of a float16: without the three bits that a bfloat16 does not have."""
_NOISE = 0.1
"""Of weights and biases of norms, and biases of products: around 1 where a norm multiplies with it, else around 0."""


class SharedWeights(Mapping[str, npt.NDArray[Any]]):
    """Name of a parameter -> its full array, float16, as `Interpreter.set_parameters` takes it.

    >>> from plans.model.transformer import transformer
    >>> weights = SharedWeights(transformer("gpt2", num_layers=1))
    >>> weights["tok_embeddings.weight"].shape
    (50257, 768)
    """

    def __init__(self, graph: Graph) -> None:
        self._shapes = {tensor.name: tuple(tensor.shape) for tensor in graph.parameters}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        row, strides, shape = self._window(name)
        return np.lib.stride_tricks.as_strided(row, shape, [2 * stride for stride in strides])

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def tensor(self, name: str, device: torch.device) -> Tensor:
        """The parameter on a device, float16."""
        row, strides, shape = self._window(name)
        return torch.as_strided(torch.from_numpy(row).to(device), shape, strides)

    def _window(self, name: str) -> tuple[npt.NDArray[np.float16], list[int], tuple[int, ...]]:
        """The row of numbers, its strides in elements and the shape."""
        shape = self._shapes[name]
        *leading, last = shape
        if not leading:
            return _row(_NOISE, 1.0 if "norm" in name and name.endswith("weight") else 0.0), [1], shape
        step = max(1, min(97, (_LENGTH - last) // sum(leading)))
        return _row(1 / math.sqrt(shape[-1]), 0.0), [*(step for _ in leading), 1], shape


@cache
def _row(spread: float, mean: float) -> npt.NDArray[np.float16]:
    numbers = np.random.default_rng(0).standard_normal(_LENGTH, dtype=np.float32)
    halves = (mean + spread * numbers).astype(np.float16)
    return (halves.view(np.uint16) & np.uint16(_BFLOAT16_BITS)).view(np.float16)


def tokens_of(graph: Graph, vocab: int) -> dict[str, npt.NDArray[np.int64]]:
    """Inputs "tokens" and "labels" of one step, [batch, seq], drawn evenly from the vocabulary."""
    random = np.random.default_rng(1)
    return {tensor.name: random.integers(0, vocab, tensor.shape) for tensor in graph.inputs}
