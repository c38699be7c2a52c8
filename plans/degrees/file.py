"""Degrees as JSON: one key per degree, under its name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from plans.degrees.check import check_stated
from plans.degrees.value import DEGREES, Degrees
from plans.errors import TwofoldError

__all__ = ["degrees_to_json", "values_from_json"]


def degrees_to_json(degrees: Degrees) -> dict[str, Any]:
    """Plain values by name, the global batch not included.

    >>> degrees_to_json(Degrees(dp=2, global_batch=2))["order"]
    ['tp', 'cp', 'dp', 'pp']
    """
    return {name: list(value) if isinstance(value, tuple) else value for name, value in degrees.values.items()}


def values_from_json(found: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The values by name, as `Degrees.of` takes them.

    Args:
        found: the JSON object.
        path: path of the file, for messages.

    Raises:
        TwofoldError: missing or unknown names, values of a wrong type, degrees that contradict each other.
    """
    if unknown := sorted(found.keys() - DEGREES.keys()):
        near = difflib.get_close_matches(unknown[0], DEGREES, n=1)
        way = f"did you mean {near[0]!r}?" if near else "remove it from the file"
        raise TwofoldError(f"{path}: degrees.{unknown[0]} is not a degree; {way}")
    if missing := [name for name in DEGREES if name not in found]:
        raise TwofoldError(f"{path}: degrees.{missing[0]} is missing; write the file again with `twofold plan`")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    try:
        check_stated(values)
    except TwofoldError as error:
        raise TwofoldError(f"{path}: {error}") from None
    return values
