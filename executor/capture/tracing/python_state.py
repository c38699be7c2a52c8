"""State that a forward changes outside of buffers: counters, lists that it extends, tensors in attributes, Python's
random numbers.

A plan keeps the values that they have at capture. A forward that computes something else with the values after it is
refused. A table that a forward makes of shapes and keeps, such as rotary angles, is the same later; an export that
starts with it reads its values.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from executor.capture.calls.control_flow import value_from_shapes
from executor.capture.calls.masks import shape_only, value_of
from plans.errors import TwofoldError

__all__ = [
    "PythonState",
    "attributes_kept",
    "changed_in",
    "check_python_state",
    "python_state",
    "restore",
    "with_values",
]

PythonState = Mapping[tuple[str, str], Any]
"""(path of a submodule, its attribute) -> value; the names of modules that draw random numbers -> their state."""

_RANDOM: Mapping[tuple[str, str], tuple[Callable[[], Any], Callable[[Any], None]]] = {
    ("", "random"): (random.getstate, random.setstate),
    ("numpy", "random"): (lambda: np.random.get_state(legacy=False), np.random.set_state),  # noqa: NPY002
}
_LIBRARY = torch.library.Library("twofold", "FRAGMENT")
_LIBRARY.define("kept_value(int number, int[] shape, ScalarType dtype, Device? device=None) -> Tensor")
_ALMOST_ONE = 1 - 2**-53
_VALUES: list[torch.Tensor] = []
"""That exports which are under way start with."""


@torch.library.impl(_LIBRARY, "kept_value", "CompositeExplicitAutograd")
def _kept_value(number: int, shape: list[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    if device is not None and device.type == "cpu":
        return _VALUES[number].clone()
    return torch.empty(shape, dtype=dtype, device="meta")


class _Buffer(NamedTuple):
    """A buffer of a module."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A tensor whose values, which follow from shapes, are known."""

    value: torch.Tensor


_CONTAINERS = (list, dict, set, deque)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def python_state(module: nn.Module) -> PythonState:
    """Numbers, containers and tensors in the attributes of a module and its submodules; states of random numbers."""
    found: dict[tuple[str, str], Any] = {key: get() for key, (get, _) in _RANDOM.items()}
    for path, part in module.named_modules():
        found |= {(path, name): _Buffer(each) for name, each in part._buffers.items() if each is not None}
        for name, value in vars(part).items():
            if name in _OF_EVERY_MODULE:
                continue
            if isinstance(value, _CONTAINERS):
                found[path, name] = value.copy()
            elif (isinstance(value, int | float) and not isinstance(value, bool)) or _tensors_in(value):
                found[path, name] = value
    return found


def _tensors_in(value: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor | _Known)]


def with_values(state: PythonState) -> PythonState:
    """The state with values in place of recorded tensors that follow from shapes."""

    def known(tensor: torch.Tensor) -> Any:
        value = value_from_shapes(tensor)
        return tensor if value is None else _Known(value)

    return {key: pytree.tree_map_only(torch.Tensor, known, value) for key, value in state.items()}


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
            own = pytree.tree_map_only(FakeTensor | _Known, _like, value)
            part = module.get_submodule(path)
            if isinstance(own, _Buffer):
                part._buffers[name] = own.tensor
            else:
                setattr(part, name, own.copy() if isinstance(own, _CONTAINERS) else own)


def _like(tensor: FakeTensor | _Known) -> torch.Tensor:
    """A tensor like one of an export that belongs to none; one of known values as a call that gives them."""
    if isinstance(tensor, _Known):
        value = tensor.value
        _VALUES.append(value)
        made: torch.Tensor = torch.ops.twofold.kept_value(
            len(_VALUES) - 1, value.shape, value.dtype, torch.device("meta")
        )
        return made
    with _disable_current_modes():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextlib.contextmanager
def attributes_kept(module: nn.Module) -> Iterator[None]:
    """Give a module and its submodules the attributes that they had before, whatever a forward does with them."""
    before = [(vars(part), dict(vars(part))) for part in module.modules()]
    state = {
        key: value
        for key, value in python_state(module).items()
        if key not in _RANDOM and not isinstance(value, _Buffer)
    }
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
    contexts: list[contextlib.AbstractContextManager[None]] = [contextlib.nullcontext()]
    contexts += [_drawn(least=True), _drawn(least=False)] if draws else []
    try:
        is_same = all(_is_again(graph, later, context) for context in contexts)
    except TwofoldError:  # it reads tensors of the step before
        is_same = False
    finally:
        _VALUES.clear()
    if not is_same:
        raise TwofoldError(f"{what}, and its next step computes something else; {way_out}")
    if draws or any(name in vars(module.get_submodule(path)) for path, name in counts):
        warnings.warn(f"{what}; if a later step depends on it, the plan does not: {way_out}", stacklevel=2)


def _is_again(graph: fx.Graph, later: Callable[[], fx.Graph], context: contextlib.AbstractContextManager[None]) -> bool:
    with context:
        again = later()
    return _calls(graph) == _calls(again) or _computed(graph) == _computed(again)


@contextlib.contextmanager
def _drawn(*, least: bool) -> Iterator[None]:
    """Within this context the random numbers of Python and numpy that decide most often are the least or the largest:
    a branch of any probability is taken in one of both.
    """

    def pick(low: Any, high: Any) -> Any:
        return low if least else high

    def picked(low: float = 0.0, high: float = _ALMOST_ONE, size: Any = None) -> Any:
        return pick(low, high) if size is None else np.full(size, pick(low, high))

    def whole(low: int, high: int | None = None, size: Any = None) -> Any:
        return picked(*((0, low - 1) if high is None else (low, high - 1)), size)

    instead: dict[Any, dict[str, Callable[..., Any]]] = {
        random: {
            "random": picked, "uniform": pick, "randint": pick, "choice": lambda values: values[pick(0, -1)],
            "randrange": whole,
        },
        np.random: {
            "random": lambda size=None: picked(size=size), "rand": lambda *size: picked(size=size or None),
            "uniform": picked, "randint": whole,
        },
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, functions in instead.items():
            for name, function in functions.items():
                stack.enter_context(mock.patch.object(owner, name, function))
        yield


def _named(keys: Iterable[tuple[str, str]]) -> str:
    return ", ".join(".".join(filter(None, ("self", *key))) for key in keys)


def _calls(graph: fx.Graph) -> list[tuple[str, str, str]]:
    return [(str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]


def _computed(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """The calls of a graph in order, with values in place of the calls that follow from shapes."""
    known = shape_only(graph)
    numbers: dict[fx.Node, str] = {}

    def named(node: fx.Node) -> str:
        if node not in numbers:
            value = value_of(node)
            held = object() if value is None else hashlib.sha256(_bytes(value)).hexdigest()
            numbers[node] = f"{held} {node.meta['val'].shape} {node.meta['val'].dtype}"
        return numbers[node]

    found: list[tuple[Any, ...]] = []
    for node in graph.nodes:
        if node not in known:
            numbers[node] = f"call {len(found)}"
            found.append((str(node.target), str(fx.map_arg((node.args, node.kwargs), named))))
    return found


def _bytes(value: torch.Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
