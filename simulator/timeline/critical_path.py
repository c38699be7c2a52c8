"""The critical path: the chain of spans that determines when a step ends.

It is followed backwards from the end of the last step to the end of the one before (to its own start where there is one
step only), so it is as long as a step takes from end to end, the pace of training. Every span is preceded by the one it
waited for last, on its own rank or on another. A collective or transfer is on the path from the arrival of its last
member on, and the path continues with that member, so that nothing on it waits. `CriticalPath` gives its composition,
which adds up to that time to the picosecond, and the waits that it passed by: who waited for whom, and how long.

On predicted timelines the path is exact, contention included, but for transfers between ranks of unequal numbers of
peers on shared links, of whose pairs the last to be complete is taken to end last. On measured timelines what leaves no
span shows as "gap"; clocks of different hosts must agree, and where two causes end within the clock's resolution either
may be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plans.program import Kind, Program
from plans.timeline import PS_PER_S, STREAMS, Timeline
from simulator.timeline.causes import Causes

__all__ = ["CriticalPath", "PathSpan", "Straggler", "critical_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathSpan:
    """A piece of the path, in picoseconds; `kind` is compute, host, gap, or the call of a communication."""

    rank: int
    stream: str
    start_ps: int
    end_ps: int
    id: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Rank `rank` waited in the collective `id` for `last`, its last member to arrive."""

    rank: int
    last: int
    id: str
    waited_ps: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CriticalPath:
    """The path of the last step, in order of time.

    Args:
        spans: consecutive parts of the path, without gaps.
        stragglers: waits in collectives at which the path changed to the last member.
    """

    spans: tuple[PathSpan, ...]
    stragglers: tuple[Straggler, ...]

    def __repr__(self) -> str:
        return f"<{self.text()}>"

    @property
    def step_ps(self) -> int:
        """Length of the path in picoseconds."""
        return sum(span.end_ps - span.start_ps for span in self.spans)

    @property
    def rank(self) -> int:
        """The rank on which it ends."""
        return self.spans[-1].rank if self.spans else 0

    @property
    def by_kind_ps(self) -> Mapping[str, int]:
        """compute, host, gap or call of communication -> its part; they add up to `step_ps`."""
        return self._sums("kind")

    @property
    def by_rank_ps(self) -> Mapping[int, int]:
        """rank -> its part; the time of a transfer or collective counts for the rank that waits for it."""
        return self._sums("rank")

    def _sums(self, name: str) -> dict[Any, int]:
        found: dict[Any, int] = {}
        for span in self.spans:
            key = getattr(span, name)
            found[key] = found.get(key, 0) + span.end_ps - span.start_ps
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def text(self) -> str:
        """One line with the parts in descending order.

        >>> one = PathSpan(rank=0, stream="compute", start_ps=0, end_ps=3_000_000_000, id="0F0/fc", kind="compute")
        >>> CriticalPath(spans=(one,), stragglers=()).text()
        'critical path 3.000 ms: compute 100.0 %'
        """
        parts = [f"{kind} {100 * part / max(1, self.step_ps):.1f} %" for kind, part in self.by_kind_ps.items()]
        return f"critical path {1e3 * self.step_ps / PS_PER_S:.3f} ms: {', '.join(parts) or 'nothing'}"


def critical_path(timeline: Timeline, program: Program, *, host_async: bool | None = None) -> CriticalPath:
    """The critical path of the last step, from the end of the step before.

    Args:
        timeline: of `program`, predicted or measured.
        program: the program, with the order of instructions and the partners of communication.
        host_async: whether compute runs behind the host; None: determined from the spans.

    >>> from costmodels import Machine
    >>> from plans.layout import Layout
    >>> from plans.lower import lower
    >>> from plans.model.mlp import mlp_graph
    >>> from plans.plan import Plan, Stage
    >>> from simulator.predict import simulate
    >>> graph = mlp_graph([64, 32, 8], batch_size=16)
    >>> names = tuple(operator.name for operator in graph.operators)
    >>> program = lower(Plan(graph=graph, stages=(Stage(mesh=Layout((2,), ("dp",)), operators=names),)))
    >>> list(critical_path(simulate(program, Machine.load("h200-x8")), program).by_kind_ps)
    ['host', 'compute']
    """
    if not len(timeline.rank):
        return CriticalPath(spans=(), stragglers=())
    causes = Causes(program, timeline, host_async=host_async)
    last = timeline.num_steps - 1
    begin, now = timeline.step_end_ps[last - 1] if last else timeline.step_start_ps[0], timeline.step_end_ps[last]
    spans: list[PathSpan] = []
    stragglers: list[Straggler] = []

    def take(rank: int, stream: str, start_ps: int, id_: str, kind: str) -> None:
        """The piece from a start to where the path has come to."""
        nonlocal now
        start_ps = max(begin, min(start_ps, now))
        if start_ps < now:
            spans.append(PathSpan(rank=rank, stream=stream, start_ps=start_ps, end_ps=now, id=id_, kind=kind))
            now = start_ps

    event = causes.last(last)
    rank = 0
    while event is not None and now > begin:
        id_, instruction = causes.instruction(event)
        rank = event.rank
        take(rank, "host", event.end_ps, "", "gap")
        start_ps, cause, arrivals = causes.cause(event)
        kind = instruction.call if STREAMS[event.stream] == "comm" else STREAMS[event.stream]
        take(rank, STREAMS[event.stream], start_ps, id_, kind)
        if instruction.kind is Kind.COLLECTIVE and STREAMS[event.stream] == "comm":
            mine = next(arrival for arrival in arrivals if arrival.rank == rank)
            late = max(arrivals, key=lambda each: (each.time_ps, each.rank == rank))
            if late.time_ps > mine.time_ps:
                stragglers.append(
                    Straggler(rank=rank, last=late.rank, id=id_, waited_ps=late.time_ps - mine.time_ps)
                )  # fmt: skip
            rank = late.rank
        event = cause
    take(rank, "host", begin, "", "gap")
    return CriticalPath(spans=tuple(reversed(spans)), stragglers=tuple(reversed(stragglers)))
