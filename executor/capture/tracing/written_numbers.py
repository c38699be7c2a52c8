"""Numbers that a forward writes into tensors, `torch.tensor([0.3, 0.7])`, as calls that make them.

A tensor that is made while a module is exported is on the meta device, and has no values. One number becomes `full`,
whole numbers that are counted become `arange`, and a few others become a stack of numbers. A list that selects a part
of a tensor becomes a slice where it can.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from executor.kernels.context import torch_dtype

__all__ = ["numbers_as_calls"]

_MOST_NUMBERS = 64
"""That are written one by one."""


@contextlib.contextmanager
def numbers_as_calls() -> Iterator[None]:
    """Within this context tensors that are made of numbers keep their values."""
    with (
        mock.patch.object(torch, "tensor", _filled),
        mock.patch.object(torch, "as_tensor", _as_tensor),
        mock.patch.object(torch, "from_numpy", _filled),
        mock.patch.object(Tensor, "new_tensor", _new_tensor),
        mock.patch.object(Tensor, "__getitem__", _part),
        mock.patch.object(Tensor, "__setitem__", _write_part),
    ):
        yield


_TENSOR = torch.tensor


def _filled(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
    """A tensor of numbers, or of anything else as torch makes it."""
    if not any(more.values()) and _are_numbers(data):
        numbers = np.asarray(data)
        made = _as_calls(numbers, dtype or _dtype_of(numbers, data), device)
        if made is not None:
            return made
    return _TENSOR(data, dtype=dtype, device=device, **more)


def _are_numbers(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return all(map(_are_numbers, data))
    return isinstance(data, bool | int | float | range | np.ndarray | np.generic)


def _dtype_of(numbers: np.ndarray[Any, Any], data: Any) -> torch.dtype:
    """The dtype that torch gives to numbers: those of numpy keep theirs."""
    if not isinstance(data, np.ndarray | np.generic) and numbers.dtype.kind == "f":
        return torch.get_default_dtype()
    return torch_dtype(numbers.dtype.name)


def _as_calls(numbers: np.ndarray[Any, Any], dtype: torch.dtype, device: Any) -> Tensor | None:
    """Calls that make numbers; None if they would be many."""
    if not numbers.size:
        return None
    if dtype == torch.int64:
        numbers = numbers.astype(np.int64)  # fractions are cut off; True - False is True in numpy
    first = numbers.flat[0].item()
    if not numbers.ndim or (numbers == first).all():
        return torch.full(numbers.shape, first, dtype=dtype, device=device)
    if dtype == torch.int64 and numbers.ndim == 1 and (np.diff(numbers) == 1).all():
        return torch.arange(first, first + len(numbers), device=device)
    if numbers.size > _MOST_NUMBERS:
        return None
    parts = [_as_calls(np.asarray(part), dtype, device) for part in numbers]
    return torch.stack([part for part in parts if part is not None])


_AS_TENSOR = torch.as_tensor


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    if isinstance(data, Tensor):
        return _AS_TENSOR(data, dtype=dtype, device=device)
    return _filled(data, dtype=dtype, device=device)


def _new_tensor(self: Tensor, data: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    return _filled(data, dtype=dtype or self.dtype, device=self.device if device is None else device)


_PART = Tensor.__getitem__


def _part(self: Tensor, index: Any) -> Tensor:
    """A part of a tensor; indices that are numbers become a copy of a slice, or a tensor that calls make."""
    given = tuple(map(_bounds, index)) if isinstance(index, tuple) else (_bounds(index),)
    if not any(map(_are_indices, given)):
        return _PART(self, given if isinstance(index, tuple) else given[0])
    alone = sum(_are_indices(each) or isinstance(each, Tensor) for each in given) == 1
    return _PART(self, tuple(_chosen(each, alone) if _are_indices(each) else each for each in given)).clone()


def _bounds(index: Any) -> Any:
    """An index; the ends of a slice as numbers, where they are tensors: x[: lengths.max()]."""
    if not isinstance(index, slice):
        return index
    return slice(*(int(each) if isinstance(each, Tensor) else each for each in (index.start, index.stop, index.step)))


def _are_indices(index: Any) -> bool:
    is_list = isinstance(index, list | range) and len(index) > 0 and all(type(each) is int for each in index)
    return is_list or (isinstance(index, np.ndarray) and index.dtype.kind == "i" and index.ndim == 1 and index.size > 0)


def _chosen(index: Any, alone: bool) -> Any:
    numbers = [int(each) for each in index]
    steps = {after - before for before, after in itertools.pairwise(numbers)} or {1}
    (step, *others), last = steps, numbers[-1]
    if alone and not others and step > 0 and (numbers[0] >= 0) == (last >= 0):
        return slice(numbers[0], None if last == -1 else last + 1, step)
    return _filled(numbers)


_WRITE_PART = Tensor.__setitem__


def _write_part(self: Tensor, index: Any, value: Any) -> None:
    """Write a part of a tensor. One number where a mask is true is filled in: its value is lost on meta."""
    index = tuple(map(_bounds, index)) if isinstance(index, tuple) else _bounds(index)
    is_number = isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.dim() == 0)
    if is_number and isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() <= self.dim():
        self.masked_fill_(index.reshape(*index.shape, *(1,) * (self.dim() - index.dim())), value)
        return
    _WRITE_PART(self, index, value)
