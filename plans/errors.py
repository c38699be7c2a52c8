"""The base exceptions of twofold, and two checks of numbers for public functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

__all__ = ["TrainingStopped", "TwofoldError", "number", "unknown_name", "whole_number"]


class TwofoldError(ValueError):
    """Invalid input. The message names the input and a way out (exit code 2)."""

    exit_code = 2


class TrainingStopped(TwofoldError):
    """Training began and may not continue, as after a loss that is not finite (exit code 1)."""

    exit_code = 1


def whole_number(what: str, value: object, *, least: int = 1) -> int:
    """`value` as an int, numpy's kinds of integers included.

    Raises:
        TwofoldError: it is not a whole number, or is below `least`.

    >>> whole_number("num_steps", 3)
    3
    >>> whole_number("num_steps", 1.5)
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: num_steps must be a whole number of at least 1, not 1.5
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise TwofoldError(f"{what} must be a whole number of at least {least}, not {value!r}")
    return int(value)


def unknown_name(what: str, name: str, known: Sequence[str], close: Sequence[str] = ()) -> str:
    """The message about a name that is not known, with the close ones, or else with all.

    >>> unknown_name("stack", "torsh", ["megatron", "torch"], close=["torch"])
    "stack 'torsh' is not known; did you mean torch?"
    """
    if close:
        return f"{what} {name!r} is not known; did you mean {' or '.join(close)}?"
    return f"{what} {name!r} is not known; known are {', '.join(known)}"


def number(what: str, value: object, *, above: float = -math.inf) -> float:
    """`value` as a float. Accepts numpy's numbers too.

    Raises:
        TwofoldError: it is not a number, not finite, or not above `above`.

    >>> number("bandwidth", "2", above=0)
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: bandwidth must be a finite number above 0, not '2'
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not above < float(value) < math.inf:
        least = "" if above == -math.inf else f" above {above:g}"
        raise TwofoldError(f"{what} must be a finite number{least}, not {value!r}")
    return float(value)
