"""The common refinement of two meshes over the same ranks.

Every axis of both meshes becomes a product of axes of a third, atomic mesh, if the meshes are related by a regrouping
and reordering of digits: the position of a rank in one mesh, as a function of its coordinates in the other, is then a
sum of digit times place value. Otherwise there is no common refinement, and only a transfer leads across.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from plans.layout import DimAxes, Layout, TensorLayout

__all__ = ["Refinement", "is_same_cut", "primes", "refine", "rewrite"]

Refinement = tuple[Layout, dict[str, DimAxes], dict[str, DimAxes]]
"""The atomic mesh, and for each axis of the first and of the second mesh its atoms, the first is major."""


@lru_cache(maxsize=1024)
def refine(first: Layout, second: Layout) -> Refinement | None:
    """The coarsest mesh both refine to, or None. It is one of the two if that one needs no cutting.

    >>> mesh, mine, theirs = refine(Layout((8,), ("tp",)), Layout((2, 4), ("dp", "mp")))
    >>> mesh.alias_name, mine, theirs
    (('dp', 'mp'), {'tp': ('dp', 'mp')}, {'dp': ('dp',), 'mp': ('mp',)})
    >>> refine(Layout((4, 2), ("a", "b")), Layout((2, 4), ("dp", "mp")))[1:]
    ({'a': ('a.0', 'a.1'), 'b': ('b',)}, {'dp': ('a.0',), 'mp': ('a.1', 'b')})
    """
    if set(first.rank_list) != set(second.rank_list) or first.num_ranks == 1:
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
    # the atoms, major first in the order of `first`: its axis, size, place value; and the axis of `second` they lie in
    order = [(axis, size, value) for axis, digits in enumerate(atoms) for size, value in reversed(digits)]
    inside = [len(borders) - 1 - int(np.searchsorted(borders, value, side="right")) for _, _, value in order]
    if all(len(digits) <= 1 for digits in atoms):
        mesh, names = first, [first.alias_name[axis] for axis, _, _ in order]
    elif len(set(inside)) == len(inside):
        mesh, names = second, [second.alias_name[axis] for axis in inside]
    else:
        names = []
        for axis, _, _ in order:
            number = sum(axis == before for before, _, _ in order[: len(names)])
            names.append(first.alias_name[axis] + (f".{number}" if len(atoms[axis]) > 1 else ""))
        mesh = Layout([size for _, size, _ in order], names, first.rank_list)
    mine = {
        alias: tuple(name for name, atom in zip(names, order, strict=True) if atom[0] == axis)
        for axis, alias in enumerate(first.alias_name)
    }
    theirs = {}
    for axis, alias in enumerate(second.alias_name):
        parts = [(value, name) for name, (_, _, value), at in zip(names, order, inside, strict=True) if at == axis]
        theirs[alias] = tuple(name for _, name in sorted(parts, reverse=True))
    return mesh, mine, theirs


@lru_cache(maxsize=1024)
def primes(mesh: Layout) -> tuple[Layout, dict[str, DimAxes]]:
    """The mesh with an axis for every prime factor of an axis, and for each axis its atoms, the first is major.

    >>> primes(Layout((4, 3), ("dp", "mp")))[1]
    {'dp': ('dp.0', 'dp.1'), 'mp': ('mp',)}
    """
    sizes: list[int] = []
    atoms: dict[str, DimAxes] = {}
    for axis in mesh.alias_name:
        rest, prime, found = mesh.size((axis,)), 2, []
        while rest > 1:
            if rest % prime:
                prime += 1
            else:
                found.append(prime)
                rest //= prime
        sizes += found or [1]
        atoms[axis] = (axis,) if len(found) <= 1 else tuple(f"{axis}.{number}" for number in range(len(found)))
    return Layout(sizes, [atom for each in atoms.values() for atom in each], mesh.rank_list), atoms


def rewrite(layout: TensorLayout, mesh: Layout, atoms: dict[str, DimAxes]) -> TensorLayout:
    """The same placement written with the atoms of `mesh`."""
    dims = tuple(tuple(atom for axis in axes for atom in atoms[axis]) for axes in layout.dims)
    return TensorLayout(mesh=mesh, dims=dims, partial=tuple(atom for axis in layout.partial for atom in atoms[axis]))


def is_same_cut(layout: TensorLayout, atoms: dict[str, DimAxes], shape: Sequence[int]) -> bool:
    """Whether `rewrite` leaves every rank its part of a tensor of `shape`.

    An axis that is one atom cuts as before. One of several does where it cuts what the axes before it left evenly: 2 by
    2 parts of 5 elements begin at 0, 3, 3 + 2 and 5, but 4 parts at 0, 2, 4 and 5.

    >>> mesh = Layout((2, 4), ("a", "b"))
    >>> [is_same_cut(mesh(("a", "b")), {"a": ("a",), "b": ("b.0", "b.1")}, (size,)) for size in (16, 10)]
    [True, False]
    """
    for size, axes in zip(shape, layout.dims, strict=True):
        count = 1
        for axis in axes:
            count *= layout.mesh.size((axis,))
            if len(atoms[axis]) > 1 and size % count:
                return False
    return True


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
