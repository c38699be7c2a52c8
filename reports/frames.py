"""Rows of plain values as pandas data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

__all__ = ["frame"]


def frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """A row for each mapping, a column for each name in any of them, in the order in which they come.

    >>> frame([{"tp": 1}, {"tp": 2, "step_s": 0.5}]).shape
    (2, 2)
    """
    import pandas

    return pandas.DataFrame.from_records(list(rows), columns=list(dict.fromkeys(name for row in rows for name in row)))
