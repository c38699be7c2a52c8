"""All layouts of a tensor on a mesh of few axes, and all steps between them but transfers, as arrays.

Which layouts there are, and which step leads from one to which, does not depend on sizes: a `StepTable` is made once
for a number of axes and dims. States and axes are numbers here; an order of axes ("sequence") is an index into
`sequences`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.redistribution.step import StepKind

__all__ = ["KINDS", "StepTable", "code", "num_layouts", "sequences", "step_table"]

Array = npt.NDArray[np.int64]

KINDS = (StepKind.SLICE, StepKind.ALL_GATHER, StepKind.ALL_TO_ALL, StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE)
"""The kinds that `StepTable.kind` numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """States and the steps between them.

    Args:
        ids: [states, dims] the sequence that splits each dim.
        partial: [states] a bit per axis that holds partial sums.
        used: [states] a bit per axis that splits a dim.
        index: code of a state -> its number (see `code`).
        kind: [steps] into `KINDS`.
        moved: [steps] the sequence that communicates.
        dim: [steps] the dim it leaves (or is sliced onto); -1 for an all-reduce.
        to_dim: [steps] where an all-to-all goes; -1 elsewhere.
        source, target: [steps] states; steps are sorted by target.
        reached, starts: the states that some step leads to, and where their steps begin.
        left, leaving, leaving_starts: the states that some step leaves, the steps sorted by source, their beginnings.
        classes: [classes, 4] kind, moved axes, used axes before and after, as bits.
        class_of: [steps] the class of each.
    """

    ids: Array
    partial: Array
    used: Array
    index: dict[int, int]
    kind: Array
    moved: Array
    dim: Array
    to_dim: Array
    source: Array
    target: Array
    reached: Array
    starts: Array
    left: Array
    leaving: Array
    leaving_starts: Array
    classes: Array
    class_of: Array


@lru_cache(maxsize=8)
def sequences(num_axes: int) -> tuple[tuple[int, ...], ...]:
    """Every order of every choice of axes; the empty one is number 0.

    >>> sequences(2)
    ((), (0,), (1,), (0, 1), (1, 0))
    """
    return tuple(order for count in range(num_axes + 1) for order in itertools.permutations(range(num_axes), count))


def code(num_axes: int, ids: tuple[int, ...], partial: int) -> int:
    """A state as one number: enough bits for each dim that every sequence has a number, the partial axes above them."""
    width = _width(num_axes)
    return sum(number << width * dim for dim, number in enumerate(ids)) | partial << width * len(ids)


def _width(num_axes: int) -> int:
    return (len(sequences(num_axes)) - 1).bit_length()


def num_layouts(num_axes: int, num_dims: int) -> int:
    """Number of ways to split dims by axes, without partial sums.

    >>> num_layouts(2, 1)  # whole, by either axis, by both in either order
    5
    """
    ways = [math.comb(num_axes, used) * math.prod(range(num_dims, num_dims + used)) for used in range(num_axes + 1)]
    return sum(ways)


@lru_cache(maxsize=256)
def step_table(num_axes: int, num_dims: int, before: int, after: int) -> StepTable:
    """The steps between layouts whose partial axes include those of `after` and are within those of `before` (bits)."""
    every = _every(num_axes, num_dims)
    ids, partial, codes = every.ids, every.partial, every.codes
    kept = ((partial & after) == after) & ((partial | before) == before)
    number = np.cumsum(kept) - 1
    rows = kept[every.source] & kept[every.target]
    kind, moved, dim, to_dim = every.kind[rows], every.moved[rows], every.dim[rows], every.to_dim[rows]
    source, target = number[every.source[rows]], number[every.target[rows]]
    leaving = np.argsort(source, kind="stable")
    reached, starts = np.unique(target, return_index=True)
    left, leaving_starts = np.unique(source[leaving], return_index=True)
    used = every.used[kept]
    mask = every.masks[moved]
    width = 1 << num_axes
    keys = ((kind * width + mask) * width + used[source]) * width + used[target]
    classes, class_of = np.unique(keys, return_inverse=True)
    return StepTable(
        ids=ids[kept], partial=partial[kept], used=used,
        index={int(each): at for at, each in enumerate(codes[kept])},
        kind=kind, moved=moved, dim=dim, to_dim=to_dim, source=source, target=target, reached=reached, starts=starts,
        left=left, leaving=leaving, leaving_starts=leaving_starts,
        classes=np.stack(
            [classes // width**3, classes // width**2 % width, classes // width % width, classes % width], axis=1
        ),
        class_of=class_of.reshape(-1),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Every:
    """All states, sorted by code, and all steps, sorted by target."""

    masks: Array
    ids: Array
    partial: Array
    used: Array
    codes: Array
    kind: Array
    moved: Array
    dim: Array
    to_dim: Array
    source: Array
    target: Array


@lru_cache(maxsize=32)
def _every(num_axes: int, num_dims: int) -> _Every:
    orders = sequences(num_axes)
    number = {order: at for at, order in enumerate(orders)}
    masks = np.array([sum(1 << axis for axis in order) for order in orders], dtype=np.int64)
    lengths = np.array([len(order) for order in orders], dtype=np.int64)
    join = np.array([[number.get(one + two, -1) for two in orders] for one in orders], dtype=np.int64)
    heads = np.array([[number[order[:at]] for at in range(num_axes)] for order in orders], dtype=np.int64)
    tails = np.array([[number[order[at:]] for at in range(num_axes)] for order in orders], dtype=np.int64)
    states = _states(num_axes, num_dims, masks)
    shifts = _width(num_axes) * np.arange(num_dims + 1, dtype=np.int64)
    codes = (states << shifts).sum(axis=1)
    order = np.argsort(codes)
    states, codes = states[order], codes[order]
    ids, partial = states[:, :-1], states[:, -1]
    used = np.bitwise_or.reduce(masks[ids], axis=1) if num_dims else np.zeros(len(ids), dtype=np.int64)
    found: list[tuple[Array, ...]] = []

    def add(kind: int, rows: Array, moved: Array | int, dim: int, to_dim: int, goal: Array) -> None:
        if len(rows):
            full = [np.broadcast_to(np.int64(each), rows.shape) for each in (kind, dim, to_dim)]
            place = np.searchsorted(codes, goal)
            found.append((full[0], np.broadcast_to(moved, rows.shape), full[1], full[2], rows, place))

    for dim in range(num_dims):
        for at in range(num_axes):
            rows = np.flatnonzero(lengths[ids[:, dim]] > at)
            own = ids[rows, dim]
            moved, without = tails[own, at], codes[rows] + ((heads[own, at] - own) << shifts[dim])
            add(1, rows, moved, dim, -1, without)
            for to_dim in range(num_dims):
                if to_dim != dim:
                    other = ids[rows, to_dim]
                    add(2, rows, moved, dim, to_dim, without + ((join[other, moved] - other) << shifts[to_dim]))
    for at in range(1, len(orders)):
        free = np.flatnonzero(((used | partial) & masks[at]) == 0)
        summed = np.flatnonzero((partial & masks[at]) == masks[at])
        rest = codes[summed] - (masks[at] << shifts[-1])
        if tuple(sorted(orders[at])) == orders[at]:
            add(4, summed, at, -1, -1, rest)
        for dim in range(num_dims):
            own = ids[free, dim]
            add(0, free, at, dim, -1, codes[free] + ((join[own, at] - own) << shifts[dim]))
            own = ids[summed, dim]
            add(3, summed, at, dim, -1, rest + ((join[own, at] - own) << shifts[dim]))
    columns = [np.concatenate(each) for each in zip(*found, strict=True)]
    by_target = np.argsort(columns[5], kind="stable")
    kind, moved, dims, to_dims, source, target = (column[by_target] for column in columns)
    return _Every(
        masks=masks, ids=ids, partial=partial, used=used, codes=codes, kind=kind, moved=moved, dim=dims,
        to_dim=to_dims, source=source, target=target,
    )  # fmt: skip


def _states(num_axes: int, num_dims: int, masks: Array) -> Array:
    """[states, dims + 1]: the sequence of every dim and the partial axes, no axis twice."""
    states = np.arange(1 << num_axes, dtype=np.int64)[:, None]  # the partial axes
    taken = states[:, 0]
    for _ in range(num_dims):
        fits = (taken[:, None] & masks[None, :]) == 0
        rows, added = np.nonzero(fits)
        states = np.concatenate([states[rows, :-1], added[:, None], states[rows, -1:]], axis=1)
        taken = taken[rows] | masks[added]
    return states
