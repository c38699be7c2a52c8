"""Exact minimum of a sum of small cost tables: variable elimination over (min, +).

This is the second of the two recursions, the one over the graph. Variables are operators, their values are strategies;
a table prices one operator or one tensor with its maker and readers. Eliminating a variable joins the tables that
mention it (a sum) and keeps the best value for every setting of its neighbours (a minimum): a chain costs one min-plus
product per operator, a branch a table over what meets there. The order is min-degree, ties by position, so the result
does not depend on hashing.

    minimise    sum over tables t of  t[values of t's variables]
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError

__all__ = ["Memory", "MinMarginals", "Table", "best_assignment", "min_marginals", "widest"]

MAX_CELLS = 50_000_000
"""Largest joined table that elimination may build; beyond it the graph needs a declared beam."""


_NO_COSTS = np.zeros(0)


BLOCK_CELLS = 4_000_000
"""Largest joined table for which equal blocks are eliminated before the variables that separate them."""


@dataclass(frozen=True, slots=True)
class Table:
    """Costs for every combination of values of `variables`; dim i of `costs` belongs to `variables[i]`."""

    variables: tuple[int, ...]
    costs: npt.NDArray[np.float64]


@dataclass(slots=True)
class Memory:
    """State shared by eliminations of one problem: the order, and joins of identical tables.

    Equal blocks of a graph share the arrays of their tables, so that the inside of a block is eliminated once; and when
    some tables change, what does not hang on them is not done again.
    """

    order: list[int] | None = None
    joins: dict[object, tuple[npt.NDArray[np.float64], npt.NDArray[np.int16], object]] = field(default_factory=dict)
    used: set[object] = field(default_factory=set)

    def forget(self) -> None:
        """Drop the joins that were not used since the last call."""
        self.joins = {key: self.joins[key] for key in self.used}
        self.used = set()


def best_assignment(
    sizes: Sequence[int], tables: Sequence[Table], memory: Memory | None = None
) -> tuple[float, tuple[int, ...]]:
    """The least total and a choice of values that reaches it (ties: the smallest index).

    Args:
        sizes: number of values per variable.
        tables: costs; infinity forbids a combination.
        memory: of eliminations with the same variables, between which some tables changed.

    Raises:
        TwofoldError: no combination is allowed, or the graph is too entangled for exact elimination.

    >>> t = Table((0, 1), np.array([[1.0, 5.0], [4.0, 0.5]]))
    >>> best_assignment([2, 2], [t])
    (0.5, (1, 1))
    """
    memory = memory or Memory()
    if memory.order is None:
        memory.order = _order(sizes, tables)
    around: dict[int, list[Table]] = {variable: [] for variable in range(len(sizes))}
    turn = {variable: at for at, variable in enumerate(memory.order)}
    for table in tables:
        around[min(table.variables, key=turn.__getitem__)].append(table)
    trail: list[tuple[int, tuple[int, ...], npt.NDArray[np.int16]]] = []
    total = 0.0
    for variable in memory.order:
        scope, least, choice = _least(variable, sizes, around.pop(variable), memory)
        trail.append((variable, scope, choice))
        if scope:
            around[min(scope, key=turn.__getitem__)].append(Table(scope, least))
        else:
            total += float(least)
    memory.forget()
    if not np.isfinite(total):
        raise TwofoldError("no combination of strategies is allowed")
    values = [0] * len(sizes)
    for variable, scope, choice in reversed(trail):
        values[variable] = int(choice[tuple(values[other] for other in scope)])
    return total, tuple(values)


def _least(
    variable: int, sizes: Sequence[int], tables: Sequence[Table], memory: Memory
) -> tuple[tuple[int, ...], npt.NDArray[np.float64], npt.NDArray[np.int16]]:
    """The variable's neighbours, and for all their values the least total and the value that reaches it."""
    scope = tuple(sorted({other for table in tables for other in table.variables} - {variable}))
    place = {other: at for at, other in enumerate((*scope, variable))}
    key = (sizes[variable], *((id(table.costs), *(place[other] for other in table.variables)) for table in tables))
    if key not in memory.joins:
        joined, _ = _join(variable, sizes, tables)
        choice = joined.argmin(axis=-1)
        least = np.take_along_axis(joined, choice[..., None], axis=-1)[..., 0]
        memory.joins[key] = least, choice.astype(np.int16), [table.costs for table in tables]  # ids stay theirs
    memory.used.add(key)
    least, choice_, _ = memory.joins[key]
    return scope, least, choice_


def widest(sizes: Sequence[int], scopes: Sequence[tuple[int, ...]]) -> tuple[float, float]:
    """Cells of the largest joined table of an elimination, and of all of them."""
    tables = [Table(scope, _NO_COSTS) for scope in scopes]
    neighbours = _neighbours(sizes, tables)
    largest = total = 0.0
    for variable in _order(sizes, tables):
        around = neighbours.pop(variable)
        cells = float(sizes[variable]) * _cells(sizes, around)
        largest, total = max(largest, cells), total + cells
        for other in around:
            neighbours[other] |= around - {other}
            neighbours[other].discard(variable)
    return largest, total


def min_marginals(sizes: Sequence[int], tables: Sequence[Table]) -> list[list[tuple[float, tuple[int, ...]]]]:
    """The least total with each value of each variable fixed, and the choices that reach it.

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
        messages = self._pass_up(tables)
        turn = {variable: at for at, variable in enumerate(self.order)}
        self.parent = {variable: min(scope, key=turn.__getitem__) for variable, scope in self.scopes.items() if scope}
        for variable in reversed(self.order):
            if variable in self.parent:
                self._pass_down(variable, messages[variable])
        roots = [variable for variable in self.order if not self.scopes[variable]]
        self.least = {root: float(self.beliefs[root].min()) for root in roots}
        self.total = sum(self.least.values())
        self.children: dict[int, list[int]] = {variable: [] for variable in self.order}
        for child, parent in self.parent.items():
            self.children[parent].append(child)

    def _pass_up(self, tables: Sequence[Table]) -> dict[int, npt.NDArray[np.float64]]:
        """Eliminate in order; fills `scopes` and `beliefs`, returns the message of every variable to its parent."""
        messages: dict[int, npt.NDArray[np.float64]] = {}
        remaining = list(tables)
        for variable in self.order:
            joined, scope = _join(variable, self.sizes, [table for table in remaining if variable in table.variables])
            remaining = [table for table in remaining if variable not in table.variables]
            self.scopes[variable], self.beliefs[variable] = scope, joined
            messages[variable] = joined.min(axis=-1)
            if scope:
                remaining.append(Table(scope, messages[variable]))
        return messages

    def _pass_down(self, variable: int, message: npt.NDArray[np.float64]) -> None:
        """Add to a variable's table its parent's costs that did not come from the variable."""
        scope, parent = self.scopes[variable], self.parent[variable]
        around = (*self.scopes[parent], parent)
        in_order = sorted(around)
        aligned = message.reshape([self.sizes[other] if other in scope else 1 for other in in_order])
        aligned = np.transpose(aligned, [in_order.index(other) for other in around])
        with np.errstate(invalid="ignore"):
            rest = self.beliefs[parent] - aligned
        rest = np.where(np.isnan(rest), np.inf, rest)
        down = rest.min(axis=tuple(at for at, other in enumerate(around) if other not in scope))
        shared = [other for other in around if other in scope]
        down = np.transpose(down, [shared.index(other) for other in scope])
        self.beliefs[variable] = self.beliefs[variable] + down[..., None]

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


def _neighbours(sizes: Sequence[int], tables: Sequence[Table]) -> dict[int, set[int]]:
    neighbours: dict[int, set[int]] = {variable: set() for variable in range(len(sizes))}
    for table in tables:
        for variable in table.variables:
            neighbours[variable].update(other for other in table.variables if other != variable)
    return neighbours


def _order(sizes: Sequence[int], tables: Sequence[Table]) -> list[int]:
    """Always the variable whose neighbours have the fewest combinations of values; the first one on a tie.

    Variables that part the others (what is before from what is behind) come last, unless that makes tables too large:
    then equal blocks between them are eliminated in the same way, and only once (`Memory`).
    """
    parting = _parting(len(sizes), tables)
    order, largest = _greedy(sizes, tables, parting)
    if largest > BLOCK_CELLS:
        other, least = _greedy(sizes, tables, set())
        return other if least < largest else order
    return order


def _parting(count: int, tables: Sequence[Table]) -> set[int]:
    """The variables that every table across them contains, in the order of their numbers."""
    across, within = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    for table in tables:
        first, last = min(table.variables), max(table.variables)
        if first < last:
            across[first + 1] += 1
            across[last] -= 1
            for variable in set(table.variables) - {first, last}:
                within[variable] += 1
    return set(np.flatnonzero((np.cumsum(across) == within)[:count]).tolist())


def _greedy(sizes: Sequence[int], tables: Sequence[Table], later: set[int]) -> tuple[list[int], float]:
    """The order, those of `later` after all others, and the cells of the largest table on the way."""
    neighbours = _neighbours(sizes, tables)
    queue = [(variable in later, _cells(sizes, around), variable) for variable, around in neighbours.items()]
    heapq.heapify(queue)
    order, largest = [], 0.0
    while queue:
        _, cells, variable = heapq.heappop(queue)
        if variable not in neighbours or cells != _cells(sizes, neighbours[variable]):
            continue
        largest = max(largest, float(sizes[variable]) * cells)
        around = neighbours.pop(variable)
        for other in around:
            neighbours[other] |= around - {other}
            neighbours[other].discard(variable)
            heapq.heappush(queue, (other in later, _cells(sizes, neighbours[other]), other))
        order.append(variable)
    return order, largest


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
