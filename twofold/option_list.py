"""The options of a command, read from the fields and the docstring of its class."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from twofold.commands.values import flag_of, is_positional, mark_value

__all__ = ["Option", "options_of", "types_in"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option or a positional argument of a command.

    Args:
        name: --global-batch, or the field's name for a positional argument.
        is_word: whether it is positional.
        is_needed: whether it has no default.
        type: type of its value.
        default: its default; None if there is none.
        group: title of its group of options.
        meaning: its description.
        value: its value in help pages, such as N or PLAN.json.
    """

    name: str
    is_word: bool
    is_needed: bool
    type: Any
    default: Any
    group: str
    meaning: str
    value: str


def options_of(command: type, group: str = "") -> Iterator[Option]:
    """All options of a command."""
    hints = typing.get_type_hints(command, include_extras=True)
    meanings = _meanings(command)
    for field in dataclasses.fields(command):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from options_of(kind, (kind.__doc__ or "").strip().partition("\n")[0].rstrip("."))
            continue
        is_word = is_positional(kind)
        plain = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        yield Option(
            name=field.name if is_word else flag_of(field.name, kind),
            is_word=is_word,
            is_needed=needed,
            type=plain,
            default=None if field.default is dataclasses.MISSING else field.default,
            group=group,
            meaning=mark_value(kind, "help") or meanings.get(field.name, ""),
            value=mark_value(kind, "metavar") or (field.name.upper() if is_word else _value(field.name, plain)),
        )


def types_in(kind: Any) -> tuple[Any, ...]:
    """The types that a type consists of.

    >>> types_in(tuple[int, ...] | None)
    (<class 'int'>, Ellipsis, <class 'NoneType'>)
    """
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is not None:
        return tuple(part for argument in typing.get_args(kind) for part in types_in(argument))
    return (kind,)


def _value(name: str, kind: Any) -> str:
    """The value of an option of this type, as help pages show it; "" for a switch."""
    parts = types_in(kind)
    if bool in parts:
        return "" if kind is bool else "True|False"
    word = "N" if int in parts else "X" if float in parts else name.upper()
    return f"{word} ..." if Ellipsis in parts else word


def _meanings(command: type) -> dict[str, str]:
    """The description of every field, from the section "Args" of the docstrings."""
    sections = [(inspect.getdoc(each) or "").partition("Args:\n")[2].partition("\n\n")[0] for each in command.__mro__]
    entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", "\n".join(sections), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
