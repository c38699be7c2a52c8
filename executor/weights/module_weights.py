"""Weights of a module as the tensors of a graph, some of which are parts of the module's, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.model.graph import Graph, Tensor
from plans.model.part import Part

__all__ = ["as_graph", "as_module"]

Arrays = dict[str, npt.NDArray[Any]]


def as_graph(graph: Graph | None, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arrays by the names of a graph, from those by the names of its module; each is cut when it is needed.

    Args:
        graph: has the parts; None: there are none.
        weights: name -> full array, or what has `shape` and reads what it is indexed with. Names of the graph are
            looked up first.
    """
    return _Parts(graph, weights) if graph is not None and graph.parts else weights


def as_module(graph: Graph | None, weights: Arrays | None) -> Arrays | None:
    """Whole arrays by the names of a module, from those by the names of its graph; None where there are none.

    Raises:
        TwofoldError: parts that leave a hole.
    """
    if graph is None or weights is None or not graph.parts:
        return weights
    found: Arrays = {}
    filled: dict[str, int] = defaultdict(int)
    for name, array in weights.items():
        part = graph.parts.get(name)
        if part is None:
            found[name] = array
            continue
        part.put(found.setdefault(part.name, np.empty(part.shape, array.dtype)), array)
        filled[part.name] += part.num_elements
    if odd := [name for name, count in filled.items() if count != found[name].size]:
        raise TwofoldError(f"the plan trains parts of {odd[0]!r} only; plan the module again")
    return found


class _Parts(Mapping[str, Any]):
    def __init__(self, graph: Graph, weights: Mapping[str, Any]) -> None:
        self._graph, self._weights = graph, weights

    def __getitem__(self, name: str) -> Any:
        part = self._graph.parts.get(name)
        if part is None or name in self._weights:
            return self._weights[name]
        return _Cut(self._graph.tensors[name], part, self._weights[part.name])

    def __iter__(self) -> Iterator[str]:
        return iter({*self._weights, *(name for name, part in self._graph.parts.items() if part.name in self._weights)})

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Cut:
    """A part of an array; what is indexed is read."""

    def __init__(self, tensor: Tensor, part: Part, whole: Any) -> None:
        if tuple(whole.shape) != part.shape:
            raise TwofoldError(
                f"the initial value of {part.name!r} has the shape {tuple(whole.shape)}, the plan {part.shape}"
            )
        self.shape, self._part, self._whole = tensor.shape, part, whole
        if part.repeats is not None and not part.is_repeated(_all(whole)):
            raise TwofoldError(
                f"{part.name!r} holds other values than when the module was captured, where its halves were equal; "
                "plan the module again"
            )

    def __getitem__(self, index: Any) -> Any:
        part = self._part
        if part.view == part.shape and not part.transposed:  # whose elements alone are read
            return self._whole[tuple(slice(start, stop) for start, stop in part.region)][index]
        return part.take(_all(self._whole), self.shape)[index]


def _all(array: Any) -> Any:
    return array[tuple(slice(0, size) for size in array.shape)]
