"""The meaning of names in a timeline: actions, groups of ranks, and the representative step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plans.timeline import STREAMS, Timeline

__all__ = ["ActionLabel", "groups_of", "read_label", "representative_step", "rows_of_step"]

_LABEL = re.compile(r"(\d+)([FBIW])(\d+)(\..*)?")


@dataclass(frozen=True, slots=True)
class ActionLabel:
    """The label of a block, such as "0F2" or "1B3.recv"; "begin" and "end" have no stage."""

    text: str
    stage: int | None
    action: str
    micro_batch: int | None


def read_label(instruction_id: str) -> ActionLabel:
    """The action of an instruction id.

    >>> read_label("0F2/layer1.linear.F")
    ActionLabel(text='0F2', stage=0, action='F', micro_batch=2)
    """
    label = instruction_id.partition("/")[0]
    match = _LABEL.fullmatch(label)
    if match is None:
        return ActionLabel(label, None, "", None)
    return ActionLabel(label, int(match[1]), match[2], int(match[3]))


def representative_step(timeline: Timeline) -> int:
    """The step that pictures show: the last of a prediction; of a run the one of median length, warm-up left out."""
    if timeline.num_steps < 3 or timeline.kind == "predicted":
        return timeline.num_steps - 1
    lengths = np.array(timeline.step_end_ps, dtype=np.int64) - np.array(timeline.step_start_ps, dtype=np.int64)
    has_spans = np.isin(np.arange(timeline.num_steps), timeline.step)
    steps = np.flatnonzero(has_spans)
    if not len(steps):
        return timeline.num_steps - 1
    steps = steps[1:] if len(steps) > 2 else steps
    order = steps[np.argsort(lengths[steps], kind="stable")]
    return int(order[(len(order) - 1) // 2])


def rows_of_step(timeline: Timeline, step: int, stream: str | None = None, rank: int | None = None) -> np.ndarray:
    """The positions of the spans of a step, in order of start."""
    chosen = timeline.step == step
    if stream is not None:
        chosen &= timeline.stream == STREAMS.index(stream)
    if rank is not None:
        chosen &= timeline.rank == rank
    rows = np.flatnonzero(chosen)
    return rows[np.lexsort((timeline.end_ps[rows], timeline.start_ps[rows]))]


def groups_of(timelines: Timeline | Sequence[Timeline]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The groups of ranks that run the same stages, as (stages, ranks), in pipeline order.

    Read from the labels of the blocks, so no plan is needed; ranks that no span names form a group without stages.
    """
    several = (timelines,) if isinstance(timelines, Timeline) else tuple(timelines)
    stages_of: dict[int, set[int]] = {rank: set() for timeline in several for rank in range(timeline.num_ranks)}
    for timeline in several:
        stage = [read_label(id_).stage for id_, _, _ in timeline.names]
        number = np.array([-1 if value is None else value for value in stage], dtype=np.int64)
        if not len(number):
            continue
        width = int(number.max()) + 2
        for pair in np.unique(timeline.rank.astype(np.int64) * width + number[timeline.name_index] + 1):
            if pair % width:  # 0 stands for no stage
                stages_of.setdefault(int(pair) // width, set()).add(int(pair) % width - 1)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(stages_of):
        found.setdefault(tuple(sorted(stages_of[rank])), []).append(rank)
    return tuple(sorted((stages, tuple(ranks)) for stages, ranks in found.items()))
