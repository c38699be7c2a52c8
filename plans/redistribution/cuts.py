"""Starts and ends of all ranks' parts of one dim, as arrays. Cached, because searches request the same ones often."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.layout import DimAxes, Layout

__all__ = ["Indices", "cut", "overlap"]

Indices = npt.NDArray[np.int64]
"""One number per rank, in the order of the mesh."""


@lru_cache(maxsize=8192)
def cut(mesh: Layout, axes: DimAxes, size: int) -> tuple[Indices, Indices]:
    """Start and stop of every rank's part of a dim of `size` cut by `axes` in turn.

    >>> [index.tolist() for index in cut(Layout((2, 2), ("a", "b")), ("b", "a"), 5)]
    [[0, 3, 2, 4], [2, 4, 3, 5]]
    """
    coordinates = _coordinates(mesh)
    start = np.zeros(mesh.num_ranks, dtype=np.int64)
    length = np.full(mesh.num_ranks, size, dtype=np.int64)
    for axis in axes:
        size, coordinate = coordinates[axis]
        part = -(-length // size)
        offset = np.minimum(coordinate * part, length)
        start, length = start + offset, np.minimum(part, length - offset)
    return start, start + length


@lru_cache(maxsize=16384)
def overlap(mesh: Layout, one: DimAxes, two: DimAxes, size: int) -> Indices:
    """The number of elements of a dim that every rank holds under both cuts."""
    low, high = cut(mesh, one, size)
    other_low, other_high = cut(mesh, two, size)
    return np.maximum(np.minimum(high, other_high) - np.maximum(low, other_low), 0)


@lru_cache(maxsize=256)
def _coordinates(mesh: Layout) -> dict[str, tuple[int, Indices]]:
    """Size of every axis, and where every rank stands along it."""
    sizes = [mesh.size((axis,)) for axis in mesh.alias_name]
    return {
        axis: (size, index)
        for axis, size, index in zip(mesh.alias_name, sizes, np.indices(sizes).reshape(len(sizes), -1), strict=True)
    }
