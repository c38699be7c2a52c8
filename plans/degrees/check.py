"""Checks of degrees against a model and a machine, used by every command and function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from plans.degrees.rules import OF_DEGREES, OF_DEVICES, OF_MODELS, ModelSizes, broken
from plans.degrees.value import Degrees, check_values
from plans.errors import TwofoldError

__all__ = ["check", "check_stated", "impossible"]


def check(
    degrees: Degrees, model: ModelSizes | None = None, *, num_devices: int | None = None, machine: str = ""
) -> None:
    """Refuse degrees that are impossible.

    Args:
        degrees: to be looked at; values that are never valid are refused when degrees are created.
        model: whose sizes they must divide; None: of any other graph.
        num_devices, machine: that there are, and the machine's name.

    Raises:
        TwofoldError: with the arithmetic and what would do.

    >>> from plans.model.transformer import sizes_of, transformer_config
    >>> check(Degrees(tp=5), sizes_of(transformer_config("gpt2")))
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: gpt2: 12 query heads cannot be split over tp 5: 12 % 5 != 0; the next valid tp is 6
    """
    known = {**degrees.values, "global_batch": degrees.global_batch}
    for sentence in impossible(known, model, num_devices=num_devices, machine=machine):
        raise TwofoldError(sentence)


def check_stated(
    values: Mapping[str, Any], model: ModelSizes | None = None, *, num_devices: int | None = None, machine: str = ""
) -> None:
    """Refuse a few degrees by name, or the global batch, whatever the others will be; else as `check`.

    Raises:
        TwofoldError: the same sentences as `check`, as far as they can be told.
    """
    check_values(values)
    for sentence in broken(OF_DEGREES, values):
        raise TwofoldError(sentence)
    for sentence in impossible(values, model, num_devices=num_devices, machine=machine):
        raise TwofoldError(sentence)


def impossible(
    known: Mapping[str, Any], model: ModelSizes | None = None, *, num_devices: int | None = None, machine: str = ""
) -> Iterator[str]:
    """Why known degrees do not fit the number of devices, then for a model; nothing where they can be."""
    if num_devices is not None:
        yield from broken(OF_DEVICES, {**known, "num_devices": num_devices, "machine": machine})
    if model is not None:
        yield from broken(OF_MODELS, {**known, "model": model})
