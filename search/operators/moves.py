"""Costs of redistributing a tensor: bounds for all pairs of layouts, prices where they matter.

A tensor on a mesh of three axes has about a hundred layouts and thousands of pairs, and few of them occur in good
plans. `Moves` starts with a lower bound for every pair and computes exact prices on request. The search requests prices
until its solution contains no bound (`search.operators.refine`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.layout import TensorLayout
from plans.model.graph import itemsize
from search.operators.move_floors import Floors, least_seconds

__all__ = ["MoveSeconds", "Moves"]

MoveSeconds = Callable[[TensorLayout, TensorLayout, tuple[int, ...], str], float]
"""(source, target, full shape, dtype) -> seconds."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Space:
    """The layouts of tensors of one shape and dtype, and the known seconds between them."""

    number: dict[TensorLayout, int] = field(default_factory=dict)
    layouts: list[TensorLayout] = field(default_factory=list)
    seconds: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    is_exact: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))
    version: int = 0


@dataclass(slots=True)
class Moves:
    """Seconds of redistributions: lower bounds at first, prices on request.

    Args:
        seconds: the price of one pair.
        floors: dtype -> what bounds it; None: every pair is priced at once.
        known: prices, kept from search to search of the same machine.
    """

    seconds: MoveSeconds
    floors: Callable[[str], Floors] | None = None
    known: dict[object, float] = field(default_factory=dict)
    _spaces: dict[tuple[tuple[int, ...], str], _Space] = field(default_factory=dict)

    def add(self, shape: tuple[int, ...], dtype: str, layouts: Sequence[TensorLayout]) -> None:
        """Announce layouts of tensors of a shape."""
        space = self._spaces.setdefault((shape, dtype), _Space())
        for layout in layouts:
            if space.number.setdefault(layout, len(space.layouts)) == len(space.layouts):
                space.layouts.append(layout)

    def numbers(self, shape: tuple[int, ...], dtype: str, layouts: Sequence[TensorLayout]) -> Ints:
        """The rows and columns of `table` for some layouts."""
        space = self._spaces[shape, dtype]
        return np.array([space.number[layout] for layout in layouts], dtype=np.int64)

    def layouts(self, shape: tuple[int, ...], dtype: str) -> list[TensorLayout]:
        """The layouts of the rows and columns."""
        return self._spaces[shape, dtype].layouts

    def table(self, shape: tuple[int, ...], dtype: str) -> Floats:
        """[layouts, layouts]: seconds from one to another, or less; infinite where there is no way."""
        space = self._spaces[shape, dtype]
        count = len(space.layouts)
        if len(space.seconds) < count:
            old, known = len(space.seconds), space
            seconds, is_exact = self._bounded(space.layouts, shape, dtype)
            seconds[:old, :old], is_exact[:old, :old] = known.seconds, known.is_exact
            space.seconds, space.is_exact, space.version = seconds, is_exact, space.version + 1
        return space.seconds

    def version(self, shape: tuple[int, ...], dtype: str) -> int:
        """A number that changes whenever `table` does."""
        self.table(shape, dtype)
        return self._spaces[shape, dtype].version

    def price_all(self, shape: tuple[int, ...], dtype: str, pairs: Iterable[tuple[int, int]]) -> bool:
        """Price every pair of numbers; returns whether one of them was new."""
        self.table(shape, dtype)
        space = self._spaces[shape, dtype]
        open_ = [pair for pair in pairs if not space.is_exact[pair]]
        for source, target in open_:
            self.price(space.layouts[source], space.layouts[target], shape, dtype)
        return bool(open_)

    def price(self, source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> float:
        """Price a pair and store the price in `table`."""
        key = self._key(source, target, shape, dtype)
        if (found := self.known.get(key)) is None:
            found = self.known[key] = 0.0 if source == target else self.seconds(source, target, shape, dtype)
        space = self._spaces.get((shape, dtype))
        if space is not None and source in space.number and target in space.number:
            self.table(shape, dtype)
            for cell in self._cells(space, source, target, dtype):
                space.version += not space.is_exact[cell]
                space.seconds[cell], space.is_exact[cell] = found, True
        return found

    def _cells(self, space: _Space, source: TensorLayout, target: TensorLayout, dtype: str) -> list[tuple[int, int]]:
        """The cells of all pairs with the same cost as a given pair."""
        if not self._has_names_to_spare(source, target, dtype):
            return [(space.number[source], space.number[target])]
        mesh, found = source.mesh, []
        for order in _renamings(mesh.device_matrix):
            one, two = (space.number.get(_with_names(layout, order), -1) for layout in (source, target))
            if one >= 0 and two >= 0:
                found.append((one, two))
        return found

    def _has_names_to_spare(self, source: TensorLayout, target: TensorLayout, dtype: str) -> bool:
        """Whether axes of equal size are interchangeable: all links and all meshes are equal."""
        mesh = source.mesh
        return self.floors is not None and mesh == target.mesh and self.floors(dtype).domains(mesh.rank_list) is None

    def _key(self, source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> object:
        """The key of a pair. Pairs that differ only in the names of axes of equal size cost the same if all links are
        equal.
        """
        if not self._has_names_to_spare(source, target, dtype):
            return source, target, shape, dtype
        mesh = source.mesh
        least = min((_renamed(source, names), _renamed(target, names)) for names in _renamings(mesh.device_matrix))
        return mesh.device_matrix, least, shape, dtype

    def _bounded(
        self, layouts: Sequence[TensorLayout], shape: tuple[int, ...], dtype: str
    ) -> tuple[Floats, npt.NDArray[np.bool_]]:
        count = len(layouts)
        seconds, is_exact = np.zeros((count, count)), np.eye(count, dtype=bool)
        meshes = {layout.mesh for layout in layouts}
        if self.floors is None or len(meshes) > 1 or not shape:
            return seconds, is_exact
        found, possible = least_seconds(self.floors(dtype), meshes.pop(), layouts, shape, itemsize(dtype))
        return np.where(possible, found * (1 - 1e-9), np.inf), is_exact | ~possible


@lru_cache(maxsize=1024)
def _renamings(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The permutations of the axes that keep the sizes."""
    return tuple(
        order
        for order in itertools.permutations(range(len(sizes)))
        if all(sizes[a] == s for a, s in zip(order, sizes, strict=True))
    )


def _renamed(layout: TensorLayout, order: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    at = {axis: order[position] for position, axis in enumerate(layout.mesh.alias_name)}
    return tuple(tuple(at[axis] for axis in axes) for axes in layout.dims), tuple(sorted(at[a] for a in layout.partial))


@lru_cache(maxsize=65_536)
def _with_names(layout: TensorLayout, order: tuple[int, ...]) -> TensorLayout:
    names = layout.mesh.alias_name
    new = {axis: names[order[position]] for position, axis in enumerate(names)}
    return TensorLayout(
        mesh=layout.mesh, dims=tuple(tuple(new[axis] for axis in axes) for axes in layout.dims),
        partial=tuple(sorted((new[axis] for axis in layout.partial), key=names.index)),
    )  # fmt: skip
