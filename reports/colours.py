"""The colours of charts and timelines, and their meaning.

They are the eight colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people with any kind of colour
vision can distinguish. `templates/picture.css` has them under the same names.
"""

from __future__ import annotations

__all__ = ["COLOURS", "KIND_COLOURS", "PART_COLOURS", "ROLE_COLOURS", "kind_of"]

COLOURS = {
    "sky": "#56b4e9", "orange": "#e69f00", "green": "#009e73", "purple": "#cc79a7", "yellow": "#f0e442",
    "vermillion": "#d55e00", "blue": "#0072b2", "grey": "#99a1ab",
}  # fmt: skip
"""Name -> colour, in the order in which series and stages take them."""

PART_COLOURS = {
    "compute": "sky", "exposed communication": "purple", "exposed all_reduce": "purple", "host wait": "yellow",
    "bubble": "grey", "waits": "grey",
}  # fmt: skip
"""Part of a step -> its colour."""

KIND_COLOURS = {
    "forward": "sky", "input gradient": "orange", "weight gradient": "green", "recompute": "yellow",
    "communication": "purple", "update": "vermillion", "other": "grey", "waiting": "grey",
}  # fmt: skip
"""Kind of work -> its colour in timelines."""

ROLE_COLOURS = {
    "weight": "sky", "optimizer": "green", "gradient": "orange", "activation": "purple", "input": "yellow",
    "buffer": "grey", "communication": "vermillion", "live": "sky",
}  # fmt: skip
"""Colours of memory roles, from the bottom of the stack to its top; "live" is all memory if roles are unknown."""

_BY_PART = {
    "F": "forward", "B": "input gradient", "W": "weight gradient", "R": "recompute", "C": "communication",
    "U": "update",
}  # fmt: skip


def kind_of(call: str, part: str) -> str:
    """The kind of work of an instruction, one of `KIND_COLOURS`; a slice moves nothing between ranks."""
    return "waiting" if call == "wait" else "other" if call == "slice" else _BY_PART.get(part, "other")
