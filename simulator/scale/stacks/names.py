"""Stacks by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from plans.errors import TwofoldError
from simulator.scale.stacks.base import Stack
from simulator.scale.stacks.megatron import Megatron
from simulator.scale.stacks.torch_native import TorchNative

__all__ = ["stack_named", "stack_names"]

_STACKS: dict[str, Callable[[], Stack]] = {
    "megatron": Megatron,
    "megatron-2022": lambda: Megatron(name="megatron-2022", flash_attention=False),
    "torch": TorchNative,
    "torch-compile": lambda: TorchNative(name="torch-compile", compiled=True),
    "twofold": Stack,
}


def stack_names() -> tuple[str, ...]:
    """The names that `stack_named` knows, sorted."""
    return tuple(sorted(_STACKS))


def stack_named(name: str) -> Stack:
    """The stack of a name.

    Raises:
        TwofoldError: an unknown name, with suggestions.

    >>> stack_named("torch-compile").name
    'torch-compile'
    """
    if name not in _STACKS:
        close = difflib.get_close_matches(name, _STACKS, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise TwofoldError(f"stack {name!r} is not known; {hint}Known are {', '.join(stack_names())}")
    return _STACKS[name]()
