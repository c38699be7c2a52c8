"""The order between the compute streams of a rank: who has to wait for whom.

`Instruction.stream` says where an instruction is issued; here the dependencies between streams follow from the values.
An instruction waits for an instruction of another stream where it reads or writes what that one wrote, or writes what
that one read. A WAIT ends the reads of its communication's input, and writes its result.

Memory belongs to the stream that it was taken on: an allocator hands it out again to the next instruction of that
stream, which therefore waits for all uses on other streams of what is freed. Nothing else holds memory back, so this
order alone is what keeps values whole, in steps that run eagerly and in recorded ones.

A step begins on all streams after stream 0 and ends on stream 0 after all others. Executor and simulator both read
this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from plans.program import Block, GroupProgram, Instruction, Kind, Scope

__all__ = ["StreamOrder", "stream_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """The streams of one step, by position in program order.

    Args:
        count: number of streams.
        streams: the stream of every instruction.
        waits: position -> positions on other streams, over before it begins; only what does not follow from others.
        awaited: the positions that some other stream waits for.
    """

    count: int
    streams: tuple[int, ...]
    waits: Mapping[int, tuple[int, ...]]
    awaited: frozenset[int]


def stream_order(group: GroupProgram) -> StreamOrder | None:
    """The order between the streams of any rank of `group`; None where all is on one stream.

    >>> from plans.layout import Layout
    >>> from plans.program import Body, Value
    >>> write = Instruction(name="a", kind=Kind.COMPUTE, call="load", part="L", outputs=("x",))
    >>> read = Instruction(name="b", kind=Kind.COMPUTE, call="relu.forward", part="F", inputs=("x",), stream=1)
    >>> block = Block(label="0F0", micro_batch=0, body=Body(name="0F", instructions=(write, read)))
    >>> values = {"x": Value(name="x", shape=(8,))}
    >>> order = stream_order(GroupProgram(mesh=Layout((1,), ("dp",)), values=values, blocks=(block,)))
    >>> order.streams, order.waits
    ((0, 1), {1: (0,)})
    """
    bodies = {id(block.body): block.body for block in group.blocks}
    count = 1 + max((instruction.stream for body in bodies.values() for instruction in body.instructions), default=0)
    return None if count == 1 else _Finder(group, count).run()


_Key = tuple[str, int]
"""A value with memory of its own, and its micro-batch."""


@dataclass(slots=True)
class _Memory:
    """Who used a value, and the streams that its memory may have been taken on.

    Attributes:
        owners: these streams.
        written: stream and position of the last write, None before the first.
        read: stream -> position of its last read since then.
        touched: stream -> position of its last use.
        is_freed: no instruction will use it, though communication may.
    """

    owners: set[int] = field(default_factory=set)
    written: tuple[int, int] | None = None
    read: dict[int, int] = field(default_factory=dict)
    touched: dict[int, int] = field(default_factory=dict)
    is_freed: bool = False


@dataclass(slots=True)
class _UnderWay:
    """A communication: where it was issued, and the memory that it reads and writes."""

    stream: int
    position: int
    reads: list[_Memory]
    writes: list[_Memory]


class _Finder:
    """Walks a step once; `known[s][u]` is the last position on stream u that stream s is ordered behind."""

    def __init__(self, group: GroupProgram, count: int) -> None:
        self._group = group
        self._known = [[-1] * count for _ in range(count)]
        self._later: list[set[int]] = [set() for _ in range(count)]  # what the next instruction of a stream waits for
        self._memory: dict[_Key, _Memory] = {}
        self._under_way: dict[_Key, _UnderWay] = {}
        self._streams: list[int] = []
        self._snapshots: list[tuple[int, ...]] = []
        self._waits: dict[int, tuple[int, ...]] = {}

    def run(self) -> StreamOrder:
        """Run all streams and return the order of their instructions."""
        for position, (block, instruction) in enumerate(self._group.walk()):
            self._streams.append(instruction.stream)
            wanted = self._later[instruction.stream]
            self._later[instruction.stream] = set()
            wanted.update(self._wanted(position, block, instruction))
            self._wait(position, instruction.stream, wanted)
            self._free(block, instruction)
        return StreamOrder(
            count=len(self._known), streams=tuple(self._streams), waits=self._waits,
            awaited=frozenset(wait for waits in self._waits.values() for wait in waits),
        )  # fmt: skip

    def _wait(self, position: int, stream: int, wanted: set[int]) -> None:
        """Let an instruction wait for positions that its stream is not ordered behind yet."""
        known, found = self._known[stream], list[int]()
        for at in sorted(wanted, reverse=True):  # the later ones may know the earlier ones
            other = self._streams[at]
            if other != stream and known[other] < at:
                found.append(at)
                known[:] = map(max, known, self._snapshots[at])
        known[stream] = position
        self._snapshots.append(tuple(known))
        if found:
            self._waits[position] = tuple(sorted(found))

    def _wanted(self, position: int, block: Block, instruction: Instruction) -> Iterator[int]:
        """The positions that an instruction has to wait for, including those of its stream."""
        stream = instruction.stream
        if instruction.kind is Kind.WAIT:
            over = self._under_way.pop(self._key(str(instruction.waits), block, instruction), None)
            if over is not None:
                yield over.position
                yield from self._arrive(position, stream, over)
            return
        reads = [self._of(name, block, instruction) for name in instruction.inputs]
        made = [name for name in instruction.outputs if not self._is_view(name, instruction)]
        writes = [self._of(name, block, instruction) for name in made]
        for memory in reads:
            yield from _read(memory, stream, position)
        for memory in writes:
            memory.owners = memory.owners or {stream}
        if instruction.token is None:
            for memory in writes:
                yield from _write(memory, stream, position)
            return
        for memory in writes:  # an in-place reduction writes at once; what is new has no earlier use
            yield from _uses(memory)
        token = self._key(instruction.token, block, instruction)
        self._under_way[token] = _UnderWay(stream, position, reads, writes)

    def _arrive(self, position: int, stream: int, over: _UnderWay) -> Iterator[int]:
        """End a communication: its buffers return to their owners and the received values are available."""
        if over.stream != stream:
            self._later[over.stream].add(position)  # buffers of its own were taken where it was issued
        for memory in over.reads:
            yield from _read(memory, stream, position)
            if memory.is_freed:
                self._give_back(memory)
        for memory in over.writes:
            memory.owners.add(stream)  # joining what came may take memory again
            yield from _write(memory, stream, position)

    def _free(self, block: Block, instruction: Instruction) -> None:
        for name in instruction.frees:
            memory = self._of(name, block, instruction)
            memory.is_freed = True
            self._give_back(memory)
            if self._group.values[name].shares is None:
                del self._memory[self._key(name, block, instruction)]

    def _give_back(self, memory: _Memory) -> None:
        for owner in memory.owners:
            self._later[owner].update(memory.touched.values())

    def _of(self, name: str, block: Block, instruction: Instruction) -> _Memory:
        values = self._group.values
        while (base := values[name].shares) is not None:
            name = base
        key = self._key(name, block, instruction)
        if key not in self._memory:
            self._memory[key] = _Memory(owners={0} if values[name].scope is Scope.KEPT else set())
        return self._memory[key]

    def _is_view(self, name: str, instruction: Instruction) -> bool:
        """Whether an output of compute is its input by another name or in another shape, which writes nothing."""
        return instruction.kind is Kind.COMPUTE and self._group.values[name].shares is not None

    def _key(self, name: str, block: Block, instruction: Instruction) -> _Key:
        """A WAIT may be for another micro-batch than its block's."""
        micro_batch = block.micro_batch
        if instruction.kind is Kind.WAIT:
            micro_batch = instruction.attrs.get("micro_batch", micro_batch)
        return name, micro_batch if self._group.values[name].scope is Scope.MICRO else 0


def _read(memory: _Memory, stream: int, position: int) -> Iterator[int]:
    if memory.written is not None:
        yield memory.written[1]
    memory.read[stream] = memory.touched[stream] = position


def _uses(memory: _Memory) -> Iterator[int]:
    if memory.written is not None:
        yield memory.written[1]
    yield from memory.read.values()


def _write(memory: _Memory, stream: int, position: int) -> Iterator[int]:
    yield from _uses(memory)
    memory.written = (stream, position)
    memory.read = {}
    memory.touched[stream] = position
