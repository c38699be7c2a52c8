"""Inputs of a rank: batches by input name, initial weights by parameter name, models by name."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from executor.device import Device
from executor.train.data import ArrayDataset, load_digits
from executor.train.initial import initial_parameter
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.plan import Plan

__all__ = [
    "InitialParameters",
    "batches_of",
    "digits",
    "epochs",
    "load_model",
    "placed",
    "random_batches",
    "random_parameters",
    "rows_of_rank",
]

Batch = dict[str, npt.NDArray[Any]]


def load_model(spec: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...]]:
    """The module and example inputs returned by a function "package.module:function" or "file.py:function".

    What the function draws with torch's generator on the CPU follows from `seed`; the generator is then as before.

    Raises:
        TwofoldError: no such file, module or function, or a function that gives something else.
    """
    place, separator, function = spec.rpartition(":")
    if not separator or not place or not function:
        raise TwofoldError(f"model {spec!r} must be package.module:function or file.py:function")
    try:
        if place.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(place).stem, place)
            if found is None or found.loader is None or not Path(place).is_file():
                raise TwofoldError(f"model {spec!r}: there is no file {place!r}")
            module = importlib.util.module_from_spec(found)
            sys.modules[found.name] = module
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            made = getattr(module, function)()
    except (ImportError, AttributeError) as error:
        raise TwofoldError(f"model {spec!r}: {error}") from None
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise TwofoldError(f"model {spec!r} must return (module with its loss, example inputs), it returned {made!r}")
    return made


class InitialParameters(Mapping[str, npt.NDArray[Any]]):
    """The whole initial parameters and buffers of a module; each is created on access."""

    def __init__(self, module: nn.Module, seed: int) -> None:
        """Take the module, whose parameters may be on meta, and the seed that decides their values."""
        self._module, self._seed = module, seed
        self._names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return initial_parameter(self._module, name, self._seed).detach().numpy()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def random_parameters(graph: Graph, seed: int) -> dict[str, npt.NDArray[Any]]:
    """Parameters drawn from N(0, 1 / size of the last dim), each by its own name and `seed`.

    Constants likewise, those that are no floats are zero (false).
    """
    found: dict[str, npt.NDArray[Any]] = {}
    for tensor in (*graph.parameters, *graph.constants):
        if not tensor.differentiable:
            found[tensor.name] = np.zeros(tensor.shape, tensor.dtype)
            continue
        random = np.random.default_rng((seed, zlib.crc32(tensor.name.encode())))
        spread = 1.0 / math.sqrt(tensor.shape[-1] if len(tensor.shape) > 1 else 100.0)
        found[tensor.name] = np.asarray(spread * random.standard_normal(tensor.shape), np.float32)
    return found


def batches_of(graph: Graph, batches: Iterable[Sequence[npt.NDArray[Any]]]) -> Iterator[Batch]:
    """Batches as tuples, named after the graph's inputs, in the order of the graph's tensors.

    Raises:
        TwofoldError: a batch with another number of arrays, or of other shapes.
    """
    inputs = [tensor for tensor in graph.tensors.values() if tensor.kind == "input"]
    for batch in batches:
        if len(batch) != len(inputs):
            raise TwofoldError(f"a batch has {len(batch)} arrays, the model takes {len(inputs)}")
        named = {tensor.name: np.asarray(array) for tensor, array in zip(inputs, batch, strict=True)}
        for tensor in inputs:
            if named[tensor.name].shape != tensor.shape:
                raise TwofoldError(
                    f"input {tensor.name!r} was planned as {tensor.shape}, the data gives {named[tensor.name].shape}"
                )
        yield named


def digits(batch_size: int, folder: str | None, seed: int) -> ArrayDataset:
    """The digits in batches (images [N, 1, 28, 28], labels [N]), shuffled by `seed`."""
    return ArrayDataset.of(load_digits(folder)).shuffle(seed).batch(batch_size)


def epochs(dataset: ArrayDataset, steps: int) -> Iterator[tuple[Any, ...]]:
    """`steps` batches of a data set, epoch after epoch."""
    done = 0
    for epoch in itertools.count():
        for batch in dataset.epoch(epoch):
            if done == steps:
                return
            yield batch
            done += 1


def random_batches(graph: Graph, seed: int, steps: int, distinct: int = 4) -> Iterator[Batch]:
    """`steps` batches of normal numbers (integers below 10 for integer inputs), `distinct` of them in turn."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(min(distinct, steps)):
        batch: Batch = {}
        for tensor in graph.inputs:
            if tensor.differentiable:
                batch[tensor.name] = random.standard_normal(tensor.shape).astype(np.float32)
            else:
                batch[tensor.name] = random.integers(0, 10, tensor.shape).astype(tensor.dtype)
        made.append(batch)
    for step in range(steps):
        yield made[step % len(made)]


def placed(batches: Iterable[Batch], device: Device) -> Iterator[dict[str, torch.Tensor]]:
    """Move batches to the device one at a time; a `Prefetcher` around it does so ahead of the step."""
    for batch in batches:
        yield {name: torch.as_tensor(array).to(device.torch_device) for name, array in batch.items()}


def rows_of_rank(plan: Plan, rank: int, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The rows of whole batches that `rank` loads: all with `full_batch`, else its rows of each micro-batch slice.

    Ranks of stages of different widths thus load the same samples in the same slice of a micro-batch.
    """
    if plan.full_batch:
        yield from batches
        return
    mesh = next(stage.mesh for stage in plan.stages if rank in stage.mesh.rank_list)
    part, count = mesh.rank_list.index(rank), plan.num_slices
    for batch in batches:
        yield {
            name: np.concatenate(
                [np.array_split(rows, mesh.num_ranks)[part] for rows in array.reshape(count, -1, *array.shape[1:])]
            )
            for name, array in batch.items()
        }
