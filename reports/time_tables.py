"""Timelines as tables: the step, where its time goes rank by rank, and the prediction next to the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plans.figures import FIGURES, figure_cells, figures_of
from plans.program import Program
from plans.ranks import format_ranks
from plans.timeline import PS_PER_S, Timeline
from plans.units import Change, Quantity, Seconds, Share
from reports.tables import Cell, Table
from simulator import CriticalPath, composition
from simulator.timeline.analysis import time_by_call_s
from simulator.timeline.labels import read_label, representative_step, rows_of_step

__all__ = [
    "actions_table", "changed_records", "comparison_table", "composition_table", "critical_path_table",
    "figures_table", "path_parts_ps", "timeline_table",
]  # fmt: skip


def timeline_table(timelines: Sequence[Timeline], *, run_step_s: float | None = None) -> Table:
    """The figures of a step (`plans.figures`) and the wait for the host, a column per timeline.

    With a prediction first, the difference of the second timeline is given in per cent, of shares in percentage points.

    Args:
        timelines: such as the prediction and the run.
        run_step_s: the step of the last one, which is a run, over more steps than were recorded; by default the median
            from one recorded step's end to the next.
    """
    figures = [figures_of(timeline) for timeline in timelines]
    if run_step_s is not None:
        figures[-1]["step_s"] = run_step_s
    quantities = [
        (figure.title, [figure_values[key] or (None if key == "peak_bytes" else 0) for figure_values in figures],
         figure.form)
        for key, figure in FIGURES.items()
    ]  # fmt: skip
    quantities.insert(-1, ("host wait", [timeline.host_wait_s for timeline in timelines], Seconds))
    titles, compared = _titles(timelines), len(timelines) == 2
    records: list[dict[str, Cell]] = []
    for name, values, form in quantities:
        cells = ["not known" if value is None else form(value) for value in values]
        records.append({"quantity": name, **dict(zip(titles, cells, strict=True))})
        if compared:
            records[-1]["difference"] = _difference(values, form)
    if any(timeline.low_s is not None for timeline in timelines):
        intervals = map(_interval, timelines)
        records.insert(1, {"quantity": "its 90 % interval", **dict(zip(titles, intervals, strict=True))})
        records[1] |= {"difference": ""} if compared else {}
    return Table.of("Step", records, notes=[f"difference: {titles[1]} against {titles[0]}."] if compared else [])


def _interval(timeline: Timeline) -> str:
    if timeline.low_s is None or timeline.high_s is None:
        return ""
    return f"{Seconds(timeline.low_s)} to {Seconds(timeline.high_s)}"


def _titles(timelines: Sequence[Timeline]) -> list[str]:
    """Their kinds, numbered where two are of one kind."""
    kinds = [timeline.kind for timeline in timelines]
    return kinds if len({*kinds}) == len(kinds) else [f"{kind} {number}" for number, kind in enumerate(kinds, 1)]


def _difference(values: Sequence[float | None], form: type[Quantity] = Seconds) -> Cell:
    """The second value against the first, in per cent; of shares in percentage points."""
    first, second = values
    if not first or second is None:
        return ""
    if form is Share:
        return f"{100 * (second - first):+.1f} points"
    return Change(second / first - 1)


def composition_table(timeline: Timeline, program: Program | None = None) -> Table:
    """Where the last step's time goes, a row for all ranks with equal times; the columns add up to the step (see
    `simulator.composition`).

    With the program of the timeline, waits in collectives for a late member are kept apart from the bubble.
    """
    parts = composition(timeline, program)
    calls = sorted({_plain(call) for part in parts for call in part.exposed_ps})
    columns = ["ranks", "step", "compute", *(f"exposed {call}" for call in calls), "host wait", "bubble"]
    spent = []
    for part in parts:
        exposed = dict.fromkeys(calls, 0)
        for call, exposed_ps in part.exposed_ps.items():
            exposed[_plain(call)] += exposed_ps
        spent.append([part.step_ps, part.compute_ps, *exposed.values(), part.host_wait_ps, part.bubble_ps])
    waits = [sum(part.straggler_ps.values()) for part in parts]
    step_ps = max(1, sum(part.step_ps for part in parts))
    ranks: dict[tuple[Cell, ...], list[int]] = {}
    for part, times, waited in zip(parts, spent, waits, strict=True):
        cells: list[Cell] = [Seconds(time / PS_PER_S) for time in times]
        if any(waits):
            longest = max(part.straggler_ps, key=lambda last: part.straggler_ps[last], default=None)
            cells.append(f"{Seconds(waited / PS_PER_S)}" + ("" if longest is None else f", most for {longest}"))
        ranks.setdefault(tuple(cells), []).append(part.rank)
    rows: list[tuple[Cell, ...]] = [(format_ranks(members, ","), *cells) for cells, members in ranks.items()]
    if parts:
        shares = [Share(sum(each) / step_ps) for each in zip(*spent, strict=True)]
        rows.append(("share", *shares, *([Share(sum(waits) / step_ps)] if any(waits) else [])))
    columns += ["wait for stragglers"] if any(waits) else []
    return Table(title=f"Where the last step goes ({timeline.kind})", columns=tuple(columns), rows=rows)


def _plain(call: str) -> str:
    """The name of a call for people: a collective on a packed buffer is the same collective."""
    return call.removesuffix("_flat")


def critical_path_table(path: CriticalPath, kind: str = "predicted") -> Table:
    """The composition of the critical path of the step, and the ranks it waited for."""
    step_ps = max(1, path.step_ps)
    records = [
        {"part": name, "time": Seconds(part / PS_PER_S), "share": Share(part / step_ps)}
        for name, part in path_parts_ps(path).items()
    ]
    records.append({"part": "step", "time": Seconds(path.step_ps / PS_PER_S), "share": Share(1)})
    notes = [
        f"In {late.id} rank {late.rank} waits {Seconds(late.waited_ps / PS_PER_S)} for rank {late.last}."
        for late in sorted(path.stragglers, key=lambda straggler: -straggler.waited_ps)[:3]
    ]
    by_rank = [f"{rank}: {Share(part / step_ps)}" for rank, part in path.by_rank_ps.items()]
    if len(by_rank) > 1:
        notes.append(f"By rank: {', '.join(by_rank[:8])}{', ...' if len(by_rank) > 8 else ''}.")
    title = f"Critical path from step end to step end ({kind}), ending on rank {path.rank}"
    return Table.of(title, records, notes=notes)


def path_parts_ps(path: CriticalPath) -> dict[str, int]:
    """Picoseconds of a critical path by kind of work; a collective on a packed buffer is the same collective."""
    parts: dict[str, int] = {}
    for name, part in path.by_kind_ps.items():
        parts[_plain(name)] = parts.get(_plain(name), 0) + part
    return parts


def comparison_table(predicted: Timeline, measured: Timeline) -> Table:
    """Per call the time that a rank spends in it in a step (mean over ranks and steps), predicted and measured.

    Communication counts from its start on a rank to its end there, waiting for others included, so on a run it may be
    longer than its price although the step is not.
    """
    titles, times = _titles([predicted, measured]), [time_by_call_s(predicted), time_by_call_s(measured)]
    records = []
    for call in sorted({*times[0], *times[1]}, key=lambda call: -max(spent.get(call, 0.0) for spent in times)):
        values = [spent.get(call) for spent in times]
        cells = ("none" if value is None else Seconds(value) for value in values)
        difference = _difference(values)
        records.append({"call": call, **dict(zip(titles, cells, strict=True)), "difference": difference})
    note = (
        "Communication counts from its start on a rank (on a run: from its issue) to its end there, waiting included."
    )
    return Table.of("Time per call, rank and step", records, notes=[note])


def actions_table(timeline: Timeline) -> Table:
    """When each action of each rank computes in the shown step: the pipeline as a table."""
    step = representative_step(timeline)
    begin = timeline.step_start_ps[step]
    times: dict[tuple[int, str], list[int]] = {}
    rows = rows_of_step(timeline, step, "compute")
    columns = (timeline.rank, timeline.name_index, timeline.start_ps, timeline.end_ps)
    for rank, name, start, end in zip(*(column[rows].tolist() for column in columns), strict=True):
        entry = times.setdefault((rank, read_label(timeline.names[name][0]).text), [start, end, 0])
        entry[1], entry[2] = max(entry[1], end), entry[2] + end - start
    return Table.of(f"Actions ({timeline.kind})", (
        {"rank": rank, "action": label, "from": Seconds((start - begin) / PS_PER_S),
         "to": Seconds((end - begin) / PS_PER_S), "busy": Seconds(busy / PS_PER_S)}
        for (rank, label), (start, end, busy) in sorted(times.items(), key=lambda item: (item[0][0], item[1][0]))
    ))  # fmt: skip


STEP = FIGURES["step_s"].title


def changed_records(steps: Sequence[tuple[str, Any]], column: str) -> list[dict[str, Cell]]:
    """A record for each named step: its figures, behind the step its change against the first one.

    Args:
        steps: (name, timeline, forecast or outcome).
        column: of the names.
    """
    records: list[dict[str, Cell]] = []
    base_s = figures_of(steps[0][1])["step_s"]
    for name, step in steps:
        cells = figure_cells(step)
        step_s = cells.pop(STEP)
        change = Change(float(step_s or 0) / base_s - 1) if records and base_s else None
        records.append({column: name, STEP: step_s, "change": change, **cells})
    return records


def figures_table() -> Table:
    """The definitions, for reports and docs."""
    return Table.of("The figures of a step", (
        {"figure": figure.title, "key": figure.key, "unit": figure.unit, "definition": figure.definition}
        for figure in FIGURES.values()
    ))  # fmt: skip
