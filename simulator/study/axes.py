"""The axes of studies: every setting of a point by its name, with its type and its meaning."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from plans.degrees import DEGREES
from plans.errors import TwofoldError
from simulator.study.whatif import KNOBS

__all__ = ["AXES", "Axis", "check_settings", "setting_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A setting that a study can vary.

    Args:
        name: in files, in Python and in tables.
        type: type of its values.
        meaning: description with unit.
        has_parts: whether NAME.PART is an axis as well, such as bandwidth.NVLink.
    """

    name: str
    type: Any
    meaning: str
    has_parts: bool = False


def _axes() -> dict[str, Axis]:
    listed = [
        Axis(name="model", type=str, meaning="a name such as llama-3-8b, or a Hugging Face config.json"),
        Axis(name="layers", type=int, meaning="blocks of the model; the model's by default"),
        Axis(name="seq", type=int, meaning="tokens of a sequence; the model's by default"),
        Axis(name="precision", type=str, meaning="bfloat16, float16 or float32 weights and activations"),
        Axis(name="mixed_precision", type=bool, meaning="float32 gradients, master weights and optimizer states; yes "
        "by default"),
        Axis(name="capacity_factor", type=str, meaning="places at an expert over an even share, or dropless; the "
        "model's by default"),
        Axis(name="global_batch", type=int, meaning="sequences of a step"),
        Axis(name="stack", type=str, meaning="the software that runs it; twofold by default"),
        Axis(name="host", type=str, meaning="host file (`twofold calibrate --host`) with the times to issue work"),
        Axis(name="execution", type=str, meaning="for twofold's executor: graph (the default) or eager"),
        Axis(name="fused", type=bool, meaning="whether twofold fuses memory-bound instructions; yes by default"),
        Axis(name="machine", type=str, meaning="a shipped machine, such as h100-sxm-x64, or a machine file"),
        Axis(name="devices", type=int, meaning="of the machine that are used; without dp, dp follows from them. A "
             "machine NAME-xN is made for that many"),
    ]  # fmt: skip
    listed += [Axis(name=degree.flag, type=degree.type, meaning=degree.meaning) for degree in DEGREES.values()]
    listed += [
        Axis(name=name, type=float, meaning=f"factor on the {quantity}", has_parts=name in ("bandwidth", "latency"))
        for name, quantity in KNOBS.items()
    ]
    listed += [
        Axis(name="slow", type=str, meaning="slow ranks: none, RANKS=FACTOR such as 3=1.2, stage1=1.1 or "
             "1/1000=1.1 for a share of all; several joined by spaces"),
        Axis(name="mtbf_hours", type=float, meaning="mean time between failures of one device; mtbf_hours.CAUSE: by "
             "one cause, the rates of all causes add up", has_parts=True),
        Axis(name="restart_s", type=float, meaning="seconds from a failure to the next step"),
        Axis(name="spares", type=int, meaning="spare devices that replace failed ones"),
        Axis(name="repair_hours", type=float, meaning="hours from a failure until the device is a spare again"),
        Axis(name="checkpoint_every", type=int, meaning="steps between checkpoints"),
        Axis(name="checkpoint_minutes", type=float, meaning="minutes between checkpoints, instead of steps"),
        Axis(name="checkpoint_GBps", type=float, meaning="of one rank, in 10^9 bytes a second; 1 by default"),
        Axis(name="checkpoint_async", type=bool, meaning="whether training continues while a checkpoint is written"),
        Axis(name="price_per_device_hour", type=float, meaning="in any currency; spares cost the same"),
    ]  # fmt: skip
    return {axis.name: axis for axis in listed}


AXES: Mapping[str, Axis] = _axes()
"""Name -> axis, in the order of tables."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that do not exist or do not fit together.

    Raises:
        TwofoldError: an unknown name, with suggestions; a value of another type.

    >>> check_settings({"bandwith.NVLink": 2.0})
    Traceback (most recent call last):
        ...
    plans.errors.TwofoldError: 'bandwith.NVLink' is not an axis; did you mean 'bandwidth'? See `twofold study --axes`
    """
    for name, value in settings.items():
        stem, dot, part = name.partition(".")
        axis = AXES.get(stem)
        if axis is None or (dot and not (axis.has_parts and part)):
            close = difflib.get_close_matches(stem, AXES, n=1)
            if axis is not None:
                close = [stem]
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise TwofoldError(f"{name!r} is not an axis; {hint}See `twofold study --axes`")
        if not _is_of(axis.type, value):
            raise TwofoldError(f"{name} must be {_SAID.get(axis.type, f'of type {axis.type}')}, not {value!r}")


_SAID = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple[str, ...]: "a list of texts",
    int | None: "a whole number", tuple[int, ...] | None: "a list of whole numbers",
}  # fmt: skip


def _is_of(kind: Any, value: Any) -> bool:
    """Whether a JSON value has a type; integers count as numbers, lists as tuples."""
    if isinstance(kind, types.UnionType):
        return any(_is_of(argument, value) for argument in get_args(kind))
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_is_of(get_args(kind)[0], each) for each in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, int | float if kind is float else kind)


def setting_text(value: Any) -> str:
    """A setting as people write it."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
