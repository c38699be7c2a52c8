"""Degrees that another program does not support are refused, never dropped."""

from __future__ import annotations

from collections.abc import Collection

from plans.degrees import DEGREES, Degrees
from plans.errors import TwofoldError

__all__ = ["check_stated_by"]


def check_stated_by(program: str, known: Collection[str], degrees: Degrees) -> None:
    """Refuse degrees that a program cannot state, unless they have their defaults.

    Args:
        program: its name.
        known: names of degrees that it can state.
        degrees: to be stated.

    Raises:
        TwofoldError: with the flag to leave out.

    >>> check_stated_by("A program", ("dp",), Degrees(dp=2, tp=2, global_batch=2))
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: A program cannot state tp 2; plan with --tp 1
    """
    for name, degree in DEGREES.items():
        if name not in known and (value := degrees.values[name]) != degree.default:
            usual = f"without --{degree.flag.replace('_', '-')}" if degree.default is None else (
                f"with --{degree.flag.replace('_', '-')} {degree.default}"
            )  # fmt: skip
            raise TwofoldError(f"{program} cannot state {degree.word or name} {value}; plan {usual}")
