"""A study as tables and as a page: the best points, the effect of each axis, and all points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plans.figures import FIGURES
from plans.units import Bytes, Change, Count, Quantity, Seconds, Share
from reports.charts import Chart, Scale, Series, bars, series_chart
from reports.page import Page, Part, Section
from reports.tables import Cell, Table
from reports.time_tables import figures_table
from search.result import pareto_front
from simulator.study.axes import setting_text
from simulator.study.findings import Findings, Row

__all__ = ["change_table", "study_page", "study_table"]

_MOST_POINTS = 500
"""Largest number of points of a chart."""

_MOST_AXES = 6
"""Axes with a chart, those that matter most first."""

_MOST_TICKS = 8
"""Values of an axis that are all named below it."""

_MOST_REFUSALS = 5

_SHOWN = 20
"""Points of the first table."""

_WIDE = 16.0
"""Values that span more than this factor are on a logarithmic axis."""


def study_page(name: str, base: Mapping[str, Any], study: Findings, *, command: str = "") -> Page:
    """The page of a study of a name; `base` are settings of every point."""
    overview = change_table(study) if study.alone else study_table(study, _SHOWN)
    whole = [] if study.alone or len(study.predicted) <= _SHOWN else [study_table(study)]
    settings = Table.of(
        "Settings of every point", ({"setting": name, "value": setting_text(value)} for name, value in base.items())
    )
    sections = [
        Section(id="result", title="The best points", parts=[overview, *_changes(study)]),
        Section(id="axes", title="Effect of each axis", parts=[] if study.alone else list(_axes(study))),
        Section(id="trade", title="Cost of speed", parts=list(_trade(study))),
        Section(id="points", title="All points", parts=whole, folded=True),
        Section(id="base", title="The base case", parts=[settings, figures_table()], folded=True),
    ]
    return Page(
        kind="study", title=f"Study: {name}", sections=sections, command=command, figures=_headline(study),
        notes=["All times are forecasts; nothing was run."],
        data={"base": dict(base), "axes": list(study.axes), "points": list(study.rows)},
    )  # fmt: skip


def _headline(study: Findings) -> dict[str, Any]:
    refused = len(study.rows) - len(study.predicted)
    figures: dict[str, Any] = {"points": Count(len(study.rows))} | ({"impossible": Count(refused)} if refused else {})
    if not study.best_first:
        return figures | {"fit": "none"}
    best = study.best_first[0]
    figures |= {
        "best": study.point(best), "its tokens/s": Count(best["tokens_per_s"]), "its step": Seconds(best["step_s"]),
        "its peak memory": Bytes(best["peak_bytes"]),
    }  # fmt: skip
    if least := study.cheapest:
        figures |= {"cheapest": study.point(least), "its price of 10^9 tokens": Count(least["price_per_1e9_tokens"])}
    return figures


# -- tables ------------------------------------------------------------------------------------------------------------


def study_table(study: Findings, most: int | None = None) -> Table:
    """The axes and the main figures.

    Args:
        study: the points.
        most: rows shown at most, those that fit and have the most tokens a second first; None: all, in their order.
    """
    rows = study.predicted
    if most is not None:
        rows = sorted(rows, key=lambda row: (not row["fits"], -row["tokens_per_s"]))[:most]
    left, hidden = len(study.predicted) - len(rows), _hidden(study)
    notes = [f"{left:,} more points are in the results."] if left else []
    return Table.of(
        f"Study: {len(study.rows):,} points",
        ({name: setting_text(row.get(name)) for name in study.axes} | _figures(row, hidden) for row in rows),
        notes=[*notes, *_refusals(study.rows)],
    )


def change_table(study: Findings) -> Table:
    """The base, and below it each change by itself; changes that come to the same share a row."""
    base, hidden = study.rows[0], _hidden(study)
    names: dict[tuple[tuple[str, Cell], ...], list[str]] = {}
    for row in study.predicted:
        cells = _figures(row, hidden)
        if "refused" not in base:
            cells["change"] = None if row is base else Change(row["step_s"] / base["step_s"] - 1)
        names.setdefault(tuple(cells.items()), []).append(study.point(row))
    records = ({"what if": "; ".join(changes), **dict(cells)} for cells, changes in names.items())
    return Table.of("One change at a time", records, notes=_refusals(study.rows))


def _hidden(study: Findings) -> set[str]:
    """Columns in which no point differs or which none has."""
    rows = study.predicted
    needed = {
        "goodput": any(row["goodput"] != 1.0 for row in rows), "fits": not all(row["fits"] for row in rows),
        "price of 10^9 tokens": any("price_per_1e9_tokens" in row for row in rows), "degrees": study.searched,
    }  # fmt: skip
    return {name for name, is_needed in needed.items() if not is_needed}


def _figures(row: Row, hidden: set[str]) -> dict[str, Cell]:
    """The cells of a point but those of hidden columns."""
    cells: dict[str, Cell] = {
        FIGURES["step_s"].title: Seconds(row["step_s"]), "tokens/s": Count(row["tokens_per_s"]),
        "goodput": Share(row["goodput"]), "price of 10^9 tokens": _cell(Count, row.get("price_per_1e9_tokens")),
        FIGURES["peak_bytes"].title: Bytes(row["peak_bytes"]), "fits": "yes" if row["fits"] else "no",
        "degrees": row.get("degrees"),
    }  # fmt: skip
    return {name: cell for name, cell in cells.items() if name not in hidden}


def _cell(form: type[Quantity], value: float | None) -> Cell:
    return None if value is None else form(value)


def _refusals(rows: Sequence[Row]) -> list[str]:
    reasons = Counter(row["refused"] for row in rows if "refused" in row).most_common()
    counts = [(count, f": {reason}") for reason, count in reasons[:_MOST_REFUSALS]]
    if others := sum(count for _, count in reasons[_MOST_REFUSALS:]):
        counts.append((others, " for other reasons."))
    return [f"{'1 point is' if count == 1 else f'{count:,} points are'} impossible{why}" for count, why in counts]


# -- charts ------------------------------------------------------------------------------------------------------------


def _changes(study: Findings) -> Iterator[Chart]:
    """One change at a time: a bar for each, the largest gain first."""
    if changed := study.changes():
        yield bars(
            [study.point(row) for row, _ in changed],
            [("tokens/s", "sky", [100 * change for _, change in changed])],
            title="Effect of each single change", x="change of tokens/s (%)", said="{:+.2f} %".format,
            ends=[str(Change(change)) for _, change in changed],
        )  # fmt: skip


def _axes(study: Findings) -> Iterator[Part]:
    """The effect of each value of a grid, and tokens/s over the most important axes."""
    bests = {name: best for name in study.axes if len(best := study.best_by_value(name)) > 1}
    records: list[dict[str, Any]] = []
    for name, best in bests.items():
        rates = {value: row["tokens_per_s"] for value, row in best.items()}
        high, low = max(rates, key=lambda value: rates[value]), min(rates, key=lambda value: rates[value])
        records.append({
            "axis": name, "best value": setting_text(high), "tokens/s": Count(rates[high]),
            "worst value": setting_text(low), "tokens/s there": Count(rates[low]),
            "change": Change(rates[low] / rates[high] - 1),
        })  # fmt: skip
    records.sort(key=lambda record: record["change"])
    if records:
        yield Table.of("The best point of every value of an axis: the most and the fewest tokens/s", records)
    for record in records[:_MOST_AXES]:
        yield _axis_chart(study, record["axis"], bests[record["axis"]])


def _axis_chart(study: Findings, name: str, best: Mapping[Any, Row]) -> Chart:
    title = f"Tokens/s over {name}"
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in best):
        rates = [row["tokens_per_s"] for row in best.values()]
        return bars(
            [setting_text(value) for value in best], [("tokens/s of its best point", "sky", rates)], title=title,
            x="tokens/s", said="{:,.0f}".format, ends=[f"{rate:,.0f}" for rate in rates],
        )  # fmt: skip
    curve = sorted((float(value), row["tokens_per_s"]) for value, row in best.items())
    low, high = curve[0][0], curve[-1][0]
    ticks = [value for value, _ in curve] if len(curve) <= _MOST_TICKS else []
    scale = Scale(x=name, y="tokens/s", log_x=low > 0 and high / low > _WIDE, ticks=ticks)
    points = _points(study, study.best_first, name, "tokens_per_s")
    series = [Series(name="points", points=points), Series(name="the best of each value", curve=curve)]
    return series_chart(series, scale, title=title)


def _trade(study: Findings) -> Iterator[Chart]:
    """Tokens a second against their price, or against memory where no price is given."""
    if study.alone or len(study.best_first) < 2:
        return
    is_priced = all("price_per_1e9_tokens" in row for row in study.best_first)
    key, unit, quantity = ("price_per_1e9_tokens", 1.0, "price of 10^9 tokens") if is_priced else (
        "peak_bytes", 1e9, "peak memory (GB)")  # fmt: skip
    front = pareto_front(study.best_first, lambda row: (-row["tokens_per_s"], row[key]))
    others = [row for row in study.best_first if not any(row is each for each in front)]
    best = _points(study, front, "tokens_per_s", key, unit)
    series = [
        Series(name="points", points=_points(study, others, "tokens_per_s", key, unit)),
        Series(name="Pareto front", points=best, curve=[point[:2] for point in best]),
    ]
    caption = f"{_MOST_POINTS} or fewer of {len(others):,} points are drawn." if len(others) > _MOST_POINTS else ""
    title = f"Tokens/s against {quantity.partition(' (')[0]}"
    yield series_chart(series, Scale(x="tokens/s", y=quantity), title=title, caption=caption)


def _points(study: Findings, rows: Sequence[Row], x: str, y: str, unit: float = 1.0) -> list[tuple[float, float, str]]:
    """The first row and evenly spaced others as points (x, y in a unit, text), as many as a chart holds."""
    points = []
    for row in rows[:: -(-len(rows) // _MOST_POINTS) or 1]:
        price = f", {row['price_per_1e9_tokens']:,.0f} for 10^9 tokens" if "price_per_1e9_tokens" in row else ""
        text = f"{study.point(row)}: {row['tokens_per_s']:,.0f} tokens/s, {Bytes(row['peak_bytes'])}{price}"
        points.append((float(row[x]), row[y] / unit, text))
    return points
