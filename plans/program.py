"""The program: what every rank does in one training step, instruction by instruction.

A program is written once per group of equal ranks (a pipeline stage's devices) and once per kind of action: a `Body` is
the list of instructions of, say, "forward of chunk 1", a `Block` runs a body for one micro-batch. `walk` spells it out
for one rank. Simulator and executor both read exactly this.

Names of values are scoped: a "micro" value exists once per micro-batch (several are alive at a time), a "body" value
within one block only, and is recomputed in the next block that needs it (a weight that is gathered for each use), a
"step" value once per step (gradient accumulators, tokens of gathers), a "kept" value lives on between steps (weights,
optimizer state).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from plans.layout import Layout, TensorLayout
from plans.model.graph import itemsize
from plans.redistribution.pieces import NO_PIECES, TransferPieces
from plans.step_check import StepCheck

__all__ = [
    "BEGIN",
    "END",
    "Block",
    "Body",
    "ConstantPlacement",
    "GroupProgram",
    "Instruction",
    "Kind",
    "ParameterPlacement",
    "Program",
    "Scope",
    "StepCheckPlacement",
    "Value",
    "moved_values",
]

BEGIN, END = -1, -2
"""Micro-batch numbers of the blocks at the start and at the end of a step."""


class Kind(StrEnum):
    """The resource that an instruction needs: a compute stream, a group of ranks, one peer, or only time."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    SEND = "send"
    RECV = "recv"
    WAIT = "wait"


class Scope(StrEnum):
    """The lifetime of a value (see the module)."""

    MICRO = "micro"
    BODY = "body"
    STEP = "step"
    KEPT = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A local tensor, the same size on every rank of its group.

    Args:
        name: unique in its group.
        shape: the local shape.
        dtype: such as "float32".
        scope: how long it lives.
        role: weight, gradient, optimizer, activation, input, buffer or token (what memory reports call it).
        shares: the value whose memory this one uses (a reshape), or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    scope: Scope = Scope.MICRO
    role: str = "activation"
    shares: str | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of its own memory; 0 for a token or a value that shares another's memory."""
        return 0 if self.role == "token" or self.shares else math.prod(self.shape) * itemsize(self.dtype)

    @property
    def span_bytes(self) -> int:
        """The bytes of the full value, also where it shares another value's memory."""
        return 0 if self.role == "token" else math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One operation of a program: compute, communication, or a wait. Simulator and executor both run instructions.

    Args:
        name: unique in its body, e.g. "layer1.linear.F".
        kind: what it needs.
        call: what is done. COMPUTE: "<operator kind>.forward", "<operator kind>.grad<i>", "slice", "sum", "accumulate",
            "load", "<optimizer>.update", "flat_pack", "flat_unpack", ...; COLLECTIVE: all_gather, reduce_scatter,
            all_reduce, all_to_all (of a redistribution `step`), or all_gather_flat / reduce_scatter_flat (optimizer
            parallel: over flattened, padded tensors); SEND / RECV: "transfer"; WAIT: "wait".
        part: F forward, B input gradient, W weight gradient, R recompute, U update (and packing, unpacking and rounding
            for it), C communication, L loading.
        operator: the operator of the graph it belongs to, or "".
        inputs: values read.
        outputs: values written (an update writes its input again: the name is in both).
        frees: values whose memory is released once it has run.
        mesh: the mesh that `axes` (and axes in `attrs`) belong to; None is the group's mesh.
        axes: mesh axes of the communicating group, first is major; () for none.
        channel: communication with equal channel keeps its order on every rank; "" for compute.
        message_bytes: bytes of the larger of input and output of one rank (the size that collective benchmarks quote);
            for SEND and RECV the largest over ranks.
        token: for communication the token value that WAIT instructions take; None when it blocks.
        waits: for WAIT the token; of the block's micro-batch, or of `attrs["micro_batch"]` where that is given.
        flops: local floating-point operations.
        shapes: the local shapes of the operands the price depends on (inputs, then outputs).
        pieces: SEND / RECV: who sends which part (global index ranges) to whom.
        transfer: SEND / RECV: source and target layout and the full shape.
        attrs: settings for the call; with "adds" it adds its result to an existing output.
        stream: number of the compute stream that it is issued on, for devices that have streams: 0, or 1 for every
            second slice of an interleaved micro-batch. Issue order is program order on all streams together.
    """

    name: str
    kind: Kind
    call: str
    part: str
    operator: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    mesh: Layout | None = None
    axes: tuple[str, ...] = ()
    channel: str = ""
    message_bytes: int = 0
    token: str | None = None
    waits: str | None = None
    flops: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "float32"
    pieces: TransferPieces = NO_PIECES
    transfer: tuple[TensorLayout, TensorLayout, tuple[int, ...]] | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Instructions of one kind of action on one chunk, shared by all its micro-batches."""

    name: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One run of a body: `label` is the action's text ("0F2"), "begin", "end", "0F2.recv" or "0F2.sent".

    ".recv" posts the receives of an action, ".sent" waits for what it has sent and releases it.

    Where two actions run at once, their blocks are cut into parts that take turns: several blocks have one label, and
    what lives within a body lives until the last of them has run.
    """

    label: str
    micro_batch: int
    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlacement:
    """The location of a parameter in a group, and how its optimizer is sharded.

    Args:
        name: name of the parameter in the graph.
        shape: full shape.
        dtype: such as "float32".
        layout: layout of the local weight.
        weight: the value that operators read.
        shard: the value that holds this rank's part of the flattened, zero-padded local weight between steps, or None
            where the weight itself is kept.
        shard_axes: the axes over which it is cut, first is major.
        reduce_axes: the axes over which its gradient is summed.
        states: optimizer state values, of the shard's shape where there is one, else of the weight's; zero at first.
        master: the value that holds the weight in more digits between steps, next to a full weight; None where there is
            none or where the shard is that value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: TensorLayout
    weight: str
    shard: str | None = None
    shard_axes: tuple[str, ...] = ()
    reduce_axes: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    master: str | None = None

    @property
    def kept(self) -> str:
        """The value that is updated: the shard, the master weight or the weight."""
        return self.shard or self.master or self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantPlacement:
    """A tensor that no optimizer changes (a buffer, a frozen parameter), as a group keeps it in one layout.

    Args:
        name: name of the tensor in the graph.
        shape: full shape.
        layout: layout of the part that a rank keeps.
        value: the value that operators read; nothing makes it, the ranks fill it before the first step.
        is_updated: whether a forward changes it (running statistics), in the same way on all copies.
    """

    name: str
    shape: tuple[int, ...]
    layout: TensorLayout
    value: str
    is_updated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheckPlacement:
    """The values of a `StepCheck` that every rank keeps between steps.

    Args:
        check: what is asked for.
        held: the value of the numbers `plans.step_check.Held`.
        norms: the value of the last norms of updates, the newest at the end, NaN where there was none; None without a
            guard against spikes.
    """

    check: StepCheck
    held: str
    norms: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgram:
    """The instructions of every rank of `mesh` in one step.

    Args:
        mesh: the ranks, with the axes over which its collectives run.
        values: every value by name.
        blocks: in program order.
        parameters: where the trained tensors live.
        loss: the value that holds the step's mean loss when the step has ended, or None where it is not known.
        constants: where the tensors live that no optimizer changes, once per layout they are read in.
        step_check: what decides which steps are skipped; None skips none.
    """

    mesh: Layout
    values: Mapping[str, Value]
    blocks: tuple[Block, ...]
    parameters: tuple[ParameterPlacement, ...] = ()
    loss: str | None = None
    constants: tuple[ConstantPlacement, ...] = ()
    step_check: StepCheckPlacement | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run this program."""
        return self.mesh.rank_list

    @property
    def changed(self) -> tuple[ParameterPlacement, ...]:
        """Everything that a step changes and keeps: parameters, and running statistics as parameters without states."""
        updated = (
            ParameterPlacement(
                name=constant.name,
                shape=constant.shape,
                dtype=self.values[constant.value].dtype,
                layout=constant.layout,
                weight=constant.value,
            )
            for constant in self.constants
            if constant.is_updated
        )
        return (*self.parameters, *updated)

    def members(self, instruction: Instruction, rank: int) -> tuple[int, ...]:
        """The ranks that take part in a collective of `rank`, in the order of its axes."""
        return (instruction.mesh or self.mesh).group_of(rank, instruction.axes)

    def walk(self) -> Iterator[tuple[Block, Instruction]]:
        """Every instruction of one step in program order."""
        for block in self.blocks:
            for instruction in block.body.instructions:
                yield block, instruction


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program:
    """One training step on all ranks.

    Args:
        groups: one program per group of equal ranks; every rank is in exactly one group.
        num_micro_batches: number of micro-batches of a step.
        name: name of the graph.

    An instruction's id is `f"{block.label}/{instruction.name}"`; with the rank it is unique within a step. A SEND and
    the RECV of the same name and channel form one transfer, whose `pieces` list the ranks of each message; a collective
    of one id runs once in each group of `mesh.groups(axes)`.

    >>> Program(groups=(GroupProgram(mesh=Layout((4,), ("dp",)), values={}, blocks=()),), num_micro_batches=1)
    <Program: 4 ranks in 1 group, at most 0 instructions per rank>
    """

    groups: tuple[GroupProgram, ...]
    num_micro_batches: int
    name: str = ""

    def __repr__(self) -> str:
        ranks, groups = self.num_ranks, len(self.groups)
        most = max((sum(len(block.body.instructions) for block in group.blocks) for group in self.groups), default=0)
        summary = f"{ranks} rank{'s' * (ranks != 1)} in {groups} group{'s' * (groups != 1)}"
        return f"<Program{self.name and f' {self.name}'}: {summary}, at most {most} instructions per rank>"

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the program runs on."""
        return sum(len(group.ranks) for group in self.groups)

    def group_of(self, rank: int) -> GroupProgram:
        """The group program that `rank` runs."""
        for group in self.groups:
            if rank in group.ranks:
                return group
        raise KeyError(rank)

    def walk(self, rank: int) -> Iterator[tuple[Block, Instruction]]:
        """Every instruction of one step of `rank`, in program order."""
        return self.group_of(rank).walk()


def moved_values(instruction: Instruction) -> tuple[str, ...]:
    """The values that a COMPUTE instruction reads and writes, one entry for each time their bytes are moved.

    Values written in place are moved both ways. A lookup reads only the rows it finds, as many bytes as it writes. The
    angles of rotary positions, given or not, are a table that all samples and heads share and the cache holds.
    """
    names = (*instruction.inputs, *instruction.outputs)
    if instruction.call.startswith("rope."):
        return (instruction.inputs[0], *instruction.outputs)
    if instruction.call == "embedding.forward" and len(instruction.inputs) == 2:
        return (instruction.inputs[0], *instruction.outputs, *instruction.outputs)
    return names
