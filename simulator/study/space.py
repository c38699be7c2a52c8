"""The points of a study: a base and its axes, combined in a grid, changed one at a time, or sampled.

Axes of one table of `together` are linked: their first values form a point, then their second values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from plans.errors import TwofoldError, whole_number
from simulator.study.axes import check_settings

__all__ = ["Space"]

_MOST_POINTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A base case and axes.

    Args:
        base: settings of every point that are not varied.
        axes: name -> values; the last one changes fastest.
        together: tables of axes, each with as many values as the others of its table; they change faster than `axes`.
        points: "grid": every combination; "one-at-a-time": the base, and each value of each axis (of axes that go
            together, each of their rows) with the others as they are in the base.
        sample: how many combinations of the grid are drawn, without repetition; None: all of them.
        seed: seed of the sample.

    Raises:
        TwofoldError: an unknown axis, an axis without values or with values of another type, one value twice, axes that
            go together and have unequal numbers of values, an axis that is given twice, too many points.

    >>> space = Space(base={"tp": 8}, axes={"pp": (1, 2), "zero": (0, 1)})
    >>> space.count, list(space)[1]
    (4, {'tp': 8, 'pp': 1, 'zero': 1})
    >>> list(Space(base={}, axes={}, together=[{"devices": (8, 16), "global_batch": (64, 128)}]))
    [{'devices': 8, 'global_batch': 64}, {'devices': 16, 'global_batch': 128}]
    """

    base: Mapping[str, Any]
    axes: Mapping[str, Sequence[Any]]
    together: Sequence[Mapping[str, Sequence[Any]]] = ()
    points: Literal["grid", "one-at-a-time"] = "grid"
    sample: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        check_settings(self.base)
        for table in self._tables:
            _check(table)
        names = [name for table in self._tables for name in table]
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise TwofoldError(f"axis {twice[0]} is given twice, in axes and in together; give it once")
        if self.points not in ("grid", "one-at-a-time"):
            raise TwofoldError(f"points must be grid or one-at-a-time, not {self.points!r}")
        if self.sample is not None:
            whole_number("sample", self.sample)
            if self.points != "grid":
                raise TwofoldError('sample needs a grid; omit it, or set points = "grid"')
        if self.count > _MOST_POINTS:
            raise TwofoldError(
                f"the study has {self.count:,} points, at most {_MOST_POINTS:,} are computed; give fewer values, "
                'points = "one-at-a-time", or sample = 10000 for that many points drawn from the grid'
            )

    @property
    def count(self) -> int:
        """Number of points."""
        if self.points != "grid":
            return len(list(self._one_at_a_time()))
        return self._size if self.sample is None else min(self.sample, self._size)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all axes."""
        return tuple(name for table in self._tables for name in table)

    @property
    def _tables(self) -> list[Mapping[str, Sequence[Any]]]:
        """Every axis alone, then those that go together."""
        return [*({name: values} for name, values in self.axes.items()), *self.together]

    @property
    def _size(self) -> int:
        return math.prod(_length(table) for table in self._tables)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The settings of every point."""
        if self.points != "grid":
            yield from self._one_at_a_time()
            return
        tables = self._tables[::-1]
        numbers: Sequence[int] = range(self._size)
        if self.count < self._size:
            numbers = _drawn(self._size, self.count, self.seed)
        for number in numbers:
            chosen = []
            for table in tables:
                number, place = divmod(number, _length(table))
                chosen.append(_row(table, place))
            yield dict(self.base) | {name: value for row in reversed(chosen) for name, value in row.items()}

    def _one_at_a_time(self) -> Iterator[dict[str, Any]]:
        yield dict(self.base)
        for table in self._tables:
            for place in range(_length(table)):
                if (changed := {**self.base, **_row(table, place)}) != self.base:
                    yield changed


def _check(table: Mapping[str, Sequence[Any]]) -> None:
    """Refuse impossible axes, or linked axes that do not fit together.

    Raises:
        TwofoldError: as `Space`.
    """
    if not table:
        raise TwofoldError("a table of linked axes is empty; it needs at least two axes")
    for name, values in table.items():
        if not isinstance(values, list | tuple) or not values:
            raise TwofoldError(f"axis {name} must be a list of values, such as [1, 2, 4], not {values!r}")
        for value in values:
            check_settings({name: value})
    first, *others = table
    for name in others:
        if len(table[name]) != len(table[first]):
            raise TwofoldError(
                f"linked axes {first} and {name} have {len(table[first])} and {len(table[name])} values; they need "
                "the same number"
            )
    rows = [_row(table, place) for place in range(_length(table))]
    if twice := [row for number, row in enumerate(rows) if row in rows[:number]]:
        if others:
            row_text = ", ".join(f"{name} = {value!r}" for name, value in twice[0].items())
            raise TwofoldError(f"linked axes have {row_text} twice; give each row once")
        raise TwofoldError(f"axis {first} has {twice[0][first]!r} twice; give each value once")


def _length(table: Mapping[str, Sequence[Any]]) -> int:
    return len(next(iter(table.values())))


def _row(table: Mapping[str, Sequence[Any]], place: int) -> dict[str, Any]:
    return {name: values[place] for name, values in table.items()}


def _drawn(size: int, count: int, seed: int) -> list[int]:
    """Different numbers below `size`, in their order; `size` may exceed 64 bits."""
    draw, found = np.random.default_rng(seed), set[int]()
    while len(found) < count:
        found.add(int.from_bytes(draw.bytes(32)) % size)
    return sorted(found)
