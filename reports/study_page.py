"""The page of a study: the best points, the effect of each axis, and all points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from plans.units import Bytes, Change, Count, Seconds
from reports.charts import Chart, Scale, Series, bars, series_chart
from reports.page import Page, Part, Section
from reports.study_tables import change_table, study_table
from reports.tables import Table
from reports.time_tables import figures_table
from search.result import pareto_front
from simulator.study.axes import setting_text
from simulator.study.findings import Findings, Row

__all__ = ["study_page"]

_MOST_POINTS = 500
"""Largest number of points of a chart."""

_MOST_AXES = 6
"""Axes with a chart, those that matter most first."""

_MOST_TICKS = 8
"""Values of an axis that are all named below it."""

_SHOWN = 20

_WIDE = 16.0
"""Values that span more than this factor are on a logarithmic axis."""


def study_page(name: str, base: Mapping[str, Any], study: Findings, *, command: str = "") -> Page:
    """The page of a study of a name; `base` are settings of every point."""
    overview, every = _tables(study)
    points = [every] if len(every.rows) > len(overview.rows) else []
    settings = tuple((name, setting_text(value)) for name, value in base.items())
    sections = [
        Section(id="result", title="The best points", parts=[overview, *_changes(study)]),
        Section(id="axes", title="Effect of each axis", parts=list(_axes(study))),
        Section(id="trade", title="Cost of speed", parts=list(_trade(study))),
        Section(id="points", title="All points", parts=points, folded=True),
        Section(id="base", title="The base case", folded=True, parts=[
            Table(title="Settings of every point", columns=("setting", "value"), rows=settings), figures_table(),
        ]),
    ]  # fmt: skip
    return Page(
        kind="study", title=f"Study: {name}", sections=sections, command=command, figures=_figures(study),
        notes=["All times are forecasts; nothing was run."],
        data={"base": dict(base), "axes": list(study.axes), "points": list(study.rows)},
    )  # fmt: skip


def _tables(study: Findings) -> tuple[Table, Table]:
    """The overview, and all points."""
    if study.alone:
        table = change_table(study)
        return table, table
    return study_table(study, _SHOWN), study_table(study)


def _figures(study: Findings) -> dict[str, Any]:
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
    """Charts of a grid: the effect of each value, and tokens/s over the most important axes."""
    if study.alone:
        return
    bests = {name: best for name in study.axes if len(best := study.best_by_value(name)) > 1}
    rows = []
    for name, best in bests.items():
        rates = {value: row["tokens_per_s"] for value, row in best.items()}
        high, low = max(rates, key=lambda value: rates[value]), min(rates, key=lambda value: rates[value])
        rows.append(
            (name, setting_text(high), Count(rates[high]), setting_text(low), Count(rates[low]),
             Change(rates[low] / rates[high] - 1))
        )  # fmt: skip
    rows.sort(key=lambda row: row[-1])
    if rows:
        yield Table(
            title="The best point of every value of an axis: the most and the fewest tokens/s",
            columns=("axis", "best value", "tokens/s", "worst value", "tokens/s there", "change"), rows=tuple(rows),
        )  # fmt: skip
    for name, *_ in rows[:_MOST_AXES]:
        yield _axis_chart(study, name, bests[name])


def _axis_chart(study: Findings, name: str, best: Mapping[Any, Row]) -> Chart:
    title = f"Tokens/s over {name}"
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in best):
        rates = [row["tokens_per_s"] for row in best.values()]
        return bars(
            [setting_text(value) for value in best], [("tokens/s of its best point", "sky", rates)], title=title,
            x="tokens/s", said="{:,.0f}".format, ends=[f"{rate:,.0f}" for rate in rates],
        )  # fmt: skip
    charted = [(float(row[name]), row["tokens_per_s"], _said(study, row)) for row in _spread(study.best_first)]
    curve = sorted((float(value), row["tokens_per_s"]) for value, row in best.items())
    low, high = curve[0][0], curve[-1][0]
    ticks = [value for value, _ in curve] if len(curve) <= _MOST_TICKS else []
    scale = Scale(x=name, y="tokens/s", log_x=low > 0 and high / low > _WIDE, ticks=ticks)
    series = [Series(name="points", points=charted), Series(name="the best of each value", curve=curve)]
    return series_chart(series, scale, title=title)


def _trade(study: Findings) -> Iterator[Chart]:
    """Tokens a second against their price, or against memory where no price is given."""
    if study.alone or len(study.best_first) < 2:
        return
    is_priced = all("price_per_1e9_tokens" in row for row in study.best_first)
    key, size, what = ("price_per_1e9_tokens", 1.0, "price of 10^9 tokens") if is_priced else (
        "peak_bytes", 1e9, "peak memory (GB)")  # fmt: skip
    front = pareto_front(study.best_first, lambda row: (-row["tokens_per_s"], row[key]))

    def points(rows: Sequence[Row]) -> list[tuple[float, float, str]]:
        return [(row["tokens_per_s"], row[key] / size, _said(study, row)) for row in rows]

    others = [row for row in study.best_first if not any(row is each for each in front)]
    series = [
        Series(name="points", points=points(_spread(others))),
        Series(name="Pareto front", points=points(front), curve=[point[:2] for point in points(front)]),
    ]
    title = f"Tokens/s against {what.partition(' (')[0]}"
    yield series_chart(series, Scale(x="tokens/s", y=what), title=title, caption=_left_out(len(others)))


def _spread(rows: Sequence[Row]) -> Sequence[Row]:
    """The first row and evenly spaced others, as many as a chart holds."""
    return rows[:: -(-len(rows) // _MOST_POINTS) or 1]


def _left_out(count: int) -> str:
    return f"{_MOST_POINTS} or fewer of {count:,} points are drawn." if count > _MOST_POINTS else ""


def _said(study: Findings, row: Row) -> str:
    price = f", {row['price_per_1e9_tokens']:,.0f} for 10^9 tokens" if "price_per_1e9_tokens" in row else ""
    return f"{study.point(row)}: {row['tokens_per_s']:,.0f} tokens/s, {Bytes(row['peak_bytes'])}{price}"
