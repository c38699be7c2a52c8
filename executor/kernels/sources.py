"""Constants, and operators unknown to twofold, which run as torch implements them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from executor.kernels.place import by_autograd, number, offset
from executor.kernels.programs import aten_call, calls_of_json, program
from plans.operators.sources import MAX_OPAQUE_INPUTS
from plans.reading import json_of

__all__ = ["SOURCE_RULES", "computed_value"]

Attrs = Mapping[str, Any]


def arange(context: OpContext, attrs: Attrs) -> Tensor:
    """This rank's part of attrs "start", start + "step", ..."""
    (size,) = context.shape
    first = offset(context, attrs, "d0", size)
    start, step = attrs.get("start", 0), attrs.get("step", 1)
    if isinstance(start, int) and isinstance(step, int):
        numbers = torch.arange(first, first + size, device=context.device).mul_(step).add_(start)
    else:
        numbers = torch.arange(first, first + size, device=context.device, dtype=torch.float64).mul_(step).add_(start)
    return numbers.to(context.torch_dtype)


def fill(context: OpContext, attrs: Attrs, *like: Tensor) -> Tensor:
    """A tensor filled with attrs "value"; the input is ignored."""
    return torch.full(context.shape, number(attrs, "value"), dtype=context.torch_dtype, device=context.device)


def buffer(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """A copy of a buffer."""
    return x.clone()


def assign(context: OpContext, attrs: Attrs, x: Tensor, value: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """The new value of the buffer x, and x, changed in place; with attrs "frozen" x as it is."""
    return x.clone() if attrs.get("frozen") else (value.clone(), x.copy_(value))


def computed(context: OpContext, attrs: Attrs) -> Tensor:
    """The results of the calls in attrs "calls"."""
    return computed_value(attrs["calls"], context.device).clone(memory_format=torch.contiguous_format)


def computed_value(calls: str, device: torch.device) -> Tensor:
    """The value of the last of some calls that read each other's results alone.

    Args:
        calls: JSON, [target, [positional, named arguments]] of each call; {"tensor": i} is what call i made.
    """
    made: list[Any] = []
    for call in _calls(calls):
        made.append(call(device, *made))
    found: Tensor = made[-1]
    return found


@lru_cache(maxsize=256)
def _calls(calls: str) -> tuple[Callable[..., Any], ...]:
    """Each call as a function of (device, results of earlier calls...); parsed once, not in every step."""
    return calls_of_json(json_of(calls.encode(), "calls"))


# -- opaque ------------------------------------------------------------------------------------------------------------


def _result(attrs: Attrs, device: torch.device, inputs: tuple[Tensor, ...]) -> Tensor:
    made, which = aten_call(attrs["target"], attrs["arguments"])(device, *inputs), attrs.get("result", -1)
    chosen: Tensor = made if which < 0 else made[which]
    return torch.view_as_real(chosen) if chosen.is_complex() else chosen


def opaque(context: OpContext, attrs: Attrs, *inputs: Tensor) -> Tensor:
    """The aten operator attrs "target" with attrs "arguments", all of it."""
    device = inputs[0].device if inputs else context.device
    return _result(attrs, device, inputs).clone(memory_format=torch.contiguous_format)


def _opaque_grad(which: int) -> Callable[..., Tensor]:
    def one(context: OpContext, attrs: Attrs, g: Tensor, *inputs: Tensor) -> Tensor:
        return by_autograd(lambda *fresh: _result(attrs, g.device, fresh), inputs, (which,), g)[0].clone()

    return one


def function(context: OpContext, attrs: Attrs, *inputs: Tensor) -> Tensor:
    """The result attrs "result" of attrs "forward"."""
    made: Tensor = program(attrs["forward"])(inputs[0].device, *inputs)[attrs["result"]]
    return made.clone(memory_format=torch.contiguous_format)


def _function_grad(which: int) -> Callable[..., Tensor]:
    def one(context: OpContext, attrs: Attrs, g: Tensor, *inputs: Tensor) -> Tensor:
        made: Tensor = program(attrs["backward"])(g.device, g, *inputs)[which]
        return made.to(context.torch_dtype).expand(context.shape).clone(memory_format=torch.contiguous_format)

    return one


SOURCE_RULES: Mapping[str, Rule] = {
    "arange.forward": arange,
    "fill.forward": fill,
    "buffer.forward": buffer,
    "assign.forward": assign,
    "computed.forward": computed,
    "opaque.forward": opaque,
    **{f"opaque.grad{which}": _opaque_grad(which) for which in range(MAX_OPAQUE_INPUTS)},
    "function.forward": function,
    **{f"function.grad{which}": _function_grad(which) for which in range(MAX_OPAQUE_INPUTS)},
}
