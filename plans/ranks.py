"""Lists of ranks as text."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["format_ranks"]


def format_ranks(ranks: Iterable[int], between: str = ", ") -> str:
    """Ranks with runs joined.

    >>> format_ranks([0, 1, 2, 3, 6])
    '0-3, 6'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return between.join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
