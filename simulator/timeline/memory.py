"""Memory over time: which values are alive, on which rank, when.

A value takes its memory when the instruction that first writes it starts, and gives it back when an instruction that
lists it in `frees` has run; kept values (weights, optimizer state) always count. A value that shares another's memory
costs nothing but keeps it alive. What a WAIT with attrs["micro_batch"] frees belongs to that micro-batch.

The program's values are all that is counted so far; the flattened tensors of the optimizer are among them (role
"buffer"). `with_buffers` adds memory that is not in the program: the buffers of communication.

An allocator that follows the order of the compute stream sees the sequence of the program, so the peak of a rank is
known without times (`peak_of_order`). With times only asynchronous communication differs: values that it frees are live
until it ends.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.program import GroupProgram, Instruction, Kind, Program, Scope, Value
from plans.timeline import BUFFERS, STREAMS, MemoryPeak, Timeline
from simulator.engine.order import ISSUE, WAIT, Names, Order
from simulator.timeline.buffers import Buffers, buffers_of, peak_of_sum

__all__ = ["Changes", "memory_timeline", "peak_of_order", "times_of_instructions", "with_buffers"]

_Curve = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def peak_of_order(group: GroupProgram) -> MemoryPeak:
    """The peak of any rank of `group` from its order alone, under the number of its first rank.

    Raises:
        TwofoldError: an instruction frees a value that is not live.

    >>> from plans.layout import Layout
    >>> from plans.program import Block, Body, Instruction, Value
    >>> line = Instruction(name="a", kind=Kind.COMPUTE, call="relu.forward", part="F", outputs=("y",))
    >>> block = Block(label="0F0", micro_batch=0, body=Body(name="0F", instructions=(line,)))
    >>> values = {"y": Value(name="y", shape=(8, 4))}
    >>> peak_of_order(GroupProgram(mesh=Layout((1,), ("dp",)), values=values, blocks=(block,)))
    MemoryPeak(rank=0, peak_bytes=128, by_role={'activation': 128})
    """
    changes = Changes(group)
    return changes.peak(group.ranks[0], np.argsort(changes.key, kind="stable"))


def memory_timeline(
    program: Program, timeline: Timeline, orders: Sequence[Order] | None = None
) -> tuple[tuple[MemoryPeak, ...], Mapping[int, _Curve]]:
    """The peak of every rank and its live bytes over the last step of a timeline of `program`.

    Args:
        program: that ran.
        timeline: of it.
        orders: of its groups, whose names have the timeline's numbers; recomputed where they are not known.

    Returns:
        peaks by rank; rank -> (times in ps, live bytes from then on), with every change, also where several fall on one
        time, so that the largest entry is the peak.

    Raises:
        TwofoldError: an instruction frees a value that is not live.
    """
    peaks: dict[int, MemoryPeak] = {}
    curves: dict[int, _Curve] = {}
    begin = timeline.step_start_ps[-1]
    for group, of_ranks in times_of_instructions(program, timeline, orders):
        changes = Changes(group)
        for rank, (start, end) in of_ranks:
            times, sequence = changes.in_time(start, end)
            peaks[rank] = changes.peak(rank, sequence)
            curves[rank] = (
                np.concatenate([[begin], times[sequence]]),
                changes.kept + np.concatenate([[0], np.cumsum(changes.size[sequence])]),
            )
    return tuple(peaks[rank] for rank in sorted(peaks)), {rank: curves[rank] for rank in sorted(curves)}


def times_of_instructions(
    program: Program, timeline: Timeline, orders: Sequence[Order] | None = None, *, step: int | None = None,
    ranks: Container[int] | None = None,
) -> Iterator[tuple[GroupProgram, Iterator[tuple[int, _Curve]]]]:  # fmt: skip
    """Group by group and rank by rank when every instruction of a step started and had run, by position.

    Args:
        program: that ran.
        timeline: of it.
        orders: of its groups, whose names have the timeline's numbers; recomputed where they are not known.
        step: by default the last.
        ranks: whose times are needed; by default all that have spans.
    """
    number_of = {} if orders is not None else {triple: number for number, triple in enumerate(timeline.names)}
    step = timeline.num_steps - 1 if step is None else step
    rows = np.flatnonzero(timeline.step == step)
    rows = rows[np.argsort(timeline.rank[rows], kind="stable")]
    bounds = np.searchsorted(timeline.rank[rows], np.arange(timeline.num_ranks + 1))
    here = [rank for rank in timeline.represents if ranks is None or rank in ranks]
    for number, group in enumerate(program.groups):
        if ranks is not None and not set(here) & set(group.ranks):
            continue
        if orders is not None:
            order, name = orders[number], orders[number].name
        else:
            order = Order(group, Names())
            triples = zip(order.ids, order.instructions, strict=True)
            name = [number_of.get((id_, instruction.call, instruction.part), -1) for id_, instruction in triples]
        when = _When(order, np.array(name, dtype=np.int64))
        own = {rank: rows[bounds[rank] : bounds[rank + 1]] for rank in group.ranks if rank in here}
        begin = timeline.step_start_ps[step]
        yield group, ((rank, when.of(timeline, of_rank, begin)) for rank, of_rank in own.items())


def with_buffers(timeline: Timeline, program: Program) -> Timeline:
    """The timeline with peaks that hold the buffers of communication too (`simulator.timeline.buffers`).

    What they add to the peak of the values is the role `plans.timeline.BUFFERS`. The curve stays that of the values.
    Communicators and fragmentation are no tensors: `Machine.room_bytes` leaves them out.
    """
    if not timeline.memory:
        return timeline
    buffers = _added_by_buffers(program, timeline)
    peaks = []
    for memory_peak in timeline.memory:
        if added := buffers.get(memory_peak.rank, 0):
            by_role = dict(sorted({**memory_peak.by_role, BUFFERS: added}.items()))
            memory_peak = replace(memory_peak, peak_bytes=memory_peak.peak_bytes + added, by_role=by_role)
        peaks.append(memory_peak)
    return replace(timeline, memory=tuple(peaks))


def _added_by_buffers(program: Program, timeline: Timeline) -> dict[int, int]:
    """rank -> what the buffers of communication add to the peak of the values of the last step."""
    found: dict[int, int] = {}
    taken_by = _buffers(program, timeline.memory_curve)
    if not taken_by:
        return found
    for group, of_ranks in times_of_instructions(program, timeline, ranks=taken_by):
        for rank, (start, end) in of_ranks:
            times, sizes = timeline.memory_curve[rank]
            changes: list[tuple[int, int]] = []
            for position, (_, instruction) in enumerate(group.walk()):
                if (taken := taken_by[rank].get(id(instruction))) is None:
                    continue
                begin, stop = int(start[position]), int(end[position])
                if taken.in_flight_bytes:
                    changes += [(begin, taken.in_flight_bytes), (stop, -taken.in_flight_bytes)]
                if taken.joining_bytes:
                    changes += [(stop, taken.joining_bytes), (stop, -taken.joining_bytes)]
            if changes and (added := peak_of_sum(times, sizes, changes) - int(sizes.max())) > 0:
                found[rank] = added
    return found


def _buffers(program: Program, ranks: Container[int]) -> dict[int, dict[int, Buffers]]:
    """rank -> `id` of an instruction -> the buffers that it takes, for some ranks; what takes none is left out."""
    found: dict[int, dict[int, Buffers]] = {}
    for group in program.groups:
        bodies = {id(block.body): block.body for block in group.blocks}.values()
        for rank in (rank for rank in group.ranks if rank in ranks):
            for instruction in (instruction for body in bodies for instruction in body.instructions):
                if instruction.kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV):
                    taken = buffers_of(instruction, group, rank)
                    if taken != Buffers():
                        found.setdefault(rank, {})[id(instruction)] = taken
    return found


_Touch = tuple[bool, str, bool, Value, Scope, int, int]
"""A value that an instruction frees or writes: whether it frees it, its name, whether every micro-batch has one of its
own; the value whose memory it is, with its scope, the number of its role and its bytes."""


def _touches(
    instruction: Instruction, scope: Mapping[str, Scope], root: Mapping[str, Value], roles: Mapping[str, int]
) -> list[_Touch]:
    """The writes, then the frees of an instruction, kept values separately."""
    return [
        (
            is_free, name, scope[name] is Scope.MICRO, root[name], root[name].scope, roles[root[name].role],
            root[name].size_bytes,
        )
        for is_free, named in ((False, instruction.outputs), (True, instruction.frees))
        for name in named
        if scope[name] is not Scope.KEPT
    ]  # fmt: skip


class Changes:
    """Every allocation and release of one step of a group, in columns.

    Attributes:
        position: of the instruction in the step.
        is_release: at its end rather than at its start.
        size: bytes, negative for a release.
        role: number of the role in `roles`.
        value, micro_batch: whose memory it is; number of the value in `names`.
        names: names of the values.
        key: program order.
        kept: bytes that are always there.
    """

    def __init__(self, group: GroupProgram) -> None:
        roles: dict[str, int] = {}
        values = group.values
        root, scope = {}, {}
        for name, value in values.items():
            while value.shares is not None:
                value = values[value.shares]
            root[name], scope[name] = value, values[name].scope
        self.by_role: dict[str, int] = {}
        for value in values.values():
            roles.setdefault(value.role, len(roles))
            if value.scope is Scope.KEPT and value.size_bytes:
                self.by_role[value.role] = self.by_role.get(value.role, 0) + value.size_bytes
        self.roles = tuple(roles)
        self.kept = sum(self.by_role.values())
        position: list[int] = []
        is_release: list[bool] = []
        size: list[int] = []
        role: list[int] = []
        numbers: dict[str, int] = {}
        value_of: list[int] = []
        micro_batches: list[int] = []
        alive: set[tuple[str, int]] = set()
        sharers: dict[tuple[str, int], int] = {}
        touched: dict[int, list[_Touch]] = {}
        at = -1
        for block in group.blocks:
            for instruction in block.body.instructions:
                at += 1
                touches = touched.get(id(instruction))
                if touches is None:
                    touches = touched[id(instruction)] = _touches(instruction, scope, root, roles)
                if not touches:
                    continue
                micro_batch = block.micro_batch
                if instruction.kind is Kind.WAIT:
                    micro_batch = instruction.attrs.get("micro_batch", micro_batch)
                for is_free, name, by_micro_batch, base, base_scope, base_role, base_bytes in touches:
                    key = (name, micro_batch if by_micro_batch else 0)
                    if is_free:
                        if key not in alive:
                            raise TwofoldError(
                                f"'{block.label}/{instruction.name}' frees {name!r}, which is not alive: "
                                "never written, or freed before"
                            )
                        alive.remove(key)
                    elif key in alive:
                        continue  # written in place
                    else:
                        alive.add(key)
                    if base_scope is Scope.KEPT:
                        continue
                    base_key = (base.name, micro_batch if base_scope is Scope.MICRO else 0)
                    before = sharers.get(base_key, 0)
                    sharers[base_key] = after = before - 1 if is_free else before + 1
                    if base_bytes and (before == 0 or after == 0):
                        position.append(at)
                        is_release.append(is_free)
                        size.append(-base_bytes if is_free else base_bytes)
                        role.append(base_role)
                        value_of.append(numbers.setdefault(base.name, len(numbers)))
                        micro_batches.append(base_key[1])
        self.position = np.array(position, dtype=np.int64)
        self.is_release = np.array(is_release, dtype=bool)
        self.size = np.array(size, dtype=np.int64)
        self.role = np.array(role, dtype=np.int64)
        self.value = np.array(value_of, dtype=np.int64)
        self.micro_batch = np.array(micro_batches, dtype=np.int64)
        self.names = tuple(numbers)
        self.key = 2 * self.position + self.is_release

    def in_time(
        self, start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The time of every change, and the changes in the sequence in which they happen.

        Args:
            start, end: of every instruction of the step, by position.
        """
        times = np.where(self.is_release, end[self.position], start[self.position])
        return times, np.lexsort((self.key, times))

    def peak(self, rank: int, sequence: npt.NDArray[np.int64]) -> MemoryPeak:
        """The peak when the changes happen in this sequence; the first of equal ones."""
        live = np.cumsum(self.size[sequence])
        by_role = dict(self.by_role)
        highest = 0
        if len(live) and live.max() > 0:
            until = sequence[: int(np.argmax(live)) + 1]
            highest = int(live.max())
            for number, role in enumerate(self.roles):
                if size := int(self.size[until[self.role[until] == number]].sum()):
                    by_role[role] = by_role.get(role, 0) + size
        by_role = {role: by_role[role] for role in sorted(by_role)}
        return MemoryPeak(rank=rank, peak_bytes=self.kept + highest, by_role=by_role)


class _When:
    """Start and end of the instructions of an order, read from the spans of a rank."""

    def __init__(self, order: Order, name: npt.NDArray[np.int64]) -> None:
        size = len(order.ids)
        self._name = name
        self._is_compute = np.array([entry.kind is Kind.COMPUTE for entry in order.instructions], dtype=bool)
        self._token = np.full(size, -1, dtype=np.int64)  # of a WAIT: the position of what it waits for
        self._is_async = np.zeros(size, dtype=bool)
        issued: dict[int, int] = {}
        for kind, position, slot in order.segments:
            if kind == ISSUE and slot >= 0:
                issued[slot] = position
                self._is_async[position] = True
            elif kind == WAIT:
                self._token[position] = issued.get(slot, -1)

    def of(
        self, timeline: Timeline, rows: npt.NDArray[np.int64], step_start_ps: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Start and end of every position; without a span an instruction takes no time where it is in order.

        A rank begins with its first span: others may have begun the step long before.
        """
        if len(rows):
            step_start_ps = max(step_start_ps, int(timeline.start_ps[rows].min()))
        num_names = len(timeline.names)
        own_start = np.full(num_names + 1, np.iinfo(np.int64).max)
        own_end = np.full(num_names + 1, step_start_ps)  # the last entry: has no name in the timeline
        at = timeline.name_index[rows]
        on_host = timeline.stream[rows] == STREAMS.index("host")
        np.minimum.at(own_start, at[~on_host], timeline.start_ps[rows[~on_host]])
        np.maximum.at(own_end, at[~on_host], timeline.end_ps[rows[~on_host]])
        ended = own_end[self._name]
        waited = np.where(self._token >= 0, ended[self._token], step_start_ps)
        blocks_until = np.where(self._is_async, step_start_ps, np.maximum(ended, waited))
        reached = np.maximum.accumulate(np.concatenate([[step_start_ps], blocks_until]))
        before, after = reached[:-1], reached[1:]
        started = own_start[self._name]
        start = np.where(self._is_compute & (started < np.iinfo(np.int64).max), np.maximum(started, before), before)
        return start, np.where(self._is_async, np.maximum(ended, before), after)
