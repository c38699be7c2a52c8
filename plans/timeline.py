"""The timeline, which both simulator and executor return.

Predicted and measured spans carry the same instruction ids (`Program`), so they can be laid side by side. Time is
integer picoseconds since the step began on the first rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from plans.shown import Shown

__all__ = ["ALLOWANCES", "PS_PER_S", "STREAMS", "MemoryPeak", "Span", "StepParts", "Timeline"]

PS_PER_S = 10**12

STREAMS = ("host", "compute", "comm")
"""The resources of a rank: the host that issues work, the compute stream, the communication streams."""


ALLOWANCES = ("communication", "fragmentation", "library")
"""Roles of memory next to a program's values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One instruction on one resource of one rank, in picoseconds; `call` and `part` as in `Instruction`."""

    rank: int
    stream: str
    start_ps: int
    end_ps: int
    step: int
    id: str
    call: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The largest number of live bytes on one rank and what they are, by role (weight, gradient, ...).

    The roles of `ALLOWANCES` are not values of a program: what a prediction adds for the buffers of communication, for
    the allocator and for the communication library.
    """

    rank: int
    peak_bytes: int
    by_role: Mapping[str, int]

    @property
    def values_bytes(self) -> int:
        """The peak of the program's values without buffers and overheads; runs count the same values.

        >>> MemoryPeak(rank=0, peak_bytes=11, by_role={"weight": 10, "fragmentation": 1}).values_bytes
        10
        """
        return self.peak_bytes - sum(self.by_role.get(role, 0) for role in ALLOWANCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of one step of a rank, in picoseconds.

    Args:
        compute_ps: its compute stream is busy.
        exposed_ps: it communicates but does not compute.
        host_wait_ps: it does neither because its host has not yet issued what comes next. Before each start that is the
            time from the end of what ran before until the host has issued what starts; at the end of the step the time
            in which only the host is busy.
        bubble_ps: the rest of the step: it waits for other ranks. At least 0: a rank that begins a step while others
            work on the one before may put more than the step into it.
    """

    compute_ps: int
    exposed_ps: int
    host_wait_ps: int
    bubble_ps: int


@dataclass(frozen=True, kw_only=True, repr=False)
class Timeline(Shown):
    """The spans of a run or a simulation in read-only columns, with derived quantities.

    Args:
        kind: "predicted", "measured" or "emulated".
        num_ranks: number of simulated or measured ranks.
        names: the distinct (id, call, part) triples that `name_index` points into.
        rank, stream, step, name_index, start_ps, end_ps: one entry per span.
        step_start_ps, step_end_ps: first start and last end of each step over all ranks.
        memory: peak of each rank.
        memory_curve: (times_ps, live bytes) by rank, as a step function of the last step.
        low_s, high_s: the 90 % interval of `step_interval_s`, if known.
        meta: machine, versions, date, command.
    """

    kind: str
    num_ranks: int
    names: Sequence[tuple[str, str, str]]
    rank: npt.NDArray[np.int32]
    stream: npt.NDArray[np.int8]
    step: npt.NDArray[np.int32]
    name_index: npt.NDArray[np.int32]
    start_ps: npt.NDArray[np.int64]
    end_ps: npt.NDArray[np.int64]
    step_start_ps: tuple[int, ...]
    step_end_ps: tuple[int, ...]
    memory: tuple[MemoryPeak, ...] = ()
    memory_curve: Mapping[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = field(default_factory=dict)
    low_s: float | None = None
    high_s: float | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns: list[npt.NDArray[Any]] = [self.rank, self.stream, self.step, self.name_index]
        columns += [self.start_ps, self.end_ps, *(part for curve in self.memory_curve.values() for part in curve)]
        for column in columns:
            column.flags.writeable = False

    def __repr__(self) -> str:
        steps = f"{self.num_steps} step{'s' * (self.num_steps != 1)}"
        summary = f"{steps} of {self.step_interval_s * 1e3:.4g} ms on {self.num_ranks} ranks, {len(self.rank):,} spans"
        return f"<Timeline {self.kind}: {summary}>"

    @classmethod
    def from_spans(cls, spans: Sequence[Span], *, kind: str, num_ranks: int, **rest: Any) -> Timeline:
        """Make a timeline from a list of spans; steps are bounded by their first start and last end."""
        table: dict[tuple[str, str, str], int] = {}
        index = [table.setdefault((span.id, span.call, span.part), len(table)) for span in spans]
        num_steps = 1 + max((span.step for span in spans), default=0)
        starts, ends = [2**62] * num_steps, [0] * num_steps
        for span in spans:
            starts[span.step] = min(starts[span.step], span.start_ps)
            ends[span.step] = max(ends[span.step], span.end_ps)
        return cls(
            kind=kind,
            num_ranks=num_ranks,
            names=tuple(table),
            rank=np.array([span.rank for span in spans], dtype=np.int32),
            stream=np.array([STREAMS.index(span.stream) for span in spans], dtype=np.int8),
            step=np.array([span.step for span in spans], dtype=np.int32),
            name_index=np.array(index, dtype=np.int32),
            start_ps=np.array([span.start_ps for span in spans], dtype=np.int64),
            end_ps=np.array([span.end_ps for span in spans], dtype=np.int64),
            step_start_ps=tuple(starts),
            step_end_ps=tuple(ends),
            **rest,
        )

    def spans(self) -> Iterator[Span]:
        """The spans one by one, in stored order."""
        for row in range(len(self.rank)):
            id_, call, part = self.names[self.name_index[row]]
            yield Span(
                rank=int(self.rank[row]), stream=STREAMS[self.stream[row]], start_ps=int(self.start_ps[row]),
                end_ps=int(self.end_ps[row]), step=int(self.step[row]), id=id_, call=call, part=part,
            )  # fmt: skip

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return len(self.step_start_ps)

    @property
    def step_s(self) -> float:
        """Seconds of the last step, from its first start to its last end."""
        return (self.step_end_ps[-1] - self.step_start_ps[-1]) / PS_PER_S

    @property
    def step_interval_s(self) -> float:
        """Seconds from the end of one step to the end of the next; `step_s` if there is only one step.

        The median over the steps after the first. With more than two steps the last one is left out: nothing follows
        it, so on shared cores it ends early.
        """
        if self.num_steps < 2:
            return self.step_s
        intervals = np.diff(np.array(self.step_end_ps, dtype=np.int64))
        return float(np.median(intervals[:-1] if len(intervals) > 1 else intervals)) / PS_PER_S

    def until(self, step: int) -> Timeline:
        """The timeline without the steps after one."""
        if step == self.num_steps - 1:
            return self
        kept = self.step <= step
        names = ("rank", "stream", "step", "name_index", "start_ps", "end_ps")
        columns = {name: getattr(self, name)[kept] for name in names}
        ends = {name: getattr(self, name)[: step + 1] for name in ("step_start_ps", "step_end_ps")}
        return replace(self, **columns, **ends)

    @cached_property
    def represents(self) -> Mapping[int, int]:
        """rank -> how many equal ranks its spans stand for, itself included; the others have no spans."""
        return Counter(sorted(self.representatives))

    @property
    def representatives(self) -> Sequence[int]:
        """The rank whose spans represent each rank: itself, or one that did the same at the same times."""
        found: Sequence[int] | None = self.meta.get("representatives")
        return range(self.num_ranks) if found is None else found

    def spelled_out(self) -> Timeline:
        """The same timeline with spans and memory for every rank, also for folded ranks."""
        if len(self.represents) == self.num_ranks:
            return self
        first = np.searchsorted(self.rank, np.arange(self.num_ranks + 1))
        of = np.array(self.representatives, dtype=np.int64)
        counts = first[of + 1] - first[of]
        begins = np.repeat(first[of] - (np.cumsum(counts) - counts), counts)
        rows = begins + np.arange(len(begins))
        peaks = {peak.rank: peak for peak in self.memory}
        return replace(
            self,
            rank=np.repeat(np.arange(self.num_ranks, dtype=self.rank.dtype), counts),
            **{name: getattr(self, name)[rows] for name in ("stream", "step", "name_index", "start_ps", "end_ps")},
            memory=tuple(replace(peaks[of], rank=rank) for rank, of in enumerate(self.representatives) if of in peaks),
            memory_curve={
                rank: self.memory_curve[of] for rank, of in enumerate(self.representatives) if of in self.memory_curve
            },
            meta={name: value for name, value in self.meta.items() if name != "representatives"},
        )

    @property
    def window_ps(self) -> tuple[int, int]:
        """Begin and end of the last step, from the end of the previous one; a single step begins at its first start."""
        return self.step_end_ps[-2] if self.num_steps > 1 else self.step_start_ps[0], self.step_end_ps[-1]

    @cached_property
    def step_parts(self) -> Mapping[int, StepParts]:
        """The parts of the last step of every rank that has spans."""
        begin, end = self.window_ps
        last = np.flatnonzero(self.step == self.num_steps - 1)
        rows = last[np.lexsort((self.start_ps[last], self.rank[last]))]
        bounds = np.searchsorted(self.rank[rows], np.arange(self.num_ranks + 1))
        return {rank: self._parts(rows[bounds[rank] : bounds[rank + 1]], begin, end) for rank in self.represents}

    @property
    def bubble_fraction(self) -> float:
        """The share of a step in which a rank waits for other ranks, averaged over ranks.

        It is 1 - (compute + exposed communication + host wait) / step, with the parts as in `StepParts` and a step as
        in `window_ps`. Ranks mostly wait for other pipeline stages; in a collective they may wait for its last member.
        """
        return self._mean("bubble_ps") / max(1, self.window_ps[1] - self.window_ps[0])

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of the last step in which a rank communicates but does not compute, averaged over ranks.

        On predicted timelines a communication begins when its last member arrives, and the wait before is bubble; on
        measured ones it begins when the rank itself issues it.
        """
        return self._mean("exposed_ps") / PS_PER_S

    @property
    def host_wait_s(self) -> float:
        """Seconds of the last step in which a rank waits for its host to issue the next instruction, averaged over
        ranks."""
        return self._mean("host_wait_ps") / PS_PER_S

    @property
    def peak_bytes(self) -> int:
        """The largest peak over ranks."""
        return max((peak.peak_bytes for peak in self.memory), default=0)

    @cached_property
    def _is_wait(self) -> npt.NDArray[np.bool_]:
        return np.array([call == "wait" for _, call, _ in self.names], dtype=bool)

    def _mean(self, part: str) -> float:
        total = sum(count * int(getattr(self.step_parts[rank], part)) for rank, count in self.represents.items())
        return total / self.num_ranks if self.num_ranks else 0.0

    def _parts(self, rows: npt.NDArray[np.int64], begin: int, end: int) -> StepParts:
        """The rows of one rank by start."""
        stream = self.stream[rows]
        compute, works = rows[stream == STREAMS.index("compute")], rows[stream != STREAMS.index("host")]
        compute_ps = _union_ps(self.start_ps[compute], self.end_ps[compute])
        both_ps = _union_ps(self.start_ps[works], self.end_ps[works])
        host = rows[(stream == STREAMS.index("host")) & ~self._is_wait[self.name_index[rows]]]
        issued_ps = np.full(len(self.names), end)
        np.minimum.at(issued_ps, self.name_index[host], self.end_ps[host])  # of two of one name the first
        has_host = np.zeros(len(self.names), dtype=bool)
        has_host[self.name_index[host]] = True
        start, name = self.start_ps[works], self.name_index[works]
        reach = np.maximum.accumulate(np.concatenate([[begin], self.end_ps[works]]))
        issue = np.where(has_host[name], issued_ps[name], begin)
        host_wait = int(np.maximum(0, np.minimum(start, issue) - reach[:-1]).sum())
        if len(host):
            host_wait += max(0, min(end, int(self.end_ps[host].max())) - int(reach[-1]))
        return StepParts(
            compute_ps=compute_ps, exposed_ps=both_ps - compute_ps, host_wait_ps=host_wait,
            bubble_ps=max(0, end - begin - both_ps - host_wait),
        )  # fmt: skip


def _union_ps(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> int:
    """The length covered by intervals that may overlap."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    gaps = np.maximum(0, starts[1:] - reach[:-1])
    return int(reach[-1] - starts[0] - gaps.sum())
