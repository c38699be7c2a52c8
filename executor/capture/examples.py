"""The example inputs of a captured module: tensors on the meta device, one for each argument of the forward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from plans.errors import TwofoldError

__all__ = ["batch_size_of", "examples_of", "with_batch"]


def examples_of(module: nn.Module, given: object) -> dict[str, torch.Tensor]:
    """Argument name -> tensor on the meta device.

    Args:
        module: that is captured.
        given: as `executor.capture.capture` takes it.

    Raises:
        TwofoldError: it does not fit the arguments of forward.
    """
    signature = inspect.signature(module.forward)
    what = f"{type(module).__name__}.forward{signature}"
    if isinstance(given, torch.Tensor):
        given = (given,)
    try:
        if isinstance(given, Mapping):
            arguments = signature.bind(**given).arguments
        elif isinstance(given, Sequence) and not isinstance(given, str):
            if given and all(isinstance(entry, int) for entry in given):
                raise TwofoldError(f"example_inputs {given!r} is one shape; give one entry per argument: ({given!r},)")
            arguments = signature.bind(*given).arguments
        else:
            raise TwofoldError(f"example_inputs must be a tuple with one entry per argument of {what}, not {given!r}")
    except TypeError as error:
        raise TwofoldError(f"example_inputs do not fit {what}: {error}") from None
    flat: dict[str, Any] = {}
    for argument, value in arguments.items():
        kind = signature.parameters[argument].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            flat.update({f"{argument}_{index}": entry for index, entry in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            raise TwofoldError(f"{what} takes **{argument}; name the arguments in its signature, the graph needs them")
        else:
            flat[argument] = value
    if not flat:
        raise TwofoldError(f"{what} has no example inputs; a training step needs a batch")
    return {argument: _example(argument, value) for argument, value in flat.items()}


def _example(argument: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value))
        raise TwofoldError(
            f"{argument!r} holds several tensors ({names}); an input is one tensor: wrap the module in one whose "
            f"forward takes {names} and calls it with the dict"
        )
    shape, dtype = value, "float32"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        shape, dtype = tuple(value.shape), value.dtype
    elif isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], tuple | list):
        shape, dtype = value
    named = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(named, torch.dtype):
        raise TwofoldError(f"the example of {argument!r} has the dtype {dtype!r}, which torch does not have")
    if not isinstance(shape, tuple | list) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise TwofoldError(
            f"the example of {argument!r} is {value!r}; give a tensor, a shape such as (32, 784) or a pair such as "
            f"((32,), 'int64')"
        )
    return torch.empty(tuple(shape), dtype=named, device="meta")


def batch_size_of(examples: Mapping[str, torch.Tensor]) -> int:
    """The number of samples, dim 0 of every input."""
    sizes = {argument: example.shape[0] if example.dim() else None for argument, example in examples.items()}
    if None in sizes.values() or len(set(sizes.values())) != 1:
        shown = ", ".join(f"{argument} {tuple(example.shape)}" for argument, example in examples.items())
        raise TwofoldError(
            f"every input needs the batch as its dim 0, of one size; given are {shown}. Lists of several lengths, "
            f"such as bags of ids with offsets, need one row per sample, padded to one length"
        )
    return next(iter(examples.values())).shape[0]


def with_batch(examples: Mapping[str, torch.Tensor], batch_size: int) -> dict[str, torch.Tensor]:
    """The examples of another batch size."""
    return {name: example.new_empty((batch_size, *example.shape[1:])) for name, example in examples.items()}
