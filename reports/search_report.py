"""The result of a search over degrees, as tables and as an HTML report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from plans.figures import figure_cells, figures_of
from plans.units import Bytes, Change, Seconds, Share, time_unit
from reports.charts import Chart, Scale, Series, series_chart
from reports.page import Page, Section
from reports.prediction import (
    MFU,
    critical_table,
    forecast_sections,
    headline,
    operators_table,
    subject,
)
from reports.tables import Cell, Table
from reports.time_tables import STEP
from search.result import pareto_front

if TYPE_CHECKING:
    from search.devices import Candidate, SearchResult
    from search.devices.reasons import Reasons

__all__ = ["search_page", "search_tables", "trade_picture", "verdict"]

_DRAWN = 5
"""Configurations with a bar in the report."""

_VISIBLE = 0.01
"""Least difference of two bars that a reader can see, as a share of the step."""

_PARETO = 20
"""Rows of the Pareto front."""

_NEIGHBOURS = 20
"""Neighbours that are forecast and printed, and as many that cannot be; the JSON has all."""

_FARTHEST = 1.25
"""Configurations slower than the fastest by more than this factor are not drawn."""


def search_tables(result: SearchResult[Candidate], top_k: int, reasons: Reasons | None = None) -> list[Table]:
    """Ranking, why the best is the best, memory against time, what was refused."""
    why = [] if reasons is None else [critical_table(result.best, reasons.critical_s)]
    return [_ranking(result, top_k), *why, *_alternatives(result, reasons), _pareto(result), *_refused(result)]


def verdict(result: SearchResult[Candidate]) -> str:
    """The best plan with its figures, in three lines."""
    from search.devices import describe

    problem, best, figures = result.problem, result.best, headline(result.problem, result.best)
    return (
        f"Best plan for {subject(problem)}:\n  {describe(best.degrees)}\n"
        f"  step {figures['step']} (90 %: {figures['90 % interval']}), {figures['tokens/s per device']} tokens/s per "
        f"device, MFU {figures['MFU']}, peak memory {figures['peak memory']} of {Bytes(problem.limit_bytes)} "
        "for tensors"
    )


def search_page(
    result: SearchResult[Candidate], *, top_k: int, reasons: Reasons, certificate: str, command: str
) -> Page:  # fmt: skip
    """The page: the ranking, the sections of the best configuration, and its alternatives."""
    from search.devices import describe

    problem, best = result.problem, result.best
    rows = {f"{at}. {describe(candidate.degrees)}": parts for at, candidate, parts in _different(result.plans[:_DRAWN])}
    *sections, further = forecast_sections(problem, best, reasons, rows, [_pareto(result), *_refused(result)])
    drawn = [(describe(plan.degrees), plan.forecast.step_s, plan.forecast.peak_bytes) for plan in result.plans]
    trade = trade_picture(drawn, title="Time against memory", limit_bytes=problem.limit_bytes)
    return Page(
        kind="plan", title=f"Search: {subject(problem)}", subtitle=f"Best: {describe(best.degrees)}.",
        figures={**headline(problem, best), "largest gap to the fastest of the space": Share(result.gap)},
        notes=[certificate, "All times are forecasts; nothing was run.", MFU], command=command,
        data={"plans": [
            {"configuration": describe(plan.degrees), **figures_of(plan.forecast)} for plan in result.plans[:top_k]
        ]},
        sections=[
            Section(id="result", title="The fastest plans", parts=[_ranking(result, top_k), trade]),
            *sections,
            Section(id="alternatives", title="Alternatives", parts=_alternatives(result, reasons)),
            further,
        ],
    )  # fmt: skip


def _different(plans: Sequence[Candidate]) -> Iterator[tuple[int, Candidate, dict[str, float]]]:
    """(number, plan, parts of its step) of the plans whose parts differ visibly from those of earlier plans."""
    from search.devices.explain import composition

    drawn: list[dict[str, float]] = []
    for number, plan in enumerate(plans, 1):
        parts, least_s = composition(plan), _VISIBLE * plan.forecast.step_s
        if all(max(abs(parts.get(name, 0.0) - spent) for name, spent in other.items()) > least_s for other in drawn):
            drawn.append(parts)
            yield number, plan, parts


def trade_picture(
    configurations: Sequence[tuple[str, float, int]], *, title: str, limit_bytes: int | None = None
) -> Chart:  # fmt: skip
    """A point for every configuration, time across and memory up; a line joins the Pareto front.

    Args:
        configurations: (name, step in seconds, peak in bytes), in any order.
        title: of the chart.
        limit_bytes: what a device has for tensors, drawn as a line.

    Raises:
        TwofoldError: nothing to draw.
    """
    if not configurations:
        raise TwofoldError(f"no configurations to draw for {title!r}")
    fastest_s = min(step_s for _, step_s, _ in configurations)
    near = [configuration for configuration in configurations if configuration[1] <= _FARTHEST * fastest_s]
    front = pareto_front(near, lambda each: each[1:])
    unit_s, unit = time_unit(max(step_s for _, step_s, _ in near))

    def points(some: Sequence[tuple[str, float, int]]) -> list[tuple[float, float, str]]:
        return [
            (step_s / unit_s, peak / 1e9, f"{name}: {Seconds(step_s)}, {Bytes(peak)}") for name, step_s, peak in some
        ]

    series = [
        Series(name="other configurations", points=points([each for each in near if each not in front])),
        Series(name="Pareto front", points=points(front), curve=[point[:2] for point in points(front)]),
    ]
    if limit_bytes is not None:
        ends = [fastest_s / unit_s, max(step_s for _, step_s, _ in near) / unit_s]
        series.append(Series(name=f"room for tensors, {Bytes(limit_bytes)}", dashed=True,
                             curve=[(end, limit_bytes / 1e9) for end in ends]))  # fmt: skip
    beyond = len(configurations) - len(near)
    note = f"{beyond} of more than {_FARTHEST:g} times the fastest are not shown." if beyond else ""
    return series_chart(series, Scale(x=f"forecast step ({unit})", y="forecast peak (GB)"), title=title, caption=note)


def _ranking(result: SearchResult[Candidate], top_k: int) -> Table:
    from search.devices import describe
    from search.devices.preference import EQUAL

    plans = result.plans[:top_k]
    is_simulated = any(plan.simulated_s is not None for plan in plans)
    shared, differences = _shared_words([describe(plan.degrees) for plan in plans])
    records = []
    for number, (plan, words) in enumerate(zip(plans, differences, strict=True), 1):
        cells = figure_cells(plan.forecast)
        first: dict[str, Cell] = {"": number, STEP: cells.pop(STEP)}
        if is_simulated:
            first["simulated"] = "" if plan.simulated_s is None else Seconds(plan.simulated_s)
        records.append({**first, **cells, "configuration": words})
    notes = [f"All plans: {shared}."] if shared else []
    if result.num_equal > 1:
        notes.append(
            f"The first {result.num_equal} are equally fast: their steps differ by less than {100 * EQUAL:.0f} %, and "
            "measured steps vary by more. The simplest is first, then the one with the most free memory."
        )
    if result.method == "search" and len(plans) > max(1, result.num_proven):
        proven = "They"
        if result.num_proven:
            proven = "Plans after the first" + (f" {result.num_proven}" if result.num_proven > 1 else "")
        notes.append(f"{proven} are the fastest that the search found. They are not proven to be the next best.")
    title = f"The {len(plans)} fastest plans" if len(plans) > 1 else "The fastest plan"
    return Table.of(title, records, notes=notes)


def _shared_words(configurations: Sequence[str]) -> tuple[str, list[str]]:
    """The parts that all configurations have in common, and what is left of each.

    >>> _shared_words(["dp 4, zb_v, layers 8 8", "dp 4, zb_v, layers 7 9"])
    ('dp 4, zb_v', ['layers 8 8', 'layers 7 9'])
    """
    parts = [configuration.split(", ") for configuration in configurations]
    if len(parts) < 2:
        return "", list(configurations)
    shared = [part for part in parts[0] if all(part in others for others in parts)]
    return ", ".join(shared), [", ".join(part for part in each if part not in shared) for each in parts]


def _alternatives(result: SearchResult[Candidate], reasons: Reasons | None) -> list[Table]:
    """The neighbours of the best, and the operators of a block in their layouts."""
    from plans.degrees.words import layout_words

    tables = [_neighbours(result)] if result.alternatives else []
    if reasons is not None:
        remarks = {
            layout_words(other.candidate.degrees): f"{other.change}: the step is {_longer(other.extra_s)}"
            for other in result.alternatives[::-1]
            if other.candidate is not None and other.extra_s is not None
        }
        tables.append(operators_table(reasons.operators, result.best.degrees, dict(reversed(remarks.items()))))
    return tables


def _longer(extra_s: float) -> str:
    return f"{Seconds(abs(extra_s))} {'longer' if extra_s >= 0 else 'shorter'}"


def _neighbours(result: SearchResult[Candidate]) -> Table:
    """A row for every neighbour that is forecast, and one for all that are impossible for the same reason."""
    from search.devices.preference import EQUAL

    slower = [(other.extra_s, other) for other in result.alternatives if other.extra_s is not None]
    impossible = [other for other in result.alternatives if other.extra_s is None]
    step_s = result.best.forecast.step_s
    records: list[dict[str, Cell]] = [
        {"change": other.change, "longer": Seconds(extra_s), "share": Change(extra_s / step_s),
         "why": other.reason}
        for extra_s, other in slower[:_NEIGHBOURS]
    ]  # fmt: skip
    changes: dict[str, list[str]] = {}
    for other in impossible[:_NEIGHBOURS]:
        changes.setdefault(other.reason, []).append(other.change)
    for reason, names in sorted(changes.items()):
        records.append({"change": "; ".join(names), "longer": None, "share": None, "why": reason})
    left = max(0, len(slower) - _NEIGHBOURS) + max(0, len(impossible) - _NEIGHBOURS)
    notes = [f"And {left} more."] if left else []
    if num_faster := sum(extra_s < -EQUAL * step_s for extra_s, _ in slower):
        notes.append(
            f"{num_faster} of these changes would be faster: the quick estimate of them is further off than the "
            "certificate assumes. Fix them by options and search again."
        )
    return Table.of("Alternatives: one degree changed, layers redistributed", records, notes=notes)


def _pareto(result: SearchResult[Candidate]) -> Table:
    from search.devices import describe

    return Table.of("Pareto front of time and memory", (
        {"step": Seconds(plan.forecast.step_s), "peak": Bytes(plan.forecast.peak_bytes),
         "configuration": describe(plan.degrees)}
        for plan in result.pareto[:_PARETO]
    ))  # fmt: skip


def _refused(result: SearchResult[Candidate]) -> list[Table]:
    reasons: dict[str, list[Any]] = {}
    for part in result.rejected:
        reasons.setdefault(part.reason, []).append(part)
    records = []
    for reason, parts in sorted(reasons.items()):
        nearest = min(parts, key=lambda part: (part.excess_bytes or 0, part.what))
        excess = "" if nearest.excess_bytes is None else f"{Bytes(nearest.excess_bytes)} too much"
        count = sum(max(1, part.count) for part in parts)
        records.append({"reason": reason, "parts": count, "nearest": nearest.what, "by": excess})
    return [Table.of("Rejected parts of the search space", records)] if records else []
