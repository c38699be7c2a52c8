"""The parts of a rank's step: compute, exposed communication, host wait and bubble.

These are the definitions behind `exposed_comm_s` and `bubble_fraction` of timelines and forecasts: `RankSpans` finds
the parts in the spans of a timeline, and a forecast adds them up with `PartsTally`. The compute stream of a rank takes
its instructions in program order. Between two instructions that compute it may have to wait:

* for its host, which has not yet issued what comes next: **host wait**;
* for a collective that has been issued. The time in which a collective of the rank is under way is **exposed
  communication**. The time in which none is, because another member is late, is not;
* for a tensor of another pipeline stage: this is **bubble**, the time of the transfer included.

The bubble is what is left of the step after the others and compute. Without the program it is not known what the stream
waits for: then all collectives count as waited for while nothing computes, and all transfers as bubble.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from plans.program import Block, GroupProgram, Instruction, Kind, Scope

__all__ = ["TRANSFER", "PartsTally", "RankSpans", "StepParts", "collectives_of", "mean_ps", "taken_by_stream"]

_Ints = npt.NDArray[np.int64]
_Triple = tuple[str, str, str]

_NEVER = np.iinfo(np.int64).max

TRANSFER = "transfer"
"""The call of communication between stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts of one step of a rank, in picoseconds.

    Args:
        compute_ps: time in which the compute stream is busy.
        exposed_by_call: call -> time in which the stream waits for a collective of this call and a collective runs.
        host_wait_ps: time in which the stream waits because the host has not issued the next instruction yet; at the
            end of the step, time in which only the host is busy.
        bubble_ps: the rest of the step, at least 0. A rank that begins the step early may have more work in it than
            the step is long.
    """

    compute_ps: int
    exposed_by_call: Mapping[str, int]
    host_wait_ps: int
    bubble_ps: int

    @property
    def exposed_ps(self) -> int:
        """All exposed communication."""
        return sum(self.exposed_by_call.values())


def mean_ps(part: str, parts: Iterable[tuple[StepParts, int]]) -> float:
    """The mean of a part over ranks.

    Args:
        part: "exposed_ps", "host_wait_ps" or "bubble_ps".
        parts: of ranks, with the number of ranks that each stands for.
    """
    total = count = 0
    for own, ranks in parts:
        total += ranks * getattr(own, part)
        count += ranks
    return total / count if count else 0.0


@dataclass(slots=True)
class PartsTally:
    """The parts of a rank's step, added up while the step is simulated, in picoseconds.

    Args:
        compute_ps, exposed_by_call, host_wait_ps: as of `StepParts`.
        end_ps: the time at which the rank ends the step.
    """

    compute_ps: float = 0
    exposed_by_call: dict[str, float] = field(default_factory=dict)
    host_wait_ps: float = 0
    end_ps: float = 0

    def parts(self, step_ps: int) -> StepParts:
        """The parts of a step of this length."""
        compute_ps, host_wait_ps = round(self.compute_ps), round(self.host_wait_ps)
        exposed = {call: round(time_ps) for call, time_ps in self.exposed_by_call.items()}
        return StepParts(
            compute_ps=compute_ps, exposed_by_call=exposed, host_wait_ps=host_wait_ps,
            bubble_ps=max(0, step_ps - compute_ps - sum(exposed.values()) - host_wait_ps),
        )  # fmt: skip

    def add(self, exposed: Iterable[tuple[str, float]], host_wait_ps: float) -> None:
        """Add exposed communication, by call, and host wait."""
        self.host_wait_ps += host_wait_ps
        for call, time in exposed:
            if time:
                self.exposed_by_call[call] = self.exposed_by_call.get(call, 0) + time

    def add_wait(
        self, call: str, free_ps: float, issued_ps: float, end_ps: float, under_way: Iterable[tuple[float, float]]
    ) -> None:
        """Add a wait for a collective.

        Args:
            call: of the collective.
            free_ps: the time at which the stream is free.
            issued_ps, end_ps: the times at which the host issues the collective and at which it ends.
            under_way: (start, end) of the collectives of the rank.

        >>> tally = PartsTally()
        >>> tally.add_wait("all_reduce", 10, 12, 20, [(14, 20)])  # the other members issue it at 14
        >>> tally.host_wait_ps, tally.exposed_by_call, tally.parts(10).bubble_ps
        (2, {'all_reduce': 6}, 2)
        """
        issued_ps = min(max(free_ps, issued_ps), end_ps)
        self.add([(call, _covered(under_way, issued_ps, end_ps))], issued_ps - free_ps)

    def add_run(self, compute_ps: float, exposed: Sequence[tuple[str, float]], length_ps: float) -> None:
        """Add a run of compute and of collectives that the stream waits for at once; the rest of its length is host
        wait."""
        self.compute_ps += compute_ps
        self.add(exposed, length_ps - compute_ps - sum(time for _, time in exposed))


def _covered(intervals: Iterable[tuple[float, float]], low: float, high: float) -> float:
    """The length that intervals cover between two times.

    >>> _covered([(0, 4), (3, 6), (8, 20)], 2, 10)
    6
    """
    length: float = 0
    for start, end in sorted(intervals):
        if end > low and start < high:
            length += min(end, high) - max(start, low)
            low = min(end, high)
    return length


def taken_by_stream(group: GroupProgram) -> Iterator[_Triple]:
    """The instructions that the compute stream of a group's ranks runs or waits for, as (id, call, part), in order.

    A COMPUTE instruction is listed at its own position. Communication is listed where the stream waits for it: at its
    WAIT, at its own position if it blocks, or at the end of the step if nothing waits for it.

    >>> from plans.layout import Layout
    >>> from plans.program import Body, Value
    >>> lines = [
    ...     Instruction(name="sum", kind=Kind.COLLECTIVE, call="all_reduce", part="C", token="t"),
    ...     Instruction(name="fc", kind=Kind.COMPUTE, call="linear.forward", part="F"),
    ...     Instruction(name="over", kind=Kind.WAIT, call="wait", part="C", waits="t"),
    ... ]
    >>> block = Block(label="0F0", micro_batch=0, body=Body(name="0F", instructions=tuple(lines)))
    >>> values = {"t": Value(name="t", shape=(), role="token")}
    >>> group = GroupProgram(mesh=Layout((2,), ("dp",)), values=values, blocks=(block,))
    >>> [id for id, _, _ in taken_by_stream(group)]
    ['0F0/fc', '0F0/sum']
    """
    under_way: dict[tuple[str, int], _Triple] = {}
    by_micro_batch = {name for name, value in group.values.items() if value.scope is Scope.MICRO}
    for block, instruction in group.walk():
        kind = instruction.kind
        if kind is Kind.WAIT:
            assert instruction.waits is not None
            waited = under_way.pop(_token(instruction.waits, block, instruction, by_micro_batch), None)
            if waited is not None:
                yield waited
            continue
        triple = f"{block.label}/{instruction.name}", instruction.call, instruction.part
        if kind is Kind.COMPUTE or instruction.token is None:
            yield triple
        else:
            under_way[_token(instruction.token, block, instruction, by_micro_batch)] = triple
    yield from under_way.values()


def collectives_of(group: GroupProgram) -> Iterator[tuple[_Triple, Instruction]]:
    """The collectives of a group's ranks, with the names of their spans as (id, call, part)."""
    for block, instruction in group.walk():
        if instruction.kind is Kind.COLLECTIVE:
            yield (f"{block.label}/{instruction.name}", instruction.call, instruction.part), instruction


def _token(name: str, block: Block, instruction: Instruction, by_micro_batch: set[str]) -> tuple[str, int]:
    if name not in by_micro_batch:
        return name, 0
    return name, instruction.attrs.get("micro_batch", block.micro_batch)


class _Covered:
    """A union of intervals and its length up to any time."""

    def __init__(self, starts: _Ints, ends: _Ints) -> None:
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        first = np.append(True, starts[1:] > reach[:-1])[: len(starts)]
        self.starts = starts[first]
        self.ends = reach[np.append(first[1:], True)[: len(starts)]]
        self._before = np.concatenate([[0], np.cumsum(self.ends - self.starts)])

    def within(self, lows: _Ints, highs: _Ints) -> _Ints:
        """The covered length of each interval from `lows` to `highs`."""
        return self._until(highs) - self._until(lows)

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return int(self._before[-1])

    def _until(self, times: _Ints) -> _Ints:
        if not len(self.starts):
            return np.zeros_like(times)
        number = np.searchsorted(self.starts, times, side="right")
        cut = np.where(number > 0, np.maximum(0, self.ends[number - 1] - times), 0)
        return self._before[number] - cut


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpans:
    """The spans of one rank in one step, as columns ordered by start.

    Args:
        names: (id, call, part) of every number in `name`.
        is_wait, is_transfer: whether the call of each name is a wait, or a transfer between stages.
        stream: 0 host, 1 compute, 2 communication.
        name, start_ps, end_ps: one entry per span.
        taken: numbers of the names of `taken_by_stream`; None if the program is not known.
        begin_ps: the time at which the rank begins the step.
    """

    names: Sequence[_Triple]
    is_wait: npt.NDArray[np.bool_]
    is_transfer: npt.NDArray[np.bool_]
    stream: npt.NDArray[np.int8]
    name: npt.NDArray[np.integer[Any]]
    start_ps: _Ints
    end_ps: _Ints
    taken: _Ints | None
    begin_ps: int

    def parts(self, begin: int, end: int) -> StepParts:
        """The parts of a step between two times."""
        compute, both = self._covered()
        lows, highs, held = self._held()
        exposed: dict[str, int] = {}
        lengths = both.within(lows, highs) - compute.within(lows, highs)
        for name, length in zip(held.tolist(), lengths.tolist(), strict=True):
            if length:
                call = self.names[name][1]
                exposed[call] = exposed.get(call, 0) + length
        lows, issued, highs, _ = self._chain()
        free = int(highs.max(initial=self.begin_ps))
        # at the end only the host is busy; without the program a host that waits may wait for communication
        host = (self.stream == 0) & ((self.taken is not None) | ~self.is_wait[self.name])
        alone = min(end, int(self.end_ps[host].max(initial=free))) - free
        host_wait = int((issued - lows - compute.within(lows, issued)).sum()) + max(0, alone)
        return StepParts(
            compute_ps=compute.total, exposed_by_call={call: exposed[call] for call in sorted(exposed)},
            host_wait_ps=host_wait,
            bubble_ps=max(0, end - begin - compute.total - sum(exposed.values()) - host_wait),
        )  # fmt: skip

    def exposed(self) -> list[tuple[int, int]]:
        """The intervals of exposed communication, by start."""
        compute, both = self._covered()
        found: list[tuple[int, int]] = []
        lows, highs, _ = self._held()
        for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
            for at, stop in _clipped(both, low, high):
                for busy, free in _clipped(compute, at, stop):
                    found.append((at, busy))
                    at = free
                found.append((at, stop))
        return [(low, high) for low, high in found if high > low]

    def idle(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The intervals between two times without compute, exposed communication and transfers."""
        works = (self.stream == 1) | ((self.stream == 2) & self.is_transfer[self.name])
        shown = np.array(self.exposed(), dtype=np.int64).reshape(-1, 2)
        busy = _Covered(
            np.concatenate([self.start_ps[works], shown[:, 0]]), np.concatenate([self.end_ps[works], shown[:, 1]])
        )
        for low, high in _clipped(busy, begin, end):
            if low > begin:
                yield begin, low
            begin = high
        if end > begin:
            yield begin, end

    def _covered(self) -> tuple[_Covered, _Covered]:
        """The time that is covered by compute, and by compute and collectives."""
        compute = self.stream == 1
        works = compute | ((self.stream == 2) & ~self.is_transfer[self.name])
        return _Covered(self.start_ps[compute], self.end_ps[compute]), _Covered(
            self.start_ps[works], self.end_ps[works]
        )

    def _held(self) -> tuple[_Ints, _Ints, _Ints]:
        """(start, end, name) of the waits for collectives from their issue on, without overlap."""
        is_collective = np.zeros(len(self.names), dtype=bool)
        is_collective[self.name[self.stream == 2]] = True
        is_collective &= ~self.is_transfer
        if self.taken is not None:
            _, issued, highs, name = self._chain()
            chosen = is_collective[name]
            return issued[chosen], highs[chosen], name[chosen]
        rows = np.flatnonzero((self.stream == 2) & is_collective[self.name])
        reach = np.maximum.accumulate(np.append(self.begin_ps, self.end_ps[rows]))
        lows = np.minimum(np.maximum(self.start_ps[rows], reach[:-1]), reach[1:])
        return lows, reach[1:], self.name[rows].astype(np.int64)

    def _chain(self) -> tuple[_Ints, _Ints, _Ints, _Ints]:
        """Four columns, one row per instruction that the stream runs or waits for: the time at which the stream is free
        for it, the end of the wait for the host, the time at which the stream is free after it, and its name."""
        works = np.flatnonzero(self.stream != 0)
        name = self.name[works].astype(np.int64)
        start, end = self.start_ps[works], self.end_ps[works]
        if self.taken is not None:
            ends, starts = np.full(len(self.names), -1), np.full(len(self.names), _NEVER)
            np.maximum.at(ends, name, end)
            np.minimum.at(starts, name, start)
            name = self.taken[ends[self.taken] >= 0]
            start, end = starts[name], ends[name]
        host = (self.stream == 0) & ~self.is_wait[self.name]
        issued = np.full(len(self.names), _NEVER)
        np.minimum.at(issued, self.name[host], self.end_ps[host])  # of two of one name the first
        issued[issued == _NEVER] = self.begin_ps
        reach = np.maximum.accumulate(np.append(self.begin_ps, end))
        lows, highs = reach[:-1], reach[1:]
        return lows, np.clip(np.minimum(start, issued[name]), lows, highs), highs, name


def _clipped(covered: _Covered, low: int, high: int) -> Iterator[tuple[int, int]]:
    """The covered intervals between two times."""
    first = int(np.searchsorted(covered.ends, low, side="right"))
    for start, end in zip(covered.starts[first:].tolist(), covered.ends[first:].tolist(), strict=True):
        if start >= high:
            break
        yield max(start, low), min(end, high)
