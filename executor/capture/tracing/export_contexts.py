"""Contexts in which torch.export traces a module: meta tensors, writes into buffers and data, and no messages."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.export import _trace as export_trace
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from plans.errors import TwofoldError

__all__ = ["as_if_not_exported", "buffers_changed_in_place", "data_without_gradient", "on_meta", "silent"]


@contextlib.contextmanager
def on_meta(module: nn.Module) -> Iterator[None]:
    """Within this context everything is on the meta device, also what a forward puts elsewhere: `x.to("cuda")`."""
    with _parameters_on_meta(module), _modules_not_moved(), _Meta(), torch.device("meta"):
        yield


class _Meta(TorchFunctionMode):
    """Replaces the devices that a forward names by meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        if func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], type(torch.FloatTensor)):
            return args[0].to(args[1].dtype)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], str | int | torch.device):
            args = (args[0], torch.device("meta"), *args[2:])
        if kwargs.get("device") is not None and not isinstance(func, torch._ops.OpOverload):
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _parameters_on_meta(module: nn.Module) -> Iterator[None]:
    """Replace parameters and buffers by meta tensors within this context; tied tensors stay tied."""
    meta: dict[int, torch.Tensor] = {}

    def stand_in(tensor: Any) -> Any:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in meta:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            meta[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        return meta[id(tensor)]

    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for submodule in module.modules():
            for held in (submodule._parameters, submodule._buffers):
                before.append((held, dict(held)))
                held.update({key: stand_in(tensor) for key, tensor in held.items() if tensor is not None})
        yield
    finally:
        for held, tensors in before:
            held.clear()  # of what the forward registers
            held.update(tensors)


@contextlib.contextmanager
def buffers_changed_in_place(module: nn.Module) -> Iterator[None]:
    """Replace assignments of buffers by writes into them: torch.export does not report those of submodules, and takes
    buffers that a forward registers for inputs that it changed.
    """
    names = {id(part): path for path, part in module.named_modules()}

    def write(owner: nn.Module, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        held = owner._buffers.get(name)
        if tensor is None or held is None or id(owner) not in names or _is_same_memory(tensor, held):
            return None  # moved to the device on which it is: self.mask = self.mask.to(x.device)
        if tensor.shape != held.shape:
            raise TwofoldError(
                f"{type(owner).__name__} {names[id(owner)]!r} replaces its buffer {name!r} {tuple(held.shape)} by one "
                f"of shape {tuple(tensor.shape)} in the forward; register it in the shape that it keeps"
            )
        with torch.no_grad():
            return held.copy_(tensor)

    with mock.patch.object(torch_module, "_global_buffer_registration_hooks", {0: write}):  # without that of the export
        yield


@contextlib.contextmanager
def data_without_gradient() -> Iterator[None]:
    """Replace `p.data` by p without gradients, and assignments to it by writes: torch.export sees neither."""

    def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.copy_(value)

    with mock.patch.object(torch.Tensor, "data", property(torch.Tensor.detach, write)):
        yield


@contextlib.contextmanager
def _modules_not_moved() -> Iterator[None]:
    """Ignore devices to which a forward moves a module, `self.head.to(x.device)`, and refuse other dtypes."""

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                raise TwofoldError(
                    f"the forward converts {name!r} of {type(module).__name__} from {str(tensor.dtype)[6:]} to "
                    f"{str(dtype)[6:]}; convert the module before it is captured, or compute with "
                    f"{name}.to({dtype})"
                )
        return module

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "to", to))
        for name in ("cuda", "cpu"):
            stack.enter_context(mock.patch.object(nn.Module, name, lambda module, *args: module))
        for name in ("float", "half", "bfloat16", "double"):
            dtype = getattr(torch, name)
            stack.enter_context(mock.patch.object(nn.Module, name, functools.partialmethod(to, dtype)))
        yield


@contextlib.contextmanager
def as_if_not_exported() -> Iterator[None]:
    """A forward that asks whether it is compiled or exported gets the answer no: some otherwise leave something out,
    such as LongT5 its mask.
    """
    with (
        mock.patch.object(torch.compiler, "is_compiling", return_value=False),
        mock.patch.object(torch.compiler, "is_exporting", return_value=False),
    ):
        yield


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress warnings and log lines of torch.export; relevant problems are raised as errors by capture."""
    noisy = ("torch._dynamo", "torch._subclasses.fake_tensor", "torch.export", "torch._export", "torch.fx")
    loggers = [logging.getLogger(name) for name in noisy]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with (
            warnings.catch_warnings(),
            # torch.export prints the graph up to a data-dependent call
            mock.patch.object(export_trace, "print", create=True),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
