"""A flag for every parallel degree of a transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import tyro

from plans.degrees import DEGREES
from plans.degrees.rules import whole_number
from twofold.commands.values import Limits

__all__ = ["DegreeOptions", "PinOptions"]

T = TypeVar("T")

_FOR_OTHER_MODELS = {
    "schedule": "; other models: a name, or a file (.csv, .txt) with a row of actions for every pipeline rank [1f1b]",
    "zero": "; other models: 0 by default",
}
"""Meaning of flags of `twofold plan` for models that are searched operator by operator."""


def _with_flags(*, pinned: bool) -> Callable[[type[T]], type[T]]:
    """Add a flag for every degree to a class of options, with its meaning as the help text.

    Args:
        pinned: flags that are not given are None instead of the degree's default.
    """

    def decorate(options: type[T]) -> type[T]:
        for degree in DEGREES.values():
            meaning = degree.meaning + (_FOR_OTHER_MODELS.get(degree.name, "") if pinned else "")
            kind = degree.type | None if pinned else degree.type
            limits = (Limits(at_least=1),) if degree.check is whole_number else ()
            options.__annotations__[degree.flag] = Annotated[kind, tyro.conf.arg(help=meaning), *limits]
            setattr(options, degree.flag, None if pinned else degree.default)
        return dataclass(frozen=True, kw_only=True)(options)

    return decorate


@_with_flags(pinned=False)
class DegreeOptions:
    """Parallel degrees of a transformer."""

    @property
    def values(self) -> dict[str, Any]:
        """The degrees by name."""
        return {name: getattr(self, degree.flag) for name, degree in DEGREES.items()}


@_with_flags(pinned=True)
class PinOptions:
    """Parallel degrees of a transformer; those that are not given are searched."""

    @property
    def pins(self) -> dict[str, Any]:
        """The given degrees by name."""
        values = {name: getattr(self, degree.flag) for name, degree in DEGREES.items()}
        return {name: value for name, value in values.items() if value is not None}
