"""The result of a search over degrees, as tables and as an HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reports.charts import seconds_bars
from reports.figures import FIGURES, figures_table
from reports.forecast_parts import (
    MFU,
    composition_table,
    critical_table,
    figure_cells,
    headline,
    operators_table,
    simulated,
    subject,
)
from reports.html import Report, step_page
from reports.page import Page
from reports.search_pictures import Configuration, roofline_parts, trade_picture
from reports.tables import Table
from reports.units import Bytes, Change, Seconds

if TYPE_CHECKING:
    from search.devices import Candidate, SearchResult
    from search.devices.reasons import Reasons

__all__ = ["search_page", "search_tables"]

_DRAWN = 5
"""Configurations with a bar in the report."""


def search_tables(found: SearchResult[Candidate], top_k: int, reasons: Reasons | None = None) -> list[Table]:
    """Ranking, composition of the best, why it is the best, memory and time against each other, what was refused."""
    return [_ranking(found, top_k), _composition(found), *_why(found, reasons), _pareto(found), *_refused(found)]


def _composition(found: SearchResult[Candidate]) -> Table:
    return composition_table(found.best, " of the best")


def _why(found: SearchResult[Candidate], reasons: Reasons | None) -> list[Table]:
    tables = [_neighbours(found)] if found.alternatives else []
    if reasons is None:
        return tables
    from plans.degrees.words import layout_words

    slower = {
        layout_words(each.candidate.degrees): f"{each.change}: the step is {each.extra_s:+.3g} s longer"
        for each in found.alternatives[::-1] if each.candidate is not None
    }  # fmt: skip
    operators = operators_table(reasons.operators, found.best.degrees, dict(reversed(slower.items())))
    return [critical_table(found.best, reasons.critical_s), *tables, operators]


def _ranking(found: SearchResult[Candidate], top_k: int) -> Table:
    from search.devices import describe

    plans = found.plans[:top_k]
    in_engine = any(each.simulated_s is not None for each in plans)
    rows = []
    for number, each in enumerate(plans, 1):
        first, *cells = figure_cells(each)
        engine = ["" if each.simulated_s is None else Seconds(each.simulated_s)] if in_engine else []
        rows.append((number, first, *engine, *cells, describe(each.degrees)))
    step, *titles = (figure.title for figure in FIGURES.values())
    columns = ("", step, *(["in the event engine"] if in_engine else []), *titles, "configuration")
    figures_shown = headline(found.problem, found.best)
    rates = f"{figures_shown['tokens/s per device']} tokens/s per device, MFU {figures_shown['MFU']}"
    notes = [f"The best: {rates}, 90 % interval {figures_shown['90 % interval']}."]
    if found.method == "search" and len(rows) > max(1, found.num_proven):
        first = f"The first {found.num_proven} are" if found.num_proven > 1 else "The first is"
        if found.num_proven:
            notes.append(f"{first} proven to have the shortest forecast step of the search space.")
        notes.append("The others are the fastest plans that the search found. They are not proven to be the next best.")
    return Table(title=subject(found.problem), columns=columns, rows=rows, notes=tuple(notes))


_NEIGHBOURS = 20
"""Neighbours that are forecast and printed, and as many that cannot be; the JSON has all."""


def _neighbours(found: SearchResult[Candidate]) -> Table:
    slower = [each for each in found.alternatives if each.extra_s is not None]
    impossible = [each for each in found.alternatives if each.extra_s is None]
    shown = [*slower[:_NEIGHBOURS], *impossible[:_NEIGHBOURS]]
    rows = tuple(
        (
            each.change,
            None if each.extra_s is None else Seconds(each.extra_s),
            None if each.extra_s is None else Change(each.extra_s / found.best.forecast.step_s),
            each.reason,
        )
        for each in shown
    )
    left = len(found.alternatives) - len(shown)
    return Table(
        title="One degree changed at a time, the layers spread again", columns=("change", "longer", "share", "why"),
        rows=rows, notes=(f"And {left} more.",) if left else (),
    )  # fmt: skip


def _pareto(found: SearchResult[Candidate]) -> Table:
    from search.devices import describe

    rows = tuple(
        (Seconds(each.forecast.step_s), Bytes(each.forecast.peak_bytes), describe(each.degrees))
        for each in found.pareto[:20]
    )
    return Table(
        title="Time against memory, of all that were forecast", columns=("step", "peak", "configuration"), rows=rows,
    )  # fmt: skip


def _refused(found: SearchResult[Candidate]) -> list[Table]:
    if not found.rejected:
        return []
    reasons: dict[str, list[Any]] = {}
    for each in found.rejected:
        reasons.setdefault(each.reason, []).append(each)
    rows = []
    for reason, own in sorted(reasons.items()):
        nearest = min(own, key=lambda each: (each.excess_bytes or 0, each.what))
        excess = "" if nearest.excess_bytes is None else f"{Bytes(nearest.excess_bytes)} too much"
        rows.append((reason, sum(max(1, each.count) for each in own), nearest.what, excess))
    return [
        Table(
            title="Parts of the space that were refused", columns=("reason", "parts", "nearest", "by"),
            rows=tuple(rows),
        )
    ]  # fmt: skip


def search_page(
    found: SearchResult[Candidate], *, top_k: int, reasons: Reasons, certificate: str, command: str
) -> Page:  # fmt: skip
    """The page: the result, in pictures, and its reasons; the rest folded."""
    from datetime import UTC, datetime

    from costmodels.utilization import peak_flops_per_s
    from search.devices import describe
    from search.devices.explain import composition

    problem = found.problem
    program, timeline = simulated(problem, found.best)
    seen = [
        Configuration(
            name=describe(each.degrees), step_s=each.forecast.step_s, peak_bytes=each.forecast.peak_bytes
        )
        for each in found.plans
    ]  # fmt: skip
    peaks = peak_flops_per_s(problem.config, problem.machine), problem.machine.compute.memory_Bps
    roofline, rates = roofline_parts(reasons.operators, *peaks)
    pictures = [
        seconds_bars(
            {f"{at}. {describe(each.degrees)}": composition(each) for at, each in enumerate(found.plans[:_DRAWN], 1)},
            title="Where the forecast step of the mean rank goes",
            x="forecast step",
        ),
        trade_picture(seen, title="Time against memory", limit_bytes=problem.limit_bytes),
        roofline,
    ]
    return step_page(Report(
        title=f"Search: {subject(problem)}",
        results=[_ranking(found, top_k), *pictures, *_why(found, reasons)],
        tables=[_composition(found), rates, _pareto(found), *_refused(found), figures_table()],
        summary={
            **headline(problem, found.best), "at most above the fastest of the space": f"{100 * found.gap:.1f} %",
        },
        notes=[certificate, "Every time is a forecast; nothing was run.", MFU,
               *(["The pipeline is the best plan in the event engine."] if timeline is not None else [])],
        program=program, predicted=timeline, memory_limit_bytes=problem.limit_bytes,
        environment={"date": datetime.now(UTC).date().isoformat()},
        command=command,
    ))  # fmt: skip
