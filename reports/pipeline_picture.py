"""A static picture of the pipeline: the actions of every rank over one step, with timelines above each other on one
axis.

It is for documents, notebooks and SVG files; reports contain the interactive timeline (`reports.live`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from plans.errors import TwofoldError
from plans.timeline import PS_PER_S, STREAMS, Timeline
from plans.units import time_unit
from reports.charts import Chart
from reports.colours import COLOURS, KIND_COLOURS, kind_of
from simulator.timeline.labels import groups_of, read_label, representative_step, rows_of_step
from simulator.timeline.stretches import joined

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MAX_ROWS", "pipeline_picture"]

MAX_ROWS = 64
"""Largest number of ranks that are drawn; beyond it one rank of each group is drawn, or fewer."""

_LANES = {"compute": (-0.4, 0.56), "comm": (0.2, 0.16)}
"""Stream -> top and height of its lane in a row of height 1."""


def pipeline_picture(timelines: Sequence[Timeline], *, title: str = "Pipeline: what every rank does") -> Chart:
    """Draw timelines one above the other.

    Args:
        timelines: the prediction first, then the run.
        title: title of the picture.

    Raises:
        TwofoldError: no timeline, or one without spans.
    """
    if not timelines:
        raise TwofoldError("a pipeline picture needs at least one timeline")
    for each in timelines:
        if not len(each.rank):
            raise TwofoldError(f"the {each.kind} timeline has no spans to draw")
    rows = [_rows(timeline) for timeline in timelines]

    def draw(figure: Figure) -> None:
        figure.set_figheight(1.0 + sum(0.5 + 0.22 * len(lines) for lines in rows))
        heights = [len(lines) + 1 for lines in rows]
        panels = figure.subplots(len(timelines), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        unit_s, unit = time_unit(max(timeline.step_s for timeline in timelines))
        for axes, timeline, lines in zip(panels, timelines, rows, strict=True):
            _draw(axes, timeline, lines, unit_s)
        panels[-1].set_xlabel(f"time since the step began ({unit}); wide lane: compute, narrow lane: communication")
        handles = {
            kind: handle for axes in panels for handle, kind in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3 if len(handles) > 4 else 4)

    return Chart(title=title, draw=draw)


def _rows(timeline: Timeline) -> list[tuple[int, str]]:
    """(rank, its label) of the rows: every rank with spans, or one of each group where they are too many."""
    groups = [
        (stages, [rank for rank in ranks if rank in timeline.represents]) for stages, ranks in groups_of(timeline)
    ]
    folded = sum(len(ranks) for _, ranks in groups) > MAX_ROWS
    rows = []
    for stages, ranks in groups:
        for rank in ranks[:1] if folded else ranks:
            count = len(ranks) if folded else timeline.represents[rank]
            stage = f", stage {', '.join(map(str, stages))}" if stages and rank == ranks[0] else ""
            rows.append((rank, f"rank {rank}{f' ×{count}' if count > 1 else ''}{stage}"))
    if len(rows) > MAX_ROWS:
        rows = [rows[round(at)] for at in np.linspace(0, len(rows) - 1, MAX_ROWS)]
    return rows


def _draw(axes: Axes, timeline: Timeline, rows: Sequence[tuple[int, str]], unit_s: float) -> None:
    step = representative_step(timeline)
    begin, length = timeline.step_start_ps[step], timeline.step_end_ps[step] - timeline.step_start_ps[step]
    scale = 1 / (unit_s * PS_PER_S)
    kinds = [kind_of(call, part) for _, call, part in timeline.names]
    labelled: set[str] = set()
    for number, (rank, _) in enumerate(rows):
        for stream, (top, height) in _LANES.items():
            spans = rows_of_step(timeline, step, stream, rank)
            for kind in KIND_COLOURS:
                chosen = spans[[kinds[name] == kind for name in timeline.name_index[spans]]] if len(spans) else spans
                if kind == "waiting" or not len(chosen):
                    continue
                places = joined(timeline.start_ps[chosen] - begin, timeline.end_ps[chosen] - begin, length // 2000)
                axes.broken_barh(
                    [(low * scale, (high - low) * scale) for low, high in places], (number + top, height),
                    facecolors=COLOURS[KIND_COLOURS[kind]], linewidth=0, label=None if kind in labelled else kind,
                )  # fmt: skip
                labelled.add(kind)
        for low, high, text in _actions(timeline, step, rank):
            if high - low > 0.012 * length * len(text):
                axes.text(
                    (low + high) / 2 * scale, number - 0.12, text, ha="center", va="center", size=7.5, color="#111111"
                )
    axes.set_title(f"{timeline.kind.upper()}: step {step + 1} of {timeline.num_steps}")
    axes.set_yticks(range(len(rows)), [label for _, label in rows], size=8)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.axvline(length * scale, linestyle="--", linewidth=0.8, color=COLOURS["grey"])
    axes.grid(visible=False, axis="y")


def _actions(timeline: Timeline, step: int, rank: int) -> list[tuple[int, int, str]]:
    """(start, end, micro-batch) of the unbroken stretches of each action of a rank, in ps since the step began."""
    begin, stretches = timeline.step_start_ps[step], list[tuple[int, int, str, str]]()
    near = (timeline.step_end_ps[step] - begin) // 500
    for at in rows_of_step(timeline, step, STREAMS[1], rank):
        label = read_label(timeline.names[timeline.name_index[at]][0])
        low, high = int(timeline.start_ps[at]) - begin, int(timeline.end_ps[at]) - begin
        if stretches and stretches[-1][3] == label.text and low <= stretches[-1][1] + near:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], high), *stretches[-1][2:])
        elif label.micro_batch is not None:
            stretches.append((low, high, str(label.micro_batch), label.text))
    return [stretch[:3] for stretch in stretches]
