"""Overlaps of two cuts of one dim, for all pairs of cuts by the axes of a mesh at once, as arrays.

A cut is a sequence of axes; it cuts a dim by one axis after the other, each time into parts of ceil(size / axis size)
(`plans.layout`). Cuts are numbered as in `table.sequences`.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.redistribution.table import Array, sequences

__all__ = ["leaves_domain", "overlaps"]


@lru_cache(maxsize=1024)
def overlaps(sizes: tuple[int, ...], size: int) -> tuple[Array, Array]:
    """Overlaps of the cuts of a dim of `size`, on a mesh whose axes have `sizes`.

    Returns:
        [sequences, sequences, ranks]: how much of the dim a rank has under both cuts; and how many different parts of
        the first cut its part of the second overlaps.

    >>> common, count = overlaps((2, 2), 4)
    >>> common[1, 2], count[0, 1], count[3, 0]
    (array([2, 0, 0, 2]), array([1, 1, 1, 1]), array([4, 4, 4, 4]))
    """
    position, beginnings = _positions(sizes)
    both = _parts(sizes, size)
    counts = np.add.reduceat((both > 0).astype(np.int64), beginnings, axis=1)
    return both[position[:, None, :], position[None, :, :]], counts.T[:, position]


@lru_cache(maxsize=1024)
def leaves_domain(sizes: tuple[int, ...], size: int, domains: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """[sequences, sequences]: whether some rank's part under the second cut holds elements that no rank of its domain
    holds under the first.

    >>> leaves_domain((2, 2), 4, (0, 0, 1, 1))[1].tolist()  # ranks 0 and 1 have the first half, 2 and 3 the second
    [True, False, True, False, True]
    """
    position, beginnings = _positions(sizes)
    both = _parts(sizes, size).astype(np.float64)
    domain = np.unique(np.array(domains), return_inverse=True)[1].reshape(-1)
    held = np.zeros((int(domain.max()) + 1, len(both)))  # the parts that a domain has
    for places in position:
        held[domain, places] = 1
    whole = np.diagonal(both)[position]
    found = np.zeros((len(position), len(position)), dtype=bool)
    for number, (first, last) in enumerate(itertools.pairwise([*beginnings.tolist(), len(both)])):
        reached = held[:, first:last] @ both[first:last]
        found[number] = (reached[domain[None, :], position] < whole).any(axis=1)
    return found


@lru_cache(maxsize=1024)
def _parts(sizes: tuple[int, ...], size: int) -> Array:
    """The number of common elements of any two parts of all cuts of a dim, in the order of `_positions`."""
    low, length = [], []
    for order in sequences(len(sizes)):
        start, long = np.zeros(1, dtype=np.int64), np.full(1, size, dtype=np.int64)
        for axis in order:
            part = -(-long // sizes[axis])
            offset = np.minimum(part[:, None] * np.arange(sizes[axis]), long[:, None])
            start = (start[:, None] + offset).ravel()
            long = np.minimum(part[:, None], long[:, None] - offset).ravel()
        low.append(start)
        length.append(long)
    start = np.concatenate(low)
    stop = start + np.concatenate(length)
    common: Array = np.minimum.outer(stop, stop)
    common -= np.maximum.outer(start, start)
    return np.maximum(common, 0, out=common)


@lru_cache(maxsize=64)
def _positions(sizes: tuple[int, ...]) -> tuple[Array, Array]:
    """Parts of all cuts in one row: [sequences, ranks] which of them a rank has, and where each cut begins."""
    index = np.indices(sizes).reshape(len(sizes), -1)
    position, beginnings, count = [], [], 0
    for order in sequences(len(sizes)):
        place = np.zeros(index.shape[1], dtype=np.int64)
        for axis in order:
            place = place * sizes[axis] + index[axis]
        position.append(place + count)
        beginnings.append(count)
        count += math.prod(sizes[axis] for axis in order)
    return np.array(position), np.array(beginnings)
