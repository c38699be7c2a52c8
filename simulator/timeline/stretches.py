"""Stretches of time: spans joined."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

__all__ = ["joined"]


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
