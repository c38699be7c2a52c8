"""The interactive timeline: predicted above measured on one axis, with zoom, search, causes, critical path and memory.

The spans of one step are packed into columns of 32-bit integers, starts as differences, then deflated and encoded in
base64, so that 100,000 of them take about a megabyte. `templates/timeline.js` unpacks and draws them.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from plans.program import Instruction, Program
from plans.ranks import format_ranks, format_shape
from plans.timeline import PS_PER_S, STREAMS, Timeline
from reports.colours import COLOURS, KIND_COLOURS, ROLE_COLOURS, kind_of
from reports.memory import role_order
from reports.page import Markup, render
from simulator import critical_path
from simulator.timeline.causes import Causes
from simulator.timeline.labels import groups_of, representative_step
from simulator.timeline.live import live_of_groups

__all__ = ["MAX_SPANS", "LiveTimeline", "Packed", "pack"]

MAX_SPANS = 100_000
"""Largest number of spans of one timeline; beyond it host spans, then all but one rank of each group are left out."""

_MAX_CAUSED = 30_000
"""Spans of a step for whose starts causes are looked up."""

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTimeline:
    """The part of a page.

    Args:
        timelines: from top to bottom, such as the prediction and the run.
        programs: of each timeline, for causes, costs and memory by role; none where they are not known.
        names: names of each timeline, where their kinds do not tell them apart.
        limit_bytes: memory of a rank.
    """

    timelines: Sequence[Timeline]
    programs: Sequence[Program | None] = ()
    names: Sequence[str] = ()
    limit_bytes: int | None = None

    def __html__(self) -> Markup:
        data, columns, said = [], list[Column](), []
        for timeline, program, name in itertools.zip_longest(self.timelines, self.programs, self.names):
            packed = pack(timeline, program, name)
            data.append(packed.header | {"columns": [len(column) for column in packed.columns]})
            columns += packed.columns
            said.append(f"{timeline.kind}: {len(packed.header['rows'])} rows")
        header = json.dumps(
            {"panels": data, "kinds": list(KIND_COLOURS), "limit_bytes": self.limit_bytes}, separators=(",", ":")
        ).encode()
        body = np.concatenate([np.zeros(0, np.int64), *columns]).astype("<i4").tobytes()
        blob = zlib.compress(len(header).to_bytes(4, "little") + header + body, 9)
        colours = {kind: COLOURS[colour] for kind, colour in KIND_COLOURS.items()}
        roles = {role: COLOURS[colour] for role, colour in ROLE_COLOURS.items()}
        return Markup(
            render("timeline.html", data=base64.b64encode(blob).decode(), kinds=colours, roles=roles,
                   label="; ".join(said))
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One timeline: constants in `header`, and the columns of its spans, exposed and critical sections.

    The columns are, of spans in order of lane and start: lane (three times the row, plus the stream), start, length
    (in units of `unit_s`, starts as differences within a lane), name, and how many spans before it the cause stands
    (0: not known). Then lane, start and length of the stretches of exposed communication, and of the critical path.
    Then for each memory curve its times and the bytes of each role, as differences.
    """

    header: dict[str, Any]
    columns: list[Column] = field(default_factory=list)


def pack(timeline: Timeline, program: Program | None = None, called: str | None = None) -> Packed:
    """The step of a timeline that pictures show; `called` stands instead of its kind."""
    step = representative_step(timeline)
    begin = timeline.step_start_ps[step]
    length = max(1, timeline.step_end_ps[step] - begin)
    unit = -(-length // 2**30)
    rows, notes = _rows(timeline, step)
    row_of = {rank: number for number, (rank, _, _) in enumerate(rows)}
    spans, lane = _spans(timeline, step, row_of, notes)
    starts, ends = timeline.start_ps[spans] - begin, timeline.end_ps[spans] - begin
    used, name = np.unique(timeline.name_index[spans], return_inverse=True)
    causes = np.zeros(len(spans), dtype=np.int64)
    critical: list[tuple[int, int, int]] = []
    if program is not None:
        upto = timeline.until(step)
        if len(spans) <= _MAX_CAUSED:
            causes = _causes(timeline, Causes(program, upto), spans, row_of, step)
        of = timeline.representatives
        for span in critical_path(upto, program).spans:
            if span.kind != "gap" and of[span.rank] in row_of:
                place = 3 * row_of[of[span.rank]] + STREAMS.index(span.stream)
                critical.append((place, span.start_ps - begin, span.end_ps - begin))
    bare = [
        (3 * row_of[rank] + 2, low - begin, high - begin)
        for rank, spans_of_rank in timeline.spans_of_step(step) if rank in row_of
        for low, high in spans_of_rank.exposed()
    ]  # fmt: skip
    columns = [np.diff(lane, prepend=0), _starts(lane, starts, unit), (ends - starts) // unit, name, causes]
    for stretches in (bare, critical):
        lanes, low, high = np.array(stretches, dtype=np.int64).reshape(-1, 3).T
        columns += [lanes, low // unit, (high - low) // unit]
    lives = [group.thinned(length) for group in live_of_groups(timeline, program) if group.rank in row_of]
    byte_unit = 1 + max((int(live_bytes.peak[1]) for live_bytes in lives), default=0) // 2**30
    for live in lives:
        columns += [np.diff(np.clip(live.times_ps, 0, length) // unit, prepend=0)]
        columns += [np.diff(live.by_role[role] // byte_unit, prepend=0) for role in role_order(live.by_role)]
    number = f": step {step + 1} of {timeline.num_steps}" if timeline.num_steps > 1 else ""
    header = {
        "kind": called or timeline.kind,
        "title": f"{called or timeline.kind.upper()}{number}",
        "length": length // unit, "unit_s": unit / PS_PER_S, "notes": notes,
        "rows": [{"rank": rank, "ranks": ranks, "stages": list(stages)} for rank, ranks, stages in rows],
        "names": _names(timeline, used, program), "byte_unit": byte_unit,
        "memory": [
            {"row": row_of[live.rank], "roles": role_order(live.by_role), "peak": live.peak[1]} for live in lives
        ],
    }  # fmt: skip
    return Packed(header=header, columns=columns)


def _rows(timeline: Timeline, step: int) -> tuple[list[tuple[int, str, tuple[int, ...]]], list[str]]:
    """(rank, the equal ranks that it stands for in words, stages) from top to bottom, and what was left out."""
    members: dict[int, list[int]] = {}
    for rank, of in enumerate(timeline.representatives):
        members.setdefault(of, []).append(rank)
    has_spans = set(np.unique(timeline.rank[timeline.step == step]).tolist())
    rows = [
        (rank, format_ranks(members[rank]), stages)
        for stages, ranks in groups_of(timeline) for rank in ranks if rank in has_spans and rank in members
    ]  # fmt: skip
    num_spans = int(np.count_nonzero((timeline.step == step) & (timeline.stream != 0)))
    if num_spans <= MAX_SPANS:
        return rows, []
    busy = np.bincount(timeline.rank, weights=(timeline.end_ps - timeline.start_ps) * (timeline.stream == 1))
    fullest: dict[tuple[int, ...], tuple[int, str, tuple[int, ...]]] = {}
    for row in rows:
        if row[2] not in fullest or busy[row[0]] > busy[fullest[row[2]][0]]:
            fullest[row[2]] = row
    return list(fullest.values()), [f"{len(fullest)} of {len(rows)} ranks: of each group the one that computes longest"]


def _spans(timeline: Timeline, step: int, row_of: Mapping[int, int], notes: list[str]) -> tuple[Column, Column]:
    """Positions of the spans that are shown and their lanes, by lane and start; cut at `MAX_SPANS`."""
    row = np.full(timeline.num_ranks, -1)
    row[list(row_of)] = list(row_of.values())
    shown = np.flatnonzero((timeline.step == step) & (row[timeline.rank] >= 0) & (timeline.end_ps > timeline.start_ps))
    if len(shown) > MAX_SPANS:
        shown = shown[timeline.stream[shown] != 0]
        notes.append("without what the host issues")
    if len(shown) > MAX_SPANS:
        longest = np.argsort(timeline.start_ps[shown] - timeline.end_ps[shown], kind="stable")[:MAX_SPANS]
        notes.append(f"the longest {MAX_SPANS:,} of {len(shown):,} spans")
        shown = shown[np.sort(longest)]
    lane = 3 * row[timeline.rank[shown]] + timeline.stream[shown]
    order = np.lexsort((timeline.end_ps[shown], timeline.start_ps[shown], lane))
    return shown[order], lane[order].astype(np.int64)


def _starts(lane: Column, starts: Column, unit: int) -> Column:
    """Each start as the difference to the one before it in its lane."""
    scaled = starts // unit
    before = np.append(0, scaled[:-1])
    return scaled - np.where(np.diff(lane, prepend=-1) == 0, before, 0)


def _causes(timeline: Timeline, causes: Causes, spans: Column, row_of: Mapping[int, int], step: int) -> Column:
    """The distance from each span back to the span that it waited for last; 0 if that is not shown."""
    of = timeline.representatives
    columns = (timeline.rank, timeline.stream, timeline.name_index, timeline.end_ps)
    places = {
        (rank, stream, timeline.names[name][0], end): number
        for number, (rank, stream, name, end) in enumerate(
            zip(*(column[spans].tolist() for column in columns), strict=True)
        )
    }
    distances = np.zeros(len(spans), dtype=np.int64)
    for rank in row_of:
        for event in causes.events(rank, step):
            number = places.get((rank, event.stream, causes.instruction(event)[0], event.end_ps))
            _, cause, _ = causes.cause(event)
            if number is None or cause is None or cause.step != step:
                continue
            before = places.get((of[cause.rank], cause.stream, causes.instruction(cause)[0], cause.end_ps))
            if before is not None:
                distances[number] = number - before
    return distances


def _names(timeline: Timeline, used: npt.NDArray[Any], program: Program | None) -> dict[str, list[Any]]:
    """The id, call and kind of every name, and with the program its operator and cost."""
    known: dict[str, Instruction] = {}
    for group in program.groups if program is not None else ():
        for block, instruction in group.walk():
            known.setdefault(f"{block.label}/{instruction.name}", instruction)
    kinds = list(KIND_COLOURS)
    names = [timeline.names[at] for at in used.tolist()]
    columns: dict[str, list[Any]] = {
        "id": [id_ for id_, _, _ in names], "call": [call for _, call, _ in names],
        "kind": [kinds.index(kind_of(call, part)) for _, call, part in names],
    }  # fmt: skip
    if known:
        instructions = [known.get(id_) for id_, _, _ in names]
        columns["operator"] = [instruction.operator if instruction else "" for instruction in instructions]
        columns["flops"] = [instruction.flops if instruction else 0 for instruction in instructions]
        columns["bytes"] = [instruction.message_bytes if instruction else 0 for instruction in instructions]
        columns["shapes"] = [
            " ".join(map(format_shape, instruction.shapes)) if instruction else "" for instruction in instructions
        ]
        columns["axes"] = [", ".join(instruction.axes) if instruction else "" for instruction in instructions]
    return columns
