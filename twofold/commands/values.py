"""Values that options accept, declared next to their type and checked before a command begins.

    steps: AtLeast1 = 3
    report: HtmlFile | None = None

`check_values` refuses a value outside its limits, an empty text, and a file that cannot be written.
"""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from plans.errors import TwofoldError

__all__ = [
    "Above0", "AtLeast0", "AtLeast1", "Factor", "HtmlFile", "Limits", "OutFile", "Port", "Steps", "SvgFile",
    "TableFile", "TraceFile", "check_values", "flag", "flag_of", "mark_value", "marks_of",
]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The range of a number; None is no limit."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def error(self, value: float) -> str | None:
        """The requirement that a value does not meet; None if it is within the limits.

        >>> Limits(at_least=1).error(0), Limits(above=0).error(-1), Limits(at_most=3).error(2)
        ('must be at least 1', 'must be above 0', None)
        """
        if not math.isfinite(value):
            return "must be a finite number"
        if self.at_least is not None and value < self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.above is not None and value <= self.above:
            return f"must be above {self.above:g}"
        if self.at_most is not None and value > self.at_most:
            return f"must be at most {self.at_most:,g}"
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """A file that the command writes; with `endings` its name must have one of them."""

    endings: tuple[str, ...] = ()

    def error(self, value: str) -> str | None:
        """The requirement that a name does not meet, or None."""
        if self.endings and not value.endswith(self.endings) and not value.startswith("/dev/"):
            return f"must end with {' or '.join(self.endings)}"
        return None


AtLeast0 = Annotated[int, Limits(at_least=0)]
AtLeast1 = Annotated[int, Limits(at_least=1)]
Steps = Annotated[int, Limits(at_least=1, at_most=10_000)]
"""Steps to simulate."""
Port = Annotated[int, Limits(at_least=0, at_most=65_535)]
Above0 = Annotated[float, Limits(above=0)]
Factor = Annotated[float, Limits(above=0, at_most=1e6)]
OutFile = Annotated[str, Writes()]
HtmlFile = Annotated[str, Writes(endings=(".html", ".htm"))]
SvgFile = Annotated[str, Writes(endings=(".svg",))]
TableFile = Annotated[str, Writes(endings=(".csv", ".csv.gz"))]
TraceFile = Annotated[str, Writes(endings=(".json", ".json.gz"))]


def flag(name: str) -> str:
    """An option as written on the command line.

    >>> flag("global_batch")
    '--global-batch'
    """
    return f"--{name.replace('_', '-')}"


def flag_of(name: str, kind: Any) -> str:
    """The option of a field of this type: the name that `tyro.conf.arg` gives it, otherwise its own."""
    return flag(mark_value(kind, "name") or name)


def marks_of(kind: Any) -> tuple[Any, ...]:
    """Everything that a type, or a part of it, is annotated with."""
    marks = typing.get_args(kind)[1:] if typing.get_origin(kind) is Annotated else ()
    return marks + tuple(mark for part in typing.get_args(kind) for mark in marks_of(part))


def mark_value(kind: Any, name: str) -> str:
    """An argument of the `tyro.conf.arg` of a type; "" if there is none."""
    return next((value for mark in marks_of(kind) if (value := getattr(mark, name, None))), "")


def is_positional(kind: Any) -> bool:
    """Whether an option of this type is a positional argument (`tyro.conf.Positional`)."""
    return any("Positional" in repr(mark) for mark in marks_of(kind))


def check_values(options: Any) -> None:
    """Check every option of a command.

    Raises:
        TwofoldError: a value that is not accepted; the message names the option.
    """
    from plans.files import check_writable

    values = [*_values(options)]
    for name, kind, value in values:
        if value == "":
            raise TwofoldError(f"{name} is empty; give a value")
        for mark in marks_of(kind):
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(mark, Limits | Writes) and (error := mark.error(each)):
                    shown = f"{each:g}" if isinstance(each, float) else each
                    raise TwofoldError(f"{name} {error}, not {shown}")
            if isinstance(mark, Writes):
                for other, its_kind, each in values:
                    if _reads(its_kind, each, value):
                        raise TwofoldError(f"{name} would replace the file of {other}; name another file")
                check_writable(value)


def _reads(kind: Any, value: Any, path: str) -> bool:
    """Whether an option that is not written, or one of its values, names the file of a path."""
    if any(isinstance(mark, Writes) for mark in marks_of(kind)) or not os.path.exists(path):
        return False
    names = value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, str) and os.path.exists(each) and os.path.samefile(each, path) for each in names)


def _values(options: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, type, value) of every option that differs from its default."""
    hints = typing.get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            yield from _values(value)
        elif value is not None and value != field.default:
            kind = hints[field.name]
            yield field.name.upper() if is_positional(kind) else flag_of(field.name, kind), kind, value
