"""State outside of tensors that a forward changes: counters, lists that it extends, Python's random numbers.

A plan keeps the values that they have at capture. A forward that computes something else with the values after it is
refused.
"""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from plans.errors import TwofoldError

__all__ = ["PythonState", "changed_in", "check_python_state", "python_state", "restore"]

PythonState = Mapping[tuple[str, str], Any]
"""(path of a submodule, its attribute) -> value; the names of modules that draw random numbers -> their state."""

_RANDOM: Mapping[tuple[str, str], tuple[Callable[[], Any], Callable[[Any], None]]] = {
    ("", "random"): (random.getstate, random.setstate),
    ("numpy", "random"): (lambda: np.random.get_state(legacy=False), np.random.set_state),  # noqa: NPY002
}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def python_state(module: nn.Module) -> PythonState:
    """Numbers and containers among the attributes of a module and its submodules, and states of random numbers."""
    found: dict[tuple[str, str], Any] = {key: get() for key, (get, _) in _RANDOM.items()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _OF_EVERY_MODULE:
                continue
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[path, name] = value
            elif isinstance(value, list | dict | set | deque) and not _has_tensors(value):
                found[path, name] = value.copy()
    return found


def _has_tensors(value: Any) -> bool:
    return any(isinstance(each, torch.Tensor) for each in (value.values() if isinstance(value, dict) else value))


def changed_in(before: PythonState, after: PythonState) -> PythonState:
    """The entries of `after` that differ from `before`."""
    return {key: value for key, value in after.items() if key in before and _written(before[key]) != _written(value)}


def _written(value: Any) -> str:
    return str(len(value)) if isinstance(value, list | set | deque) else repr(value)


def restore(module: nn.Module, state: PythonState) -> None:
    """Set attributes of a module and its submodules, and states of random numbers."""
    for (path, name), value in state.items():
        if (path, name) in _RANDOM:
            _RANDOM[path, name][1](value)
        else:
            setattr(module.get_submodule(path), name, value.copy() if hasattr(value, "copy") else value)


def check_python_state(module: nn.Module, changed: PythonState, graph: fx.Graph, later: Callable[[], fx.Graph]) -> None:
    """Refuse a forward whose next step differs because of what it changes outside of tensors.

    Args:
        module: that is captured.
        changed: what its forward changed, with the values after it.
        graph: its export.
        later: exports it again, starting from `changed`.

    Raises:
        TwofoldError: the exports differ.

    Warns:
        UserWarning: they do not, but a later step might.
    """
    if not changed:
        return
    draws = [f"{path}.{name}".lstrip(".") for path, name in changed if (path, name) in _RANDOM]
    counts = [".".join(filter(None, ("self", path, name))) for path, name in changed if (path, name) not in _RANDOM]
    does = [f"counts in {', '.join(counts)}"] if counts else []
    does += [f"draws from {' and '.join(draws)}"] if draws else []
    ways = ["register_buffer(name, torch.zeros(())) makes it a value that every step updates"] if counts else []
    ways += ["draw with torch.rand"] if draws else []
    what, way_out = f"the forward {' and '.join(does)}", "; ".join(ways)
    if _calls(graph) != _calls(later()):
        raise TwofoldError(f"{what}, and its next step computes something else; {way_out}")
    warnings.warn(f"{what}; if a later step depends on it, the plan does not: {way_out}", stacklevel=2)


def _calls(graph: fx.Graph) -> list[tuple[str, str, str]]:
    return [(str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]
