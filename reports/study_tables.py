"""The points of a study as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reports.figures import FIGURES
from reports.tables import Cell, Table
from reports.units import Change, Count, Seconds, Share

__all__ = ["Row", "change_table", "setting_text", "study_table"]

Row = Mapping[str, Any]
"""Settings and figures of a point by name."""
Cells = dict[str, Callable[[Row], Cell]]

_MOST_REFUSALS = 5


def study_table(axes: Sequence[str], rows: Sequence[Row], most: int | None = None, *, searched: bool = False) -> Table:
    """What was varied and the main figures.

    Args:
        axes: names of what was varied.
        rows: settings and figures of every point.
        most: rows shown at most, those that fit and have the most tokens a second first; None: all, in their order.
        searched: whether degrees are shown.
    """
    told = [row for row in rows if "refused" not in row]
    shown = told if most is None else sorted(told, key=lambda row: (not row["fits"], -row["tokens_per_s"]))[:most]
    cells: Cells = {name: lambda row, name=name: setting_text(row.get(name)) for name in axes}  # type: ignore[misc]
    cells |= _figures(told, searched)
    body = tuple(tuple(cell(row) for cell in cells.values()) for row in shown)
    notes = [f"{len(told) - len(shown):,} more points are in the results."] if len(shown) < len(told) else []
    return Table(
        title=f"Study: {len(rows):,} points", columns=tuple(cells), rows=body,
        notes=(*notes, *_refusals(rows)),
    )  # fmt: skip


def change_table(axes: Sequence[str], rows: Sequence[Row], *, searched: bool = False) -> Table:
    """The base, and below it each change by itself; changes that come to the same share a row.

    Args:
        axes: names of what was varied, one at a time.
        rows: settings and figures of the base, then of every change.
        searched: whether degrees are shown.
    """
    base, told = rows[0], [row for row in rows if "refused" not in row]
    cells: Cells = {}
    if "refused" not in base:
        cells["change"] = lambda row: None if row is base else Change(row["step_s"] / base["step_s"] - 1)
    cells = {**_figures(told, searched), **cells}
    names: dict[tuple[Cell, ...], list[str]] = {}
    for row in told:
        changed = [f"{name} = {setting_text(row[name])}" for name in axes if row.get(name) != base.get(name)]
        names.setdefault(tuple(cell(row) for cell in cells.values()), []).append(", ".join(changed) or "unchanged")
    return Table(
        title="One change at a time", columns=("what if", *cells),
        rows=tuple(("; ".join(said), *values) for values, said in names.items()), notes=tuple(_refusals(rows)),
    )  # fmt: skip


def _figures(rows: Sequence[Row], searched: bool) -> Cells:
    """Title -> the cell of a row."""
    found: Cells = {
        FIGURES["step_s"].title: lambda row: Seconds(row["step_s"]),
        "tokens/s": lambda row: Count(row["tokens_per_s"]),
    }
    if any(row["goodput"] != 1.0 for row in rows):
        found["goodput"] = lambda row: Share(row["goodput"])
    if any("price_per_1e9_tokens" in row for row in rows):
        found["price of 10^9 tokens"] = lambda row: (
            Count(row["price_per_1e9_tokens"]) if "price_per_1e9_tokens" in row else None
        )
    found[FIGURES["peak_bytes"].title] = lambda row: FIGURES["peak_bytes"].form(row["peak_bytes"])
    if not all(row["fits"] for row in rows):
        found["fits"] = lambda row: "yes" if row["fits"] else "no"
    if searched:
        found["degrees"] = lambda row: row["degrees"]
    return found


def _refusals(rows: Sequence[Row]) -> list[str]:
    counts: dict[str, int] = {}
    for row in rows:
        if "refused" in row:
            counts[row["refused"]] = counts.get(row["refused"], 0) + 1
    most = sorted(counts.items(), key=lambda each: -each[1])
    notes = [f"{_points(count)} cannot be: {reason}" for reason, count in most[:_MOST_REFUSALS]]
    if len(most) > _MOST_REFUSALS:
        notes.append(f"{_points(sum(count for _, count in most[_MOST_REFUSALS:]))} cannot be for other reasons.")
    return notes


def _points(count: int) -> str:
    return "1 point" if count == 1 else f"{count:,} points"


def setting_text(value: Any) -> str:
    """A setting as people write it."""
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
