"""The points of a study as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from plans.figures import FIGURES
from plans.units import Change, Count, Seconds, Share
from reports.tables import Cell, Table
from simulator.study.axes import setting_text
from simulator.study.findings import Findings, Row

__all__ = ["change_table", "study_table"]

Cells = dict[str, Callable[[Row], Cell]]

_MOST_REFUSALS = 5


def study_table(study: Findings, most: int | None = None) -> Table:
    """The axes and the main figures.

    Args:
        study: the points.
        most: rows shown at most, those that fit and have the most tokens a second first; None: all, in their order.
    """
    predicted = study.predicted
    shown = (
        predicted if most is None else sorted(predicted, key=lambda row: (not row["fits"], -row["tokens_per_s"]))[:most]
    )
    cells: Cells = {name: lambda row, name=name: setting_text(row.get(name)) for name in study.axes}  # type: ignore[misc]
    cells |= _figures(study)
    body = tuple(tuple(cell(row) for cell in cells.values()) for row in shown)
    notes = [f"{len(predicted) - len(shown):,} more points are in the results."] if len(shown) < len(predicted) else []
    return Table(
        title=f"Study: {len(study.rows):,} points", columns=tuple(cells), rows=body,
        notes=(*notes, *_refusals(study.rows)),
    )  # fmt: skip


def change_table(study: Findings) -> Table:
    """The base, and below it each change by itself; changes that come to the same share a row."""
    base = study.rows[0]
    cells: Cells = {}
    if "refused" not in base:
        cells["change"] = lambda row: None if row is base else Change(row["step_s"] / base["step_s"] - 1)
    cells = {**_figures(study), **cells}
    names: dict[tuple[Cell, ...], list[str]] = {}
    for row in study.predicted:
        names.setdefault(tuple(cell(row) for cell in cells.values()), []).append(study.point(row))
    return Table(
        title="One change at a time", columns=("what if", *cells),
        rows=tuple(("; ".join(said), *values) for values, said in names.items()), notes=tuple(_refusals(study.rows)),
    )  # fmt: skip


def _figures(study: Findings) -> Cells:
    """Title -> the cell of a row."""
    rows = study.predicted
    cells: Cells = {
        FIGURES["step_s"].title: lambda row: Seconds(row["step_s"]),
        "tokens/s": lambda row: Count(row["tokens_per_s"]),
    }
    if any(row["goodput"] != 1.0 for row in rows):
        cells["goodput"] = lambda row: Share(row["goodput"])
    if any("price_per_1e9_tokens" in row for row in rows):
        cells["price of 10^9 tokens"] = lambda row: (
            Count(row["price_per_1e9_tokens"]) if "price_per_1e9_tokens" in row else None
        )
    cells[FIGURES["peak_bytes"].title] = lambda row: FIGURES["peak_bytes"].form(row["peak_bytes"])
    if not all(row["fits"] for row in rows):
        cells["fits"] = lambda row: "yes" if row["fits"] else "no"
    if study.searched:
        cells["degrees"] = lambda row: row["degrees"]
    return cells


def _refusals(rows: Sequence[Row]) -> list[str]:
    counts: dict[str, int] = {}
    for row in rows:
        if "refused" in row:
            counts[row["refused"]] = counts.get(row["refused"], 0) + 1
    most = sorted(counts.items(), key=lambda each: -each[1])
    notes = [f"{_points(count)} impossible: {reason}" for reason, count in most[:_MOST_REFUSALS]]
    if len(most) > _MOST_REFUSALS:
        notes.append(f"{_points(sum(count for _, count in most[_MOST_REFUSALS:]))} impossible for other reasons.")
    return notes


def _points(count: int) -> str:
    return "1 point is" if count == 1 else f"{count:,} points are"
