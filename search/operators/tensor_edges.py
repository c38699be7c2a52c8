"""A tensor that one operator of a stage hands on to others: which layouts are moved to which, by their strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plans.layout import TensorLayout

__all__ = ["Layouts", "TensorEdge"]

Layouts = tuple[tuple[TensorLayout, TensorLayout], ...]
"""Of a tensor where an operator reads it, and of the gradient that this makes."""


@dataclass(slots=True)
class TensorEdge:
    """A tensor with its maker, where that is in the stage, and its readers.

    Args:
        tensor: its name.
        variables: positions of the maker, if it is inside, and of the readers.
        source: numbers (in `Moves`) of the layouts in which the maker hands it on, per kind; empty without a maker.
        slots: per reading input: which of `variables` it belongs to, and per kind of that variable's strategies the
            numbers of the layout that is read, and of the gradient's.
        kind_of: per variable and strategy the kind.
        wanted: whether a gradient goes back.
    """

    tensor: str
    variables: tuple[int, ...]
    source: np.ndarray
    arrives: np.ndarray
    slots: list[tuple[int, np.ndarray, np.ndarray]]
    kind_of: list[np.ndarray]
    sizes: tuple[int, ...]
    wanted: bool
    key: object = None

    def joined(self) -> TensorEdge:
        """The same with one dim for operators that are tied, and with the key that equal ones share."""
        unique = list(dict.fromkeys(self.variables))
        if len(unique) < len(self.variables):
            rows_of: dict[int, np.ndarray] = {}
            kind_of = []
            for variable in unique:
                mine = [at for at, other in enumerate(self.variables) if other == variable]
                rows, which = np.unique(np.stack([self.kind_of[at] for at in mine]), axis=1, return_inverse=True)
                kind_of.append(which.reshape(-1))
                rows_of |= dict(zip(mine, rows, strict=True))
            axis = [unique.index(variable) for variable in self.variables]
            self.slots = [(axis[at], read[rows_of[at]], back[rows_of[at]]) for at, read, back in self.slots]
            self.source, self.arrives = self.source[rows_of[0]], self.arrives[rows_of[0]]
            self.sizes = tuple(int(which.max()) + 1 for which in kind_of)
            self.variables, self.kind_of = tuple(unique), kind_of
        numbers = (self.source, self.arrives, *(each for _, *both in self.slots for each in both), *self.kind_of)
        self.key = (tuple(at for at, *_ in self.slots), self.wanted, tuple(each.tobytes() for each in numbers))
        return self

    def costs(self, seconds: np.ndarray) -> np.ndarray:
        """[kinds of every variable]: seconds to bring the tensor to all its readers, and its gradients back, once.

        `seconds`: from every layout to every other one, by their numbers.
        """

        def along(which: np.ndarray, variable: int) -> np.ndarray:
            return which.reshape([-1 if at == variable else 1 for at in range(len(self.sizes))])

        total = np.zeros(self.sizes)
        source, arrives = along(self.source, 0), along(self.arrives, 0)
        reads = [along(read, variable) for variable, read, _ in self.slots]
        backs = [along(back, variable) for variable, _, back in self.slots]
        for at, (read, back) in enumerate(zip(reads, backs, strict=True)):
            total = total + _once(seconds[source, read], read, reads[:at])
            if self.wanted:
                total = total + _once(seconds[back, arrives], back, backs[:at])
        return total


def _once(seconds: np.ndarray, number: np.ndarray, earlier: Sequence[np.ndarray]) -> np.ndarray:
    """What is moved to the same layout for several readers is moved, and paid, once."""
    for other in earlier:
        seconds = np.where(number == other, 0.0, seconds)
    return seconds
