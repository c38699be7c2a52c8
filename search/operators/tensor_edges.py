"""A tensor that one operator of a stage passes to others, and the redistributions between their strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from plans.layout import TensorLayout
from search.operators.eliminate import Table

__all__ = ["Layouts", "TensorEdge"]

Layouts = tuple[tuple[TensorLayout, TensorLayout], ...]
"""The layouts of a tensor at a reader, and of the gradient from there."""


@dataclass(slots=True)
class TensorEdge:
    """A tensor with its maker, where that is in the stage, and its readers.

    Args:
        tensor: its name.
        form: its shape and dtype; layouts of tensors of one form have the same numbers.
        variables: positions of the maker, if it is inside, and of the readers.
        source, arrives: per kind of the first variable the numbers (in `Moves`) of the layouts in which the tensor is
            handed on, and in which its gradient is needed.
        slots: per reading input: which of `variables` it belongs to, and per kind of that variable's strategies the
            numbers of the layout that is read, and of the gradient's.
        kind_of: per variable and strategy the kind.
        sizes: how many kinds each variable has.
        wanted: whether a gradient goes back.

    Edges with equal `key` cost the same.
    """

    tensor: str
    form: object
    variables: tuple[int, ...]
    source: np.ndarray
    arrives: np.ndarray
    slots: list[tuple[int, np.ndarray, np.ndarray]]
    kind_of: list[np.ndarray]
    sizes: tuple[int, ...]
    wanted: bool
    key: object = field(init=False)

    def __post_init__(self) -> None:
        numbers = (self.source, self.arrives, *(each for _, *both in self.slots for each in both), *self.kind_of)
        slots = tuple(at for at, *_ in self.slots)
        self.key = (self.form, slots, self.wanted, tuple(number.tobytes() for number in numbers))

    def restricted(self, keep: Sequence[np.ndarray]) -> TensorEdge:
        """The same edge with fewer values; `keep[variable]` are the numbers of those that remain."""
        rows, kind_of = [], []
        for variable, kinds in zip(self.variables, self.kind_of, strict=True):
            left, which = np.unique(kinds[keep[variable]], return_inverse=True)
            rows.append(left)
            kind_of.append(which.reshape(-1))
        return TensorEdge(
            tensor=self.tensor, form=self.form, variables=self.variables, source=self.source[rows[0]],
            arrives=self.arrives[rows[0]], kind_of=kind_of,
            slots=[(at, read[rows[at]], back[rows[at]]) for at, read, back in self.slots],
            sizes=tuple(map(len, rows)), wanted=self.wanted,
        )  # fmt: skip

    def moves(self, values: Sequence[int]) -> list[tuple[int, int]]:
        """The layouts between which one choice moves the tensor and its gradient, as pairs of numbers."""
        kinds = [int(kind_of[values[variable]]) for kind_of, variable in zip(self.kind_of, self.variables, strict=True)]
        source, arrives = int(self.source[kinds[0]]), int(self.arrives[kinds[0]])
        found = [(source, number) for number in {int(read[kinds[at]]) for at, read, _ in self.slots}]
        if self.wanted:
            found += [(number, arrives) for number in {int(back[kinds[at]]) for at, _, back in self.slots}]
        return found

    @property
    def axes(self) -> list[int]:
        """The variables that have more than one kind, by their places: the dims of a table. At least one variable."""
        return [at for at, size in enumerate(self.sizes) if size > 1] or [0]

    def costs(self, seconds: np.ndarray) -> np.ndarray:
        """[kinds of every variable of `axes`]: seconds to bring the tensor to all its readers, and its gradients back.

        `seconds`: from every layout to every other one, by their numbers.
        """
        axes = self.axes

        def along(which: np.ndarray, variable: int) -> np.ndarray:
            return which.reshape([-1 if at == variable else 1 for at in axes])

        total = np.zeros([self.sizes[at] for at in axes])
        source, arrives = along(self.source, 0), along(self.arrives, 0)
        reads = [along(read, variable) for variable, read, _ in self.slots]
        backs = [along(back, variable) for variable, _, back in self.slots]
        for at, (read, back) in enumerate(zip(reads, backs, strict=True)):
            total = total + _once(seconds[source, read], read, reads[:at])
            if self.wanted:
                total = total + _once(seconds[back, arrives], back, backs[:at])
        return total

    def table(self, costs: np.ndarray) -> Table:
        """[values of every variable of `axes`], from `costs`."""
        for place, at in enumerate(self.axes):
            costs = costs.take(self.kind_of[at], axis=place)
        return Table(tuple(self.variables[at] for at in self.axes), costs)


def _once(seconds: np.ndarray, number: np.ndarray, earlier: Sequence[np.ndarray]) -> np.ndarray:
    """A move to the same layout for several readers runs, and costs, once."""
    for other in earlier:
        seconds = np.where(number == other, 0.0, seconds)
    return seconds
