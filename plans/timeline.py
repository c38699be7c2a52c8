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

from plans.program import Program
from plans.shown import Shown
from plans.step_parts import TRANSFER, RankSpans, StepParts, collectives_of, mean_ps, taken_by_stream

__all__ = ["BUFFERS", "PS_PER_S", "STREAMS", "MemoryPeak", "Span", "Timeline"]

PS_PER_S = 10**12

STREAMS = ("host", "compute", "comm")
"""The resources of a rank: the host that issues work, the compute stream, the communication streams."""


BUFFERS = "communication"
"""The role of the buffers of communication, which are not values of a program."""


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

    The role `BUFFERS` is not of a program's values: a prediction adds what communication needs besides them.
    """

    rank: int
    peak_bytes: int
    by_role: Mapping[str, int]

    @property
    def values_bytes(self) -> int:
        """The peak of the program's values; runs count the same values.

        >>> MemoryPeak(rank=0, peak_bytes=11, by_role={"weight": 10, "communication": 1}).values_bytes
        10
        """
        return self.peak_bytes - self.by_role.get(BUFFERS, 0)


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
        program: the program that ran, if known; it determines what the compute streams wait for.

    >>> timeline = simulate(plan, machine)  # doctest: +SKIP
    >>> timeline.step_interval_s, timeline.bubble_fraction, timeline.peak_bytes  # doctest: +SKIP
    (0.7848, 0.472, 27300000000)
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
    program: Program | None = field(default=None, compare=False)

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
        """number of equal ranks that a rank's spans represent, including itself; the others have no spans."""
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
        return {rank: spans.parts(*self.window_ps) for rank, spans in self.spans_of_step(self.num_steps - 1)}

    def spans_of_step(self, step: int) -> Iterator[tuple[int, RankSpans]]:
        """(rank, its spans in a step) for every rank that has spans."""
        of_step = np.flatnonzero(self.step == step)
        start = self._begins(of_step)
        order = np.lexsort((start, self.rank[of_step]))
        rows, start = of_step[order], start[order]
        bounds = np.searchsorted(self.rank[rows], np.arange(self.num_ranks + 1))
        begins = np.full(self.num_ranks, self.step_end_ps[step - 1] if step else self.step_start_ps[0])
        if step:
            before = np.flatnonzero(self.step == step - 1)
            own = np.full(self.num_ranks, -1)
            np.maximum.at(own, self.rank[before], self.end_ps[before])
            begins = np.where(own >= 0, np.minimum(own, begins), begins)
        for rank in self.represents:
            here = slice(bounds[rank], bounds[rank + 1])
            mine = rows[here]
            yield rank, RankSpans(
                names=self.names, is_wait=self._has_call("wait"), is_transfer=self._has_call(TRANSFER),
                stream=self.stream[mine], name=self.name_index[mine], start_ps=start[here],
                end_ps=self.end_ps[mine], taken=self._taken.get(rank), begin_ps=int(begins[rank]),
            )  # fmt: skip

    def _begins(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The times at which the spans of one step begin: a collective when its last member has issued it.

        Predicted spans of collectives begin then; measured ones begin when the rank itself issues the collective.
        """
        start = self.start_ps[rows].copy()
        if self.program is None or self.kind == "predicted":
            return start
        number_of = {name: number for number, name in enumerate(self.names)}
        collectives = {
            rank: (group, {number_of.get(name): line for name, line in collectives_of(group)})
            for group in self.program.groups for rank in group.ranks
        }  # fmt: skip
        meetings: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for at in np.flatnonzero(self.stream[rows] == STREAMS.index("comm")).tolist():
            rank, name = int(self.rank[rows[at]]), int(self.name_index[rows[at]])
            group, lines = collectives[rank]
            if (line := lines.get(name)) is not None:
                meetings.setdefault((name, group.members(line, rank)), []).append(at)
        for present in meetings.values():
            start[present] = np.minimum(start[present].max(), self.end_ps[rows[present]])
        return start

    @cached_property
    def _taken(self) -> Mapping[int, npt.NDArray[np.int64]]:
        """rank -> names that its compute stream runs or waits for, in order, as numbers; empty without the program."""
        if self.program is None:
            return {}
        number_of = {name: number for number, name in enumerate(self.names)}
        found = {}
        for group in self.program.groups:
            if here := [rank for rank in group.ranks if rank in self.represents]:
                numbers = (number_of.get(each, -1) for each in taken_by_stream(group))
                order = np.array([number for number in numbers if number >= 0], dtype=np.int64)
                if len(order):  # a trace of another program may name its instructions otherwise
                    found.update(dict.fromkeys(here, order))
        return found

    @property
    def bubble_fraction(self) -> float:
        """The share of a step in which a rank waits for other ranks, averaged over ranks.

        It is 1 - (compute + exposed communication + host wait) / step, with the parts as in `plans.step_parts` and a
        step as in `window_ps`. Ranks mostly wait for other pipeline stages; in a collective they may wait for its last
        member.
        """
        return self._mean_ps("bubble_ps") / max(1, self.window_ps[1] - self.window_ps[0])

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of the last step in which a rank waits for collectives, averaged over ranks.

        A collective begins when its last member arrives; the wait before is bubble. On measured timelines without
        their program it is not known who the members are, and a collective begins when the rank issues it.
        """
        return self._mean_ps("exposed_ps") / PS_PER_S

    @property
    def host_wait_s(self) -> float:
        """Seconds of the last step in which a rank waits for its host to issue the next instruction, averaged over
        ranks."""
        return self._mean_ps("host_wait_ps") / PS_PER_S

    @property
    def peak_bytes(self) -> int:
        """The largest peak over ranks."""
        return max((peak.peak_bytes for peak in self.memory), default=0)

    def _has_call(self, call: str) -> npt.NDArray[np.bool_]:
        if call not in self._calls:
            self._calls[call] = np.array([name == call for _, name, _ in self.names], dtype=bool)
        return self._calls[call]

    @cached_property
    def _calls(self) -> dict[str, npt.NDArray[np.bool_]]:
        return {}

    def _mean_ps(self, part: str) -> float:
        return mean_ps(part, ((self.step_parts[rank], count) for rank, count in self.represents.items()))
