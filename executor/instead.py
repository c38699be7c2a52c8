"""Lets other functions run in place of a library's, also where a module imported them by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, cast

__all__ = ["called_instead"]


def _call(*args: Any, **kwargs: Any) -> Any:
    return other(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821  # see `called_instead`


@contextlib.contextmanager
def called_instead(others: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Within this context a call of a function calls another one with its arguments.

    Args:
        others: function -> what is called instead. A function gets a code that looks the other one up among the globals
            of its module, because names of the function in other modules cannot be found.
    """
    functions = {cast(FunctionType, function): instead for function, instead in others.items()}
    before = {function: function.__code__ for function in functions}
    try:
        for function, instead in functions.items():
            name = f"_twofold_{function.__name__}"
            function.__globals__[name] = instead
            function.__code__ = _call.__code__.replace(co_names=(name,))
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code
            function.__globals__.pop(f"_twofold_{function.__name__}", None)
