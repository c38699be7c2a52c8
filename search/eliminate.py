"""Exact minimum of a sum of small cost tables: variable elimination over (min, +).

This is the second of the two recursions, the one over the graph. Variables are operators, their values are strategies;
a table prices one operator or one tensor with its maker and readers. Eliminating a variable joins the tables that
mention it (a sum) and keeps the best value for every setting of its neighbours (a minimum): a chain costs one min-plus
product per operator, a branch a table over what meets there. The order is min-degree, ties by position, so the result
does not depend on hashing.

    minimise    sum over tables t of  t[values of t's variables]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError

__all__ = ["MinMarginals", "Table", "best_assignment", "min_marginals"]

MAX_CELLS = 50_000_000
"""Largest joined table that elimination may build; beyond it the graph needs a declared beam."""


@dataclass(frozen=True, slots=True)
class Table:
    """Costs for every combination of values of `variables`; dim i of `costs` belongs to `variables[i]`."""

    variables: tuple[int, ...]
    costs: npt.NDArray[np.float64]


def best_assignment(sizes: Sequence[int], tables: Sequence[Table]) -> tuple[float, tuple[int, ...]]:
    """The least total and a choice of values that reaches it (ties: the smallest index).

    Args:
        sizes: number of values per variable.
        tables: costs; infinity forbids a combination.

    Raises:
        TwofoldError: no combination is allowed, or the graph is too entangled for exact elimination.

    >>> t = Table((0, 1), np.array([[1.0, 5.0], [4.0, 0.5]]))
    >>> best_assignment([2, 2], [t])
    (0.5, (1, 1))
    """
    remaining = list(tables)
    trail: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
    total = 0.0
    for variable in _order(sizes, tables):
        joined, scope = _join(variable, sizes, [table for table in remaining if variable in table.variables])
        remaining = [table for table in remaining if variable not in table.variables]
        choice = joined.argmin(axis=-1)
        least = joined.min(axis=-1)
        trail.append((variable, scope, choice))
        if scope:
            remaining.append(Table(scope, least))
        else:
            total += float(least)
    if not np.isfinite(total):
        raise TwofoldError("no combination of strategies is allowed")
    values = [0] * len(sizes)
    for variable, scope, choice in reversed(trail):
        values[variable] = int(choice[tuple(values[other] for other in scope)])
    return total, tuple(values)


def min_marginals(sizes: Sequence[int], tables: Sequence[Table]) -> list[list[tuple[float, tuple[int, ...]]]]:
    """For every variable and each of its values: the least total with that value fixed, and how it is reached.

    One pass of messages up the tree of joined tables and one down (min-sum message passing on a bucket tree; Dechter
    1999) gives every table the least total for each of its cells, so nothing is eliminated again.

    >>> t = Table((0, 1), np.array([[1.0, 5.0], [4.0, 0.5]]))
    >>> min_marginals([2, 2], [t])[0]
    [(1.0, (0, 0)), (0.5, (1, 1))]
    """
    tree = MinMarginals(sizes, tables)
    return [
        [(total, tree.reached(variable, value) if np.isfinite(total) else ()) for value, total in enumerate(row)]
        for variable, row in ((variable, tree.marginal(variable).tolist()) for variable in range(len(sizes)))
    ]


class MinMarginals:
    """The joined tables of an elimination; each holds the least cost of its connected part for every cell."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table]) -> None:
        self.sizes, self.order = sizes, _order(sizes, tables)
        self.scopes: dict[int, tuple[int, ...]] = {}
        self.beliefs: dict[int, npt.NDArray[np.float64]] = {}
        messages: dict[int, npt.NDArray[np.float64]] = {}
        remaining = list(tables)
        for variable in self.order:
            joined, scope = _join(variable, sizes, [table for table in remaining if variable in table.variables])
            remaining = [table for table in remaining if variable not in table.variables]
            self.scopes[variable], self.beliefs[variable] = scope, joined
            messages[variable] = joined.min(axis=-1)
            if scope:
                remaining.append(Table(scope, messages[variable]))
        turn = {variable: at for at, variable in enumerate(self.order)}
        self.parent = {each: min(scope, key=lambda v: turn[v]) for each, scope in self.scopes.items() if scope}
        for variable in reversed(self.order):
            if (scope := self.scopes[variable]) and (parent := self.parent[variable]) is not None:
                around = (*self.scopes[parent], parent)
                own = messages[variable].reshape([sizes[other] if other in scope else 1 for other in sorted(around)])
                own = np.transpose(own, [sorted(around).index(other) for other in around])
                with np.errstate(invalid="ignore"):
                    rest = self.beliefs[parent] - own
                rest = np.where(np.isnan(rest), np.inf, rest)
                down = rest.min(axis=tuple(at for at, other in enumerate(around) if other not in scope))
                kept = [other for other in around if other in scope]
                down = np.transpose(down, [kept.index(other) for other in scope])
                self.beliefs[variable] = self.beliefs[variable] + down[..., None]
        roots = [variable for variable in self.order if not self.scopes[variable]]
        self.least = {root: float(self.beliefs[root].min()) for root in roots}
        self.total = sum(self.least.values())
        self.children: dict[int, list[int]] = {variable: [] for variable in self.order}
        for child, parent in self.parent.items():
            self.children[parent].append(child)

    def marginal(self, variable: int) -> npt.NDArray[np.float64]:
        """The least total for every value of a variable."""
        root = variable
        while root in self.parent:
            root = self.parent[root]
        elsewhere = sum(least for other, least in self.least.items() if other != root)
        belief = self.beliefs[variable]
        return np.asarray(belief.min(axis=tuple(range(belief.ndim - 1))) + elsewhere)

    def in_order(self) -> list[tuple[float, int, int]]:
        """(least total, variable, value) of all values that are allowed, the cheapest first."""
        every = [
            (total, variable, value)
            for variable in range(len(self.sizes))
            for value, total in enumerate(self.marginal(variable).tolist())
            if np.isfinite(total)
        ]
        return sorted(every)

    def reached(self, variable: int, value: int) -> tuple[int, ...]:
        """The values of all variables for the least total with one of them fixed; from its table outwards."""
        values: dict[int, int] = {variable: value}
        seen = {variable}
        waiting = [variable, *(root for root in self.least if root != variable)]
        while waiting:
            here = waiting.pop(0)
            seen.add(here)
            everything = (*self.scopes[here], here)
            cells = self.beliefs[here][tuple(values.get(other, slice(None)) for other in everything)]
            free = [other for other in everything if other not in values]
            if free:
                found = np.unravel_index(int(np.argmin(cells)), cells.shape)
                values.update((other, int(at)) for other, at in zip(free, found, strict=True))
            near = [*self.children[here], *([self.parent[here]] if here in self.parent else [])]
            # what is connected comes first, so that another part's root is not met before its own neighbours
            waiting = [*(other for other in near if other not in seen), *waiting]
            waiting = [other for other in dict.fromkeys(waiting) if other not in seen]
        return tuple(values[each] for each in range(len(values)))


def _order(sizes: Sequence[int], tables: Sequence[Table]) -> list[int]:
    neighbours: dict[int, set[int]] = {variable: set() for variable in range(len(sizes))}
    for table in tables:
        for variable in table.variables:
            neighbours[variable].update(other for other in table.variables if other != variable)
    order = []
    while neighbours:
        variable = min(neighbours, key=lambda v: (_cells(sizes, neighbours[v]), v))
        around = neighbours.pop(variable)
        for other in around:
            neighbours[other] |= around - {other}
            neighbours[other].discard(variable)
        order.append(variable)
    return order


def _cells(sizes: Sequence[int], variables: set[int]) -> int:
    count = 1
    for variable in variables:
        count *= sizes[variable]
    return count


def _join(
    variable: int, sizes: Sequence[int], tables: Sequence[Table]
) -> tuple[npt.NDArray[np.float64], tuple[int, ...]]:
    scope = tuple(sorted({other for table in tables for other in table.variables} - {variable}))
    everything = (*scope, variable)
    shape = tuple(sizes[other] for other in everything)
    if np.prod(shape, dtype=np.float64) > MAX_CELLS:
        raise TwofoldError(
            f"the operators are too entangled for exact search: a table of {shape} costs would be needed"
        )
    joined = np.zeros(shape)
    for table in tables:
        positions = [everything.index(other) for other in table.variables]
        order = np.argsort(positions)
        view = np.transpose(table.costs, order)
        expand = [slice(None) if position in positions else None for position in range(len(everything))]
        joined = joined + view[tuple(expand)]
    return joined, scope
