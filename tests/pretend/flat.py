"""Flat buffers, clipping and casts in numpy, from what `plans.lower` says of them. Used by `pretend`.

A flat buffer is a matrix of `rows` rows; in a row stand parts of several arrays, of `sizes` elements each. An array
fills the column of its part row by row, padded with zeros; given `count` equal copies of a rank (along some axes), a
row's part is one of `count` pieces, the rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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


SCALE, GOOD, SKIPPED, IN_A_ROW, REASON, NORM, USUAL, USED = range(8)
"""What is held of a step check."""


def first_held(check: Any) -> Array:
    held = np.zeros(8)
    held[SCALE] = held[USED] = 1.0 if check.loss_scale is None else check.loss_scale.initial
    return held


def checked_step(attrs: Mapping[str, Any], square: Array, held: Array, norms: Array | None = None) -> list[Array]:
    """The decision, what is held, and the factor of the gradients where there is one."""
    check, clip, scale = attrs["check"], attrs["clip_norm"], held[SCALE]
    norm = np.sqrt(square) / scale
    finite = bool(np.isfinite(norm))
    usual = np.nan if norms is None else norms.mean()
    jumps = finite and check.spike is not None and not np.isnan(usual) and norm > check.spike.factor * usual
    skips, new = not finite or jumps, held.copy()
    new[USED], new[NORM], new[USUAL] = scale, norm, usual
    new[REASON] = 1 if not finite else 2 if jumps else 0
    new[SKIPPED] += skips
    new[IN_A_ROW] = held[IN_A_ROW] + 1 if skips else 0
    if (asked := check.loss_scale) is not None:
        new[GOOD] = held[GOOD] + 1 if finite else 0
        if not finite:
            new[SCALE] = scale * asked.backoff
        elif new[GOOD] == asked.growth_every:
            new[SCALE], new[GOOD] = scale * asked.growth, 0
    results = [np.array(float(skips)), new]
    if norms is not None:
        results.append(norms if skips else np.append(norms[1:], norm))
    if clip is not None or asked is not None:
        results.append(np.array((1.0 if clip is None else clip_factor(np.square(norm), clip)) / scale))
    return results
