"""Stretches of time: spans joined, and those in which a rank communicates and does not compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

__all__ = ["exposed", "joined"]


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


def exposed(compute: list[tuple[int, int]], comm: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(start, end) of what of the communication nothing hides; both joined and in order.

    >>> list(exposed([(0, 4), (6, 8)], [(2, 10)]))
    [(4, 6), (8, 10)]
    """
    number = 0
    for low, high in comm:
        while number < len(compute) and compute[number][1] <= low:
            number += 1
        at = number
        while low < high and at < len(compute) and compute[at][0] < high:
            if low < compute[at][0]:
                yield low, compute[at][0]
            low = compute[at][1]
            at += 1
        if low < high:
            yield low, high
