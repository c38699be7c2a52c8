"""The layouts of one tensor on one mesh as states of a search, and the steps between them.

States are plain tuples, so that thousands of them cost little; `Space.step` makes the real `Step` of a move. Axes of
size 1 do not appear in states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from plans.layout import DimAxes, Layout, TensorLayout
from plans.redistribution.cuts import Indices, cut, overlap
from plans.redistribution.step import Step, StepKind

__all__ = ["Move", "Space", "State", "put"]

State = tuple[tuple[DimAxes, ...], DimAxes]
"""The axes of every dim, and the partial axes in mesh order."""


class Move(NamedTuple):
    """A step between two states."""

    kind: StepKind
    axes: DimAxes
    dim: int | None
    to_dim: int | None
    before: State
    after: State


class Space:
    """All layouts of a tensor of `shape` on `mesh`, on the way to `target`."""

    def __init__(self, mesh: Layout, target: TensorLayout, shape: tuple[int, ...]) -> None:
        self.mesh = mesh
        self.shape = shape
        self.sizes = {axis: mesh.size((axis,)) for axis in mesh.alias_name}
        self.axes = tuple(axis for axis in mesh.alias_name if self.sizes[axis] > 1)
        self.goal = self.state(target)
        self.open_dims = tuple(range(len(shape)))
        self._layouts: dict[State, TensorLayout] = {}
        self._parts: dict[tuple[DimAxes, int], int] = {}
        self._local: dict[State, int] = {}
        self._lacking: dict[tuple[State, State], int] = {}

    def drop_spare_dims(self, start: State, goal: State) -> None:
        """Keep only one of the dims that neither layout splits, for splits on the way, if all axes can split it evenly.

        Such dims are equivalent: splitting one of them gains the same as splitting any other.
        """
        spare = [dim for dim, axes in enumerate(zip(start[0], goal[0], strict=True)) if axes == ((), ())]
        whole = math.prod(self.sizes.values())
        kept = [dim for dim in spare if self.shape[dim] % whole == 0][:1]
        if kept:
            self.open_dims = tuple(dim for dim in self.open_dims if dim not in spare or dim in kept)

    def state(self, layout: TensorLayout) -> State:
        """The state of a layout on this mesh."""
        kept = frozenset(self.axes)
        partial = frozenset(layout.partial)
        return (
            tuple(tuple(axis for axis in axes if axis in kept) for axes in layout.dims),
            tuple(axis for axis in self.axes if axis in partial),
        )

    def layout(self, state: State) -> TensorLayout:
        """The layout of a state."""
        if state not in self._layouts:
            self._layouts[state] = TensorLayout(mesh=self.mesh, dims=state[0], partial=state[1])
        return self._layouts[state]

    def step(self, move: Move) -> Step:
        """The step of a move."""
        before, after = self.layout(move.before), self.layout(move.after)
        return Step(kind=move.kind, axes=move.axes, dim=move.dim, to_dim=move.to_dim, before=before, after=after)

    def states(self, least: DimAxes, most: DimAxes) -> Iterator[State]:
        """Every state whose partial axes include `least` and are within `most`.

        >>> mesh = Layout((2,), ("a",))
        >>> list(Space(mesh, mesh("a"), (4,)).states((), ("a",)))
        [(((),), ()), ((('a',),), ()), (((),), ('a',))]
        """
        num_dims, dims_seen = len(self.shape), {}
        for order in itertools.permutations(self.axes):
            for places in itertools.product(range(-1, num_dims), repeat=len(order)):
                cuts = (
                    tuple(axis for axis, at in zip(order, places, strict=True) if at == dim) for dim in range(num_dims)
                )
                dims_seen[tuple(cuts)] = {axis for axis, at in zip(order, places, strict=True) if at < 0}
        for count in range(len(most) + 1):
            for partial in itertools.combinations(most, count):
                if set(least) <= set(partial):
                    yield from ((dims, partial) for dims, free in dims_seen.items() if free.issuperset(partial))

    def may_be_uneven(self) -> bool:
        """Whether some layout cuts a dim unevenly."""
        whole = math.prod(self.sizes.values())
        return any(size % whole for size in self.shape)

    def moves(self, state: State, goal: State) -> Iterator[Move]:
        """Every collective and slice that leads on from `state`; sums that the goal keeps stay untouched."""
        dims, partial = state
        used = {axis for axes in dims for axis in axes} | set(partial)
        free = tuple(axis for axis in self.axes if axis not in used)
        for axes in self._orders(free):
            for dim in self.open_dims:
                own = dims[dim]
                yield Move(StepKind.SLICE, axes, dim, None, state, (put(dims, dim, own + axes), partial))
        for dim, own in enumerate(dims):
            for at in range(len(own)):
                kept, axes = own[:at], own[at:]
                without = put(dims, dim, kept)
                yield Move(StepKind.ALL_GATHER, axes, dim, None, state, (without, partial))
                for to_dim in self.open_dims:
                    other = dims[to_dim]
                    if to_dim != dim:
                        after = (put(without, to_dim, other + axes), partial)
                        yield Move(StepKind.ALL_TO_ALL, axes, dim, to_dim, state, after)
        due = tuple(axis for axis in partial if axis not in goal[1])
        for axes in self._orders(due):
            rest = tuple(axis for axis in partial if axis not in axes)
            if axes == tuple(axis for axis in due if axis in axes):
                yield Move(StepKind.ALL_REDUCE, axes, None, None, state, (dims, rest))
            for dim in self.open_dims:
                own = dims[dim]
                yield Move(StepKind.REDUCE_SCATTER, axes, dim, None, state, (put(dims, dim, own + axes), rest))

    def closing(self, goal: State) -> list[Move]:
        """Every all-gather and all-to-all that leads to the goal."""
        dims, partial = goal
        used = {axis for axes in dims for axis in axes} | set(partial)
        free = tuple(axis for axis in self.axes if axis not in used)
        found = []
        for axes in self._orders(free):
            for dim in self.open_dims:
                before = (put(dims, dim, dims[dim] + axes), partial)
                found.append(Move(StepKind.ALL_GATHER, axes, dim, None, before, goal))
        for to_dim, own in enumerate(dims):
            for at in range(len(own)):
                without = put(dims, to_dim, own[:at])
                for dim in self.open_dims:
                    if dim != to_dim:
                        before = (put(without, dim, dims[dim] + own[at:]), partial)
                        found.append(Move(StepKind.ALL_TO_ALL, own[at:], dim, to_dim, before, goal))
        return found

    def _orders(self, axes: DimAxes) -> Iterator[DimAxes]:
        """Every ordered choice of `axes`; on more than three axes only single ones, all, and runs that the goal has."""
        if len(self.axes) <= 3:
            for count in range(1, len(axes) + 1):
                yield from itertools.permutations(axes, count)
            return
        chosen: dict[DimAxes, None] = dict.fromkeys((axis,) for axis in axes)
        chosen[axes] = None
        for wanted in self.goal[0]:
            for low, high in itertools.combinations(range(len(wanted) + 1), 2):
                if set(wanted[low:high]) <= set(axes):
                    chosen[wanted[low:high]] = None
        yield from (choice for choice in chosen if choice)

    def part(self, axes: DimAxes, dim: int) -> int:
        """The largest part of a dim cut by `axes` in turn."""
        key = (axes, dim)
        if key not in self._parts:
            size = self.shape[dim]
            for axis in axes:
                size = -(-size // self.sizes[axis])
            self._parts[key] = size
        return self._parts[key]

    def local_elements(self, state: State) -> int:
        """The elements of the largest local part."""
        if state not in self._local:
            self._local[state] = math.prod(self.part(axes, dim) for dim, axes in enumerate(state[0]))
        return self._local[state]

    def is_even(self, state: State) -> bool:
        """Whether every dim is cut into parts of one size."""
        return all(
            size % math.prod(self.sizes[axis] for axis in axes) == 0
            for size, axes in zip(self.shape, state[0], strict=True)
        )

    def is_alike(self, one: State, two: State) -> bool:
        """Whether every rank holds the same part in both; parts without elements may still differ in shape."""
        if one == two:
            return True
        if one[1] != two[1] or self.lacking(one, two) or self.lacking(two, one):
            return False
        if self.is_even(one) and self.is_even(two):
            return True
        lengths = [
            [np.subtract(*cut(self.mesh, axes, size)) for size, axes in zip(self.shape, state[0], strict=True)]
            for state in (one, two)
        ]
        return all(np.array_equal(mine, theirs) for mine, theirs in zip(*lengths, strict=True))

    def received(self, move: Move) -> int:
        """The elements that the rank which receives most gets; agrees with `traffic.max_received_bytes`."""
        if move.kind is StepKind.SLICE:
            return 0
        if move.kind is StepKind.TRANSFER:
            return self.lacking(move.before, move.after)
        members = math.prod(self.sizes[axis] for axis in move.axes)
        if move.kind is StepKind.ALL_GATHER:
            return (members - 1) * self.local_elements(move.before)
        if move.kind is StepKind.REDUCE_SCATTER:
            return (members - 1) * self.local_elements(move.after)
        if move.kind is StepKind.ALL_REDUCE:
            return 2 * (members - 1) * -(-self.local_elements(move.before) // members)
        chunk = [self.part(axes, dim) for dim, axes in enumerate(move.before[0])]
        assert move.to_dim is not None
        chunk[move.to_dim] = self.part(move.after[0][move.to_dim], move.to_dim)
        return (members - 1) * math.prod(chunk)

    def lacking(self, state: State, goal: State | None = None) -> int:
        """The elements of `goal` (the target by default) that the worst rank does not hold in `state`.

        Where sums are still to be taken a rank holds no finished value, and lacks its full part.
        """
        goal = self.goal if goal is None else goal
        key = (state, goal)
        if key not in self._lacking:
            self._lacking[key] = self._count_lacking(state, goal)
        return self._lacking[key]

    def _count_lacking(self, state: State, goal: State) -> int:
        if state[1] != goal[1]:
            return self.local_elements(goal)
        wanted: Indices | int = 1
        held: Indices | int = 1
        for size, mine, theirs in zip(self.shape, state[0], goal[0], strict=True):
            low, high = cut(self.mesh, theirs, size)
            wanted = wanted * (high - low)
            held = held * overlap(self.mesh, mine, theirs, size)
        return int(np.max(np.asarray(wanted - held)))


def put(dims: tuple[DimAxes, ...], dim: int, axes: DimAxes) -> tuple[DimAxes, ...]:
    """The dims with one of them split by `axes`."""
    return (*dims[:dim], axes, *dims[dim + 1 :])
