"""The report of a step: predicted, measured or both, with what was planned and verified."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from plans.figures import figures_of
from plans.graph_data import graph_data
from plans.lower import lower
from plans.plan import Plan, plan_to_json
from plans.program import Program
from plans.timeline import Timeline
from reports.charts import Chart, Scale, Series, series_chart
from reports.graph_picture import GraphPicture
from reports.live import LiveTimeline
from reports.memory import memory_table
from reports.page import Page, Part, Section, Text
from reports.plan_tables import parameter_table, plan_table
from reports.tables import Check, Table, verification_table
from reports.time_tables import (
    actions_table,
    comparison_table,
    composition_table,
    critical_path_table,
    figures_table,
    timeline_table,
)
from simulator import composition, critical_path

__all__ = ["Report", "step_page"]

_MAX_OPEN_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class Report:
    """The content of a report; a section appears only if its data is given.

    Args:
        title: title of the page.
        summary: key figures, name -> value, shown first and large.
        plan: for the plan's tables and graph.
        program: for causes, costs and live memory by role; by default the plan's.
        predicted: the simulation.
        measured: the run; its `kind` is "measured" or "emulated".
        checks: the verification.
        losses: name -> loss by step; the second and later ones are drawn dashed.
        step_times_s: seconds of every step of the run.
        run_step_s: the step of the run by all of them; by default that of the steps that were recorded.
        memory_limit_bytes: per rank; by default the plan's.
        machine: what the prediction was computed for, name -> value.
        environment: the environment of the report: versions, date, variables such as CUDA_DEVICE_MAX_CONNECTIONS.
        results: tables and charts of the result, shown first.
        what_if: tables and charts of what-if questions, shown first.
        tables: further tables, under details.
        notes: sentences under the title, e.g. what was not run.
        command: the command line that made it.
    """

    title: str
    summary: Mapping[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    program: Program | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    checks: Sequence[Check] = ()
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    step_times_s: Sequence[float] = ()
    run_step_s: float | None = None
    memory_limit_bytes: int | None = None
    machine: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    results: Sequence[Part] = ()
    what_if: Sequence[Part] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    command: str = ""

    @property
    def timelines(self) -> list[Timeline]:
        """The prediction and the run, as far as there are any."""
        return [timeline for timeline in (self.predicted, self.measured) if timeline is not None]

    @property
    def kind(self) -> str:
        """The kind of report that `twofold serve` lists."""
        kinds = (
            ("verification", self.checks), ("what-if", self.what_if), ("plan", self.results),
            ("comparison of prediction and run", self.predicted and self.measured),
        )  # fmt: skip
        return next((kind for kind, given in kinds if given), "prediction")


def step_page(report: Report) -> Page:
    """The page.

    >>> "<title>Step time</title>" in step_page(Report(title="Step time")).html()
    True
    """
    if report.plan is not None:
        limit = report.plan.memory_limit_bytes if report.memory_limit_bytes is None else report.memory_limit_bytes
        report = replace(report, program=report.program or lower(report.plan), memory_limit_bytes=limit)
    kinds = " above ".join(timeline.kind.upper() for timeline in report.timelines)
    return Page(
        kind=report.kind, title=report.title, subtitle=f"{kinds} throughout." if kinds else "", notes=report.notes,
        figures=report.summary, data=_data(report), command=report.command, sections=list(_sections(report)),
    )  # fmt: skip


def _sections(report: Report) -> Iterator[Section]:
    drawn = [timeline for timeline in report.timelines if len(timeline.rank)]
    live = LiveTimeline(timelines=drawn, programs=[report.program] * len(drawn), limit_bytes=report.memory_limit_bytes)
    yield Section(id="verification", title="Verification", parts=_verification(report.checks))
    yield Section(id="result", title="Result", parts=report.results)
    yield Section(id="what-if", title="What if", parts=report.what_if)
    title = f"The step, {' and '.join(timeline.kind for timeline in report.timelines)}"
    yield Section(id="results", title=title, parts=_results(report))
    actions = [actions_table(timeline) for timeline in drawn]
    yield Section(id="pipeline", title="Pipeline and memory", parts=[live] if drawn else [])
    yield Section(id="actions", title="The pipeline as a table", parts=actions, folded=True)
    yield Section(id="training", title="Training", parts=[*_losses(report.losses), *_step_times(report)])
    peaks = [memory_table(timeline, known) for timeline, known in _with_program(report) if timeline.memory]
    yield Section(id="memory", title="Peak memory", parts=peaks)
    title = "Where the time goes, rank by rank and call by call"
    yield Section(id="composition", title=title, parts=list(_where_time_goes(report, drawn)), folded=True)
    yield from _plan(report.plan)
    meant = [figures_table()] if report.timelines else []
    yield Section(id="further", title="Further tables", parts=[*report.tables, *meant], folded=True)
    yield Section(id="environment", title="Environment", parts=list(_environment(report)))


def _with_program(report: Report) -> list[tuple[Timeline, Program | None]]:
    """The timelines, the prediction with its program: a run's memory is what it reported."""
    return [(timeline, report.program if timeline is report.predicted else None) for timeline in report.timelines]


def _data(report: Report) -> dict[str, Any]:
    """The data of the page as JSON values."""
    plan = report.plan
    return {
        "title": report.title,
        "summary": {name: str(value) for name, value in report.summary.items()},
        "timelines": [
            _timeline_data(timeline)
            | ({"step_s": report.run_step_s} if timeline is report.measured and report.run_step_s else {})
            for timeline in report.timelines
        ],
        "checks": [{**asdict(check), "passed": check.passed} for check in report.checks],
        "losses": {name: [float(value) for value in values] for name, values in report.losses.items()},
        "step_times_s": [float(value) for value in report.step_times_s],
        "machine": dict(report.machine),
        "environment": dict(report.environment),
        "command": report.command,
        "plan": json.loads(plan_to_json(plan)) if plan and len(plan.graph.operators) <= 1000 else None,
    }


def _verification(checks: Sequence[Check]) -> list[Part]:
    if not checks:
        return []
    must = [check for check in checks if not check.informs]
    failed = [check.name for check in must if not check.passed]
    outside = [check.name for check in checks if check.informs and not check.passed]
    passed = f"All {len(must)} checks passed" if len(must) != 1 else "The check passed"
    verdict = f"FAILED: {', '.join(failed)}" if failed else passed
    verdict += f"; outside its interval: {', '.join(outside)}" if outside else ""
    style = "fail" if failed else "warn" if outside else "pass"
    return [Text(f"{verdict}.", style), verification_table(checks)]


def _results(report: Report) -> list[Part]:
    if not report.timelines:
        return []
    run = report.measured
    table = timeline_table(report.timelines, run_step_s=None if run is None else report.run_step_s)
    if run is not None and report.run_step_s is not None:
        caption = f"The {run.kind} step is the median of all {len(report.step_times_s)} steps without those of the "
        caption += f"warm-up. The other {run.kind} figures are for the last {run.num_steps} steps, which were recorded."
        table = replace(table, notes=(*table.notes, caption))
    return [table]


def _losses(losses: Mapping[str, Sequence[float]]) -> list[Chart]:
    lines = [
        Series(name=name, curve=list(enumerate(map(float, values), 1)), dashed=at > 0)
        for at, (name, values) in enumerate(losses.items()) if len(values)
    ]  # fmt: skip
    note = "The loss of every step, as the mean over micro-batches."
    note += " Equal losses coincide: dashes on a line." if len(lines) > 1 else ""
    return [series_chart(lines, Scale(x="step", y="loss"), title="Loss", caption=note)] if lines else []


def _step_times(report: Report) -> list[Chart]:
    times_s, predicted, measured = report.step_times_s, report.predicted, report.measured
    if not len(times_s):
        return []
    band = None
    if predicted is not None and predicted.low_s is not None and predicted.high_s is not None:
        band = (1e3 * predicted.low_s, 1e3 * predicted.high_s, "90 % interval of the prediction")
    kind = "measured" if measured is None else measured.kind
    lines = [Series(name=kind, curve=[(float(at), 1e3 * time) for at, time in enumerate(times_s, 1)])]
    if predicted is not None:
        time = 1e3 * predicted.step_interval_s
        lines.append(Series(name="predicted", curve=[(1.0, time), (float(len(times_s)), time)], dashed=True))
    note = f"All {kind} steps. The prediction is for a typical step."
    return [series_chart(lines, Scale(x="step", y="step time (ms)", band=band), title="Step time", caption=note)]


def _where_time_goes(report: Report, drawn: Sequence[Timeline]) -> Iterator[Table]:
    for timeline in drawn:
        yield composition_table(timeline, report.program)
        if report.program is not None:
            yield critical_path_table(critical_path(timeline, report.program), timeline.kind)
    if len(drawn) == 2:
        yield comparison_table(*drawn)


def _plan(plan: Plan | None) -> Iterator[Section]:
    if plan is None:
        return
    table = plan_table(plan).joined("operator")
    title = f"Plan: {len(table.rows)} operators, layouts and communication"
    yield Section(id="plan", title=title, parts=[table], folded=len(table.rows) > _MAX_OPEN_ROWS)
    graph = GraphPicture(graph_data(plan.graph, plan))
    yield Section(
        id="graph", title="Parameters and graph", parts=[parameter_table(plan).joined("parameter"), graph], folded=True
    )


def _environment(report: Report) -> Iterator[Part]:
    for title, entries in (("Machine of the prediction", report.machine), ("Environment", report.environment)):
        if entries:
            rows = tuple((name, str(value)) for name, value in entries.items())
            yield Table(title=title, columns=("name", "value"), rows=rows)


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    return {
        "kind": timeline.kind,
        "num_ranks": timeline.num_ranks,
        "num_steps": timeline.num_steps,
        **figures_of(timeline),
        "step_span_s": timeline.step_s,
        "step_low_s": timeline.low_s,
        "step_high_s": timeline.high_s,
        "memory": [
            {"rank": memory_peak.rank, "peak_bytes": memory_peak.peak_bytes, "by_role": dict(memory_peak.by_role)}
            for memory_peak in timeline.memory
        ],
        "meta": dict(timeline.meta),
        "composition": [asdict(each) for each in composition(timeline)] if len(timeline.rank) else [],
    }
