"""Kinds of work in pictures of timelines, and spans that touch."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

__all__ = ["KIND_COLOURS", "joined", "kind_of"]

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


def joined(starts: npt.NDArray[Any], ends: npt.NDArray[Any], near: int = 0) -> list[tuple[int, int]]:
    """Intervals by start, with those joined that are no further apart than `near`.

    >>> import numpy as np
    >>> joined(np.array([0, 5, 9]), np.array([5, 6, 10]))
    [(0, 6), (9, 10)]
    """
    found: list[tuple[int, int]] = []
    for low, high in zip(starts.tolist(), ends.tolist(), strict=True):
        if found and low <= found[-1][1] + near:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found
