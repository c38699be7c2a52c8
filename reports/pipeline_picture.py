"""The pipeline picture: what every rank does over one step, the prediction above the run, on one time axis.

First `pipeline_panel` makes the data (rows, boxes, outlines of actions), then `pipeline_picture` draws it. A picture
has at most about `MAX_BOXES` boxes; a larger step is drawn with one box per action, then for one rank of each group,
then in slots of time that show what took most of each, and the picture says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from plans.errors import TwofoldError
from plans.timeline import PS_PER_S, Timeline
from reports.spans import KIND_COLOURS, groups_of, kind_of, read_label, representative_step, rows_of_step
from reports.svg import Picture, text_width
from reports.units import format_seconds, time_unit

__all__ = ["COLOURS", "MAX_BOXES", "ActionOutline", "Box", "Panel", "Row", "pipeline_panel", "pipeline_picture"]

MAX_BOXES = 4000
MAX_ROWS = 64

COLOURS = {kind: colour for kind, colour in KIND_COLOURS.items() if kind != "waiting"}
"""The fill of each kind of work; waiting is drawn as idle."""

_WIDTH, _LEFT, _RIGHT = 1120.0, 118.0, 16.0
_COMPUTE, _COMM, _GAP = 19.0, 6.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rank, the stages of its group, and how many equal ranks it stands for."""

    rank: int
    stages: tuple[int, ...]
    stands_for: int = 1

    @property
    def group(self) -> str:
        """Such as "stage 0" or "stages 0, 2"."""
        if not self.stages:
            return "no stage"
        return f"stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Work on one lane ("compute" or "comm") of a row, in picoseconds since the step began."""

    row: int
    lane: str
    start_ps: int
    end_ps: int
    kind: str
    name: str

    @property
    def length_ps(self) -> int:
        """The duration in picoseconds."""
        return self.end_ps - self.start_ps


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOutline:
    """A run of compute boxes of one action on a row; `busy_ps` is its longest stretch without a gap."""

    row: int
    start_ps: int
    end_ps: int
    busy_ps: tuple[int, int]
    label: str
    micro_batch: int | None
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One timeline's part of the picture: of `step`, `step_ps` long; `notes` say what was left out or merged."""

    title: str
    step: int
    step_ps: int
    rows: tuple[Row, ...]
    boxes: tuple[Box, ...]
    outlines: tuple[ActionOutline, ...]
    notes: tuple[str, ...] = field(default=())


def pipeline_panel(timeline: Timeline, *, max_boxes: int = MAX_BOXES, step: int | None = None) -> Panel:
    """The boxes of one step of a timeline.

    Args:
        timeline: what a simulation or a run returned.
        max_boxes: about how many boxes there may be.
        step: which step; by default the last of a prediction, the one of median length of a run.

    Raises:
        TwofoldError: no spans, or no such step.
    """
    step = representative_step(timeline) if step is None else step
    if not 0 <= step < timeline.num_steps or not (timeline.step == step).any():
        raise TwofoldError(
            f"the {timeline.kind} timeline has no spans of step {step}; it covers {timeline.num_steps} steps"
        )
    notes: list[str] = []
    rows = [Row(rank=rank, stages=stages) for stages, ranks in groups_of(timeline) for rank in ranks]
    if len(rows) > MAX_ROWS:
        rows = _one_per_group(timeline, step)
        notes.append("one rank of each group, the one that computes longest")
        if len(rows) > MAX_ROWS:
            rows = [rows[round(at)] for at in np.linspace(0, len(rows) - 1, MAX_ROWS)]
            notes.append(f"{MAX_ROWS} of the groups, evenly picked")
    boxes, outlines = _boxes(timeline, step, rows, False)
    if len(boxes) > max_boxes:
        notes.append(f"{len(boxes):,} instructions merged by action, backward in the colour of input gradients")
        boxes, outlines = _boxes(timeline, step, rows, True)
    if len(boxes) > max_boxes and len(fewer := _one_per_group(timeline, step)) < len(rows):
        rows = fewer
        notes.append("one rank of each group, the one that computes longest")
        boxes, outlines = _boxes(timeline, step, rows, True)
    length = timeline.step_end_ps[step] - timeline.step_start_ps[step]
    if len(boxes) > max_boxes:
        slots = max(1, min(round(_WIDTH), max_boxes // (2 * len(rows))))
        notes.append(f"each slot of {format_seconds(length / slots / PS_PER_S)} shows what took most of it")
        boxes, outlines = _slots(boxes, length, slots), []
    steps = f"step {step + 1} of {timeline.num_steps}, " if timeline.num_steps > 1 else ""
    return Panel(
        title=f"{timeline.kind.upper()}: {steps}{format_seconds(length / PS_PER_S)}",
        step=step, step_ps=length, rows=tuple(rows), boxes=tuple(boxes), outlines=tuple(outlines), notes=tuple(notes),
    )  # fmt: skip


def pipeline_picture(
    timelines: Sequence[Timeline], *, max_boxes: int = MAX_BOXES, title: str = "Pipeline: what every rank does"
) -> Picture:
    """Draw timelines one above the other on the same time axis.

    Args:
        timelines: the prediction first, then the run.
        max_boxes: about how many boxes all of them may have together.
        title: of the picture.
    """
    panels = [pipeline_panel(each, max_boxes=max_boxes // max(1, len(timelines))) for each in timelines]
    if not panels:
        raise TwofoldError("a pipeline picture needs at least one timeline")
    longest_ps = max(1, *(panel.step_ps for panel in panels))
    heights = [_panel_height(panel) for panel in panels]
    picture = Picture(title=title, width=_WIDTH, height=34 + sum(heights) + 40)
    entries = [(style, kind if kind != "other" else "load, slice, other") for kind, style in COLOURS.items()]
    picture.legend(_LEFT, 16, [*entries, ("idle", "idle or waiting")])
    top = 34.0
    for panel, height in zip(panels, heights, strict=True):
        _draw_panel(picture, panel, top, longest_ps)
        top += height
    _, unit = time_unit(longest_ps / PS_PER_S)
    picture.text((_LEFT + _WIDTH - _RIGHT) / 2, top + 24, f"time since the step began ({unit})", "middle")
    picture.text(_LEFT, top + 24, "wide lane: compute; narrow lane: communication in flight", "small muted")
    return picture


def _panel_height(panel: Panel) -> float:
    groups = len({row.stages for row in panel.rows})
    return 26 + len(panel.rows) * (_COMPUTE + _COMM + _GAP) + 5 * groups + 24


def _draw_panel(picture: Picture, panel: Panel, top: float, longest_ps: int) -> None:
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_ps
    picture.text(8, top + 16, panel.title, "title")
    if panel.notes:
        picture.text(16 + text_width(panel.title, 14.5), top + 16, "; ".join(panel.notes), "small muted")
    tops, y, last = [], top + 26, None
    for row in panel.rows:
        if last is not None and row.stages != last:
            y += 5
        if row.stages != last:
            picture.text(8, y + 14, row.group if len(row.group) < 11 else f"st. {','.join(map(str, row.stages))}"[:12])
        last = row.stages
        tops.append(y)
        rank = f"rank {row.rank}" + (f" ×{row.stands_for}" if row.stands_for > 1 else "")
        picture.text(_LEFT - 6, y + 14, rank, "end small")
        picture.rect(_LEFT, y, panel.step_ps * scale, _COMPUTE, "idle")
        y += _COMPUTE + _COMM + _GAP
    bottom = y
    unit_s, _ = time_unit(longest_ps / PS_PER_S)
    unit_ps = unit_s * PS_PER_S
    for tick in _nice_ticks(longest_ps / unit_ps, 12):
        x = _LEFT + tick * unit_ps * scale
        picture.line(x, top + 22, x, bottom, "grid")
        picture.line(x, bottom, x, bottom + 4)
        picture.text(x, bottom + 15, f"{tick:g}", "middle small")
    picture.line(_LEFT, bottom, _WIDTH - _RIGHT, bottom)
    for box in panel.boxes:
        low, height = (0.0, _COMPUTE) if box.lane == "compute" else (_COMPUTE + 1, _COMM)
        width = max(0.25, box.length_ps * scale)
        hover = f"{box.name}: {format_seconds(box.length_ps / PS_PER_S)} from {format_seconds(box.start_ps / PS_PER_S)}"
        picture.rect(_LEFT + box.start_ps * scale, tops[box.row] + low, width, height, COLOURS[box.kind], hover)
    several = any(len(row.stages) > 1 for row in panel.rows)
    for outline in panel.outlines:
        x, width = _LEFT + outline.start_ps * scale, (outline.end_ps - outline.start_ps) * scale
        if width > 3:
            picture.rect(x, tops[outline.row], width, _COMPUTE, "frame")
        text = "" if outline.micro_batch is None else outline.label if several else str(outline.micro_batch)
        low, high = (_LEFT + edge * scale for edge in outline.busy_ps)  # text stands on a colour, not on a gap
        if text and high - low >= text_width(text, 11) + 3:
            picture.text((low + high) / 2, tops[outline.row] + 13.5, text, "ink middle small")
    end = _LEFT + panel.step_ps * scale
    picture.line(end, top + 22, end, bottom, "mark")


def _one_per_group(timeline: Timeline, step: int) -> list[Row]:
    """Of every group the rank with most compute."""
    used = rows_of_step(timeline, step, "compute")
    length = (timeline.end_ps[used] - timeline.start_ps[used]).astype(float)
    busy = np.bincount(timeline.rank[used], weights=length, minlength=timeline.num_ranks)
    return [
        Row(rank=max(ranks, key=lambda rank: (busy[rank], -rank)), stages=stages, stands_for=len(ranks))
        for stages, ranks in groups_of(timeline)
    ]


def _boxes(
    timeline: Timeline, step: int, rows: Sequence[Row], by_action: bool
) -> tuple[list[Box], list[ActionOutline]]:
    """A box per span, or per run of spans of one action without a visible gap, and the outlines of actions."""
    start = timeline.step_start_ps[step]
    gap_ps = (timeline.step_end_ps[step] - start) // 500  # two pixels: too short to be seen as a gap
    labels = [read_label(id_) for id_, _, _ in timeline.names]
    kinds = [kind_of(call, part) for _, call, part in timeline.names]
    boxes: list[Box] = []
    outlines: list[ActionOutline] = []
    for number, row in enumerate(rows):
        compute: list[Box] = []
        actions: list[ActionOutline] = []
        stretches: list[Box] = []
        for at in rows_of_step(timeline, step, "compute", row.rank):
            name = int(timeline.name_index[at])
            low, high = int(timeline.start_ps[at]) - start, int(timeline.end_ps[at]) - start
            if kinds[name] == "waiting" or high <= low:
                continue
            label = labels[name]
            kind = label.kind if label.stage is not None or label.text == "end" else kinds[name]
            box = Box(
                row=number, lane="compute", start_ps=low, end_ps=high, kind=kinds[name], name=timeline.names[name][0]
            )
            compute.append(box)
            same = bool(actions) and actions[-1].label == label.text
            if same and low <= stretches[-1].end_ps + gap_ps:
                stretches[-1] = replace(stretches[-1], end_ps=max(stretches[-1].end_ps, high))
            else:
                stretches.append(replace(box, kind=kind, name=label.text))
            busy, first = (stretches[-1].start_ps, stretches[-1].end_ps), low
            if same:
                last = actions.pop()
                busy, first = max(last.busy_ps, busy, key=lambda edges: edges[1] - edges[0]), last.start_ps
                high = max(high, last.end_ps)
            actions.append(
                ActionOutline(
                    row=number,
                    start_ps=first,
                    end_ps=high,
                    busy_ps=busy,
                    label=label.text,
                    micro_batch=label.micro_batch,
                    kind=kind,
                )
            )
        boxes += stretches if by_action else compute
        outlines += actions
        boxes += _comm_boxes(timeline, step, row.rank, number, kinds, by_action)
    return boxes, outlines


def _comm_boxes(timeline: Timeline, step: int, rank: int, number: int, kinds: Sequence[str], merged: bool) -> list[Box]:
    """Boxes of the communication lane; those that overlap are joined, since the lane shows whether something moves."""
    start = timeline.step_start_ps[step]
    found: list[Box] = []
    for at in rows_of_step(timeline, step, "comm", rank):
        name = int(timeline.name_index[at])
        low, high = int(timeline.start_ps[at]) - start, int(timeline.end_ps[at]) - start
        if kinds[name] == "waiting" or high <= low:
            continue
        id_ = timeline.names[name][0]
        if (found and low < found[-1].end_ps) or (found and merged and low == found[-1].end_ps):
            last = found[-1]
            several = last.name if id_ == last.name else f"{last.name.partition(' and ')[0]} and others"
            found[-1] = Box(
                row=number,
                lane="comm",
                start_ps=last.start_ps,
                end_ps=max(last.end_ps, high),
                kind=last.kind,
                name=several,
            )
        else:
            found.append(Box(row=number, lane="comm", start_ps=low, end_ps=high, kind="communication", name=id_))
    return found


def _slots(boxes: Sequence[Box], length_ps: int, num_slots: int) -> list[Box]:
    """Per lane and slot of time the kind that took most of it, if it took half; equal neighbours are one box."""
    by_lane: dict[tuple[int, str], list[Box]] = {}
    for box in boxes:
        by_lane.setdefault((box.row, box.lane), []).append(box)
    edges = np.linspace(0, max(1, length_ps), num_slots + 1)
    result = []
    for (row, lane), members in by_lane.items():
        share = {kind: np.zeros(num_slots) for kind in COLOURS}
        for box in members:
            first = min(num_slots - 1, int(np.searchsorted(edges, box.start_ps, side="right")) - 1)
            last = max(first, min(num_slots - 1, int(np.searchsorted(edges, box.end_ps, side="left")) - 1))
            part = slice(first, last + 1)
            covered = np.minimum(edges[part.start + 1 : part.stop + 1], box.end_ps) - np.maximum(
                edges[part], box.start_ps
            )
            share[box.kind][part] += covered
        names = list(share)
        most = np.argmax(np.stack([share[name] for name in names]), axis=0)
        busy = sum(share.values()) >= 0.5 * (edges[1] - edges[0])
        at = 0
        while at < num_slots:
            until = at + 1
            while until < num_slots and most[until] == most[at] and busy[until] == busy[at]:
                until += 1
            if busy[at]:
                kind = names[int(most[at])]
                result.append(
                    Box(
                        row=row, lane=lane, start_ps=int(edges[at]), end_ps=int(edges[until]), kind=kind,
                        name=f"mostly {kind}",
                    )
                )  # fmt: skip
            at = until
    return result


def _nice_ticks(high: float, about: int) -> list[float]:
    """Ticks at 1, 2, 2.5 or 5 times a power of ten, from 0 to at most `high`."""
    power = 10.0 ** math.floor(math.log10(high / about))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if high / (factor * power) <= about), 10 * power)
    return [position * step for position in range(int(high / step * (1 + 1e-12)) + 1)]
