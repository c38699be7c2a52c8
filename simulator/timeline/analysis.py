"""Where the time of a step goes, rank by rank: `plans.step_parts`, with waits for late members separate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plans.program import Program
from plans.timeline import PS_PER_S, Timeline
from simulator.timeline.causes import Causes

__all__ = ["Composition", "composition", "time_by_call_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The parts of the last step of one rank, in picoseconds; they add up to `step_ps`.

    Args:
        rank: the rank.
        compute_ps, host_wait_ps: as in `StepParts`.
        exposed_ps: call of the collective -> exposed communication, as in `StepParts`.
        bubble_ps: as in `StepParts`, without `straggler_ps`.
        straggler_ps: last member -> time in which it waits in collectives for that rank.
    """

    rank: int
    compute_ps: int
    exposed_ps: Mapping[str, int]
    host_wait_ps: int
    bubble_ps: int
    straggler_ps: Mapping[int, int] = field(default_factory=dict)

    @property
    def step_ps(self) -> int:
        """The complete step, from the end of the one before (`Timeline.window_ps`)."""
        waiting_ps = self.bubble_ps + sum(self.straggler_ps.values())
        return self.compute_ps + sum(self.exposed_ps.values()) + self.host_wait_ps + waiting_ps

    @property
    def exposed_s(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.exposed_ps.values()) / PS_PER_S


def composition(timeline: Timeline, program: Program | None = None) -> tuple[Composition, ...]:
    """The composition of the last step for every rank that was measured or simulated.

    Args:
        timeline: to take apart.
        program: whose timeline it is; without it straggler waits count as bubble.

    >>> from plans.timeline import Span
    >>> rows = [("compute", 0, 6, "linear.forward"), ("comm", 4, 9, "all_reduce"), ("compute", 12, 20, "sum")]
    >>> spans = [
    ...     Span(rank=0, stream=stream, start_ps=start, end_ps=end, step=0, id=call, call=call, part="F")
    ...     for stream, start, end, call in rows
    ... ]
    >>> composition(Timeline.from_spans(spans, kind="measured", num_ranks=1))
    (Composition(rank=0, compute_ps=14, exposed_ps={'all_reduce': 3}, host_wait_ps=0, bubble_ps=3, straggler_ps={}),)
    """
    result = []
    waits = _straggler_waits(timeline, program) if program is not None and len(timeline.rank) else {}
    for rank, spans in timeline.spans_of_step(timeline.num_steps - 1):
        parts, waited_here = timeline.step_parts[rank], waits.get(rank, ())
        straggler, waiting_ps = dict[int, int](), parts.bubble_ps
        if waited_here:
            waited = _take(spans.idle(*timeline.window_ps), sorted(waited_here))
            for latest in sorted(waited):
                straggler[latest] = min(waited[latest], waiting_ps)
                waiting_ps -= straggler[latest]
        result.append(
            Composition(
                rank=rank,
                compute_ps=parts.compute_ps,
                exposed_ps=parts.exposed_by_call,
                host_wait_ps=parts.host_wait_ps,
                bubble_ps=waiting_ps,
                straggler_ps=straggler,
            )
        )
    return tuple(result)


def _straggler_waits(timeline: Timeline, program: Program) -> dict[int, list[tuple[int, int, int, str]]]:
    """rank -> (its arrival, that of the last member, that member, id) for every collective in which it waited."""
    causes, last = Causes(program, timeline), timeline.num_steps - 1
    found: dict[int, list[tuple[int, int, int, str]]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for rank in timeline.represents:
        for id_, position, members in causes.collectives(rank):
            if (id_, members) in seen:
                continue
            seen.add((id_, members))
            arrivals = causes.meeting(rank, last, position)
            latest = max(arrivals, key=lambda each: each.time_ps)
            for each in arrivals:
                if each.time_ps < latest.time_ps:
                    found.setdefault(each.rank, []).append((each.time_ps, latest.time_ps, latest.rank, id_))
    return found


def _take(free: Iterable[tuple[int, int]], waits: Sequence[tuple[int, int, int, str]]) -> dict[int, int]:
    """How much of the free intervals the waits (by start) cover, by their third entry; of two the first counts."""
    taken: dict[int, int] = {}
    reach = 0
    disjoint: list[tuple[int, int, int]] = []
    for start, end, latest, _ in waits:
        if end > max(start, reach):
            disjoint.append((max(start, reach), end, latest))
            reach = end
    at = 0
    for begin, stop in free:
        while at < len(disjoint) and disjoint[at][1] <= begin:
            at += 1
        for start, end, latest in disjoint[at:]:
            if start >= stop:
                break
            taken[latest] = taken.get(latest, 0) + min(end, stop) - max(start, begin)
    return taken


def time_by_call_s(timeline: Timeline) -> dict[str, float]:
    """Call -> seconds per rank and step on its streams, waits and issuing left out; the first of several steps too."""
    steps = np.unique(timeline.step)
    steps = steps[1:] if len(steps) > 2 else steps
    used = np.isin(timeline.step, steps) & (timeline.stream != 0)
    total = np.bincount(
        timeline.name_index[used],
        weights=(timeline.end_ps[used] - timeline.start_ps[used]).astype(float),
        minlength=len(timeline.names),
    )
    result: dict[str, float] = {}
    for (_, call, _), time_ps in zip(timeline.names, total, strict=True):
        if call != "wait" and time_ps:
            result[call] = result.get(call, 0.0) + time_ps / PS_PER_S / timeline.num_ranks / max(1, len(steps))
    return result
