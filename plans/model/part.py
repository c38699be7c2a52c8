"""Parts of a module's parameters: several weights of a graph that the module stores in one tensor.

Modules often compute queries, keys and values with one product, and some libraries store kernels transposed. A plan
that splits each of them separately needs separate weights. Elementwise optimizers train the parts exactly as they train
the combined tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

__all__ = ["Part"]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A region of a module's tensor, in the shape that the graph has it in.

    Args:
        name: name of the module's tensor.
        shape: shape of the module's tensor.
        view: the shape in which it is cut; as many elements as `shape`.
        region: the first element of every dim of `view`, and the one behind the last.
        transposed: the graph has the part's rows as columns.
        repeats: a dim of `view` along which the module's tensor has nothing but the part, again and again.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    region: tuple[tuple[int, int], ...]
    transposed: bool = False
    repeats: int | None = None

    @property
    def num_elements(self) -> int:
        """Number of elements of the part."""
        return math.prod(stop - start for start, stop in self.region)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the module's tensor."""
        return self.num_elements == math.prod(self.shape)

    def take(self, whole: Any, shape: Sequence[int]) -> Any:
        """The part of an array, in the shape of the graph.

        >>> import numpy as np
        >>> part = Part(name="w", shape=(2, 4), view=(2, 2, 2), region=((0, 2), (1, 2), (0, 2)), transposed=True)
        >>> part.take(np.arange(8).reshape(2, 4), (2, 2)).tolist()
        [[2, 6], [3, 7]]
        """
        cut = whole.reshape(self.view)[self._index()]
        return cut.reshape(tuple(shape)[::-1]).T if self.transposed else cut.reshape(tuple(shape))

    def put(self, whole: Any, part: Any) -> None:
        """Write the part into an array of the whole's shape, whose elements are in one piece.

        >>> import numpy as np
        >>> part, whole = Part(name="w", shape=(4,), view=(2, 2), region=((0, 2), (0, 1))), np.zeros(4)
        >>> part.put(whole, np.array([5.0, 6.0]))
        >>> whole.tolist()
        [5.0, 0.0, 6.0, 0.0]
        """
        home = whole.reshape(self.view)[self._index()]
        home[...] = (part.T if self.transposed else part).reshape(home.shape)

    def is_repeated(self, whole: Any) -> bool:
        """Whether an array has nothing but the part along `repeats`, where it is to.

        >>> import numpy as np
        >>> part = Part(name="cos", shape=(4,), view=(4,), region=((0, 2),), repeats=0)
        >>> part.is_repeated(np.array([1, 2, 1, 2])), part.is_repeated(np.array([1, 2, 1, 3]))
        (True, False)
        """
        if self.repeats is None:
            return True
        start, stop = self.region[self.repeats]
        count = self.view[self.repeats] // (stop - start)
        folded = whole.reshape((*self.view[: self.repeats], count, stop - start, *self.view[self.repeats + 1 :]))
        first = (*(slice(None),) * self.repeats, slice(0, 1))
        return bool((folded == folded[first]).all())

    def _index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.region)
