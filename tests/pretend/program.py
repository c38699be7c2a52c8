"""A program on pretend ranks: all of them in this process, every tensor a numpy array, every float a float64.

It follows what `plans.program` says of a program and looks at nothing else: no torch, no code of the executor or of the
simulator. It is stricter than either, and an AssertionError says where:

* a value is made once (a step's accumulator: changed in place), has the declared shape, is there when it is read and
  freed once; nothing but kept values and the loss is left when a step has ended; what lives within a body is freed in
  the block that made it, before the next block begins (of two actions at once: in the blocks of the same label);
* what shares memory does not outlive the memory;
* a token is issued before it is waited for, and waited for before the step ends; what an operation under way reads or
  writes is neither freed nor changed before its WAIT (a SEND keeps a copy of its own: its buffer may go);
* all members issue the collectives of a channel in one order; the k-th SEND of a channel meets the k-th RECV;
* ranks that wait for each other forever are shown with the place where each one stands.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from plans.layout import TensorLayout
from plans.model.graph import itemsize
from plans.program import Block, GroupProgram, Instruction, Kind, ParameterPlacement, Program, Scope, Value
from tests.pretend.flat import SCALE, SKIPPED, checked_step, clip_factor, first_held, pack, unpack
from tests.pretend.operators import RULES, UPDATES

Array = np.ndarray
Key = tuple[str, int | None]


@dataclass
class Meeting:
    """A collective or a transfer: who is there with what, and what comes out of it."""

    what: str
    expected: frozenset[Any]
    brought: dict[Any, Any] = field(default_factory=dict)
    results: dict[int, tuple[Array, ...]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.expected <= self.brought.keys()


@dataclass
class UnderWay:
    """What a token of one rank stands for."""

    meetings: list[Meeting]
    finish: Callable[[], Sequence[Array]]
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    waited: bool = False


@dataclass
class Rank:
    number: int
    group: GroupProgram
    todo: list[tuple[Block, Instruction]] = field(default_factory=list)
    at: int = 0
    env: dict[Key, Array] = field(default_factory=dict)
    tokens: dict[Key, UnderWay] = field(default_factory=dict)
    made: Counter[Key] = field(default_factory=Counter)
    freed: Counter[Key] = field(default_factory=Counter)
    blocked: UnderWay | None = None
    num_on_channel: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    maker: dict[Key, str] = field(default_factory=dict)
    """The label of the blocks that made a value that lives within a body."""
    last_of: dict[str, int] = field(default_factory=dict)
    """The last place of a label's blocks: two actions that run at once have several blocks each."""

    @property
    def done(self) -> bool:
        return self.at == len(self.todo)

    @property
    def place(self) -> str:
        if self.done:
            return f"rank {self.number} is done"
        block, instruction = self.todo[self.at]
        return f"rank {self.number} at {block.label}/{instruction.name} ({instruction.call})"


class Pretend:
    """All ranks of a program, with the given whole parameters; `step` runs one training step."""

    def __init__(self, program: Program, parameters: Mapping[str, Array]) -> None:
        self.program, self.steps = program, 0
        self.ranks = {rank: Rank(rank, group) for group in program.groups for rank in group.ranks}
        assert sorted(self.ranks) == list(range(program.num_ranks))
        for rank in self.ranks.values():
            for placement in rank.group.parameters:
                part = _box(
                    parameters[placement.name].astype(np.float64), placement.layout.region(rank.number, placement.shape)
                )
                kept = rank.group.values[placement.kept]
                assert kept.scope is Scope.KEPT, kept
                if placement.master:
                    rank.env[placement.weight, None] = part.copy()
                if placement.shard:
                    part = _flat_part(
                        part, placement.layout.mesh.index(rank.number, placement.shard_axes), kept.shape[0]
                    )
                assert part.shape == kept.shape, (placement, part.shape)
                rank.env[kept.name, None] = part
                for state in placement.states:
                    rank.env[state, None] = np.zeros(rank.group.values[state].shape)
            if (check := rank.group.step_check) is not None:
                rank.env[check.held, None] = first_held(check.check)
                if check.norms is not None:
                    rank.env[check.norms, None] = np.full(rank.group.values[check.norms].shape, np.nan)
            for constant in rank.group.constants:
                rank.env[constant.value, None] = _box(
                    parameters[constant.name], constant.layout.region(rank.number, constant.shape)
                ).copy()

    def step(self, feed: Callable[[int], Mapping[str, Array]]) -> dict[int, float | None]:
        """One step; `feed(rank)` is that rank's batch. Returns each rank's loss, None where it is not known."""
        self.steps += 1
        self.meetings: dict[Any, Meeting] = {}
        self.issued: dict[tuple[str, tuple[int, ...]], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for rank in self.ranks.values():
            rank.todo, rank.at = list(self.program.walk(rank.number)), 0
            rank.last_of = {block.label: place for place, (block, _) in enumerate(rank.todo)}
            rank.tokens, rank.made, rank.freed, rank.num_on_channel = {}, Counter(), Counter(), Counter()
        fed = {rank: feed(rank) for rank in self.ranks}
        while not all(rank.done for rank in self.ranks.values()):
            moved = False
            for rank in self.ranks.values():
                while not rank.done and self._advance(rank, fed[rank.number]):
                    moved = True
            assert moved, "deadlock: " + "; ".join(rank.place for rank in self.ranks.values())
        return {rank.number: self._end(rank) for rank in self.ranks.values()}

    def parameters(self) -> dict[str, Array]:
        """The whole parameters, put together; every replica must hold the same."""
        whole: dict[str, Array] = {}
        for group in self.program.groups:
            for placement in group.parameters:
                assert placement.name not in whole, f"{placement.name} is kept by two groups"
                whole[placement.name] = np.full(placement.shape, np.nan)
                for rank in group.ranks:
                    region = placement.layout.region(rank, placement.shape)
                    part, index = self._weight(placement, rank), tuple(slice(*ends) for ends in region)
                    there = whole[placement.name][index]
                    assert np.isnan(there).all() or np.allclose(there, part, rtol=0, atol=1e-12), (
                        f"{placement} on {rank}"
                    )
                    whole[placement.name][index] = part
        return whole

    def _weight(self, placement: ParameterPlacement, rank: int) -> Array:
        if placement.shard is None:
            weight = self.ranks[rank].env[placement.weight, None]
            assert np.array_equal(weight, self.ranks[rank].env[placement.kept, None]), f"{placement} on {rank}"
            return weight
        shards = [
            self.ranks[member].env[placement.shard, None]
            for member in placement.layout.mesh.group_of(rank, placement.shard_axes)
        ]
        shape = placement.layout.local_shape(placement.shape)
        return np.concatenate(shards)[: math.prod(shape)].reshape(shape)

    # ---------------------------------------------------------------- one rank

    def _advance(self, rank: Rank, fed: Mapping[str, Array]) -> bool:
        """Run the next instruction if it can run."""
        block, instruction = rank.todo[rank.at]
        if instruction.kind is Kind.WAIT:
            if not self._wait(rank, block, instruction):
                return False
        elif instruction.kind is Kind.COMPUTE:
            self._compute(rank, block, instruction, fed)
        else:
            if rank.blocked is None:
                under_way = self._issue(rank, block, instruction)
                if instruction.token is None:
                    rank.blocked = under_way
                else:
                    token = _key(rank, block, instruction.token)
                    again = rank.group.values[token[0]].scope is Scope.BODY
                    assert token not in rank.tokens or (again and rank.tokens[token].waited), (
                        f"{rank.place} issues {token} again"
                    )
                    rank.tokens[token] = under_way
            if rank.blocked is not None:
                if not all(meeting.complete for meeting in rank.blocked.meetings):
                    return False
                self._take(rank, rank.blocked)
                rank.blocked = None
        for name in instruction.frees:
            self._free(rank, _key(rank, block, name), instruction)
        rank.at += 1
        if rank.done or rank.todo[rank.at][0] is not block:
            left = [key for key in rank.env if rank.group.values[key[0]].scope is Scope.BODY]
            late = [key for key in left if rank.last_of[rank.maker[key]] < rank.at]  # by parts of a label that are over
            assert not late, f"rank {rank.number} keeps {late} after {block.label}"
        return True

    def _wait(self, rank: Rank, block: Block, instruction: Instruction) -> bool:
        token = _key(rank, block, str(instruction.waits), instruction.attrs.get("micro_batch"))
        assert token in rank.tokens, f"{rank.place}: {token} is waited for before it is issued"
        under_way = rank.tokens[token]
        if not all(meeting.complete for meeting in under_way.meetings):
            return False
        if not under_way.waited:
            self._take(rank, under_way)
        return True

    def _take(self, rank: Rank, under_way: UnderWay) -> None:
        under_way.waited = True
        for key, array in zip(under_way.writes, under_way.finish(), strict=True):
            shape = rank.group.values[key[0]].shape
            assert array.shape == shape, f"{rank.place}: {key} comes as {array.shape}, not {shape}"
            rank.env[key] = array

    def _read(self, rank: Rank, key: Key) -> Array:
        assert key in rank.env, f"{rank.place}: {key} is not there" + (" any more" if rank.freed[key] else "")
        return rank.env[key]

    def _claim(self, rank: Rank, block: Block, instruction: Instruction) -> tuple[Key, ...]:
        """The outputs, as values that are about to be made: their memory is taken now."""
        keys = tuple(_key(rank, block, name) for name in instruction.outputs)
        busy = {key for each in rank.tokens.values() if not each.waited for key in (*each.reads, *each.writes)}
        for key in keys:
            value = rank.group.values[key[0]]
            assert key not in busy, f"{rank.place} changes {key} while an operation under way uses it"
            in_place = key[0] in instruction.inputs or instruction.call == "accumulate" or instruction.attrs.get("adds")
            assert in_place or not rank.made[key], f"{rank.place} makes {key} a second time"
            if value.scope is not Scope.KEPT and (not rank.made[key] or rank.freed[key]):
                rank.made[key] += 1
            assert rank.freed[key] == 0, f"{rank.place} makes {key} after it was freed"
            if value.scope is Scope.BODY:
                rank.maker[key] = block.label
        return keys

    def _free(self, rank: Rank, key: Key, instruction: Instruction) -> None:
        value = rank.group.values[key[0]]
        assert value.scope is not Scope.KEPT, f"{rank.place} frees the kept {key}"
        if value.role != "token":
            assert key in rank.env, f"{rank.place} frees {key}, which is not there"
        for token, under_way in rank.tokens.items():
            assert under_way.waited or key not in (*under_way.reads, *under_way.writes), (
                f"{rank.place} frees {key} while {token} uses it"
            )
        for other in [other for other in rank.env if rank.group.values[other[0]].shares == key[0]]:
            assert other[1] != key[1] or other[0] in instruction.frees, (
                f"{rank.place} frees {key}, but {other} lives in it"
            )
        rank.env.pop(key, None)
        rank.freed[key] += 1
        if value.scope is Scope.BODY:  # the next body makes it again
            rank.freed[key] = rank.made[key] = 0

    def _end(self, rank: Rank) -> float | None:
        """Check what is left, and drop what lives for a step."""
        values, loss = rank.group.values, rank.group.loss
        for token, under_way in rank.tokens.items():
            assert under_way.waited, f"rank {rank.number} never waits for {token}"
        for key, count in rank.made.items():
            if values[key[0]].scope is Scope.MICRO:
                assert count == rank.freed[key] == 1, f"rank {rank.number}: {key} made {count}, freed {rank.freed[key]}"
        left = {key[0] for key in rank.env if values[key[0]].scope is not Scope.KEPT}
        assert left == ({loss} if loss else set()), f"rank {rank.number} keeps {left - {loss}}"
        for key in [key for key in rank.env if values[key[0]].scope is Scope.KEPT]:
            assert rank.env[key].shape == values[key[0]].shape
        return None if loss is None else float(rank.env.pop((loss, None)))

    # ------------------------------------------------------------------ compute

    def _compute(self, rank: Rank, block: Block, instruction: Instruction, fed: Mapping[str, Array]) -> None:
        inputs = [self._read(rank, _key(rank, block, name)) for name in instruction.inputs]
        keys = self._claim(rank, block, instruction)
        values, attrs = rank.group.values, instruction.attrs
        mesh = instruction.mesh or rank.group.mesh
        if instruction.call == "load":
            outputs = [self._load(rank, block, instruction, fed)]
        elif instruction.call == "slice":
            step = attrs["step"]
            outputs = [_chunk(inputs[0], step.dim, mesh, rank.number, step.axes)]
        elif instruction.call == "flat_slice":
            outputs = [_flat_part(inputs[0], mesh.index(rank.number, attrs["axes"]), values[keys[0][0]].shape[0])]
        elif instruction.call == "fused":
            known = dict(zip(instruction.inputs, inputs, strict=True))
            for each in attrs["steps"]:
                assert not each.frees and not known.keys() & set(each.outputs), each
                made = _made(rank, each, [known[name] for name in each.inputs], {**values, **attrs["inner"]})
                known |= dict(zip(each.outputs, made, strict=True))
            outputs = [known[name] for name in instruction.outputs]
        elif instruction.call == "accumulate":
            outputs = [rank.env.get(keys[0], 0.0) + attrs.get("scale", 1.0) * inputs[0]]
        elif instruction.call == "flat_pack":
            over = attrs.get("axes", ())
            index, count = mesh.index(rank.number, over), mesh.size(over)
            outputs = [pack(inputs, attrs["rows"], attrs["sizes"], index, count)]
        elif instruction.call == "flat_unpack":
            outputs = unpack(inputs[0], attrs["rows"], attrs["sizes"], [values[key[0]].shape for key in keys])
        elif instruction.call == "store":
            outputs = [each.copy() for each in inputs]
        elif instruction.call == "sum_squares":
            counted = mesh.index(rank.number, attrs["axes"]) == 0
            outputs = [np.array(sum((float((array**2).sum()) for array in inputs), 0.0) if counted else 0.0)]
        elif instruction.call == "clip_scale":
            outputs = [clip_factor(inputs[0], attrs["clip_norm"])]
        elif instruction.call == "step_check":
            outputs = checked_step(attrs, *inputs)
        elif instruction.call == "scale":
            outputs = [inputs[0] * inputs[1]]
        elif instruction.call in UPDATES:
            count = {"sgd.update": 2, "momentum.update": 3, "adamw.update": 4}[instruction.call]
            outputs, number, skips = [], self.steps, False
            if attrs.get("checked"):
                *inputs, skips, held = inputs
                number = self.steps - int(held[SKIPPED])
            for first in range(0, len(inputs), count):  # of one parameter after the other
                given = instruction.inputs[first : first + count]
                made = instruction.outputs[len(outputs) : len(outputs) + count - 1]
                assert made == (given[0], *given[2:]), instruction
                weight, gradient = (values[name].dtype for name in given[:2])
                assert weight == gradient, f"{rank.place}: the gradient is {gradient}, the weight {weight}"
                own = inputs[first : first + count]
                outputs += (own[0], *own[2:]) if skips else UPDATES[instruction.call](attrs, number, *own)
        else:
            outputs = _made(rank, instruction, inputs, values)
            if instruction.attrs.get("adds"):
                outputs = [rank.env.get(keys[0], 0.0) + outputs[0]]
        for key, array in zip(keys, outputs, strict=True):
            value, array = values[key[0]], np.asarray(array)
            assert array.shape == value.shape, f"{rank.place}: {key} comes as {array.shape}, not {value.shape}"
            wanted = np.floating if value.dtype.startswith(("float", "bfloat")) else np.integer
            assert np.issubdtype(array.dtype, wanted), f"{rank.place}: {key} comes as {array.dtype}, not {value.dtype}"
            rank.env[key] = array
        for name, shape in zip((*instruction.inputs, *instruction.outputs), instruction.shapes, strict=True):
            assert values[name].shape == shape, (instruction, name)

    def _load(self, rank: Rank, block: Block, instruction: Instruction, fed: Mapping[str, Array]) -> Array:
        attrs = instruction.attrs
        layout, shape = attrs["layout"], attrs["shape"]
        region = layout.region(rank.number, shape)
        rows = shape[0]
        if attrs["source"] == "local":  # fed are this rank's rows of every micro-batch
            rows = region[0][1] - region[0][0]
            region = ((0, rows), *region[1:])
        whole = fed[attrs["tensor"]]
        number, count = attrs.get("slice", (0, 1))  # of a micro-batch
        assert len(whole) == rows * count * self.program.num_micro_batches, (instruction, whole.shape)
        first = (block.micro_batch * count + number) * rows
        return _box(whole[first : first + rows], region).copy()

    # ------------------------------------------------------------ communication

    def _issue(self, rank: Rank, block: Block, instruction: Instruction) -> UnderWay:
        reads = tuple(_key(rank, block, name) for name in instruction.inputs)
        inputs = [self._read(rank, key).copy() for key in reads]
        writes = self._claim(rank, block, instruction)
        if instruction.kind is Kind.COLLECTIVE:
            assert len(inputs) == len(writes) == 1, instruction
            return self._collective(rank, block, instruction, inputs[0], reads, writes)
        if instruction.kind is Kind.SEND:
            return self._send(rank, block, instruction, inputs[0])
        return self._receive(rank, block, instruction, writes)

    def _collective(
        self,
        rank: Rank,
        block: Block,
        instruction: Instruction,
        array: Array,
        reads: tuple[Key, ...],
        writes: tuple[Key, ...],
    ) -> UnderWay:
        members = rank.group.members(instruction, rank.number)
        span = max(rank.group.values[name].span_bytes for name in (*instruction.inputs, *instruction.outputs))
        assert instruction.message_bytes == span, f"{rank.place}: {instruction.message_bytes} bytes, not {span}"
        dtypes = {rank.group.values[name].dtype for name in (*instruction.inputs, *instruction.outputs)}
        assert dtypes == {instruction.dtype}, f"{rank.place}: {dtypes}, not {instruction.dtype}"
        order = self.issued[instruction.channel, members]
        mine = f"{block.label}/{instruction.name}"
        order[rank.number].append(mine)
        for other, names in order.items():
            place = len(order[rank.number]) - 1
            assert len(names) <= place or names[place] == mine, (
                f"channel {instruction.channel}: rank {rank.number} issues {mine}, rank {other} {names[place]}"
            )
        meeting = self.meetings.setdefault((mine, members), Meeting(mine, frozenset(members)))
        assert rank.number not in meeting.brought, f"{rank.place} runs twice in a step"
        meeting.brought[rank.number] = array

        def finish() -> Sequence[Array]:
            parts = [meeting.brought[member] for member in members]
            return [_collected(instruction, rank, parts, members.index(rank.number))]

        return UnderWay([meeting], finish, reads, writes)

    def _send(self, rank: Rank, block: Block, instruction: Instruction, array: Array) -> UnderWay:
        source, _, shape = _transfer(instruction)
        number = self._count(rank, instruction)
        origin = source.region(rank.number, shape)
        assert array.shape == source.local_shape(shape), (instruction, array.shape)
        meetings = []
        for piece in instruction.pieces:
            if piece.src_rank == rank.number:
                meeting = self._pair(instruction, piece.src_rank, piece.dst_rank, number)
                meeting.brought.setdefault("send", (instruction.name, block.micro_batch, []))
                meeting.brought["send"][2].append((piece.region, _box(array, piece.region, origin)))
                meetings.append(meeting)
        return UnderWay(meetings, tuple, (), ())

    def _receive(self, rank: Rank, block: Block, instruction: Instruction, writes: tuple[Key, ...]) -> UnderWay:
        _, target, shape = _transfer(instruction)
        number = self._count(rank, instruction)
        region = target.region(rank.number, shape)
        sources = {piece.src_rank for piece in instruction.pieces if piece.dst_rank == rank.number}
        meetings = [self._pair(instruction, source, rank.number, number) for source in sorted(sources)]
        for meeting in meetings:
            meeting.brought["recv"] = True

        def finish() -> Sequence[Array]:
            result = np.full([stop - start for start, stop in region], np.nan)
            for meeting in meetings:
                name, micro_batch, parts = meeting.brought["send"]
                assert (name, micro_batch) == (instruction.name, block.micro_batch), (
                    f"rank {rank.number} takes {name} of micro-batch {micro_batch} for {block.label}/{instruction.name}"
                )
                for box, array in parts:
                    at = tuple(
                        slice(low - start, high - start) for (low, high), (start, _) in zip(box, region, strict=True)
                    )
                    assert np.isnan(result[at]).all(), f"{instruction.name}: {box} comes twice"
                    result[at] = array
            assert not np.isnan(result).any(), f"{instruction.name}: a part of {region} never comes"
            dtype = rank.group.values[instruction.outputs[0]].dtype
            return [result if dtype.startswith(("float", "bfloat")) else result.astype(np.int64)]

        return UnderWay(meetings, finish, (), writes)

    def _count(self, rank: Rank, instruction: Instruction) -> int:
        key = instruction.channel, instruction.kind
        rank.num_on_channel[key] += 1
        arriving: Counter[int] = Counter()
        for piece in instruction.pieces:
            if not piece.is_local:
                arriving[piece.dst_rank] += piece.num_elements * itemsize(instruction.dtype)
        assert instruction.message_bytes == max(arriving.values(), default=0), instruction
        return rank.num_on_channel[key]

    def _pair(self, instruction: Instruction, source: int, target: int, number: int) -> Meeting:
        key = (instruction.channel, source, target, number)
        return self.meetings.setdefault(key, Meeting(str(key), frozenset({"send", "recv"})))


def live_bytes(group: GroupProgram) -> Iterator[tuple[str, int]]:
    """Live bytes while each instruction of a step runs, by its id: `frees` are believed."""
    live = sum(value.size_bytes for value in group.values.values() if value.scope is Scope.KEPT)
    there: set[Key] = set()
    for block, instruction in group.walk():

        def key(name: str, block: Block = block) -> Key:
            return name, block.micro_batch if group.values[name].scope is Scope.MICRO else None

        for name in instruction.outputs:
            if group.values[name].scope is not Scope.KEPT and key(name) not in there:
                there.add(key(name))
                live += group.values[name].size_bytes
        yield f"{block.label}/{instruction.name}", live
        for name in instruction.frees:
            there.remove(key(name))
            live -= group.values[name].size_bytes


def _made(rank: Rank, instruction: Instruction, inputs: Sequence[Array], values: Mapping[str, Value]) -> list[Array]:
    """What an operator, or its gradient, makes."""
    if instruction.call == "sum":
        return [sum(inputs[1:], inputs[0].copy())]
    mesh, first = instruction.mesh or rank.group.mesh, values[instruction.outputs[0]]
    attrs = dict(instruction.attrs, shape=first.shape, dtype=first.dtype)
    attrs["first"] = mesh.index(rank.number, attrs.get("bias_axes", ())) == 0
    attrs["part"] = {dim: mesh.index(rank.number, axes) for dim, axes in attrs.get("split", {}).items()}
    if attrs.get("scaled"):
        *inputs, held = inputs
        attrs["scale"] *= held[SCALE]
    made = RULES[instruction.call](attrs, *inputs)
    return list(made) if isinstance(made, tuple) else [made]


def _key(rank: Rank, block: Block, name: str, micro_batch: int | None = None) -> Key:
    micro_batch = block.micro_batch if micro_batch is None else micro_batch
    return name, micro_batch if rank.group.values[name].scope is Scope.MICRO else None


def _transfer(instruction: Instruction) -> tuple[TensorLayout, TensorLayout, tuple[int, ...]]:
    assert instruction.transfer is not None
    return instruction.transfer


def _box(array: Array, region: Sequence[tuple[int, int]], origin: Sequence[tuple[int, int]] | None = None) -> Array:
    starts = [start for start, _ in origin] if origin is not None else [0] * len(region)
    return array[tuple(slice(low - at, high - at) for (low, high), at in zip(region, starts, strict=True))]


def _flat_part(array: Array, index: int, size: int) -> Array:
    flat = array.reshape(-1)[index * size : (index + 1) * size]
    return np.concatenate([flat, np.zeros(size - len(flat))])


def _chunk(array: Array, dim: int, mesh: Any, rank: int, axes: Sequence[str]) -> Array:
    count = mesh.size(axes)
    assert array.shape[dim] % count == 0, (array.shape, dim, axes)
    return np.split(array, count, axis=dim)[mesh.index(rank, axes)].copy()


def _collected(instruction: Instruction, rank: Rank, parts: list[Array], index: int) -> Array:
    call, step, count = instruction.call, instruction.attrs.get("step"), len(parts)
    value = rank.group.values[instruction.outputs[0]]
    if call == "all_reduce":
        return sum(parts[1:], parts[0].copy())
    if call == "all_gather_flat":
        assert parts[0].size == -(-math.prod(value.shape) // count)
        return np.concatenate(parts)[: math.prod(value.shape)].reshape(value.shape)
    if call == "reduce_scatter_flat":
        assert value.shape[0] * count >= parts[0].size
        return _flat_part(sum(parts[1:], parts[0].copy()), index, value.shape[0])
    assert step is not None and tuple(step.axes) == tuple(instruction.axes), instruction
    if call == "all_gather":
        return np.concatenate(parts, axis=step.dim)
    if call == "reduce_scatter":
        return np.split(sum(parts[1:], parts[0].copy()), count, axis=step.dim)[index].copy()
    assert call == "all_to_all", call
    return np.concatenate([np.split(part, count, axis=step.to_dim)[index] for part in parts], axis=step.dim)
