"""The page of a table of measurements that was predicted: scores, errors, the rows that are furthest off."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from plans.files import write_atomically
from reports.calibration_picture import Series, log_picture
from reports.page import figure, folded, key_figures, page, page_data, section
from reports.tables import Table

__all__ = ["validation_html", "write_validation_report"]

_WORST = 40
_MOST_POINTS = 2_000
_MOST_SERIES = 4
"""Of a picture; sources beyond are drawn together."""

_OTHERS = "others"


def write_validation_report(path: str | os.PathLike[str], name: str, document: Mapping[str, Any]) -> Path:
    """Write `validation_html(name, document)` to a file atomically."""
    return write_atomically(path, validation_html(name, document).encode())


def validation_html(name: str, document: Mapping[str, Any]) -> str:
    """The page as text.

    Args:
        name: of the table.
        document: the JSON object of `twofold validate`: sources, rows, skipped.
    """
    rows = document["rows"]
    errors = [abs(_error(row)) for row in rows]
    inside = sum(row["low"] <= row["value"] <= row["high"] for row in rows)
    summary = {"rows predicted": str(len(rows)), "rows skipped": str(len(document["skipped"]))}
    if rows:
        summary |= {
            "mean error": f"{sum(errors) / len(errors):.1%}",
            "inside the interval": f"{inside / len(rows):.0%}",
        }
    return page(
        f"Predictions of {name}",
        [
            section("scores", "Scores", _scores(document["sources"]).html()) if rows else "",
            section("errors", "Errors", *_pictures(rows)) if rows else "",
            section("worst", f"The {min(_WORST, len(rows))} rows that are furthest off", _worst(rows).html())
            if rows else "",
            folded("skipped", "Rows that were not predicted", _skipped(document["skipped"]).html())
            if document["skipped"] else "",
        ],
        notes="<li>An interval is meant to hold 9 of 10 measured values, over every plausible reading of a row.</li>",
        figures=key_figures(summary), data=page_data(sources=document["sources"], rows=rows[:_MOST_POINTS]),
    )  # fmt: skip


def _error(row: Mapping[str, Any]) -> float:
    return float(row["predicted"] / row["value"] - 1)


def _scores(sources: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        title="By source and metric",
        columns=("source", "metric", "rows", "mean error", "median", "bias", "inside", "order"),
        rows=tuple(
            (
                str(score["source"])[:70], score["metric"], str(score["rows"]), f"{score['mape']:.1%}",
                f"{score['median_ape']:.1%}", f"{score['bias']:+.1%}", f"{score['within_interval']:.0%}",
                "" if score["pair_order"] is None else f"{score['pair_order']:.0%}",
            )
            for score in sources
        ),
        right=frozenset({"rows", "mean error", "median", "bias", "inside", "order"}),
        notes=("Order: of all pairs of rows that differ in their layout only, the share that is in the right order.",),
    )  # fmt: skip


def _pictures(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One for each metric: errors over measured values, a colour for each source."""
    for metric in dict.fromkeys(row["metric"] for row in rows):
        own = [row for row in rows if row["metric"] == metric]
        names = [source for source, _ in Counter(row["source"] for row in own).most_common()]
        shown = names if len(names) <= _MOST_SERIES else [*names[: _MOST_SERIES - 1], _OTHERS]
        series = []
        for source in shown:
            some = [row for row in own if row["source"] == source or (source == _OTHERS and row["source"] not in shown)]
            step = -(-len(some) // (_MOST_POINTS // len(shown)))
            points = [(row["value"], _error(row), _told(row)) for row in some[::step]]
            series.append(Series(name=source[:60] or "no source", points=points))
        picture = log_picture(
            series, title=f"{metric}: predicted over measured", x_name=f"measured {metric}", y_name="error",
            linear_y=True,
        )  # fmt: skip
        yield figure(picture, f"Errors of {len(own)} rows. Hover over a point for its row.")


def _told(row: Mapping[str, Any]) -> str:
    return f"row {row['row']}: {row['value']:.4g} measured, {row['predicted']:.4g} predicted"


def _worst(rows: Sequence[Mapping[str, Any]]) -> Table:
    far = sorted(rows, key=lambda row: -abs(_error(row)))[:_WORST]
    return Table(
        title="Furthest off first",
        columns=("row", "source", "model", "devices", "software", "metric", "measured", "predicted", "error",
                 "interval"),
        rows=tuple(
            (
                str(row["row"]), str(row["source"])[:40], str(row.get("label_model", "")), row["machine"], row["stack"],
                row["metric"], f"{row['value']:.4g}", f"{row['predicted']:.4g}", f"{_error(row):+.1%}",
                f"{row['low']:.4g} to {row['high']:.4g}",
            )
            for row in far
        ),
        right=frozenset({"row", "measured", "predicted", "error"}),
    )  # fmt: skip


def _skipped(skipped: Sequence[Mapping[str, Any]]) -> Table:
    counts = Counter(each["reason"] for each in skipped).most_common()
    first = {reason: next(each["row"] for each in skipped if each["reason"] == reason) for reason, _ in counts}
    return Table(
        title="Why", columns=("reason", "rows", "first row"),
        rows=tuple((reason, str(count), str(first[reason])) for reason, count in counts),
        right=frozenset({"rows", "first row"}),
    )  # fmt: skip
