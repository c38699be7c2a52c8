"""The page of a validated table of measurements: scores, errors, and the rows with the largest errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

from plans.units import Change, Count, Quantity, Share
from reports.charts import Chart, Scale, Series, series_chart
from reports.page import Page, Section
from reports.tables import Table

__all__ = ["scores_table", "validation_page"]

_MOST_POINTS = 2_000
_MOST_SERIES = 8
"""Largest number of sources with their own colour in a chart; others are drawn together."""

_OTHERS = "others"

Row = Mapping[str, Any]


def validation_page(name: str, document: Mapping[str, Any]) -> Page:
    """The page.

    Args:
        name: name of the table.
        document: the JSON object of `twofold validate`: sources, rows, skipped.
    """
    rows, skipped = document["rows"], document["skipped"]
    figures: dict[str, Any] = {"rows predicted": Count(len(rows)), "rows skipped": Count(len(skipped))}
    if rows:
        inside = sum(row["low"] <= row["value"] <= row["high"] for row in rows)
        figures |= {
            "mean error": Share(sum(abs(_error(row)) for row in rows) / len(rows)),
            "inside the interval": Share(inside / len(rows)),
        }
    return Page(
        kind="validation", title=f"Predictions of {name}", figures=figures,
        notes=["An interval should contain 9 of 10 measured values, for all plausible readings of a row."],
        data={"sources": document["sources"], "rows": rows[:_MOST_POINTS]},
        sections=[
            Section(id="scores", title="Scores", parts=[scores_table(document["sources"])] if rows else []),
            Section(id="errors", title="Predicted against measured", parts=list(_charts(rows))),
            Section(id="worst", title="Rows, largest errors first", parts=[_worst(rows)] if rows else []),
            Section(id="skipped", title="Rows that were not predicted", folded=True,
                    parts=[_skipped(skipped)] if skipped else []),
        ],
    )  # fmt: skip


def _error(row: Row) -> float:
    return float(row["predicted"] / row["value"] - 1)


def scores_table(sources: Sequence[Row]) -> Table:
    """A row for every source and metric."""
    return Table.of(
        "Errors of the predictions, by source and metric",
        (
            {
                "source": str(score["source"]), "metric": score["metric"], "rows": Count(score["rows"]),
                "mean error": Share(score["mape"]), "median": Share(score["median_ape"]),
                "bias": Change(score["bias"]), "inside": Share(score["within_interval"]),
                "order": None if score["pair_order"] is None else Share(score["pair_order"]),
            }
            for score in sources
        ),
        notes=[
            "inside: share of rows with a value inside the interval of the prediction; it should be 90 %.",
            "order: share of the pairs of rows with different layouts that are in the right order.",
        ],
    )  # fmt: skip


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Predicted over measured values with intervals, and errors, one chart per metric and a colour per source."""
    for metric in dict.fromkeys(row["metric"] for row in rows):
        of_metric = [row for row in rows if row["metric"] == metric]
        names = [source for source, _ in Counter(row["source"] for row in of_metric).most_common()]
        shown = names if len(names) <= _MOST_SERIES else [*names[: _MOST_SERIES - 1], _OTHERS]
        values, errors = [], []
        for source in shown:
            some = [
                row
                for row in of_metric
                if row["source"] == source or (source == _OTHERS and row["source"] not in shown)
            ]
            some = some[:: -(-len(some) // (_MOST_POINTS // len(shown)))]
            name = shorten(source, 60, placeholder=" ...") or "no source"
            points = [(row["value"], row["predicted"], _described(row)) for row in some]
            spread = [(row["low"], row["high"]) for row in some]
            values.append(Series(name=name, points=points, spread=spread))
            errors.append(Series(name=name, points=[(row["value"], _error(row), _described(row)) for row in some]))
        scale = Scale(x=f"measured {metric}", y=f"predicted {metric}", log_x=True, log_y=True, diagonal=True)
        note = f"{len(of_metric)} rows with their intervals. Hover over a point to read its row."
        yield series_chart(values, scale, title=f"{metric}: predicted against measured", caption=note)
        scale = Scale(x=f"measured {metric}", y="error", log_x=True, relative=True)
        yield series_chart(errors, scale, title=f"{metric}: predicted / measured - 1")


def _described(row: Row) -> str:
    values = f"{row['value']:.4g} measured, {row['predicted']:.4g} predicted"
    return f"row {row['row']}: {values} ({Change(_error(row))})"


def _worst(rows: Sequence[Row]) -> Table:
    return Table.of("Click on a column to sort", (
        {
            "row": int(row["row"]), "source": shorten(str(row["source"]), 40, placeholder=" ..."),
            "model": str(row.get("label_model", "")), "devices": row["machine"], "software": row["stack"],
            "metric": row["metric"], "measured": Quantity(row["value"]), "predicted": Quantity(row["predicted"]),
            "error": Change(_error(row)), "low": Quantity(row["low"]), "high": Quantity(row["high"]),
        }
        for row in sorted(rows, key=lambda row: -abs(_error(row)))
    ))  # fmt: skip


def _skipped(skipped: Sequence[Row]) -> Table:
    rows: dict[str, list[Row]] = {}
    for row in skipped:
        rows.setdefault(row["reason"], []).append(row)
    return Table.of("Why", (
        {"reason": reason, "rows": Count(len(alike)), "first row": int(alike[0]["row"])}
        for reason, alike in sorted(rows.items(), key=lambda item: -len(item[1]))
    ))  # fmt: skip
