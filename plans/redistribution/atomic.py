"""The common refinement of two meshes over the same ranks.

Every axis of both meshes becomes a product of axes of a third, atomic mesh, if the meshes are related by a regrouping
and reordering of digits: the position of a rank in one mesh, as a function of its coordinates in the other, is then a
sum of digit times place value. Otherwise there is no common refinement, and only a transfer leads across.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
    borders = [int(value) for value in np.cumprod((1, *reversed(_device_matrix(second))))]
    digits = _digits_of_axes(position, borders)
    if digits is None or not np.array_equal(_expected(digits).reshape(matrix), position):
        return None
    atoms = [
        _Atom(axis=axis, size=size, place=place, inside=len(borders) - 1 - bisect.bisect_right(borders, place))
        for axis, parts in enumerate(digits)
        for size, place in reversed(parts)
    ]
    mesh, names = _atomic_mesh(first, second, atoms)
    mine = {
        alias: tuple(name for name, atom in zip(names, atoms, strict=True) if atom.axis == axis)
        for axis, alias in enumerate(first.alias_name)
    }
    theirs = {}
    for axis, alias in enumerate(second.alias_name):
        parts = [(atom.place, name) for name, atom in zip(names, atoms, strict=True) if atom.inside == axis]
        theirs[alias] = tuple(name for _, name in sorted(parts, reverse=True))
    return mesh, mine, theirs


class _Atom(NamedTuple):
    """A digit that both meshes share, major first in the order of the first mesh.

    `axis` is the axis of the first mesh that it is a part of, `inside` that of the second; `place` is its place value
    in the second mesh.
    """

    axis: int
    size: int
    place: int
    inside: int


def _digits_of_axes(position: npt.NDArray[np.int64], borders: list[int]) -> list[list[tuple[int, int]]] | None:
    """Per axis of the first mesh its digits, minor first: (size, place value in the second mesh); None without any.

    Args:
        position: [the first mesh's matrix] where each rank is in the second mesh.
        borders: the place values of the axes of the second mesh, and behind them the number of its ranks.
    """
    found = []
    for axis, size in enumerate(position.shape):
        line = np.moveaxis(position, axis, 0).reshape(size, -1)[:, 0]
        digits = _digits([int(value) for value in line])
        cut = None if digits is None else _cut(digits, borders)
        if cut is None:
            return None
        found.append(cut)
    return found


def _expected(digits: list[list[tuple[int, int]]]) -> npt.NDArray[np.int64]:
    """The positions in the second mesh that follow from the digits of each axis, added up."""
    expected = np.zeros((), dtype=np.int64)
    for parts in digits:
        line = np.zeros(1, dtype=np.int64)
        for size, place in parts:
            line = (np.arange(size)[:, None] * place + line[None, :]).reshape(-1)
        expected = expected[..., None] + line
    return expected


def _atomic_mesh(first: Layout, second: Layout, atoms: list[_Atom]) -> tuple[Layout, list[str]]:
    """The mesh with an axis per atom, and the atoms' names; one of the two meshes where that has these axes."""
    per_axis = Counter(atom.axis for atom in atoms)
    if all(count <= 1 for count in per_axis.values()):
        return first, [first.alias_name[atom.axis] for atom in atoms]
    if len({atom.inside for atom in atoms}) == len(atoms):
        return second, [second.alias_name[atom.inside] for atom in atoms]
    names: list[str] = []
    numbers: Counter[int] = Counter()
    for atom in atoms:
        number = f".{numbers[atom.axis]}" if per_axis[atom.axis] > 1 else ""
        names.append(first.alias_name[atom.axis] + number)
        numbers[atom.axis] += 1
    return Layout([atom.size for atom in atoms], names, first.rank_list), names


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
