"""The timeline, which both simulator and executor return.

Predicted and measured spans carry the same instruction ids (`Program`), so they can be laid side by side. Time is
integer picoseconds since the step began on the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALLOWANCES", "PS_PER_S", "STREAMS", "MemoryPeak", "Span", "Timeline"]

PS_PER_S = 10**12

STREAMS = ("host", "compute", "comm")
"""The resources of a rank: the host that issues work, the compute stream, the communication streams."""


ALLOWANCES = ("communication", "fragmentation", "library")
"""Roles of memory beside a program's values."""


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

    The roles of `ALLOWANCES` are no values of a program: what a prediction adds for the buffers of communication, for
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


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans in read-only columns, with quantities derived from them.

    Args:
        kind: "predicted", "measured" or "emulated".
        num_ranks: ranks simulated or measured.
        names: the distinct (id, call, part) triples that `name_index` points into.
        rank, stream, step, name_index, start_ps, end_ps: one entry per span.
        step_start_ps, step_end_ps: per step the first start and the last end over all ranks.
        memory: per rank the peak.
        memory_curve: rank -> (times_ps, live bytes) as a step function of the last step.
        low_s, high_s: the 90 % interval of `step_interval_s`, where one is known.
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

    @classmethod
    def from_spans(cls, spans: Sequence[Span], *, kind: str, num_ranks: int, **rest: Any) -> Timeline:
        """Columns from a list of spans; steps are bounded by their first start and last end."""
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
        """Seconds from one step's end to the next one's, the pace of training; `step_s` when there is one step only.

        The median over the steps after the first, without the last one where there are more than two: as nothing
        follows it, ranks that are done leave the cores they share to the others, and it ends early.
        """
        if self.num_steps < 2:
            return self.step_s
        intervals = np.diff(np.array(self.step_end_ps, dtype=np.int64))
        return float(np.median(intervals[:-1] if len(intervals) > 1 else intervals)) / PS_PER_S

    @property
    def represents(self) -> Mapping[int, int]:
        """rank -> how many equal ranks its spans stand for, itself included; the others have no spans."""
        found: Mapping[int, int] | None = self.meta.get("represents")
        return dict.fromkeys(range(self.num_ranks), 1) if found is None else found

    @property
    def bubble_fraction(self) -> float:
        """The share of a step, from the end of the one before to its own, in which the compute streams stand idle.

        Averaged over ranks, of the last step; of a single step from its first start on. Ranks begin a step while others
        work on the one before, so a step may span more than that.
        """
        busy = sum(count * _union_ps(*self._rows(rank, "compute")) for rank, count in self.represents.items())
        begin = self.step_end_ps[-2] if self.num_steps > 1 else self.step_start_ps[0]
        length = self.step_end_ps[-1] - begin
        return max(0.0, 1.0 - busy / (length * self.num_ranks)) if length > 0 else 0.0

    @property
    def exposed_comm_s(self) -> float:
        """Seconds of the last step in which a rank communicates but does not compute, averaged over ranks."""
        total = 0
        for rank, count in self.represents.items():
            compute, comm = self._rows(rank, "compute"), self._rows(rank, "comm")
            both = (np.concatenate([compute[0], comm[0]]), np.concatenate([compute[1], comm[1]]))
            total += count * (_union_ps(*both) - _union_ps(*compute))
        return total / self.num_ranks / PS_PER_S if self.num_ranks else 0.0

    @property
    def peak_bytes(self) -> int:
        """The largest peak over ranks."""
        return max((peak.peak_bytes for peak in self.memory), default=0)

    def _rows(self, rank: int, stream: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        last = self.num_steps - 1
        rows = (self.rank == rank) & (self.stream == STREAMS.index(stream)) & (self.step == last)
        return self.start_ps[rows], self.end_ps[rows]


def _union_ps(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> int:
    """The length covered by intervals that may overlap."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    gaps = np.maximum(0, starts[1:] - reach[:-1])
    return int(reach[-1] - starts[0] - gaps.sum())
