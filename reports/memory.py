"""Memory of a step: live bytes by role over time, and the peak of the fullest rank of every group as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plans.program import Kind, Program, Scope, Value
from plans.timeline import PS_PER_S, STREAMS, MemoryPeak, Timeline
from reports.spans import groups_of, representative_step, rows_of_step
from reports.tables import Table
from reports.units import Bytes, Seconds
from simulator import memory_peak

__all__ = ["ROLE_COLOURS", "LiveBytes", "live_by_role", "live_of_groups", "memory_table", "worst_ranks"]

ROLE_COLOURS = {
    "weight": "sky",
    "optimizer": "green",
    "gradient": "orange",
    "activation": "purple",
    "input": "yellow",
    "buffer": "grey",
    "communication": "vermillion",
    "library": "blue",
    "live": "sky",
}
"""The fill of each role, from the bottom of the stack to its top; "live" is their sum where roles are not known."""

_MAX_ACTIONS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """Live bytes of one rank over a step as a step function: `by_role[role][i]` from `times_ps[i]` on."""

    rank: int
    times_ps: npt.NDArray[np.int64]
    by_role: Mapping[str, npt.NDArray[np.int64]]

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """The total bytes over all roles."""
        return np.sum(np.stack(list(self.by_role.values())), axis=0, dtype=np.int64)

    @property
    def peak(self) -> tuple[int, int]:
        """The first time of the peak, and its bytes."""
        at = int(np.argmax(self.total))
        return int(self.times_ps[at]), int(self.total[at])

    def thinned(self, length_ps: int, num_columns: int = 800) -> LiveBytes:
        """The same with at most two changes in each column of a picture: its highest and its last.

        So a picture stays small where a step has thousands of changes, and no peak that can be seen is lost.
        """
        total = self.total
        rows = np.flatnonzero(np.append(self.times_ps[1:] != self.times_ps[:-1], True))
        column = np.floor(self.times_ps[rows] * (num_columns / length_ps)).astype(np.int64)
        by_height = np.lexsort((total[rows], column))  # the highest of a column stands last
        highest = by_height[np.append(column[by_height][1:] != column[by_height][:-1], True)]
        ends = np.flatnonzero(np.append(column[1:] != column[:-1], True))
        kept = rows[np.union1d(highest, ends)]
        by_role = {role: sizes[kept] for role, sizes in self.by_role.items()}
        return LiveBytes(rank=self.rank, times_ps=self.times_ps[kept], by_role=by_role)


def live_by_role(program: Program, timeline: Timeline, rank: int, *, step: int | None = None) -> LiveBytes:
    """Live bytes of a rank over time, from the program's values and the times of its instructions.

    As `simulator.timeline.memory` counts it: a value lives from the start of the instruction that makes it until the
    one that frees it has run, asynchronous communication until it is over; a value that shares another's memory keeps
    it alive;
    "kept" values live on. The largest total is the rank's `MemoryPeak` when the timeline is of that program and step.

    Args:
        program: that the timeline is of.
        timeline: gives the times.
        rank: which rank.
        step: by default the one that pictures show.
    """
    step = representative_step(timeline) if step is None else step
    begin = timeline.step_start_ps[step]
    spans: dict[str, tuple[int, int]] = {}
    rows = rows_of_step(timeline, step, rank=rank)
    for row in rows:
        if timeline.stream[row] != STREAMS.index("host"):
            id_ = timeline.names[timeline.name_index[row]][0]
            start, end = int(timeline.start_ps[row]) - begin, int(timeline.end_ps[row]) - begin
            known = spans.get(id_, (start, end))
            spans[id_] = min(known[0], start), max(known[1], end)
    values = program.group_of(rank).values
    lives = _Lives(values)
    arrives: dict[tuple[str, int], int] = {}
    now = int(timeline.start_ps[rows].min()) - begin if len(rows) else 0  # others may have begun long before
    for block, instruction in program.walk(rank):
        own = spans.get(f"{block.label}/{instruction.name}")
        micro_batch, start, end = block.micro_batch, now, max(now, own[1]) if own else now
        if instruction.kind is Kind.COMPUTE and own:
            start = max(now, own[0])
        elif instruction.kind is Kind.WAIT:
            micro_batch = instruction.attrs.get("micro_batch", micro_batch)
            token = str(instruction.waits)
            end = max(end, arrives.get(_key(values[token].scope, token, micro_batch), 0))
        if instruction.token is not None:
            arrives[_key(values[instruction.token].scope, instruction.token, micro_batch)] = end
        else:
            now = end
        for name in instruction.outputs:
            lives.make(name, micro_batch, start)
        for name in instruction.frees:
            lives.free(name, micro_batch, end)
    return lives.curves(rank)


class _Lives:
    """The changes of live bytes, in program order: (time, bytes, role)."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values
        kept = [value for value in values.values() if value.scope is Scope.KEPT]
        self.changes = [(0, value.size_bytes, value.role) for value in kept]
        self.alive: set[tuple[str, int]] = set()
        self.num_sharers: dict[tuple[str, int], int] = {}

    def make(self, name: str, micro_batch: int, when: int) -> None:
        """Write a value; memory is allocated unless it was live."""
        key = _key(self.values[name].scope, name, micro_batch)
        if self.values[name].scope is not Scope.KEPT and key not in self.alive:
            self.alive.add(key)
            self._share(name, micro_batch, 1, when)

    def free(self, name: str, micro_batch: int, when: int) -> None:
        """Free a value; its memory is released with the last value that shares it."""
        key = _key(self.values[name].scope, name, micro_batch)
        if key in self.alive:
            self.alive.remove(key)
            self._share(name, micro_batch, -1, when)

    def _share(self, name: str, micro_batch: int, change: int, when: int) -> None:
        root = self.values[name]
        while root.shares is not None:
            root = self.values[root.shares]
        if root.scope is Scope.KEPT:
            return
        key = _key(root.scope, root.name, micro_batch)
        before = self.num_sharers.get(key, 0)
        self.num_sharers[key] = before + change
        if before == 0 or before + change == 0:
            self.changes.append((when, change * root.size_bytes, root.role))

    def curves(self, rank: int) -> LiveBytes:
        """The sums of the changes by role; changes at one moment keep the program's order."""
        changes = sorted((change for change in self.changes if change[1]), key=lambda change: change[0])
        times = np.array([0, *(time for time, _, _ in changes)], dtype=np.int64)
        present = {role for _, _, role in changes} or {"live"}
        roles = [role for role in ROLE_COLOURS if role in present] + sorted(present - set(ROLE_COLOURS))
        by_role = {
            role: np.cumsum([0, *(size if each == role else 0 for _, size, each in changes)], dtype=np.int64)
            for role in roles
        }
        return LiveBytes(rank=rank, times_ps=times, by_role=by_role)


def worst_ranks(timeline: Timeline) -> tuple[MemoryPeak, ...]:
    """Of every group of ranks the peak of the fullest rank, in pipeline order."""
    peaks = {peak.rank: peak for peak in timeline.memory}
    worst = []
    for _, ranks in groups_of(timeline):
        mine = [peaks[rank] for rank in ranks if rank in peaks]
        if mine:
            worst.append(max(mine, key=lambda peak: (peak.peak_bytes, -peak.rank)))
    return tuple(worst)


def live_of_groups(timeline: Timeline, program: Program | None = None) -> list[LiveBytes]:
    """Live bytes of the fullest rank of every group: by role with the program, else their sum where it was recorded."""
    if program is not None:
        shown = [peak.rank for peak in worst_ranks(timeline)] or [ranks[0] for _, ranks in groups_of(timeline)]
        return [live_by_role(program, timeline, rank) for rank in shown]
    begin, lives = timeline.step_start_ps[-1], []
    for _, ranks in groups_of(timeline):
        known = [rank for rank in ranks if rank in timeline.memory_curve]
        if known:
            rank = max(known, key=lambda rank: int(timeline.memory_curve[rank][1].max(initial=0)))
            times, sizes = timeline.memory_curve[rank]
            lives.append(LiveBytes(rank=rank, times_ps=times - begin, by_role={"live": sizes}))
    return lives


def memory_table(timeline: Timeline, program: Program | None = None) -> Table:
    """Bytes by role at the peak, a row for the fullest rank of every group.

    With the program of the timeline, notes say when the values of each rank are at their peak and which actions made
    them. What communication adds is the difference to the peak of the values, which may be at another time.
    """
    peaks = worst_ranks(timeline)
    present = {role for peak in peaks for role, size in peak.by_role.items() if size}
    roles = [role for role in ROLE_COLOURS if role in present] + sorted(present - set(ROLE_COLOURS))
    rows = tuple(
        (str(peak.rank), *(Bytes(peak.by_role.get(role, 0)) for role in roles), Bytes(peak.peak_bytes))
        for peak in peaks
    )
    notes = []
    for each in peaks if program is not None else ():
        assert program is not None
        peak = memory_peak(program, timeline, each.rank)
        made = [f"{action} {Bytes(size)}" for action, size in peak.by_action.items() if action]
        more = f", {len(made) - _MAX_ACTIONS} more" if len(made) > _MAX_ACTIONS else ""
        said = f", made by {', '.join(made[:_MAX_ACTIONS])}{more}" if made else ""
        when = Seconds(peak.time_ps / PS_PER_S)
        notes.append(f"Rank {each.rank}: values are at their peak after {when}{said}; the rest is kept between steps.")
    return Table(
        title=f"Peak memory of the fullest rank of every group ({timeline.kind})",
        columns=("rank", *roles, "peak"), rows=rows, notes=tuple(notes),
    )  # fmt: skip


def _key(scope: Scope, name: str, micro_batch: int) -> tuple[str, int]:
    return (name, micro_batch if scope is Scope.MICRO else 0)
