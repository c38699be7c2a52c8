"""The effect of a sequence of instructions on the clocks of a rank: a map that is linear in (max, +).

A rank has clocks: when its **host** is free, when its compute **stream** is free, when each communication channel is,
when a tensor arrives. Without contention every instruction sets a clock to the latest of some clocks plus a constant,
and so does every sequence of instructions: new clock o = max over clocks i of (i + coefficient of o on i). Sequences
are joined by the matrix product of this algebra, and n equal blocks by log n products.

Coefficients are whole picoseconds: Python integers, or numpy arrays over any batch of configurations. Source: Baccelli,
Cohen, Olsder, Quadrat, "Synchronization and Linearity" (1992), chapter 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError

__all__ = ["NEVER", "MaxPlus", "Times", "latest"]

NEVER = -(2**60)
"""The coefficient of a clock that does not matter: so early that no sum with it is ever the latest."""

Times: TypeAlias = "int | npt.NDArray[np.int64]"
"""Picoseconds: one number, or one per configuration."""

Row: TypeAlias = "Mapping[str, Times]"
"""A clock as the latest of others plus constants."""


def latest(one: Times, other: Times) -> Times:
    """The later of two times, elementwise."""
    if isinstance(one, int) and isinstance(other, int):
        return one if one >= other else other
    return np.maximum(one, other)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaxPlus:
    """A sequence of instructions of one rank, as a map of its clocks.

    Args:
        rows: clock -> its value afterwards: {clock before: constant}, the latest of their sums. Clocks that it does not
            name keep their value.

    Where hosts issue and devices compute (`host_async`) there are the clocks "host" and "stream". Where the host
    computes itself there is only "host", which all methods below find out from the clocks.

    >>> block = MaxPlus.identity().compute(2, 10).compute(2, 5)
    >>> block.rows["stream"]
    {'stream': 15, 'host': 17}
    >>> block.repeat(3).rows["stream"]
    {'stream': 45, 'host': 47}
    """

    rows: Mapping[str, Row]

    @classmethod
    def identity(cls, clocks: Iterable[str] = ("stream", "host")) -> MaxPlus:
        """The map that changes no clock."""
        return cls(rows={clock: {clock: 0} for clock in clocks})

    @property
    def clocks(self) -> tuple[str, ...]:
        """The clocks that the map changes."""
        return tuple(self.rows)

    def row(self, clock: str) -> Row:
        """A clock after the sequence; unchanged if the sequence does not move it."""
        return self.rows.get(clock, {clock: 0})

    def coefficient(self, after: str, before: str) -> Times:
        """The least difference of clock `after` to clock `before`; NEVER if it does not depend on it."""
        return self.row(after).get(before, NEVER)

    # ------------------------------------------------------------------ instructions

    def host(self, dispatch_ps: Times) -> MaxPlus:
        """Add host time."""
        return self._with(host=_later(self.row("host"), dispatch_ps))

    def compute(self, dispatch_ps: Times, work_ps: Times) -> MaxPlus:
        """Compute: issued by the host, done by the stream; both by the host where there is no stream."""
        if "stream" not in self.rows:
            return self.host(dispatch_ps + work_ps)
        host = _later(self.row("host"), dispatch_ps)
        return self._with(host=host, stream=_later(_join(self.row("stream"), host), work_ps))

    def mark(self, clock: str) -> MaxPlus:
        """Set clock `clock` to the time at which communication issued now would be posted."""
        return self._with(**{clock: self._now()})

    def issue(self, token: str, dispatch_ps: Times, work_ps: Times, channel: str = "channel") -> MaxPlus:
        """Issue communication among ranks that all do the same; `token` and `channel` are set to its end.

        It begins after the compute issued before it and after what went over its channel before.
        """
        issued = self.host(dispatch_ps)
        end = _later(_join(issued._now(), issued.row(channel)), work_ps)
        return issued._with(**{token: end, channel: end})

    def wait(self, token: str, dispatch_ps: Times = 0) -> MaxPlus:
        """Wait for a token and drop it: the stream waits, or the host if it computes itself."""
        if token not in self.rows:
            raise TwofoldError(f"a wait for {token!r}, which nothing before it issues; known are {list(self.rows)}")
        return self.host(dispatch_ps).wait_for(token).drop(token)

    def wait_for(self, clock: str) -> MaxPlus:
        """Wait for a clock that stays unchanged, for example the "arrival" of a tensor that another rank sends."""
        own = "stream" if "stream" in self.rows else "host"
        return self._with(**{own: _join(self.row(own), self.row(clock))})

    def drop(self, *clocks: str) -> MaxPlus:
        """The map without some of its clocks."""
        return MaxPlus(rows={clock: row for clock, row in self.rows.items() if clock not in clocks})

    # ------------------------------------------------------------------- composition

    def then(self, following: MaxPlus) -> MaxPlus:
        """The map of this sequence followed by another one."""
        rows = dict(self.rows)
        for clock, row in following.rows.items():
            joined: dict[str, Times] = {}
            for between, constant in row.items():
                for before, first in self.row(between).items():
                    total = first + constant
                    joined[before] = latest(joined[before], total) if before in joined else total
            rows[clock] = joined
        return MaxPlus(rows=rows)

    def repeat(self, count: int | npt.NDArray[np.int64]) -> MaxPlus:
        """`count` times in a row, by squaring; an array repeats every configuration its own number of times."""
        if np.min(count) < 0:
            raise TwofoldError(f"a block is repeated {count} times; it must be at least 0")
        result = MaxPlus.identity(self.rows)
        power = self
        left = count
        while np.max(left) > 0:
            odd = left % 2
            if isinstance(odd, int):
                result = result.then(power) if odd else result
            elif np.any(odd):
                result = _where(odd == 1, result.then(power), result)
            left = left // 2
            if np.max(left) > 0:
                power = power.then(power)
        return result

    @classmethod
    def stack(cls, maps: Sequence[MaxPlus], axis: int = -1) -> MaxPlus:
        """Maps as one with a further axis, such as one entry per stage.

        A clock that one of them does not move keeps its value there; one that nothing reads before ("sent") is NEVER.

        >>> stages = MaxPlus.stack([MaxPlus.identity().compute(1, work) for work in (10, 20)])
        >>> stages.rows["stream"]["stream"]
        array([10, 20])
        """
        rows: dict[str, Row] = {}
        read = {before for max_plus in maps for row in max_plus.rows.values() for before in row}
        for clock in dict.fromkeys(clock for max_plus in maps for clock in max_plus.rows):
            own = [max_plus.row(clock) if clock in max_plus.rows or clock in read else {} for max_plus in maps]
            rows[clock] = {
                before: _stacked([row.get(before, NEVER) for row in own], axis)
                for before in dict.fromkeys(before for row in own for before in row)
            }
        return cls(rows=rows)

    def _now(self) -> Row:
        return _join(self.row("stream"), self.row("host")) if "stream" in self.rows else self.row("host")

    def _with(self, **rows: Row) -> MaxPlus:
        return MaxPlus(rows={**self.rows, **rows})


def _array(times: Times | Sequence[Times]) -> npt.NDArray[np.int64]:
    try:
        return np.asarray(times, dtype=np.int64)
    except OverflowError:
        raise TwofoldError(
            "a part of the step takes more than 2^63 picoseconds (106 days), the longest "
            "supported time; use smaller sizes"
        ) from None


def _stacked(times: Sequence[Times], axis: int) -> npt.NDArray[np.int64]:
    if all(isinstance(time, int) for time in times):
        return _array(times)
    return np.stack(np.broadcast_arrays(*map(_array, times)), axis)


def _later(row: Row, by: Times) -> Row:
    return {clock: constant + by for clock, constant in row.items()}


def _join(one: Row, other: Row) -> Row:
    joined = dict(one)
    for clock, constant in other.items():
        joined[clock] = latest(joined[clock], constant) if clock in joined else constant
    return joined


def _where(condition: npt.NDArray[np.bool_], one: MaxPlus, other: MaxPlus) -> MaxPlus:
    rows: dict[str, Row] = {}
    for clock in dict.fromkeys((*one.rows, *other.rows)):
        first, second = one.row(clock), other.row(clock)
        rows[clock] = {
            before: np.where(condition, first.get(before, NEVER), second.get(before, NEVER))
            for before in dict.fromkeys((*first, *second))
        }
    return MaxPlus(rows=rows)
