"""Findings of a study: the best points, the effect of each axis, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simulator.study.axes import setting_text

__all__ = ["Findings", "Row"]

Row = Mapping[str, Any]
"""Settings and figures of a point by name; of one that cannot be `refused` instead of figures."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The points of a study.

    Args:
        axes: names of what was varied.
        rows: rows of every point, in order.
        alone: one change at a time, after the base itself; else every combination.
        searched: the degrees of every point were searched.
    """

    axes: Sequence[str]
    rows: Sequence[Row]
    alone: bool = False
    searched: bool = False

    @cached_property
    def predicted(self) -> list[Row]:
        """Rows that have figures."""
        return [row for row in self.rows if "refused" not in row]

    @cached_property
    def best_first(self) -> list[Row]:
        """Rows that fit the memory of their devices, those with the most tokens a second first."""
        return sorted((row for row in self.predicted if row["fits"]), key=lambda row: -row["tokens_per_s"])

    @cached_property
    def cheapest(self) -> Row | None:
        """The point with the least price per token among those that fit and have a price."""
        priced = [row for row in self.best_first if "price_per_1e9_tokens" in row]
        return min(priced, key=lambda row: row["price_per_1e9_tokens"], default=None)

    def changes(self) -> list[tuple[Row, float]]:
        """The relative change of tokens a second for each single change, the largest gain first."""
        if not self.alone or "refused" in self.rows[0]:
            return []
        base, rates = self.rows[0], [(row, row["tokens_per_s"]) for row in self.predicted[1:]]
        return sorted(((row, rate / base["tokens_per_s"] - 1) for row, rate in rates), key=lambda each: -each[1])

    def best_by_value(self, name: str) -> dict[Any, Row]:
        """Value of an axis -> its best row, in the order of the axis; values without a row that fits are left out.

        >>> rows = [{"tp": tp, "fits": tp > 1, "tokens_per_s": 8.0 / tp} for tp in (1, 2, 4)]
        >>> list(Findings(axes=["tp"], rows=rows).best_by_value("tp"))
        [2, 4]
        """
        found: dict[Any, Row] = {}
        for row in self.best_first:
            found.setdefault(_hashable(row.get(name)), row)
        order = dict.fromkeys(_hashable(row.get(name)) for row in self.rows)
        return {value: found[value] for value in order if value in found}

    def point(self, row: Row) -> str:
        """The settings of a point as text."""
        base = self.rows[0] if self.alone else {}
        changed = [name for name in self.axes if name in row and row[name] != base.get(name)]
        return ", ".join(f"{name} = {setting_text(row[name])}" for name in changed) or "unchanged"


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
