"""A lower bound on the least total cost, and on the least total with each single value, for problems of any shape.

Elimination needs tables over all variables that meet, which real graphs make too large. Here no table grows: the sum is
rewritten, without changing its value, until the sum of all minima is as large as possible. One step takes a variable,
moves the minimum of each of its tables for every value into the variable, and distributes the sum over the tables that
follow. A forward and backward pass over the variables raises the sum of the minima and never lowers it. It is a lower
bound on the least total, and at convergence nearly always equal to it (sequential reparametrisation: Kolmogorov, TRW-S,
2006; Kolmogorov, SRMP, 2015).

A value whose bound exceeds a known solution cannot be in a better one and is removed. When few values are left,
elimination solves the rest.

A tensor whose table is too large is represented by pairs of its producer with each reader. The price of a
redistribution that several readers share is distributed over them. Any distribution gives a lower bound, and the parts
are moved to where they raise it (`_Pairs.share`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from search.operators.problem import Problem
from search.operators.tensor_edges import TensorEdge

__all__ = ["Dual"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NOTHING = 1e-15
"""Seconds below which a cost counts as zero."""

_NO_WAY = 1e3
"""Replaces infinite seconds, between layouts without a conversion: more than any answer, but sums remain exact."""

MOST_CELLS = 70_000
"""Largest table of a tensor, in cells, that is not divided into pairs."""


@dataclass(slots=True, eq=False)
class _Table:
    """The remaining part of a table, by the kinds of its variables' values."""

    variables: tuple[int, ...]
    kind_of: list[Ints]
    costs: Floats


class _Whole:
    """A tensor with one table."""

    def __init__(self, edge: TensorEdge, seconds: Floats) -> None:
        self.edge, self.seconds = edge, seconds
        self.costs = edge.costs(_finite(seconds))
        self.tables = [self._table(self.costs.copy())]

    def _table(self, costs: Floats) -> _Table:
        axes = self.edge.axes
        return _Table(tuple(self.edge.variables[at] for at in axes), [self.edge.kind_of[at] for at in axes], costs)

    def own(self) -> Floats | None:
        """The cost of the first variable."""
        return None

    def raised(self, seconds: Floats) -> Floats | None:
        """Replace seconds by larger ones; returns the additional cost of the first variable."""
        costs, self.seconds = self.edge.costs(_finite(seconds)), seconds
        self.tables[0].costs += costs - self.costs
        self.costs = costs
        return None

    def share(self) -> None:
        """No cost is shared."""

    def restricted(self, edge: TensorEdge, rows: list[Ints]) -> _Whole:
        """The same tensor with some kinds removed."""
        new = _Whole.__new__(_Whole)
        left = np.ix_(*(rows[at] for at in self.edge.axes))
        shape = [edge.sizes[at] for at in edge.axes]
        new.edge, new.seconds, new.costs = edge, self.seconds, self.costs[left].reshape(shape)
        new.tables = [new._table(self.tables[0].costs[left].reshape(shape))]
        return new


class _Pairs:
    """A tensor as pairs of its first variable with each of the others.

    `parts` has per direction (there, back) and reader [kinds of the first variable, layouts]: the reader's part of the
    price. Over the readers that know a layout the parts add up to the price.
    """

    def __init__(self, edge: TensorEdge, seconds: Floats) -> None:
        self.edge, self.seconds = edge, seconds
        self.readers = [slot for slot in edge.slots if slot[0] != 0]
        prices, self._own = self._prices(seconds)
        self.knows = [self._counts(number) for number in (1, 2)[: len(prices)]]
        self.parts = [
            [price / np.maximum(knows, 1) for _ in self.readers]
            for price, knows in zip(prices, self.knows, strict=True)
        ]
        self.tables = [
            _Table(
                (edge.variables[0], edge.variables[slot[0]]), [edge.kind_of[0], edge.kind_of[slot[0]]],
                np.asarray(sum(parts[at][:, slot[1 + number]] for number, parts in enumerate(self.parts))),
            )
            for at, slot in enumerate(self.readers)
        ]  # fmt: skip

    def _counts(self, number: int) -> Floats:
        """The number of readers that know each layout."""
        counts = np.zeros(len(self.seconds))
        for slot in self.readers:
            counts[np.unique(slot[number])] += 1
        return counts

    def _prices(self, seconds: Floats) -> tuple[list[Floats], Floats]:
        """Per direction [kinds of the first variable, layouts], without what that variable reads itself; and that."""
        edge, seconds = self.edge, _finite(seconds)
        prices = [seconds[edge.source]]
        if edge.wanted:
            prices.append(seconds[:, edge.arrives].T.copy())
        own, rows = np.zeros(len(edge.source)), np.arange(len(edge.source))
        for slot in edge.slots:
            if slot[0] == 0:
                for price, layouts in zip(prices, slot[1:], strict=False):
                    own += price[rows, layouts]
                    price[rows, layouts] = 0.0
        return prices, own

    def own(self) -> Floats | None:
        """The cost of the first variable, by its kinds."""
        return self._own

    def raised(self, seconds: Floats) -> Floats | None:
        """Replace seconds by larger ones; returns the additional cost of the first variable."""
        before, own_before = self._prices(self.seconds)
        after, own = self._prices(seconds)
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            rise = (new - old) / np.maximum(self.knows[number], 1)
            for slot, parts, table in zip(self.readers, self.parts[number], self.tables, strict=True):
                parts += rise
                table.costs += rise[:, slot[1 + number]]
        self.seconds, self._own = seconds, own
        return own - own_before

    def share(self) -> None:
        """Let those readers pay for a layout whose bound that raises."""
        for number, every in enumerate(self.parts):
            pool, needs = np.zeros_like(every[0]), np.zeros_like(every[0])
            found = []
            for slot, parts, table in zip(self.readers, every, self.tables, strict=True):
                groups = _groups(slot[1:][number].tobytes())
                slack = table.costs - table.costs.min(axis=1, keepdims=True)
                least = np.minimum.reduceat(slack[:, groups.order], groups.starts, axis=1)
                spare = np.minimum(parts[:, groups.numbers], least)
                need = least <= _NOTHING
                pool[:, groups.numbers] += spare
                needs[:, groups.numbers] += need
                found.append((groups, spare, need))
            fair = pool / np.maximum(np.where(needs > 0, needs, self.knows[number]), 1)
            for (groups, spare, need), parts, table in zip(found, every, self.tables, strict=True):
                some = needs[:, groups.numbers] > 0
                change = np.where(need | ~some, fair[:, groups.numbers], 0.0) - spare
                parts[:, groups.numbers] += change
                table.costs += change[:, groups.place]

    def restricted(self, edge: TensorEdge, rows: list[Ints]) -> _Whole | _Pairs:
        """The same tensor with some kinds removed; as one table if that is small now."""
        first = rows[0]
        parts = [[part[first] for part in every] for every in self.parts]
        costs = [
            table.costs[np.ix_(first, rows[slot[0]])] for slot, table in zip(self.readers, self.tables, strict=True)
        ]
        new = _Pairs.__new__(_Pairs)
        new.edge, new.seconds = edge, self.seconds
        new.readers = [slot for slot in edge.slots if slot[0] != 0]
        if math.prod(edge.sizes) <= MOST_CELLS:
            whole = _Whole(edge, self.seconds)
            _, own = new._prices(self.seconds)
            whole.tables[0].costs -= _along(own, 0, edge)  # it stays with the variable
            for at, slot in enumerate(new.readers):
                paid = sum(part[at][:, slot[1 + number]] for number, part in enumerate(parts))
                whole.tables[0].costs += _along(costs[at] - paid, slot[0], edge)
            return whole
        new._own = new._prices(self.seconds)[1]
        new.knows = [new._counts(number) for number in (1, 2)[: len(parts)]]
        new.parts = parts
        new.tables = [
            _Table((edge.variables[0], edge.variables[slot[0]]), [edge.kind_of[0], edge.kind_of[slot[0]]], cost)
            for slot, cost in zip(new.readers, costs, strict=True)
        ]
        new._take_over(new._prices(self.seconds)[0])
        return new

    def _take_over(self, prices: list[Floats]) -> None:
        """Share the parts out that belonged to readers which do not know a layout any more."""
        for number, every in enumerate(self.parts):
            paid = np.zeros_like(prices[number])
            for slot, part in zip(self.readers, every, strict=True):
                known = np.unique(slot[1 + number])
                paid[:, known] += part[:, known]
            open_ = (prices[number] - paid) / np.maximum(self.knows[number], 1)
            for slot, part, table in zip(self.readers, every, self.tables, strict=True):
                part += open_
                table.costs += open_[:, slot[1 + number]]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups of equal numbers: an order that sorts them, the start of each group, their values, and the group of each
    given number.
    """

    order: Ints
    starts: Ints
    numbers: Ints
    place: Ints


@lru_cache(maxsize=4096)
def _groups(given: bytes) -> _Groups:
    numbers = np.frombuffer(given, dtype=np.int64)
    found, place = np.unique(numbers, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(numbers[order]) > 0])
    return _Groups(order, starts, found, place.reshape(-1))


def _finite(seconds: Floats) -> Floats:
    return np.where(np.isfinite(seconds), seconds, _NO_WAY)


def _along(costs: Floats, axis: int, edge: TensorEdge) -> Floats:
    """[kinds of the first variable] or [those, kinds of another] in the dims of the edge's table."""
    own = {0, axis} if costs.ndim == 2 else {0}
    return costs.reshape([edge.sizes[at] if at in own else 1 for at in edge.axes])


@dataclass(slots=True)
class _Side:
    """A table from the point of view of one of its variables."""

    table: _Table
    axis: int
    others: tuple[int, ...]
    shape: list[int]
    kinds: Ints
    groups: _Groups | None
    ahead: tuple[bool, bool]


@dataclass(slots=True)
class Dual:
    """The bound of one problem; `problem` loses the values that `drop` takes away.

    Args:
        problem: own costs and tensors.
    """

    problem: Problem
    own: list[Floats] = field(init=False)
    met: list[tuple[int, ...]] = field(init=False, default_factory=list)
    _tensors: list[_Whole | _Pairs] = field(init=False)
    _sides: list[list[_Side]] = field(init=False)

    def __post_init__(self) -> None:
        self.own = [each.copy() for each in self.problem.own]
        self._tensors = []
        for edge in self.problem.edges:
            small = len(edge.sizes) < 3 or math.prod(edge.sizes) <= MOST_CELLS
            tensor = (_Whole if small else _Pairs)(edge, self.problem.seconds(edge))
            self._tensors.append(tensor)
            self._pay(edge, tensor.own())
        self._connect()

    def _pay(self, edge: TensorEdge, seconds: Floats | None) -> None:
        if seconds is not None:
            self.own[edge.variables[0]] += seconds[edge.kind_of[0]]

    def _connect(self) -> None:
        self._sides = [[] for _ in self.own]
        for tensor in self._tensors:
            for table in tensor.tables:
                first, last = min(table.variables), max(table.variables)
                for axis, variable in enumerate(table.variables):
                    kinds = table.kind_of[axis]
                    plain = len(kinds) == table.costs.shape[axis] and bool((kinds == np.arange(len(kinds))).all())
                    self._sides[variable].append(
                        _Side(
                            table, axis, tuple(at for at in range(table.costs.ndim) if at != axis),
                            [-1 if at == axis else 1 for at in range(table.costs.ndim)], kinds,
                            None if plain else _groups(kinds.tobytes()), (variable < last, variable > first),
                        )
                    )  # fmt: skip

    # -------------------------------------------------------------------- bound

    def bound(self) -> float:
        """The lower bound: no choice of values costs less."""
        tables = sum(float(table.costs.min()) for tensor in self._tensors for table in tensor.tables)
        return tables + sum(float(own.min()) for own in self.own)

    def value_bounds(self) -> list[Floats]:
        """Per variable and value: no choice with it costs less. A bound, not the least total with the value."""
        bound, found = self.bound(), []
        for own, sides in zip(self.own, self._sides, strict=True):
            above = own - own.min()
            for side in sides:
                least = side.table.costs.min(axis=side.others)
                above = above + (least - least.min())[side.kinds]
            found.append(bound + above)
        return found

    def sweep(self) -> None:
        """Pass over the variables forward and backward; `met` are the choices found on the way."""
        count = len(self.own)
        self.met = [self._through(range(count), 0), self._through(range(count - 1, -1, -1), 1)]
        for tensor in self._tensors:
            tensor.share()

    def _through(self, order: range, way: int) -> tuple[int, ...]:
        values = [-1] * len(self.own)
        for variable in order:
            own, sides = self.own[variable], self._sides[variable]
            messages = []
            for side in sides:
                least = side.table.costs.min(axis=side.others)
                own += least if side.groups is None else least[side.kinds]
                messages.append(least)
            values[variable] = self._chosen(variable, messages, values)
            out = sum(side.ahead[way] for side in sides)
            weight = 1.0 / max(out, sum(side.ahead[1 - way] for side in sides), 1)
            part = own * weight
            for side, least in zip(sides, messages, strict=True):
                if not side.ahead[way]:
                    side.table.costs -= least.reshape(side.shape)
                    continue
                if side.groups is None:
                    given = part
                    own -= given
                else:
                    given = np.minimum.reduceat(part[side.groups.order], side.groups.starts)
                    own -= given[side.kinds]
                side.table.costs += (given - least).reshape(side.shape)
        return tuple(values)

    def _chosen(self, variable: int, shares: Sequence[Floats], values: Sequence[int]) -> int:
        """The best value of a variable given the values chosen so far."""
        score = self.own[variable].copy()
        for side, least in zip(self._sides[variable], shares, strict=True):
            table = side.table
            known = [
                table.kind_of[at][values[other]] if at != side.axis and values[other] >= 0 else slice(None)
                for at, other in enumerate(table.variables)
            ]
            if all(isinstance(each, slice) for each in known):
                continue
            part = table.costs[tuple(known)]
            if part.ndim > 1:
                axis = sum(isinstance(each, slice) for each in known[: side.axis])
                part = part.min(axis=tuple(at for at in range(part.ndim) if at != axis))
            score += (part - least)[side.kinds]
        return int(score.argmin())

    # ------------------------------------------------------------------ changes

    def rise(self) -> None:
        """Adopt prices that have risen. The bound remains valid and rises too."""
        for tensor in self._tensors:
            seconds = self.problem.seconds(tensor.edge)
            if seconds is not tensor.seconds:
                self._pay(tensor.edge, tensor.raised(seconds))

    def near(self, limits: Iterable[float], fits: Callable[[Sequence[int]], bool]) -> Problem | None:
        """The problem of the values that may cost no more than the first of some limits with which it fits.

        Args:
            limits: totals.
            fits: whether these values do.
        """
        bounds = self.value_bounds()
        for limit in limits:
            keep = [np.flatnonzero(bound <= max(limit, float(bound.min()))) for bound in bounds]
            if fits([len(kept) for kept in keep]):
                return self.problem.restricted(keep)
        return None

    def drop(self, limit: float) -> None:
        """Remove the values that cost more than `limit` with any others."""
        keep = [np.flatnonzero(bounds <= limit) for bounds in self.value_bounds()]
        if all(len(kept) == len(own) for kept, own in zip(keep, self.own, strict=True)):
            return
        smaller = self.problem.restricted(keep)
        tensors = []
        for tensor, edge in zip(self._tensors, smaller.edges, strict=True):
            rows = [np.unique(kinds[keep[at]]) for at, kinds in zip(edge.variables, tensor.edge.kind_of, strict=True)]
            tensors.append(tensor.restricted(edge, rows))
        self.own = [own[kept] for own, kept in zip(self.own, keep, strict=True)]
        self.problem, self._tensors, self.met = smaller, tensors, []
        self._connect()
