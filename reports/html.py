"""The report: one HTML file with results first, pictures, tables, the environment, and the data inside.

Nothing is fetched: pictures are inline SVG, the data is JSON in a script element (`id="twofold-data"`), light and dark
themes follow the reader's setting. A section appears only when its data is given.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from plans.files import write_atomically
from plans.lower import lower
from plans.plan import Plan, plan_to_json
from plans.program import Program
from plans.timeline import Timeline
from reports.graph_picture import graph_data, graph_picture
from reports.line_picture import Line, line_picture
from reports.memory_picture import memory_picture
from reports.memory_tables import memory_table
from reports.pipeline_picture import MAX_BOXES, pipeline_panel, pipeline_picture
from reports.plan_tables import parameter_table, plan_table
from reports.svg import Picture, style_sheet, template
from reports.tables import Check, Table, verification_table
from reports.time_tables import comparison_table, composition_table, critical_path_table, timeline_table
from reports.units import format_seconds
from simulator import composition, critical_path

__all__ = ["MAX_REPORT_BYTES", "report_html", "write_report"]

MAX_REPORT_BYTES = 2_000_000
_MAX_TABLE_ROWS = 400
_MAX_OPEN_ROWS = 40


def write_report(path: str | os.PathLike[str], **parts: Any) -> Path:
    """Write `report_html(**parts)` to a file, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    return write_atomically(path, report_html(**parts).encode())


def report_html(
    *,
    title: str,
    summary: Mapping[str, str] | None = None,
    plan: Plan | None = None,
    program: Program | None = None,
    predicted: Timeline | None = None,
    measured: Timeline | None = None,
    checks: Sequence[Check] = (),
    losses: Mapping[str, Sequence[float]] | None = None,
    step_times_s: Sequence[float] = (),
    memory_limit_bytes: int | None = None,
    machine: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    results: Sequence[Table | Picture] = (),
    what_if: Sequence[Table | Picture] = (),
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
    command: str = "",
) -> str:
    """The report as text, under 2 MB: a larger one is made with fewer boxes and shorter tables, and says so.

    Args:
        title: of the page.
        summary: key figures, name -> value, shown first and large.
        plan: for the plan's tables and graph.
        program: for live memory by role; by default the plan's.
        predicted: the simulation.
        measured: the run; its `kind` says whether it was measured or emulated.
        checks: the verification.
        losses: name -> loss by step; later ones are drawn dashed.
        step_times_s: seconds of every step of the run.
        memory_limit_bytes: per rank; by default the plan's.
        machine: what the prediction was computed for, name -> value.
        environment: where and with what the report was made: versions, date, variables such as
            CUDA_DEVICE_MAX_CONNECTIONS.
        results: tables and pictures of what was found, shown first.
        what_if: tables and pictures of what would be different, shown first.
        tables: further tables, under details.
        notes: sentences under the title, e.g. what was not run.
        command: that made it.
    """
    limit = memory_limit_bytes if memory_limit_bytes is not None or plan is None else plan.memory_limit_bytes
    timelines = [each for each in (predicted, measured) if each is not None]
    program = lower(plan) if program is None and plan is not None else program
    max_boxes, max_rows = MAX_BOXES, _MAX_TABLE_ROWS
    while True:
        sections = [
            _verification(checks),
            _found(results, max_rows),
            _what_if(what_if, max_rows),
            _results(timelines, step_times_s),
            _pipeline(timelines, max_boxes),
            _losses(losses),
            _step_times(step_times_s, predicted, measured),
            _memory(predicted, measured, program, limit),
            _where_time_goes(timelines, predicted, measured, program, max_rows),
            _plan(plan, max_rows),
            _further(tables, max_rows),
            _environment(machine, environment, command),
        ]
        kinds = " above ".join(each.kind.upper() for each in timelines)
        text = Template(template("report.html")).substitute(
            title=escape(title),
            subtitle=f"{kinds} throughout." if kinds else "",
            notes="".join(f"<li>{escape(note)}</li>" for note in notes),
            style=style_sheet() + template("report.css"),
            figures=_key_figures(summary),
            sections="\n".join(section for section in sections if section),
            footer=f"Made by twofold. {escape(command)}".strip(),
            data=_json(
                title=title,
                summary=dict(summary or {}),
                timelines=[_timeline_data(each, max_boxes // len(timelines)) for each in timelines],
                checks=[{**asdict(each), "passed": each.passed} for each in checks],
                losses={name: [float(value) for value in values] for name, values in (losses or {}).items()},
                step_times_s=[float(value) for value in step_times_s],
                machine=dict(machine or {}),
                environment=dict(environment or {}),
                command=command,
                plan=json.loads(plan_to_json(plan)) if plan and len(plan.graph.operators) <= 1000 else None,
            ),
        )
        if len(text.encode()) < MAX_REPORT_BYTES or max_boxes < 100:
            return text
        max_boxes, max_rows = max_boxes // 2, max(20, max_rows // 2)


# -------------------------------------------------------------------------------- sections


def _section(id_: str, title: str, *body: str) -> str:
    return Template(template("section.html")).substitute(id=id_, title=escape(title), body="\n".join(body))


def _folded(id_: str, title: str, *body: str) -> str:
    return Template(template("folded.html")).substitute(id=id_, title=escape(title), body="\n".join(body))


def _figure(picture: Picture, caption: str) -> str:
    return Template(template("figure.html")).substitute(picture=picture.inline(), caption=escape(caption))


def _key_figures(summary: Mapping[str, str] | None) -> str:
    entry = Template(template("key_figure.html"))
    entries = [entry.substitute(name=escape(name), value=escape(str(value))) for name, value in (summary or {}).items()]
    return f'<dl class="keys">{"".join(entries)}</dl>' if entries else ""


def _verification(checks: Sequence[Check]) -> str:
    if not checks:
        return ""
    must = [check for check in checks if not check.informs]
    failed = [check.name for check in must if not check.passed]
    said = f"FAILED: {', '.join(failed)}." if failed else f"All {len(must)} checks passed."
    verdicts = [f'<p class="{"fail" if failed else "pass"}">{escape(said)}</p>']
    if outside := [check.name for check in checks if check.informs and not check.passed]:
        verdicts.append(f'<p class="warn">Outside its interval: {escape(", ".join(outside))}.</p>')
    return _section("verification", "Verification", *verdicts, verification_table(checks).html())


def _found(parts: Sequence[Table | Picture], max_rows: int) -> str:
    shown = [each.html(max_rows) if isinstance(each, Table) else _figure(each, "") for each in parts]
    return _section("found", "Found", *shown) if shown else ""


def _what_if(parts: Sequence[Table | Picture], max_rows: int) -> str:
    said = "The bars turn one knob at a time; rest the pointer on one for its step time."
    shown = [each.html(max_rows) if isinstance(each, Table) else _figure(each, said) for each in parts]
    return _section("what-if", "What if", *shown) if shown else ""


def _results(timelines: Sequence[Timeline], times_s: Sequence[float]) -> str:
    if not timelines:
        return ""
    title = " and ".join(each.kind for each in timelines)
    table, run = timeline_table(timelines), timelines[-1]
    if len(times_s) > run.num_steps and run.kind != "predicted":
        every = f"The {run.kind} figures are of the last {run.num_steps} steps, which were recorded; all "
        every += f"{len(times_s)} steps took {format_seconds(float(np.median(times_s)))} in the median."
        table = replace(table, notes=(*table.notes, every))
    return _section("results", f"The step, {title}", table.html())


def _pipeline(timelines: Sequence[Timeline], max_boxes: int) -> str:
    drawn = [each for each in timelines if len(each.rank)]
    if not drawn:
        return ""
    kinds = " above ".join(each.kind.upper() for each in drawn)
    caption = f"{kinds}, on one time axis. Rest the pointer on a box for its instruction; numbers are micro-batches."
    return _section("pipeline", "Pipeline", _figure(pipeline_picture(drawn, max_boxes=max_boxes), caption))


def _losses(losses: Mapping[str, Sequence[float]] | None) -> str:
    lines = [Line(name=name, values=values, dashed=at > 0) for at, (name, values) in enumerate((losses or {}).items())]
    lines = [line for line in lines if len(line.values)]
    if not lines:
        return ""
    picture = line_picture(lines, title="Loss", x_name="step", y_name="loss")
    said = "The loss of every step: mean over micro-batches."
    said += " Equal losses lie on each other: dashes on a line." if len(lines) > 1 else ""
    return _section("losses", "Losses", _figure(picture, said))


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
    figure = _figure(picture, f"Every {kind} step; the prediction is for a typical one.")
    return _section("steps", f"Step times, {kind}", figure)


def _memory(predicted: Timeline | None, measured: Timeline | None, program: Program | None, limit: int | None) -> str:
    figures = []
    for each, known in ((predicted, program), (measured, None)):
        if each is not None and (each.memory or each.memory_curve or (known is not None and len(each.rank))):
            picture = memory_picture(each, program=known, limit_bytes=limit)
            caption = f"{each.kind.upper()}: live bytes on the fullest rank of every group; 1 MB is 10^6 bytes."
            figures.append(_figure(picture, caption))
            if each.memory:
                figures.append(memory_table(each, known).html())
    return _section("memory", "Memory", *figures) if figures else ""


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
    return _folded("composition", "Where the time goes, rank by rank and call by call", *body) if body else ""


def _plan(plan: Plan | None, max_rows: int) -> str:
    if plan is None:
        return ""
    graph = _figure(graph_picture(graph_data(plan.graph, plan)), "The graph after the search; orange edges move data.")
    table = plan_table(plan)
    shown = table.html(max_rows)
    if len(table.rows) > _MAX_OPEN_ROWS:
        shown = _folded("operators", f"{len(table.rows)} operators: layouts and communication", shown)
    return _section("plan", "Plan", shown) + _folded(
        "graph", "Parameters and graph", parameter_table(plan).html(max_rows), graph
    )


def _further(tables: Sequence[Table], max_rows: int) -> str:
    return _folded("further", "Further tables", *(table.html(max_rows) for table in tables)) if tables else ""


def _environment(machine: Mapping[str, str] | None, environment: Mapping[str, str] | None, command: str) -> str:
    body = []
    if command:
        body.append(f"<pre>{escape(command)}</pre>")
    for title, entries in (("Machine of the prediction", machine), ("Environment", environment)):
        if entries:
            rows = tuple((name, str(value)) for name, value in entries.items())
            body.append(Table(title=title, columns=("name", "value"), rows=rows).html())
    return _section("environment", "Environment", *body) if body else ""


# ------------------------------------------------------------------------------------ data


def _json(**given: Any) -> str:
    """What the page shows, as JSON that is safe inside a script element; without what was not given."""
    kept = {name: _finite(value) for name, value in given.items() if value not in (None, {}, [], "")}
    return json.dumps(kept, default=str, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _timeline_data(timeline: Timeline, max_boxes: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "kind": timeline.kind,
        "num_ranks": timeline.num_ranks,
        "num_steps": timeline.num_steps,
        "step_s": timeline.step_s,
        "step_interval_s": timeline.step_interval_s,
        "low_s": timeline.low_s,
        "high_s": timeline.high_s,
        "bubble_fraction": timeline.bubble_fraction,
        "exposed_comm_s": timeline.exposed_comm_s,
        "peak_bytes": timeline.peak_bytes,
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
