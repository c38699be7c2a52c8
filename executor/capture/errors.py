"""What is said where a forward cannot be exported: the reason, the line, and what to change."""

from __future__ import annotations

import linecache
import os
import traceback
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

__all__ = ["FIXED", "explained", "where_in"]

FIXED = (
    "shapes must be fixed and the control flow independent of the values, for every batch size: choose by torch.where "
    "or a mask instead of an if or a boolean index, and multiply rows by weights instead of selecting them"
)

_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


def explained(error: BaseException, module: nn.Module, batch_size: int) -> str:
    """Why torch.export failed, where in the user's code, and what to change."""
    return (
        f"torch.export cannot capture {type(module).__name__} for a batch of {batch_size}: {_reason(error)}"
        f"{where_in(error, module)}; {_way_out(error)}"
    )


def _way_out(error: BaseException) -> str:
    if type(error).__name__ == "FakeTensorDeviceMismatchError":
        return "a tensor that the forward reads must be a parameter, a buffer (self.register_buffer) or an input"
    if _KEPT in str(error):
        return (
            "a forward may not set parameters (p.data = ...), nor keep what it makes in a global or a functools.cache; "
            "keep it in an attribute of its module"
        )
    if "Meta" in str(error) and isinstance(error, NotImplementedError):
        return "torch cannot compute the shape of its result; write it with other operators"
    if "torch.func" in "".join(traceback.format_tb(error.__traceback__)):
        return "torch.func is not captured; use torch.autograd.grad instead"
    *_, line = ("", *(line for _, _, line in _frames(error) if line))
    if "__format__" in str(error) or line.startswith("print("):
        return "leave messages that read values out of the forward"
    if "numpy()" in str(error):
        return "compute with torch instead of numpy"
    if "one_hot(" in line:
        return "give one_hot its number of classes"
    if isinstance(error, _DEPENDS_ON_VALUES):
        return FIXED
    return "check that the forward works with batches of these shapes, of any size"


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int, str]]:
    """What was executing, from the outside to the inside: frame, number of the line, its text if it is of the user."""
    while error.__cause__ is not None:
        error = error.__cause__
    inside = tuple(os.path.dirname(each) + os.sep for each in (torch.__file__, os.path.dirname(__file__)))
    for frame, number in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        yield frame, number, "" if file.startswith(inside) else linecache.getline(file, number).strip()


def where_in(error: BaseException, module: nn.Module) -> str:
    """The line of user code that was executing, and the module that it belongs to."""
    paths, path, line = {id(part): name for name, part in module.named_modules()}, "", ""
    for frame, number, text in _frames(error):
        path = paths.get(id(frame.f_locals.get("self")), path)
        line = f"{frame.f_code.co_filename}, line {number}: {text}" if text else line
    return f" (in {f'module {path!r}' if path else 'forward'}, {line})" if line else ""


_KEPT = "fake tensor in the exported program constant's list"
"""Part of the message of torch.export about a tensor that an earlier forward stored on the module."""


def _reason(error: BaseException) -> str:
    if isinstance(error, _DEPENDS_ON_VALUES):
        return "a shape or the control flow depends on values of tensors"
    if _KEPT in str(error):
        return "a tensor that the forward makes outlives it"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
