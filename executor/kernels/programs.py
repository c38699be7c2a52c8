"""Runs sequences of aten calls that a plan file stores as JSON."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from plans.errors import TwofoldError
from plans.reading import json_of

__all__ = ["NUMBER_CALLS", "aten_call", "calls_of_json", "program"]

NUMBER_CALLS: Mapping[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge")
}
"""Calls on sizes."""


@lru_cache(maxsize=1024)
def aten_call(target: str, arguments: str) -> Callable[..., Any]:
    """An aten operator with its fixed arguments, as a function of (device, tensors...).

    Args:
        target: its name, such as "aten.cumsum.default".
        arguments: positional and named arguments as JSON, with {"tensor": i}, {"device": true}, {"torch": name}
            and {"number": "-inf"} or "1j"; {"tensor": i, "complex": true} is a tensor [.., 2] as complex numbers.

    Raises:
        TwofoldError: this version of torch has no such operator.
    """
    namespace, _, name = target.partition(".")
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if namespace == "number":
        operation = NUMBER_CALLS.get(name)
    if namespace not in ("aten", "number") or operation is None:
        raise TwofoldError(f"this torch has no operator {target!r}; capture the model again with this version of torch")
    args, kwargs = json_of(arguments.encode(), target)

    def held(value: Any, device: torch.device, inputs: tuple[Any, ...]) -> Any:
        if isinstance(value, list):
            return [held(each, device, inputs) for each in value]
        if isinstance(value, dict):
            if "tensor" in value:
                given = inputs[value["tensor"]]
                return torch.view_as_complex(given.contiguous()) if "complex" in value else given
            if "number" in value:
                return (complex if value["number"].rstrip(")").endswith("j") else float)(value["number"])
            return device if "device" in value else getattr(torch, value["torch"])
        return value

    def run(device: torch.device, *inputs: Any) -> Any:
        return operation(
            *(held(value, device, inputs) for value in args),
            **{key: held(value, device, inputs) for key, value in kwargs.items()},
        )

    return run


def calls_of_json(calls: list[Any]) -> tuple[Callable[..., Any], ...]:
    """Calls [target, [positional, named arguments]] as functions of (device, what was given or made before...)."""
    return tuple(
        _taken(arguments[0]) if target == "getitem" else aten_call(target, json.dumps(arguments))
        for target, arguments in calls
    )


def _taken(arguments: list[Any]) -> Callable[..., Any]:
    which, index = arguments
    return lambda device, *made: made[which["tensor"]][index]


@lru_cache(maxsize=256)
def program(text: str) -> Callable[..., tuple[Any, ...]]:
    """A program as a function of (device, inputs...) that returns its results.

    Args:
        text: JSON, "calls" as `calls_of_json` reads them and "results", the number of each result or null. In it
            {"tensor": i} is input i or what a call made, counted on from the inputs.

    >>> double = '{"calls": [["aten.mul.Scalar", [[{"tensor": 0}, 2], {}]]], "results": [1, null]}'
    >>> program(double)(torch.device("cpu"), torch.ones(2))
    (tensor([2., 2.]), None)
    """
    held = json_of(text.encode(), "program")
    calls, results = calls_of_json(held["calls"]), held["results"]

    def run(device: torch.device, *inputs: Any) -> tuple[Any, ...]:
        made = list(inputs)
        for call in calls:
            made.append(call(device, *made))
        return tuple(None if result is None else made[result] for result in results)

    return run
