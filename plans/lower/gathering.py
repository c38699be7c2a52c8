"""Gathers sharded weights: once at the start of a step, or (level 3) block by block in every body that reads them.

Several weights share one flat buffer. Packing a rank's shards, gathering them with one collective, and unpacking them
are separate instructions, so that their time and memory count in simulator and executor. A master weight is rounded to
the dtype of the graph before it is gathered.

At level 3 a weight exists within a body. The gather of a block is issued `prefetch` blocks before its first operator,
on a separate channel, and waited for where the weight is first read. Liveness frees the weight after its last use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plans.layout import Layout
from plans.lower.buckets import Bucket
from plans.lower.emit import Emitter, ValueTable, channel_of
from plans.program import Instruction, Kind, Scope, Value

__all__ = ["Arrival", "collective", "gather", "wait", "with_arrivals", "with_gathers"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """The end of a gather: a WAIT and, for several weights, the unpacking."""

    instructions: tuple[Instruction, ...]


WEIGHTS = ":weights"
"""Ends the names of channels on which gathers overtake reductions."""


def gather(emitter: Emitter, bucket: Bucket, scope: Scope, *, channel_end: str = "", blocking: bool = False) -> Arrival:
    """Issue the gather of a bucket; returns what makes its weights usable.

    Args:
        emitter: where it is issued.
        bucket: of sharded parameters.
        scope: how long the weights and the buffers live.
        channel_end: added to the name of the channel.
        blocking: wait at once; nothing is returned.
    """
    table, first = emitter.table, bucket.first
    dtype, mesh, axes = first.tensor.dtype, first.mesh, first.axes
    shards = tuple(f"{name}#shard" for name in bucket.names)
    source, result, temporary = shards[0], first.name, False
    if not bucket.is_single:
        source = table.add(_buffer(f"{bucket.name}#shards", sum(bucket.sizes), dtype, scope))
        result = table.add(_buffer(f"{bucket.name}#whole", mesh.size(axes) * sum(bucket.sizes), dtype, scope))
        emitter.compute(
            f"{source}.pack", "flat_pack", "U", shards, (source,), mesh=mesh, attrs={"rows": 1, "sizes": bucket.sizes}
        )
        temporary = True
    elif table[source].dtype != dtype:
        source = table.add(_buffer(f"{first.name}#cast", first.shard_size, dtype, scope))
        emitter.compute(f"{source}.make", "cast.forward", "U", shards, (source,), mesh=mesh)
        temporary = True
    frees = (source,) if temporary and scope is Scope.STEP else ()
    line = collective(
        emitter, "all_gather_flat", source, result, (mesh, axes), None if blocking else scope, channel_end=channel_end,
        frees=frees if blocking else (),
    )  # fmt: skip
    arrival = Emitter(mesh=emitter.mesh, table=table)
    if line.token is not None:
        emitter.pending.pop(result)
        wait(arrival, result, line.token, frees)
    if not bucket.is_single:
        arrival.compute(
            f"{result}.unpack", "flat_unpack", "U", (result,), bucket.names, mesh=mesh,
            attrs={
                "rows": mesh.size(axes),
                "sizes": bucket.sizes,
                "shapes": tuple(parameter.shape for parameter in bucket.parameters),
            },
            frees=(result,) if scope is Scope.STEP else (),
        )  # fmt: skip
    return Arrival(instructions=tuple(arrival.instructions))


def collective(
    emitter: Emitter,
    call: str,
    value: str,
    result: str,
    along: tuple[Layout, tuple[str, ...]],
    scope: Scope | None,
    *,
    channel_end: str = "",
    frees: tuple[str, ...] = (),
) -> Instruction:
    """Append a collective of one value, over the groups of a mesh along axes.

    `scope` is that of its token, None blocks; `channel_end` is added to the name of its channel.
    """
    (mesh, axes), table, name = along, emitter.table, f"{result}.{call}"
    before, after = table[value], table[result]
    line = Instruction(
        name=name, kind=Kind.COLLECTIVE, call=call, part="C", inputs=(value,), outputs=(result,), mesh=mesh, axes=axes,
        channel=channel_of(mesh, axes) + channel_end, message_bytes=max(before.span_bytes, after.span_bytes),
        token=None if scope is None else emitter.token(name, scope), shapes=(before.shape, after.shape),
        dtype=before.dtype, frees=frees,
    )  # fmt: skip
    emitter.add(line)
    return line


def wait(emitter: Emitter, value: str, token: str, frees: tuple[str, ...] = ()) -> None:
    """Append the WAIT for the communication that produces `value`."""
    emitter.instructions.append(
        Instruction(
            name=f"{token}.wait", kind=Kind.WAIT, call="wait", part="C", inputs=(value,), waits=token, frees=frees
        )
    )


def with_arrivals(instructions: Sequence[Instruction], arrivals: Mapping[str, Arrival]) -> list[Instruction]:
    """The same body with each gather completed before the first use of its weights; all weights of a bucket arrive at
    once."""
    result: list[Instruction] = []
    there: set[Arrival] = set()
    for instruction in instructions:
        for name in instruction.inputs:
            if name in arrivals and arrivals[name] not in there:
                there.add(arrivals[name])
                result += arrivals[name].instructions
        result.append(instruction)
    return result


def with_gathers(
    body: Sequence[Instruction],
    blocks: Mapping[str, Sequence[Bucket]],
    block_of: Mapping[str, str],
    prefetch: int,
    mesh: Layout,
    table: ValueTable,
) -> list[Instruction]:
    """The same body with the gathers of the weights that it reads.

    Args:
        body: of one chunk.
        blocks: block -> the buckets of its weights that are gathered for each use.
        block_of: operator -> block.
        prefetch: by how many blocks a gather is issued ahead.
        mesh, table: of the group.
    """
    bucket_of = {name: bucket for buckets in blocks.values() for bucket in buckets for name in bucket.names}
    home_of = {bucket: block for block, buckets in blocks.items() for bucket in buckets}
    begun: dict[str, int] = {}
    start: dict[str, int] = {}
    used: dict[str, dict[Bucket, None]] = {}
    for position, instruction in enumerate(body):
        if instruction.operator:
            begun.setdefault(block_of[instruction.operator], position)
        for name in instruction.inputs:
            if name in bucket_of:
                bucket = bucket_of[name]
                block = home_of[bucket]
                used.setdefault(block, {})[bucket] = None
                start.setdefault(block, min(position, begun.get(block, position)))
    order = sorted(start, key=lambda block: start[block])
    issues: dict[int, list[str]] = {}
    for number, block in enumerate(order):
        at = start[order[number - prefetch]] if number >= prefetch else 0
        issues.setdefault(at, []).append(block)
    result: list[Instruction] = []
    arrivals: dict[str, Arrival] = {}
    for position, instruction in enumerate(body):
        for block in issues.get(position, ()):
            emitter = Emitter(mesh=mesh, table=table)
            for bucket in used[block]:
                arrivals |= dict.fromkeys(bucket.names, gather(emitter, bucket, Scope.BODY, channel_end=WEIGHTS))
            result += emitter.instructions
        result.append(instruction)
    return with_arrivals(result, arrivals)


def _buffer(name: str, size: int, dtype: str, scope: Scope) -> Value:
    return Value(name=name, shape=(size,), dtype=dtype, scope=scope, role="buffer")
