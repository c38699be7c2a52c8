"""Where the time of a step goes, rank by rank.

Every picosecond of the last step counts once, for the first of these that is true of it: the rank computes; it
communicates (exposed, by call; of several communications the one that began first); its host is busy issuing; nothing
of it is busy: it waits for others (bubble).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from plans.timeline import PS_PER_S, STREAMS, Timeline

__all__ = ["Composition", "composition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """What the last step of one rank consists of, in picoseconds; the parts add up to `step_ps`.

    Args:
        rank: the rank.
        compute_ps: its compute stream is busy.
        exposed_ps: call of the communication -> time in which it communicates but does not compute.
        host_ps: only its host is busy, issuing.
        bubble_ps: it waits for other ranks.
    """

    rank: int
    compute_ps: int
    exposed_ps: Mapping[str, int]
    host_ps: int
    bubble_ps: int

    @property
    def step_ps(self) -> int:
        """The whole step, the same on every rank."""
        return self.compute_ps + sum(self.exposed_ps.values()) + self.host_ps + self.bubble_ps

    @property
    def exposed_s(self) -> float:
        """Seconds of exposed communication."""
        return sum(self.exposed_ps.values()) / PS_PER_S


def composition(timeline: Timeline) -> tuple[Composition, ...]:
    """The composition of the last step for every rank, measured or predicted.

    Sources: the exposed part of communication and the bubble as in `Timeline.exposed_comm_s` and `bubble_fraction`,
    here split further.

    >>> from plans.timeline import Span
    >>> rows = [("compute", 0, 6, "linear.forward"), ("comm", 4, 9, "all_reduce"), ("compute", 12, 20, "sum")]
    >>> spans = [
    ...     Span(rank=0, stream=stream, start_ps=start, end_ps=end, step=0, id=call, call=call, part="F")
    ...     for stream, start, end, call in rows
    ... ]
    >>> composition(Timeline.from_spans(spans, kind="measured", num_ranks=1))
    (Composition(rank=0, compute_ps=14, exposed_ps={'all_reduce': 3}, host_ps=0, bubble_ps=3),)
    """
    last = timeline.num_steps - 1
    window = (timeline.step_start_ps[last], timeline.step_end_ps[last])
    calls = [call for _, call, _ in timeline.names]
    rows = np.flatnonzero(timeline.step == last)
    rows = rows[np.lexsort((timeline.name_index[rows], timeline.start_ps[rows], timeline.rank[rows]))]
    bounds = np.searchsorted(timeline.rank[rows], np.arange(timeline.num_ranks + 1))
    result = []
    for rank in range(timeline.num_ranks):
        own = rows[bounds[rank] : bounds[rank + 1]]
        spans: dict[str, list[tuple[int, int, str]]] = {name: [] for name in STREAMS}
        for row in own:
            call = calls[timeline.name_index[row]]
            if call != "wait":
                stream = STREAMS[timeline.stream[row]]
                spans[stream].append((int(timeline.start_ps[row]), int(timeline.end_ps[row]), call))
        free = [window]
        compute, free = _take(free, spans["compute"])
        exposed, free = _take(free, spans["comm"])
        host, free = _take(free, spans["host"])
        result.append(
            Composition(
                rank=rank,
                compute_ps=sum(compute.values()),
                exposed_ps={call: exposed[call] for call in sorted(exposed)},
                host_ps=sum(host.values()),
                bubble_ps=sum(end - start for start, end in free),
            )
        )
    return tuple(result)


def _take(
    free: list[tuple[int, int]], spans: list[tuple[int, int, str]]
) -> tuple[dict[str, int], list[tuple[int, int]]]:
    """How much of the free intervals the spans (by start) cover, by call, and what stays free."""
    taken: dict[str, int] = {}
    covered: list[tuple[int, int, str]] = []  # disjoint, ascending
    reach = free[0][0] if free else 0
    for start, end, call in spans:
        if end > max(start, reach):
            covered.append((max(start, reach), end, call))
            reach = end
    left: list[tuple[int, int]] = []
    at = 0
    for begin, stop in free:
        while at < len(covered) and covered[at][1] <= begin:
            at += 1
        where, position = begin, at
        while position < len(covered) and covered[position][0] < stop:
            start, end, call = covered[position]
            start, end = max(start, where), min(end, stop)
            if start > where:
                left.append((where, start))
            if end > start:
                taken[call] = taken.get(call, 0) + end - start
                where = end
            position += 1
        if where < stop:
            left.append((where, stop))
    return taken, left
