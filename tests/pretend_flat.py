"""Flat buffers, clipping and casts in numpy, from what `plans.lower` says of them. Used by `pretend`.

A flat buffer is a matrix of `rows` rows; in a row stand parts of several arrays, of `sizes` elements each. An array
fills the column of its part row by row, padded with zeros; given `count` equal copies of a rank (along some axes), a
row's part is one of `count` pieces, the rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray


def pack(arrays: Sequence[Array], rows: int, sizes: Sequence[int], index: int, count: int) -> Array:
    columns = []
    for array, size in zip(arrays, sizes, strict=True):
        padded = np.zeros(rows * count * size)
        assert len(padded) >= array.size, (len(padded), array.shape)
        padded[: array.size] = array.reshape(-1)
        columns.append(padded.reshape(rows, count, size)[:, index])
    return np.concatenate(columns, axis=1).reshape(-1)


def unpack(flat: Array, rows: int, sizes: Sequence[int], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    matrix = flat.reshape(rows, sum(sizes))
    starts = np.cumsum([0, *sizes])
    found = []
    for start, size, shape in zip(starts, sizes, shapes, strict=False):
        part = matrix[:, start : start + size].reshape(-1)
        found.append(part[: int(np.prod(shape))].reshape(shape).copy())
    return found


def clip_factor(square: Array, limit: float) -> Array:
    """As torch.nn.utils.clip_grad_norm_."""
    return np.minimum(1.0, limit / (np.sqrt(square) + 1e-6))
