"""The problem of the search over operators: choose one value for every variable, given costs of variables and tensors.

    minimise    sum over variables of own[value]  +  sum over tensors of the moves that the values around them make

Unlike the tables that are eliminated (`eliminate`), tensors stay tensors here: layouts of the maker, layouts of the
readers, and one matrix of seconds. So a tensor with many readers needs no table, and some of the values can be taken
away from all of it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from search.operators.eliminate import Memory, Table, widest
from search.operators.tensor_edges import TensorEdge

__all__ = ["Problem"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Problem:
    """Own costs and tensors of some variables.

    Args:
        own: cost of each value, per variable.
        edges: the tensors.
        seconds: cost of moving a tensor from every layout to every other one; may rise while the problem is solved.
        left: per variable which of its values there are, in the numbers of the whole problem.

    `memory` is for `eliminate.best_assignment`.
    """

    own: Sequence[Floats]
    edges: Sequence[TensorEdge]
    seconds: Callable[[TensorEdge], Floats]
    left: Sequence[Ints]
    memory: Memory = field(init=False, default_factory=Memory)
    _tables: dict[object, tuple[Floats, Floats]] = field(init=False, default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """Number of values per variable."""
        return [len(own) for own in self.own]

    def total(self, values: Sequence[int]) -> float:
        """The cost of an assignment of values to all variables."""
        own_s = sum(float(own[value]) for own, value in zip(self.own, values, strict=True))
        moved_s = 0.0
        for edge in self.edges:
            seconds = self.seconds(edge)
            moved_s += sum(float(seconds[pair]) for pair in edge.moves(values))
        return own_s + moved_s

    def numbers(self, values: Sequence[int]) -> tuple[int, ...]:
        """The same values in the numbers of the whole problem."""
        return tuple(int(left[value]) for left, value in zip(self.left, values, strict=True))

    def restricted(self, keep: Sequence[Ints]) -> Problem:
        """The problem with some of the values of each variable."""
        return Problem(
            own=[own[kept] for own, kept in zip(self.own, keep, strict=True)],
            edges=[edge.restricted(keep) for edge in self.edges], seconds=self.seconds,
            left=[left[kept] for left, kept in zip(self.left, keep, strict=True)],
        )  # fmt: skip

    def entangled(self, sizes: Sequence[int] | None = None) -> tuple[float, float]:
        """Cells of the largest table that elimination would join, and of all of them; of these sizes, if given."""
        sizes = sizes or self.sizes
        scopes = [tuple(variable for variable in edge.variables if sizes[variable] > 1) for edge in self.edges]
        return widest(sizes, [scope for scope in scopes if scope])

    def tables(self) -> list[Table]:
        """The tables whose sum is minimised, one per variable and one per tensor."""
        tables = [Table((variable,), own) for variable, own in enumerate(self.own)]
        for edge in self.edges:
            seconds = self.seconds(edge)
            if (known := self._tables.get(edge.key)) is None or known[0] is not seconds:
                known = self._tables[edge.key] = seconds, edge.table(edge.costs(seconds)).costs
            tables.append(Table(tuple(edge.variables[at] for at in edge.axes), known[1]))
        return tables
