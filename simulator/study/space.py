"""The points of a study: a base and what is varied, all combinations, one axis at a time, or a sample."""

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
        points: "grid": every combination; "one-at-a-time": the base, and each value of each axis with the others as
            they are in the base.
        sample: how many combinations of the grid are drawn, without repetition; None: all of them.
        seed: of the sample.

    Raises:
        TwofoldError: an unknown axis, an axis without values or with values of another type, one value twice, too many
            points.

    >>> space = Space(base={"tp": 8}, axes={"pp": (1, 2), "zero": (0, 1)})
    >>> space.count, list(space)[1]
    (4, {'tp': 8, 'pp': 1, 'zero': 1})
    """

    base: Mapping[str, Any]
    axes: Mapping[str, Sequence[Any]]
    points: Literal["grid", "one-at-a-time"] = "grid"
    sample: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        check_settings(self.base)
        for name, values in self.axes.items():
            if not isinstance(values, list | tuple) or not values:
                raise TwofoldError(f"axis {name} is {values!r}; it is a list of values, such as [1, 2, 4]")
            for value in values:
                check_settings({name: value})
            if twice := [value for number, value in enumerate(values) if value in values[:number]]:
                raise TwofoldError(f"axis {name} has {twice[0]!r} twice; give each value once")
        if self.points not in ("grid", "one-at-a-time"):
            raise TwofoldError(f"points is {self.points!r}; it is grid or one-at-a-time")
        if self.sample is not None:
            whole_number("sample", self.sample)
            if self.points != "grid":
                raise TwofoldError('sample is of a grid; leave it out, or say points = "grid"')
        if self.count > _MOST_POINTS:
            raise TwofoldError(
                f"the study has {self.count:,} points, at most {_MOST_POINTS:,} are computed; give fewer values, "
                'points = "one-at-a-time", or sample = 10000 for that many points drawn from the grid'
            )

    @property
    def count(self) -> int:
        """How many points there are."""
        if self.points != "grid":
            return len(list(self._one_at_a_time()))
        return self._size if self.sample is None else min(self.sample, self._size)

    @property
    def _size(self) -> int:
        return math.prod(map(len, self.axes.values()))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The settings of every point."""
        if self.points != "grid":
            yield from self._one_at_a_time()
            return
        numbers: Sequence[int] = range(self._size)
        if self.count < self._size:
            numbers = _drawn(self._size, self.count, self.seed)
        for number in numbers:
            chosen = {}
            for name in reversed(list(self.axes)):
                number, place = divmod(number, len(self.axes[name]))
                chosen[name] = self.axes[name][place]
            yield {**self.base, **{name: chosen[name] for name in self.axes}}

    def _one_at_a_time(self) -> Iterator[dict[str, Any]]:
        yield dict(self.base)
        for name, values in self.axes.items():
            for value in values:
                if value != self.base.get(name):
                    yield {**self.base, name: value}


def _drawn(size: int, count: int, seed: int) -> list[int]:
    """Different numbers below `size`, in their order; `size` may exceed 64 bits."""
    draw, found = np.random.default_rng(seed), set[int]()
    while len(found) < count:
        found.add(int.from_bytes(draw.bytes(32)) % size)
    return sorted(found)
