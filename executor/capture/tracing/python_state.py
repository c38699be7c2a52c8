"""State that a forward changes outside of buffers: counters, lists that it extends, tensors in attributes, Python's
random numbers.

A plan keeps the values that they have at capture. A forward that computes something else with the values after it is
refused.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from plans.errors import TwofoldError

__all__ = ["PythonState", "attributes_kept", "changed_in", "check_python_state", "python_state", "restore"]

PythonState = Mapping[tuple[str, str], Any]
"""(path of a submodule, its attribute) -> value; the names of modules that draw random numbers -> their state."""

_RANDOM: Mapping[tuple[str, str], tuple[Callable[[], Any], Callable[[Any], None]]] = {
    ("", "random"): (random.getstate, random.setstate),
    ("numpy", "random"): (lambda: np.random.get_state(legacy=False), np.random.set_state),  # noqa: NPY002
}
_CONTAINERS = (list, dict, set, deque)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def python_state(module: nn.Module) -> PythonState:
    """Numbers, containers and tensors in the attributes of a module and its submodules; states of random numbers."""
    found: dict[tuple[str, str], Any] = {key: get() for key, (get, _) in _RANDOM.items()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _OF_EVERY_MODULE:
                continue
            if isinstance(value, _CONTAINERS):
                found[path, name] = value.copy()
            elif (isinstance(value, int | float) and not isinstance(value, bool)) or _tensors_in(value):
                found[path, name] = value
    return found


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def changed_in(before: PythonState, after: PythonState) -> PythonState:
    """The entries of `after` that are new or differ from `before`."""
    found = {}
    for key, value in after.items():
        held = {id(each) for each in _tensors_in(before.get(key))}
        if tensors := _tensors_in(value):
            is_changed = any(id(each) not in held for each in tensors)
        else:
            is_changed = bool(held) or key not in before or _written(before[key]) != _written(value)
        if is_changed:
            found[key] = value
    return found


def _written(value: Any) -> str:
    return str(len(value)) if isinstance(value, list | set | deque) else repr(value)


def restore(module: nn.Module, state: PythonState) -> None:
    """Set attributes of a module and its submodules, and states of random numbers."""
    for (path, name), value in state.items():
        if (path, name) in _RANDOM:
            _RANDOM[path, name][1](value)
        else:
            own = pytree.tree_map_only(FakeTensor, _like, value)
            setattr(module.get_submodule(path), name, own.copy() if isinstance(own, _CONTAINERS) else own)


def _like(tensor: FakeTensor) -> torch.Tensor:
    """A tensor like one of an export that belongs to none."""
    with _disable_current_modes():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Give a module and its submodules the attributes that they had before, whatever a forward does with them."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    state = {key: value for key, value in python_state(module).items() if key not in _RANDOM}
    try:
        yield
    finally:
        for now, held in before:
            now.clear()
            now.update(held)
        restore(module, state)


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
    kept = [key for key in changed if _tensors_in(changed[key])]
    counts = [key for key in changed if key not in _RANDOM and key not in kept]
    does = [f"counts in {_named(counts)}"] if counts else []
    does += [f"keeps tensors in {_named(kept)}"] if kept else []
    does += [f"draws from {' and '.join(draws)}"] if draws else []
    ways = ["register_buffer(name, torch.zeros(())) makes it a value that every step updates"] if counts else []
    ways += ["pass what a step needs of the one before as an input, or keep a mean in a buffer"] if kept else []
    ways += ["draw with torch.rand"] if draws else []
    what, way_out = f"the forward {' and '.join(does)}", "; ".join(ways)
    try:
        is_same = _calls(graph) == _calls(later())
    except TwofoldError:  # it reads tensors of the step before
        is_same = False
    if not is_same:
        raise TwofoldError(f"{what}, and its next step computes something else; {way_out}")
    if draws or any(name in vars(module.get_submodule(path)) for path, name in counts):
        warnings.warn(f"{what}; if a later step depends on it, the plan does not: {way_out}", stacklevel=2)


def _named(keys: Iterable[tuple[str, str]]) -> str:
    return ", ".join(".".join(filter(None, ("self", *key))) for key in keys)


def _calls(graph: fx.Graph) -> list[tuple[str, str, str]]:
    return [(str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]
