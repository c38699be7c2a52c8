"""Ranks, axes and shapes as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["format_axes", "format_ranks", "format_shape"]


def format_ranks(ranks: Iterable[int], between: str = ", ") -> str:
    """Ranks as text, with consecutive ranks joined.

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


def format_axes(axes: Sequence[str]) -> str:
    """Axes as one word.

    >>> format_axes(["tp"]), format_axes(["dp", "tp"])
    ('tp', '(dp, tp)')
    """
    return axes[0] if len(axes) == 1 else f"({', '.join(axes)})"


def format_shape(shape: Iterable[int]) -> str:
    """Sizes of a tensor.

    >>> format_shape([8, 4096]), format_shape([])
    ('8×4096', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"
