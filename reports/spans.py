"""Kinds of work in pictures of timelines."""

from __future__ import annotations

__all__ = ["KIND_COLOURS", "kind_of"]

KIND_COLOURS = {
    "forward": "sky",
    "input gradient": "orange",
    "weight gradient": "green",
    "recompute": "yellow",
    "communication": "purple",
    "update": "vermillion",
    "other": "grey",
    "waiting": "grey",
}
"""Kind of work -> its colour in charts."""

_BY_PART = {
    "F": "forward",
    "B": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
    "C": "communication",
    "U": "update",
}


def kind_of(call: str, part: str) -> str:
    """The kind of work of an instruction, one of `KIND_COLOURS`; a slice moves nothing between ranks."""
    return "waiting" if call == "wait" else "other" if call == "slice" else _BY_PART.get(part, "other")
