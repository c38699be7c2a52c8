"""The memory picture: live bytes by role over the step, for the fullest rank of every group.

What is drawn depends on what is known: with the program the bytes of every role at every moment (`live_by_role`), with
a timeline's curve their sum, with peaks only a bar by role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.program import Kind, Program, Scope, Value
from plans.timeline import PS_PER_S, STREAMS, MemoryPeak, Timeline
from reports.spans import groups_of, representative_step, rows_of_step, say_kind
from reports.svg import Picture, text_width
from reports.units import format_bytes, format_seconds, nice_ticks, time_unit

__all__ = ["ROLE_COLOURS", "LiveBytes", "live_by_role", "memory_picture", "worst_ranks"]

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

_WIDTH, _LEFT, _RIGHT, _HEIGHT = 1120.0, 78.0, 16.0, 190.0


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


def memory_picture(
    timeline: Timeline,
    *,
    program: Program | None = None,
    limit_bytes: int | None = None,
    title: str = "Memory: live bytes by role",
) -> Picture:
    """Draw live memory of the fullest rank of every group.

    Args:
        timeline: with peaks, or with curves, or given with its program.
        program: that the timeline is of; without it the sum (curves) or bars (peaks) are drawn.
        limit_bytes: per rank, drawn as a line where it is near, said in words where it is far.
        title: of the picture.

    Raises:
        TwofoldError: nothing is known about memory.
    """
    if program is not None:
        shown = [peak.rank for peak in worst_ranks(timeline)] or [members[0] for _, members in groups_of(timeline)]
        return _curves(timeline, [live_by_role(program, timeline, rank) for rank in shown], limit_bytes, title)
    if timeline.memory_curve:
        begin, lives = timeline.step_start_ps[-1], []
        for _, ranks in groups_of(timeline):
            known = [rank for rank in ranks if rank in timeline.memory_curve]
            if known:
                rank = max(known, key=lambda rank: int(timeline.memory_curve[rank][1].max(initial=0)))
                times, sizes = timeline.memory_curve[rank]
                lives.append(LiveBytes(rank=rank, times_ps=times - begin, by_role={"live": sizes}))
        return _curves(timeline, lives, limit_bytes, title)
    if not timeline.memory:
        raise TwofoldError(f"the {timeline.kind} timeline has no memory data")
    return _bars(timeline, worst_ranks(timeline), limit_bytes, title)


def _curves(timeline: Timeline, lives: Sequence[LiveBytes], limit: int | None, title: str) -> Picture:
    step = representative_step(timeline)
    length = max(
        1, timeline.step_end_ps[step] - timeline.step_start_ps[step], *(int(live.times_ps[-1]) for live in lives)
    )
    most = max(1, *(live.peak[1] for live in lives))
    near = limit is not None and limit <= 3 * most
    top_bytes = 1.08 * (max(most, limit or 0) if near else most)
    roles = [role for role in ROLE_COLOURS if any(role in live.by_role for live in lives)]
    roles += sorted({role for live in lives for role in live.by_role} - set(roles))
    picture = Picture(title=title, width=_WIDTH, height=30 + len(lives) * (_HEIGHT + 44) + 22)
    picture.legend(
        _LEFT, 16, [(ROLE_COLOURS.get(role, "grey"), "all roles" if role == "live" else role) for role in roles]
    )
    _say_limit(picture, limit, most, near)
    stages_of = {rank: stages for stages, ranks in groups_of(timeline) for rank in ranks}
    top = 30.0
    for live in lives:
        _curve(picture, timeline, live, roles, top, length, top_bytes, stages_of.get(live.rank, ()))
        if near and limit is not None:
            y = top + 24 + (_HEIGHT - 4) * (1 - limit / top_bytes)
            picture.line(_LEFT, y, _WIDTH - _RIGHT, y, "limit")
            picture.text(_WIDTH - _RIGHT - 4, y - 4, f"limit {format_bytes(limit)}", "end small")
        top += _HEIGHT + 44
    picture.text(
        (_LEFT + _WIDTH) / 2, top + 12, f"time since the step began ({time_unit(length / PS_PER_S)[1]})", "middle"
    )
    return picture


def _curve(
    picture: Picture,
    timeline: Timeline,
    live: LiveBytes,
    roles: Sequence[str],
    top: float,
    length: int,
    top_bytes: float,
    stages: tuple[int, ...],
) -> None:
    low, high = top + 24 + _HEIGHT - 4, top + 24
    across, up = (_WIDTH - _LEFT - _RIGHT) / length, (low - high) / top_bytes
    group = f", stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}" if stages else ""
    picture.text(8, top + 15, f"{say_kind(timeline)}: rank {live.rank}{group}", "title")
    _bytes_axis(picture, low, high, top_bytes)
    unit_s, _ = time_unit(length / PS_PER_S)
    for tick in nice_ticks(length / unit_s / PS_PER_S, 12):
        x = _LEFT + tick * unit_s * PS_PER_S * across
        picture.line(x, low, x, low + 4)
        picture.text(x, low + 15, f"{tick:g}", "middle small")
    last = _drawn(live, across)
    times = np.clip(np.append(live.times_ps[last], length), 0, length)  # a rank may begin before the step does
    below = np.zeros(int(last.sum()), dtype=np.int64)
    for role in roles:
        if role not in live.by_role:
            continue
        above = below + live.by_role[role][last]
        xs = [f"{_LEFT + float(time) * across:.1f}" for time in times]
        commands = f"M{xs[0]} {low - above[0] * up:.1f}"
        for index in range(len(above)):
            commands += f"V{low - above[index] * up:.1f}H{xs[index + 1]}"
        for index in reversed(range(len(below))):
            commands += f"V{low - below[index] * up:.1f}H{xs[index]}"
        hover = f"{role}: at most {format_bytes(int(live.by_role[role].max()))}"
        picture.path(commands + "Z", ROLE_COLOURS.get(role, "grey"), hover)
        below = above
    picture.line(_LEFT, low, _WIDTH - _RIGHT, low)
    when, peak = live.peak
    x, y = _LEFT + max(0, when) * across, low - peak * up
    picture.circle(x, y, 3.5, "frame")
    text = f"peak {format_bytes(peak)} at {format_seconds(when / PS_PER_S)}"
    left = x + 8 + text_width(text, 10.5) < _WIDTH
    picture.text(x + 7 if left else x - 7, max(y - 5, high + 2), text, "small" if left else "small end")


def _drawn(live: LiveBytes, across: float) -> npt.NDArray[np.bool_]:
    """Which changes are drawn: of several at a moment the last, of those within one unit the highest and the last.

    So the picture stays small where a step has thousands of changes, and no peak that can be seen is lost.
    """
    last = np.append(live.times_ps[1:] != live.times_ps[:-1], True)
    rows = np.flatnonzero(last)
    column = np.floor(live.times_ps[rows] * across).astype(np.int64)
    by_height = np.lexsort((live.total[rows], column))  # the highest of a column stands last
    highest = by_height[np.append(column[by_height][1:] != column[by_height][:-1], True)]
    ends = np.flatnonzero(np.append(column[1:] != column[:-1], True))
    chosen = np.zeros(len(last), dtype=bool)
    chosen[rows[highest]] = chosen[rows[ends]] = True
    return chosen


def _bars(timeline: Timeline, peaks: Sequence[MemoryPeak], limit: int | None, title: str) -> Picture:
    most = max(1, *(peak.peak_bytes for peak in peaks))
    near = limit is not None and limit <= 3 * most
    longest = 1.15 * (max(most, limit or 0) if near else most)
    roles = [role for role in ROLE_COLOURS if any(peak.by_role.get(role) for peak in peaks)]
    roles += sorted({role for peak in peaks for role in peak.by_role} - set(ROLE_COLOURS))
    left = 170.0
    picture = Picture(title=title, width=_WIDTH, height=62 + 30 * len(peaks) + 42)
    picture.legend(left, 16, [(ROLE_COLOURS.get(role, "grey"), role) for role in roles])
    picture.text(8, 44, f"{say_kind(timeline)}: peak of the fullest rank of every group", "title")
    _say_limit(picture, limit, most, near)
    stages_of = {rank: stages for stages, ranks in groups_of(timeline) for rank in ranks}
    scale, y = (_WIDTH - left - 90) / longest, 56.0
    for peak in peaks:
        stages = ", ".join(map(str, stages_of.get(peak.rank, ())))
        picture.text(left - 8, y + 15, f"rank {peak.rank}" + (f" (stage {stages})" if stages else ""), "end")
        x = left
        for role in roles:
            size = peak.by_role.get(role, 0)
            picture.rect(x, y, size * scale, 21, ROLE_COLOURS.get(role, "grey"), f"{role}: {format_bytes(size)}")
            if size * scale > text_width(format_bytes(size), 10.5) + 6:
                picture.text(x + size * scale / 2, y + 14.5, format_bytes(size), "ink middle small")
            x += size * scale
        rest = peak.peak_bytes - sum(peak.by_role.values())
        if rest > 0:
            picture.rect(x, y, rest * scale, 21, "idle", f"not attributed: {format_bytes(rest)}")
            x += rest * scale
        picture.text(x + 6, y + 15, format_bytes(peak.peak_bytes), "small")
        y += 30
    unit, name = _byte_unit(longest)
    picture.line(left, y, left + longest * scale, y)
    for tick in nice_ticks(longest / unit, 10):
        picture.line(left + tick * unit * scale, y, left + tick * unit * scale, y + 4)
        picture.text(left + tick * unit * scale, y + 16, f"{tick:g}", "middle small")
    picture.text(left + longest * scale / 2, y + 33, f"live bytes at the peak ({name})", "middle")
    if near and limit is not None:
        picture.line(left + limit * scale, 52, left + limit * scale, y, "limit")
        picture.text(left + limit * scale + 4, 50, f"limit {format_bytes(limit)}", "small")
    return picture


def _say_limit(picture: Picture, limit: int | None, most: int, near: bool) -> None:
    if limit is not None and not near:
        text = f"limit per rank {format_bytes(limit)}: the peak is {100 * most / limit:.2g} % of it"
        picture.text(_WIDTH - _RIGHT, 16, text, "end small muted")


def _bytes_axis(picture: Picture, low: float, high: float, top_bytes: float) -> None:
    unit, name = _byte_unit(top_bytes)
    for tick in nice_ticks(top_bytes / unit, 5):
        y = low - tick * unit * (low - high) / top_bytes
        picture.line(_LEFT, y, _WIDTH - _RIGHT, y, "grid")
        picture.text(_LEFT - 6, y + 4, f"{tick:g}", "end small")
    picture.line(_LEFT, low, _LEFT, high)
    picture.text(20, (low + high) / 2, f"live memory ({name})", "middle small", turned=True)


def _byte_unit(size: float) -> tuple[float, str]:
    name = format_bytes(size).split()[1]
    return {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[name], name


def _key(scope: Scope, name: str, micro_batch: int) -> tuple[str, int]:
    return (name, micro_batch if scope is Scope.MICRO else 0)
