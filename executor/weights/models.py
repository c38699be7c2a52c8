"""Modules by name, and initial weights by parameter name."""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from executor.user_code import UserCodeError, load_named, running_user_code
from executor.weights.initial import as_array, initial_parameter, no_init_parameters
from executor.weights.published import published_model
from plans.errors import TwofoldError
from plans.model.graph import Graph

__all__ = ["InitialParameters", "RandomParameters", "check_model", "load_model", "load_shapes"]


def load_shapes(spec: str) -> tuple[nn.Module, tuple[Any, ...], str | None]:
    """As `load_model`, but built on the meta device, where weights take no memory; and the reason, if that fails.

    A function that reads values while it builds (`.item()`, a checkpoint, numpy) cannot be called there, so it is
    called again normally.

    Raises:
        TwofoldError: see `load_model`.
    """
    try:
        with no_init_parameters():
            return *load_model(spec), None
    except UserCodeError as error:
        reason = str(error).partition(" raised ")[2]
    return *load_model(spec), reason


def load_model(spec: str, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...]]:
    """The module and example inputs that a function "package.module:function" or "file.py:function" returns.

    Of a config.json, those of transformers (`executor.weights.published`). What is drawn with torch's generator on the
    CPU follows from `seed`; the generator is then as before.

    Raises:
        TwofoldError: no such file, module or function, a function that raises or gives something else, or a
            config.json from which no module can be built.
    """
    made: Any = partial(published_model, spec) if spec.endswith(".json") else load_named(spec, "model")
    if callable(made):
        try:
            inspect.signature(made).bind()
        except TypeError as error:
            raise TwofoldError(f"model {spec!r} is called without arguments: {error}; give them defaults") from None
        except ValueError:  # a built-in function without a signature
            pass
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        with running_user_code(f"model {spec!r}"):
            made = made() if callable(made) else made
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise TwofoldError(
            f"model {spec!r} must return (module with its loss, example inputs), "
            f"it returned a value of type {type(made).__name__}"
        )
    return made


def check_model(spec: str, graph: Graph) -> None:
    """Refuse a model that lacks a parameter of a graph, or has it in another shape.

    Raises:
        TwofoldError: see above, and `load_model`.
    """
    module = load_shapes(spec)[0]
    shapes = {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    for tensor in graph.parameters:
        part = graph.parts.get(tensor.name)
        name, wanted = (tensor.name, tensor.shape) if part is None else (part.name, part.shape)
        if name not in shapes:
            raise TwofoldError(
                f"{spec} has no parameter {name!r}, which the plan has; give the model that the plan was made for"
            )
        if shapes[name] != tuple(wanted):
            raise TwofoldError(
                f"{spec}: {name!r} has the shape {shapes[name]}, the plan {tuple(wanted)}; give the model that the "
                "plan was made for"
            )


class _CreatedByName(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name; each is created on access."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class InitialParameters(_CreatedByName):
    """The full initial parameters and buffers of a module; each is created on access."""

    def __init__(self, module: nn.Module, seed: int) -> None:
        """Take the module, whose parameters may be on meta, and the seed that decides their values."""
        super().__init__([name for name, _ in [*module.named_parameters(), *module.named_buffers()]])
        self._module, self._seed = module, seed

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name not in self._names:
            raise KeyError(name)
        return as_array(initial_parameter(self._module, name, self._seed).detach())


class RandomParameters(_CreatedByName):
    """Random parameters of a graph, each created on access from its name and a seed alone.

    Values are drawn from N(0, 1 / size of the last dim), those of constants too; integer and boolean ones are zero.
    """

    def __init__(self, graph: Graph, seed: int) -> None:
        """Take the graph whose parameters and constants are drawn."""
        self._tensors = {tensor.name: tensor for tensor in (*graph.parameters, *graph.constants)}
        super().__init__(self._tensors)
        self._seed = seed

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        tensor = self._tensors[name]
        if not tensor.differentiable:
            return np.zeros(tensor.shape, tensor.dtype)
        random = np.random.default_rng((self._seed, zlib.crc32(name.encode())))
        spread = 1.0 / math.sqrt(tensor.shape[-1] if len(tensor.shape) > 1 else 100.0)
        return np.asarray(spread * random.standard_normal(tensor.shape), np.float32)
