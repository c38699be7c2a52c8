"""The report: one HTML file with results first, pictures, tables, the environment, and the data inside.

Nothing is fetched: pictures are inline SVG, the data is JSON in a script element (`id="twofold-data"`), light and dark
themes follow the reader's setting. A section appears only when its data is given.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from plans.files import write_atomically
from plans.lower import lower
from plans.plan import Plan, plan_to_json
from plans.program import Program
from plans.timeline import Timeline
from reports.figures import figures_of, figures_table
from reports.graph_picture import graph_data, graph_picture
from reports.line_picture import Line, line_picture
from reports.memory_picture import memory_picture
from reports.memory_tables import memory_table
from reports.page import figure, folded, key_figures, page, page_data, section
from reports.pipeline_picture import MAX_BOXES, pipeline_panel, pipeline_picture
from reports.plan_tables import parameter_table, plan_table
from reports.svg import Picture
from reports.tables import Check, Table, verification_table
from reports.time_tables import comparison_table, composition_table, critical_path_table, timeline_table
from reports.units import format_seconds
from simulator import composition, critical_path

__all__ = ["MAX_REPORT_BYTES", "Report", "report_html", "write_report"]

MAX_REPORT_BYTES = 2_000_000
_MAX_TABLE_ROWS = 400
_MAX_OPEN_ROWS = 40


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report shows; a section appears only when its data is given.

    Args:
        title: of the page.
        summary: key figures, name -> value, shown first and large.
        plan: for the plan's tables and graph.
        program: for live memory by role; by default the plan's.
        predicted: the simulation.
        measured: the run; its `kind` says whether it was measured or emulated.
        checks: the verification.
        losses: name -> loss by step; the second and later ones are drawn dashed.
        step_times_s: seconds of every step of the run.
        memory_limit_bytes: per rank; by default the plan's.
        machine: what the prediction was computed for, name -> value.
        environment: where and with what the report was made: versions, date, variables such as
            CUDA_DEVICE_MAX_CONNECTIONS.
        results: tables and pictures of the result, shown first.
        what_if: tables and pictures of what-if questions, shown first.
        tables: further tables, under details.
        notes: sentences under the title, e.g. what was not run.
        command: the command line that made it.
    """

    title: str
    summary: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    program: Program | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    checks: Sequence[Check] = ()
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    step_times_s: Sequence[float] = ()
    memory_limit_bytes: int | None = None
    machine: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    results: Sequence[Table | Picture] = ()
    what_if: Sequence[Table | Picture] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    command: str = ""

    @property
    def timelines(self) -> list[Timeline]:
        """The prediction and the run, as far as there are any."""
        return [each for each in (self.predicted, self.measured) if each is not None]


def write_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write `report_html(report)` to a file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    return write_atomically(path, report_html(report).encode())


def report_html(report: Report) -> str:
    """The report as text, under 2 MB: a larger one is made with fewer boxes and shorter tables, and says so.

    >>> "<title>Step time</title>" in report_html(Report(title="Step time"))
    True
    """
    if report.plan is not None:
        limit = report.plan.memory_limit_bytes if report.memory_limit_bytes is None else report.memory_limit_bytes
        report = replace(report, program=report.program or lower(report.plan), memory_limit_bytes=limit)
    max_boxes, max_rows = MAX_BOXES, _MAX_TABLE_ROWS
    while True:
        kinds = " above ".join(each.kind.upper() for each in report.timelines)
        text = page(
            report.title, _sections(report, max_boxes, max_rows), subtitle=f"{kinds} throughout." if kinds else "",
            notes="".join(f"<li>{escape(note)}</li>" for note in report.notes), figures=key_figures(report.summary),
            footer=f"Made by twofold. {escape(report.command)}".strip(), data=_data(report, max_boxes),
        )  # fmt: skip
        if len(text.encode()) < MAX_REPORT_BYTES or max_boxes < 100:
            return text
        max_boxes, max_rows = max_boxes // 2, max(20, max_rows // 2)


def _sections(report: Report, max_boxes: int, max_rows: int) -> list[str]:
    timelines, predicted, measured = report.timelines, report.predicted, report.measured
    return [
        _verification(report.checks),
        _found(report.results, max_rows),
        _what_if(report.what_if, max_rows),
        _results(timelines, report.step_times_s),
        _pipeline(timelines, max_boxes),
        _losses(report.losses),
        _step_times(report.step_times_s, predicted, measured),
        _memory(predicted, measured, report.program, report.memory_limit_bytes),
        _where_time_goes(timelines, predicted, measured, report.program, max_rows),
        _plan(report.plan, max_rows),
        _further(report.tables, max_rows),
        _environment(report.machine, report.environment, report.command),
    ]


def _data(report: Report, max_boxes: int) -> str:
    """The data of the page as JSON."""
    plan, timelines = report.plan, report.timelines
    return page_data(
        title=report.title,
        summary=dict(report.summary),
        timelines=[_timeline_data(each, max_boxes // len(timelines)) for each in timelines],
        checks=[{**asdict(each), "passed": each.passed} for each in report.checks],
        losses={name: [float(value) for value in values] for name, values in report.losses.items()},
        step_times_s=[float(value) for value in report.step_times_s],
        machine=dict(report.machine),
        environment=dict(report.environment),
        command=report.command,
        plan=json.loads(plan_to_json(plan)) if plan and len(plan.graph.operators) <= 1000 else None,
    )


def _verification(checks: Sequence[Check]) -> str:
    if not checks:
        return ""
    must = [check for check in checks if not check.informs]
    failed = [check.name for check in must if not check.passed]
    said = f"FAILED: {', '.join(failed)}." if failed else f"All {len(must)} checks passed."
    verdicts = [f'<p class="{"fail" if failed else "pass"}">{escape(said)}</p>']
    if outside := [check.name for check in checks if check.informs and not check.passed]:
        verdicts.append(f'<p class="warn">Outside its interval: {escape(", ".join(outside))}.</p>')
    return section("verification", "Verification", *verdicts, verification_table(checks).html())


def _found(parts: Sequence[Table | Picture], max_rows: int) -> str:
    shown = [each.html(max_rows) if isinstance(each, Table) else figure(each, "") for each in parts]
    return section("found", "Found", *shown) if shown else ""


def _what_if(parts: Sequence[Table | Picture], max_rows: int) -> str:
    said = "Each bar changes one quantity; hover over a bar for its step time."
    shown = [each.html(max_rows) if isinstance(each, Table) else figure(each, said) for each in parts]
    return section("what-if", "What if", *shown) if shown else ""


def _results(timelines: Sequence[Timeline], times_s: Sequence[float]) -> str:
    if not timelines:
        return ""
    title = " and ".join(each.kind for each in timelines)
    table, run = timeline_table(timelines), timelines[-1]
    if len(times_s) > run.num_steps and run.kind != "predicted":
        every = f"The {run.kind} figures are of the last {run.num_steps} steps, which were recorded; all "
        every += f"{len(times_s)} steps took {format_seconds(float(np.median(times_s)))} in the median."
        table = replace(table, notes=(*table.notes, every))
    return section("results", f"The step, {title}", table.html(), figures_table().html())


def _pipeline(timelines: Sequence[Timeline], max_boxes: int) -> str:
    drawn = [each for each in timelines if len(each.rank)]
    if not drawn:
        return ""
    kinds = " above ".join(each.kind.upper() for each in drawn)
    caption = f"{kinds}, on one time axis. Hover over a box for its instruction; numbers are micro-batches."
    return section("pipeline", "Pipeline", figure(pipeline_picture(drawn, max_boxes=max_boxes), caption))


def _losses(losses: Mapping[str, Sequence[float]]) -> str:
    lines = [Line(name=name, values=values, dashed=at > 0) for at, (name, values) in enumerate(losses.items())]
    lines = [line for line in lines if len(line.values)]
    if not lines:
        return ""
    picture = line_picture(lines, title="Loss", x_name="step", y_name="loss")
    said = "The loss of every step, as the mean over micro-batches."
    said += " Equal losses coincide: dashes on a line." if len(lines) > 1 else ""
    return section("losses", "Losses", figure(picture, said))


def _step_times(times_s: Sequence[float], predicted: Timeline | None, measured: Timeline | None) -> str:
    if not len(times_s):
        return ""
    band = None
    if predicted is not None and predicted.low_s is not None and predicted.high_s is not None:
        band = (1e3 * predicted.low_s, 1e3 * predicted.high_s, "90 % interval of the prediction")
    kind = "measured" if measured is None else measured.kind
    lines = [Line(name=kind, values=[1e3 * time for time in times_s])]
    if predicted is not None:
        lines.append(Line(name="predicted", values=[1e3 * predicted.step_interval_s] * len(times_s), dashed=True))
    picture = line_picture(lines, title="Step time", x_name="step", y_name="step time (ms)", band=band)
    drawn = figure(picture, f"Every {kind} step; the prediction is for a typical one.")
    return section("steps", f"Step times, {kind}", drawn)


def _memory(predicted: Timeline | None, measured: Timeline | None, program: Program | None, limit: int | None) -> str:
    figures = []
    for each, known in ((predicted, program), (measured, None)):
        if each is not None and (each.memory or each.memory_curve or (known is not None and len(each.rank))):
            picture = memory_picture(each, program=known, limit_bytes=limit)
            caption = f"{each.kind.upper()}: live bytes on the fullest rank of every group; 1 MB is 10^6 bytes."
            figures.append(figure(picture, caption))
            if each.memory:
                figures.append(memory_table(each, known).html())
    return section("memory", "Memory", *figures) if figures else ""


def _where_time_goes(
    timelines: Sequence[Timeline],
    predicted: Timeline | None,
    measured: Timeline | None,
    program: Program | None,
    max_rows: int,
) -> str:
    body = []
    for each in timelines:
        if len(each.rank):
            body.append(composition_table(each, program).html(max_rows))
            if program is not None:
                body.append(critical_path_table(critical_path(each, program), each.kind).html(max_rows))
    if predicted is not None and measured is not None and len(predicted.rank) and len(measured.rank):
        body.append(comparison_table(predicted, measured).html(max_rows))
    return folded("composition", "Where the time goes, rank by rank and call by call", *body) if body else ""


def _plan(plan: Plan | None, max_rows: int) -> str:
    if plan is None:
        return ""
    graph = figure(graph_picture(graph_data(plan.graph, plan)), "The graph after the search; orange edges move data.")
    table = plan_table(plan)
    shown = table.html(max_rows)
    if len(table.rows) > _MAX_OPEN_ROWS:
        shown = folded("operators", f"{len(table.rows)} operators: layouts and communication", shown)
    return section("plan", "Plan", shown) + folded(
        "graph", "Parameters and graph", parameter_table(plan).html(max_rows), graph
    )


def _further(tables: Sequence[Table], max_rows: int) -> str:
    return folded("further", "Further tables", *(table.html(max_rows) for table in tables)) if tables else ""


def _environment(machine: Mapping[str, str], environment: Mapping[str, str], command: str) -> str:
    body = []
    if command:
        body.append(f"<pre>{escape(command)}</pre>")
    for title, entries in (("Machine of the prediction", machine), ("Environment", environment)):
        if entries:
            rows = tuple((name, str(value)) for name, value in entries.items())
            body.append(Table(title=title, columns=("name", "value"), rows=rows).html())
    return section("environment", "Environment", *body) if body else ""


# ------------------------------------------------------------------------------------ data


def _timeline_data(timeline: Timeline, max_boxes: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "kind": timeline.kind,
        "num_ranks": timeline.num_ranks,
        "num_steps": timeline.num_steps,
        **figures_of(timeline),
        "step_span_s": timeline.step_s,
        "step_low_s": timeline.low_s,
        "step_high_s": timeline.high_s,
        "memory": [
            {"rank": each.rank, "peak_bytes": each.peak_bytes, "by_role": dict(each.by_role)}
            for each in timeline.memory
        ],
        "meta": dict(timeline.meta),
    }
    if len(timeline.rank):
        panel = pipeline_panel(timeline, max_boxes=max_boxes)
        data["actions"] = {
            "columns": ["rank", "label", "start_ps", "end_ps"],
            "rows": [[panel.rows[each.row].rank, each.label, each.start_ps, each.end_ps] for each in panel.outlines],
        }
        data["composition"] = [asdict(each) for each in composition(timeline)]
    return data
