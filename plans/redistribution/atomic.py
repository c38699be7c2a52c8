"""The common refinement of two meshes over the same ranks.

Every axis of both meshes becomes a product of axes of a third, atomic mesh, if the meshes are related by a regrouping
and reordering of digits: the position of a rank in one mesh, as a function of its coordinates in the other, is then a
sum of digit times place value. Otherwise there is no common refinement, and only a transfer leads across.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import numpy as np

from plans.layout import DimAxes, Layout, TensorLayout

__all__ = ["Refinement", "refine", "rewrite"]

Refinement = tuple[Layout, dict[str, DimAxes], dict[str, DimAxes]]
"""The atomic mesh, and for each axis of the first and of the second mesh its atoms, the first is major."""


@lru_cache(maxsize=1024)
def refine(first: Layout, second: Layout) -> Refinement | None:
    """The coarsest mesh both refine to, or None.

    >>> mesh, mine, theirs = refine(Layout((8,), ("tp",)), Layout((2, 4), ("dp", "mp")))
    >>> mesh.device_matrix, mine, theirs
    ((2, 4), {'tp': ('x0', 'x1')}, {'mp': ('x1',), 'dp': ('x0',)})
    """
    if set(first.rank_list) != set(second.rank_list):
        return None
    where = {rank: at for at, rank in enumerate(second.rank_list)}
    matrix = _device_matrix(first)
    position = np.array([where[rank] for rank in first.rank_list]).reshape(matrix)
    borders = np.cumprod((1, *reversed(_device_matrix(second))))  # place values of the axes of `second`
    atoms: list[list[tuple[int, int]]] = []  # per axis of `first`: (size, place value in `second`), minor first
    for axis, size in enumerate(matrix):
        line = np.moveaxis(position, axis, 0).reshape(size, -1)[:, 0]
        digits = _digits([int(value) for value in line])
        cut = None if digits is None else _cut(digits, [int(border) for border in borders])
        if cut is None:
            return None
        atoms.append(cut)
    expected = np.zeros((), dtype=np.int64)
    for digits in atoms:
        line = np.zeros(1, dtype=np.int64)
        for size, value in digits:
            line = (np.arange(size)[:, None] * value + line[None, :]).reshape(-1)
        expected = expected[..., None] + line
    if not np.array_equal(expected.reshape(matrix), position):
        return None
    named = [
        [(f"x{axis}_{at}", size, value) for at, (size, value) in enumerate(digits)] for axis, digits in enumerate(atoms)
    ]
    order = [atom for digits in named for atom in reversed(digits)]
    names = {old: f"x{at}" for at, (old, _, _) in enumerate(order)}
    if not order:
        return None
    mesh = Layout([size for _, size, _ in order], list(names.values()), first.rank_list)
    mine = {
        alias: tuple(names[old] for old, _, _ in reversed(digits))
        for alias, digits in zip(first.alias_name, named, strict=True)
    }
    theirs = {}
    for at, alias in enumerate(reversed(second.alias_name)):
        inside = [(value, names[old]) for old, _, value in order if borders[at] <= value < borders[at + 1]]
        theirs[alias] = tuple(name for _, name in sorted(inside, reverse=True))
    return mesh, mine, theirs


def rewrite(layout: TensorLayout, mesh: Layout, atoms: dict[str, DimAxes]) -> TensorLayout:
    """The same placement written with the atoms of `mesh`."""
    dims = tuple(tuple(atom for axis in axes for atom in atoms[axis]) for axes in layout.dims)
    return TensorLayout(mesh=mesh, dims=dims, partial=tuple(atom for axis in layout.partial for atom in atoms[axis]))


def _device_matrix(mesh: Layout) -> tuple[int, ...]:
    return tuple(mesh.size((axis,)) for axis in mesh.alias_name)


def _digits(line: list[int]) -> list[tuple[int, int]] | None:
    """Write line[i] - line[0] as a sum of digit times place value; sizes and place values, minor digit first."""
    digits: list[tuple[int, int]] = []
    block, size = 1, len(line)
    while block < size:
        value = line[block] - line[0]
        count = 1
        while count * block < size and line[count * block] - line[0] == count * value:
            count += 1
        if size % (block * count) or value <= 0:
            return None
        digits.append((count, value))
        block *= count
    return digits


def _cut(digits: list[tuple[int, int]], borders: list[int]) -> list[tuple[int, int]] | None:
    """Cut digits that reach over the place value of an axis of the other mesh."""
    done: list[tuple[int, int]] = []
    for size, value in digits:
        inner = [border // value for border in borders if value < border < value * size]
        edges = [1, *sorted(set(inner)), size]
        if any(border % value for border in borders if value < border < value * size):
            return None
        for low, high in itertools.pairwise(edges):
            if high % low:
                return None
            done.append((high // low, value * low))
    assert math.prod(size for size, _ in done) == math.prod(size for size, _ in digits)
    return done
