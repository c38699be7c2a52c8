"""Parts of a module's parameters: what a graph takes for several weights and the module keeps in one tensor.

Queries, keys and values are often made in one product, and some libraries store kernels transposed. A plan that splits
each of them by itself needs them apart; elementwise optimizers train the parts as they train the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["Part"]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Elements [start, start + size) of one dim of a module's tensor, in the shape that the graph has them in.

    Args:
        name: of the module's tensor.
        shape: of the module's tensor.
        view: the shape in which it is cut; as many elements as `shape`.
        dim: of `view`, along which it is cut.
        start: the first element of that dim.
        size: elements of that dim.
        transposed: the graph has the part's rows as columns.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    dim: int
    start: int
    size: int
    transposed: bool = False

    @property
    def num_elements(self) -> int:
        """How many elements the part has."""
        return math.prod(self.view) // self.view[self.dim] * self.size

    def take(self, whole: Any, shape: Sequence[int]) -> Any:
        """The part of an array, in the shape of the graph.

        >>> import numpy as np
        >>> part = Part(name="w", shape=(2, 4), view=(2, 2, 2), dim=1, start=1, size=1, transposed=True)
        >>> part.take(np.arange(8).reshape(2, 4), (2, 2)).tolist()
        [[2, 6], [3, 7]]
        """
        cut = whole.reshape(self.view)[self._index()]
        return cut.reshape(tuple(shape)[::-1]).T if self.transposed else cut.reshape(tuple(shape))

    def put(self, whole: Any, part: Any) -> None:
        """Write the part into an array of the whole's shape, whose elements lie in one piece.

        >>> import numpy as np
        >>> part, whole = Part(name="w", shape=(4,), view=(2, 2), dim=1, start=0, size=1), np.zeros(4)
        >>> part.put(whole, np.array([5.0, 6.0]))
        >>> whole.tolist()
        [5.0, 0.0, 6.0, 0.0]
        """
        home = whole.reshape(self.view)[self._index()]
        home[...] = (part.T if self.transposed else part).reshape(home.shape)

    def _index(self) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(self.start, self.start + self.size))
