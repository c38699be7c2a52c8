"""Batches of training data by input name: checked against a graph, drawn at random, cut for a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from executor.device import Device
from executor.kernels.context import torch_dtype
from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator, Tensor
from plans.plan import Plan

__all__ = [
    "WHOLE", "Batch", "BatchCheck", "Share", "as_read", "batches_of", "input_limits", "input_probabilities", "placed",
    "random_batches", "rows_of_rank",
]  # fmt: skip

Batch = dict[str, Any]
"""Name of an input -> array, or tensor where numpy lacks the dtype."""

_ROUNDED = frozenset({("float32", "bfloat16"), ("float32", "float16")})
"""(given, planned): dtypes that may differ."""

_PASSING = frozenset({"cast", "concat", "expand", "narrow", "permute", "reshape"})
"""Operators whose output has the numbers of their inputs."""


_OF_PROBABILITIES = frozenset({"aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default"})
"""Losses whose second operand holds probabilities; a CUDA kernel of the first ends the process at any other number."""


def input_limits(graph: Graph, *, in_any_part: bool = False) -> dict[str, int]:
    """Input of whole numbers -> the number below which they must be: rows of a table, classes of a loss.

    Inputs without an entry are read by neither.

    Args:
        graph: of the plan.
        in_any_part: whether the columns of an input may have limits of their own, as ids of several tables: then the
            largest of these counts, else the smallest.

    >>> from plans.model.transformer import transformer
    >>> input_limits(transformer("gpt2", num_layers=1))
    {'tokens': 50257, 'labels': 50257}
    """
    limits: dict[str, int] = {}
    of_parts: dict[str, int] = {}
    for operator, reads in _operands(graph):
        if operator.kind == "embedding":
            limit, read = graph.tensors[operator.inputs[1]].shape[0], reads[0]
        elif operator.kind == "cross_entropy":
            limit, read = graph.tensors[operator.inputs[0]].shape[-1], reads[1]
        else:
            continue
        for name, is_whole in read.items():
            if is_whole or not in_any_part:
                limits[name] = min(limit, limits.get(name, limit))
            else:
                of_parts[name] = max(limit, of_parts.get(name, limit))
    return of_parts | limits


def input_probabilities(graph: Graph) -> frozenset[str]:
    """Inputs of numbers from 0 to 1: the targets of a binary cross entropy.

    >>> from plans.model.transformer import transformer
    >>> input_probabilities(transformer("gpt2", num_layers=1))
    frozenset()
    """
    found: set[str] = set()
    for operator, reads in _operands(graph):
        if operator.attrs.get("target") in _OF_PROBABILITIES:
            found.update(*reads[1:2])
    return frozenset(name for name in found if graph.tensors[name].differentiable)


def _operands(graph: Graph) -> Iterator[tuple[Operator, list[dict[str, bool]]]]:
    """Every operator, with the inputs of the graph whose numbers each of its operands holds, and whether it holds all
    numbers of the input."""
    came_from = {tensor.name: {tensor.name: True} for tensor in graph.inputs}
    for operator in graph.operators:
        reads = [came_from.get(name, {}) for name in operator.inputs]
        if operator.kind in _PASSING:
            passed = {name: is_whole and operator.kind != "narrow" for read in reads for name, is_whole in read.items()}
            came_from |= dict.fromkeys(operator.outputs, passed)
        yield operator, reads


class BatchCheck:
    """Gives batches the names of a graph's inputs, and refuses those that are not for it.

    Args:
        graph: that they are for.
        parts: a batch given to it has one of this many equal parts of the samples of a full batch.
    """

    def __init__(self, graph: Graph, parts: int = 1) -> None:
        self._parts = parts
        self._inputs = [tensor for tensor in graph.tensors.values() if tensor.kind == "input"]
        self._limits = input_limits(graph, in_any_part=True)
        self._probabilities = input_probabilities(graph)
        self._ignored = {
            operator.attrs["ignore_index"] for operator in graph.operators if "ignore_index" in operator.attrs
        }

    def __call__(self, batch: Sequence[Any] | Mapping[str, Any]) -> Batch:
        """A batch by the names of the inputs.

        Args:
            batch: arrays or tensors in the order of the model's arguments, or by the names of the inputs. Inputs
                planned in half precision may come as float32; they are rounded.

        Raises:
            TwofoldError: another number of arrays, other names, another shape or dtype, a number that is not a row of
                the table, no class or no probability of the loss that reads it.
        """
        arrays = self._in_order(batch)
        return {tensor.name: self._checked(tensor, array) for tensor, array in zip(self._inputs, arrays, strict=True)}

    def _in_order(self, batch: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        asked = "the plan asks for " + ", ".join(
            f"{tensor.name} {tensor.dtype} {tensor.shape}" for tensor in self._inputs
        )
        if isinstance(batch, Mapping):
            if batch.keys() != {tensor.name for tensor in self._inputs}:
                raise TwofoldError(f"a batch of the data has the names {', '.join(map(str, batch))}; {asked}")
            return [batch[tensor.name] for tensor in self._inputs]
        if not isinstance(batch, (tuple, list)):
            raise TwofoldError(
                f"a batch of the data is not a tuple or dict of arrays but {type(batch).__name__}; {asked}"
            )
        if len(batch) != len(self._inputs):
            raise TwofoldError(f"a batch of the data has {len(batch)} arrays; {asked}")
        return list(batch)

    def _checked(self, tensor: Tensor, given: Any) -> Any:
        array = _array(tensor.name, given)
        dtype, shape = str(array.dtype).removeprefix("torch."), tuple(array.shape)
        expected = (tensor.shape[0] // self._parts, *tensor.shape[1:])
        if shape != expected or (dtype != tensor.dtype and (dtype, tensor.dtype) not in _ROUNDED):
            raise TwofoldError(
                f"input {tensor.name!r}: the data gives {dtype} {shape}, the plan asks for {tensor.dtype} "
                f"{expected}; change the data, or plan again"
            )
        limit = self._limits.get(tensor.name)
        if limit is not None and array.size:
            outside = [int(each) for each in (array.min(), array.max()) if not 0 <= each < limit]
            if wrong := [each for each in outside if each not in self._ignored]:
                raise TwofoldError(
                    f"input {tensor.name!r}: the data gives {wrong[0]}, the plan asks for numbers from 0 to "
                    f"{limit - 1} (rows of a table, classes of a loss); change the data, or plan again for them"
                )
        if tensor.name in self._probabilities and array.size:
            for each in (float(array.min()), float(array.max())):
                if not 0 <= each <= 1:
                    raise TwofoldError(
                        f"input {tensor.name!r}: the data gives {each:g}, the plan asks for numbers from 0 to 1 "
                        "(targets of a binary cross entropy); change the data"
                    )
        return _held(array, tensor.dtype)


def _array(name: str, given: Any) -> Any:
    """What is given for an input, as an array or as a tensor on the CPU."""
    if not isinstance(given, torch.Tensor):
        try:
            return np.asarray(given)
        except ValueError:
            raise TwofoldError(f"input {name!r}: the data gives rows of different lengths; pad them") from None
    if given.layout != torch.strided:
        raise TwofoldError(f"input {name!r}: the data gives a sparse tensor; convert it with to_dense()")
    if given.is_meta:
        raise TwofoldError(f"input {name!r}: the data gives a tensor on the meta device, which has no values")
    return given.detach().cpu()


def _held(array: Any, dtype: str) -> Any:
    """An array, or a tensor where numpy lacks the dtype."""
    if dtype == "bfloat16":
        return torch.as_tensor(array).to(torch_dtype(dtype))
    return np.asarray(array).astype(dtype, copy=False)


def batches_of(graph: Graph, batches: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Iterator[Batch]:
    """Every batch by the names of the graph's inputs.

    Raises:
        TwofoldError: as `BatchCheck`.
    """
    yield from map(BatchCheck(graph), batches)


def random_batches(graph: Graph, seed: int, steps: int, distinct: int = 4) -> Iterator[Batch]:
    """`steps` batches, `distinct` of them in turn: normal numbers; whole numbers below an input's limit.

    Targets of a binary cross entropy are from 0 to 1, whole numbers without a limit (masks) 0 or 1.
    """
    random, limits, probabilities = np.random.default_rng(seed), input_limits(graph), input_probabilities(graph)
    made = []
    for _ in range(min(distinct, steps)):
        batch: Batch = {}
        for tensor in graph.inputs:
            if tensor.name in probabilities:
                batch[tensor.name] = _held(random.random(tensor.shape, np.float32), tensor.dtype)
            elif tensor.differentiable:
                batch[tensor.name] = _held(random.standard_normal(tensor.shape, np.float32), tensor.dtype)
            else:
                drawn = random.integers(0, limits.get(tensor.name, 2), tensor.shape)
                batch[tensor.name] = _held(drawn, tensor.dtype)
        made.append(batch)
    for step in range(steps):
        yield made[step % len(made)]


def placed(batches: Iterable[Batch], device: Device) -> Iterator[dict[str, torch.Tensor]]:
    """Move batches to the device one at a time; a `Prefetcher` around it does so ahead of the step."""
    for batch in batches:
        yield {name: torch.as_tensor(array).to(device.torch_device) for name, array in batch.items()}


def as_read(graph: Graph | None, batches: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Batches of a model as its graph reads them: some inputs one place later (`Graph.later`)."""
    if graph is None or not graph.later:
        return batches
    return ({name: _later(array, graph.later.get(name)) for name, array in batch.items()} for batch in batches)


def _later(array: Any, last: int | None) -> Any:
    """[batch, length] without its first column, and `last` behind the others."""
    if last is None:
        return array
    moved = array.clone() if isinstance(array, torch.Tensor) else np.array(array)
    moved[:, :-1] = array[:, 1:]
    moved[:, -1] = last
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The samples of a batch that one rank reads: one of `parts` equal parts of each micro-batch slice.

    Ranks of stages of different widths thus read the same samples in the same slice of a micro-batch.

    Args:
        slices: micro-batch slices of a batch.
        parts: ranks that share a slice.
        part: which of them this is, from 0.

    >>> Share(slices=2, parts=2, part=1).of(np.arange(8))
    array([2, 3, 6, 7])
    """

    slices: int = 1
    parts: int = 1
    part: int = 0

    @classmethod
    def of_rank(cls, plan: Plan, rank: int) -> Self:
        """The inputs that a rank of a plan reads: all of them with `full_batch`."""
        if plan.full_batch:
            return cls()
        mesh = next(stage.mesh for stage in plan.stages if rank in stage.mesh.rank_list)
        return cls(slices=plan.num_slices, parts=mesh.num_ranks, part=mesh.rank_list.index(rank))

    def of(self, array: Any) -> Any:
        """The rows of this part, of an array or tensor with the rows of a full batch."""
        if self.parts == 1:
            return array
        rest = array.shape[1:]
        return array.reshape(self.slices, self.parts, -1, *rest)[:, self.part].reshape(-1, *rest)


WHOLE = Share()
"""All samples of a batch."""


def rows_of_rank(plan: Plan, rank: int, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The rows of the full batch that `rank` reads."""
    share = Share.of_rank(plan, rank)
    for batch in batches:
        yield {name: share.of(array) for name, array in batch.items()}
