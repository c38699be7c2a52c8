"""Collectives and transfers of a program, on gloo and NCCL.

Every communication is built once into a `Launch`, a function `launch(*inputs) -> Work`; `Work.finish()` waits and
returns the outputs. Chunk i of a collective belongs to member i of its team (`executor.step.groups`): where torch
stores the members in another order, chunks are permuted on the way in or out.

Where a dim is cut unevenly (`plans.layout`: parts of ceil(n / k), the last ones smaller or empty) parts are padded with
zeros to the largest before a gather or a reduce-scatter and cut afterwards; an all-to-all sends pieces of unequal size.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from executor.device import Device
from executor.kernels.context import torch_dtype
from executor.step.groups import Groups, Lane, Team
from executor.step.parts import cut_parts, joined_parts
from plans.errors import TwofoldError
from plans.layout import Region
from plans.program import Instruction, Kind, Value
from plans.redistribution import Step, StepKind
from plans.redistribution.rows import sends_rows

__all__ = [
    "Launch", "SelfTransfer", "SelfTransfers", "Work", "collective_launch", "transfer_launch",
]  # fmt: skip

# 2.13 renames two functions and warns about the old names, which are the only ones in 2.11
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work:
    """Communication in flight: the handles to wait for, and how to build the outputs from the received data.

    `finish` may be called more than once. Tensors that are being sent stay referenced until then: a program waits for a
    send where it is known to have arrived (`plans.lower.sends`).
    """

    __slots__ = ("_outputs", "_result", "_works")

    def __init__(self, works: Sequence[Any], result: Callable[[], tuple[Tensor, ...]]) -> None:
        self._works, self._result = works, result
        self._outputs: tuple[Tensor, ...] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._works

    def finish(self) -> tuple[Tensor, ...]:
        """Wait (on an accelerator: let the current stream wait) and return the outputs."""
        if self._outputs is None:
            for work in self._works:
                work.wait()
            self._outputs = self._result()
            self._works, self._result = (), tuple  # lets go of the buffers
        return self._outputs


Launch = Callable[..., Work]
"""Launches one communication with the tensors of the instruction's inputs."""


# -- collectives -------------------------------------------------------------------------------------------------------


def collective_launch(instruction: Instruction, team: Team, output: Value) -> Launch:
    """The function that launches a collective; `output` is the value it makes.

    Raises:
        TwofoldError: a call that is not a collective.
    """
    call, step = instruction.call, instruction.attrs.get("step")
    in_place = instruction.inputs == instruction.outputs or output.shares is not None
    if call == "all_reduce":
        return _all_reduce(team, in_place)
    if call == "all_gather_flat":
        return _gather_flat(team, output.shape)
    if call == "reduce_scatter_flat":
        return _scatter_flat(team, output.shape[0])
    if call not in ("all_gather", "reduce_scatter", "all_to_all"):
        raise TwofoldError(f"instruction {instruction.name!r} has the call {call!r}, which is not a collective")
    assert isinstance(step, Step) and step.dim is not None, instruction
    if team.size == 1:
        return lambda x: Work((), lambda: (x.clone(),))
    if (cuts := _uneven_cuts(step, instruction.attrs.get("shape"), team)) is not None:
        if call == "all_gather":
            return _gather_uneven(team, step.dim, cuts)
        return _scatter_uneven(team, step.dim, cuts) if call == "reduce_scatter" else _exchange_uneven(team, step, cuts)
    if call == "all_gather":
        return _gather(team, step.dim)
    if call == "reduce_scatter":
        return _scatter(team, step.dim)
    assert step.to_dim is not None
    return _exchange(team, step.dim, step.to_dim)


def _all_reduce(team: Team, in_place: bool) -> Launch:
    def launch(x: Tensor) -> Work:
        total = x if in_place else x.clone(memory_format=torch.contiguous_format)
        if team.size == 1:
            return Work((), lambda: (total,))
        return Work((dist.all_reduce(total, group=team.group, async_op=True),), lambda: (total,))

    return launch


def _gather(team: Team, dim: int) -> Launch:
    """Gather parts into consecutive rows and join them along `dim` in the order of the members."""

    def launch(x: Tensor) -> Work:
        x = x.contiguous()
        if _sends_rows("all_gather", team, x.shape, dim, team.size * x.nbytes):
            whole = x.new_empty((*x.shape[:dim], team.size * x.shape[dim], *x.shape[dim + 1 :]))
            work = team.group.allgather_into_tensor_coalesced(_rows(whole, dim), _rows(x, dim))
            return Work((work,), _kept(x, whole))
        buffer = x.new_empty((team.size, *x.shape))
        work = _all_gather(buffer.view(-1), x.view(-1), group=team.group, async_op=True)
        return Work((work,), lambda: (joined_parts(buffer, team, dim),))

    return launch


def _scatter(team: Team, dim: int) -> Launch:
    """Sum a tensor and keep a member's part along `dim`."""

    def launch(x: Tensor) -> Work:
        if _sends_rows("reduce_scatter", team, x.shape, dim, x.nbytes):
            x = x.contiguous()
            part = x.new_empty((*x.shape[:dim], x.shape[dim] // team.size, *x.shape[dim + 1 :]))
            work = team.group.reduce_scatter_tensor_coalesced(_rows(part, dim), _rows(x, dim))
            return Work((work,), _kept(x, part))
        rows = cut_parts(x, team, dim)
        mine = rows.new_empty(rows.shape[1:])
        work = _reduce_scatter(mine.view(-1), rows.view(-1), group=team.group, async_op=True)
        return Work((work,), _kept(rows, mine))

    return launch


def _exchange(team: Team, dim: int, to_dim: int) -> Launch:
    def launch(x: Tensor) -> Work:
        rows = cut_parts(x, team, to_dim)
        buffer = torch.empty_like(rows)
        work = dist.all_to_all_single(buffer.view(-1), rows.view(-1), group=team.group, async_op=True)
        return Work((work,), lambda: (joined_parts(buffer, team, dim), rows)[:1])

    return launch


def _sends_rows(call: str, team: Team, shape: Sequence[int], dim: int, size_bytes: int) -> bool:
    num_rows = math.prod(shape[:dim])
    return num_rows > 1 and team.is_sorted and sends_rows(call, num_rows, size_bytes)


def _rows(x: Tensor, dim: int) -> list[Tensor]:
    """The rows before `dim` of a contiguous tensor, each flattened."""
    return list(x.view(math.prod(x.shape[:dim]), -1).unbind())


# -- uneven dims


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cuts:
    """The parts of a step's dims for the members of a team, if they differ in size.

    `widths` are those of the parts that are gathered, `chunks` the bounds, within what a member holds, of the parts
    that are scattered; both in the order of the members. `padded` is the width of the largest part of that dim.
    """

    widths: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    padded: int = 0
    me: int = 0


def _uneven_cuts(step: Step, shape: Sequence[int] | None, team: Team) -> _Cuts | None:
    if shape is None or (step.before.is_even(shape) and step.after.is_even(shape)):
        return None
    before = [step.before.region(rank, shape) for rank in team.members]
    after = [step.after.region(rank, shape) for rank in team.members]
    gathered = step.dim if step.kind in (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL) else None
    scattered = step.to_dim if step.kind is StepKind.ALL_TO_ALL else step.dim if gathered is None else None
    widths: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()
    padded = 0
    if gathered is not None:
        widths = tuple(part[gathered][1] - part[gathered][0] for part in before)
        padded = step.before.local_shape(shape)[gathered]
    if scattered is not None:
        first = before[0][scattered][0]
        chunks = tuple((part[scattered][0] - first, part[scattered][1] - first) for part in after)
        padded = padded or step.after.local_shape(shape)[scattered]
    return _Cuts(widths=widths, chunks=chunks, padded=padded, me=team.members.index(dist.get_rank()))


def _gather_uneven(team: Team, dim: int, cuts: _Cuts) -> Launch:
    def launch(x: Tensor) -> Work:
        x = _padded(x, dim, cuts.padded)
        buffer = x.new_empty((team.size, *x.shape))
        works = [] if not x.numel() else [_all_gather(buffer.view(-1), x.view(-1), group=team.group, async_op=True)]

        def whole() -> tuple[Tensor, ...]:
            parts = zip(team.order, cuts.widths, strict=True)
            return (torch.cat([buffer[position].narrow(dim, 0, width) for position, width in parts], dim),)

        return Work(works, whole)

    return launch


def _scatter_uneven(team: Team, dim: int, cuts: _Cuts) -> Launch:
    def launch(x: Tensor) -> Work:
        chunks = [x.narrow(dim, low, high - low) for low, high in cuts.chunks]
        rows = torch.stack([_padded(chunks[member], dim, cuts.padded) for member in team.inverse])
        mine = rows.new_empty(rows.shape[1:])
        works = []
        if mine.numel():
            works = [_reduce_scatter(mine.view(-1), rows.view(-1), group=team.group, async_op=True)]
        low, high = cuts.chunks[cuts.me]
        return Work(works, lambda: (mine.narrow(dim, 0, high - low).contiguous(), rows)[:1])

    return launch


def _exchange_uneven(team: Team, step: Step, cuts: _Cuts) -> Launch:
    dim, to_dim = step.dim, step.to_dim
    assert dim is not None and to_dim is not None

    def launch(x: Tensor) -> Work:
        sent = [x.narrow(to_dim, *_start_length(cuts.chunks[member])) for member in team.inverse]
        shapes = []
        for member in team.inverse:
            shape = list(x.shape)
            shape[dim], shape[to_dim] = cuts.widths[member], _start_length(cuts.chunks[cuts.me])[1]
            shapes.append(tuple(shape))
        sizes = [math.prod(shape) for shape in shapes]
        message = torch.cat([tensor.reshape(-1) for tensor in sent])
        buffer = x.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            buffer, message, sizes, [tensor.numel() for tensor in sent], group=team.group, async_op=True
        )

        def whole() -> tuple[Tensor, ...]:
            parts = [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]
            return (torch.cat([parts[position] for position in team.order], dim), message)[:1]

        return Work((work,), whole)

    return launch


def _start_length(bounds: tuple[int, int]) -> tuple[int, int]:
    return bounds[0], bounds[1] - bounds[0]


def _padded(x: Tensor, dim: int, width: int) -> Tensor:
    """`x` padded with zeros along `dim`, contiguous."""
    missing = width - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x.contiguous()


# -- full tensors, flattened


def _gather_flat(team: Team, shape: tuple[int, ...]) -> Launch:
    """Flat shards, the last padded, become a tensor of `shape`."""
    count = math.prod(shape)

    def whole(buffer: Tensor) -> tuple[Tensor, ...]:
        flat = buffer if team.is_sorted else buffer[list(team.order)]
        return (flat.view(-1)[:count].view(shape),)

    def launch(x: Tensor) -> Work:
        if team.size == 1:
            return Work((), lambda: (x[:count].view(shape).clone(),))
        buffer = x.new_empty((team.size, x.numel()))
        work = _all_gather(buffer.view(-1), x, group=team.group, async_op=True)
        return Work((work,), lambda: whole(buffer))

    return launch


def _scatter_flat(team: Team, size: int) -> Launch:
    """A tensor, flattened and padded with zeros, is summed; member i keeps elements [i size, (i + 1) size)."""

    def launch(x: Tensor) -> Work:
        flat = x.reshape(-1)
        padding = team.size * size - flat.numel()
        if padding:
            flat = F.pad(flat, (0, padding))
        if team.size == 1:
            return Work((), lambda: (flat.clone(),))
        if not team.is_sorted:
            flat = flat.view(team.size, size)[list(team.inverse)].view(-1)
        mine = flat.new_empty(size)
        work = _reduce_scatter(mine, flat, group=team.group, async_op=True)
        return Work((work,), _kept(flat, mine))

    return launch


def _kept(sent: Tensor, result: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A function that returns `result` and keeps the sent tensor alive until it is called."""
    return lambda: (result, sent)[:1]


# -- transfers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SelfTransfer:
    """Transfers of a rank to itself on one channel: the k-th SEND matches the k-th RECV, whichever is launched first.

    Args:
        timeout_s: how long `take` waits for a message, where the SEND is launched by another thread (emulation).
        num_sent: messages sent so far.
        num_received: sequence numbers given out so far.
        messages: sequence number -> the message, until it is taken.
        arrived: notified of every message.
    """

    timeout_s: float = 0.0
    num_sent: int = 0
    num_received: int = 0
    messages: dict[int, Tensor] = field(default_factory=dict)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def put(self, message: Tensor) -> None:
        """Send the next message."""
        with self.arrived:
            self.messages[self.num_sent] = message
            self.num_sent += 1
            self.arrived.notify_all()

    def next_sequence(self) -> int:
        """The sequence number of the message that the next RECV takes."""
        self.num_received += 1
        return self.num_received - 1

    def take(self, sequence: int, name: str) -> Tensor:
        """Wait for the message with this sequence number and remove it.

        Raises:
            RuntimeError: it did not arrive within `timeout_s`; `name` is the instruction that waits.
        """
        with self.arrived:
            if not self.arrived.wait_for(lambda: sequence in self.messages, self.timeout_s):
                raise RuntimeError(f"{name} waits for what this rank itself has not sent yet")
            return self.messages.pop(sequence)


SelfTransfers = defaultdict[str, SelfTransfer]
"""the transfers of a rank to itself, by channel."""


def transfer_launch(
    instruction: Instruction, rank: int, groups: Groups | None, device: Device, self_transfers: SelfTransfers
) -> Launch:
    """The function that launches this rank's side of a SEND or a RECV.

    The pieces for one peer travel as one message, in the order of `instruction.pieces`.
    """
    assert instruction.transfer is not None, instruction
    source, target, shape = instruction.transfer
    sending = instruction.kind is Kind.SEND
    per_peer: dict[int, list[tuple[slice, ...]]] = {}
    mine = (source if sending else target).region(rank, shape)
    for piece in instruction.pieces:
        if (piece.src_rank if sending else piece.dst_rank) == rank:
            peer = piece.dst_rank if sending else piece.src_rank
            per_peer.setdefault(peer, []).append(_local(piece.region, mine))
    own = per_peer.pop(rank, None)
    ways = []
    for peer, parts in per_peer.items():
        assert groups is not None
        ends = (rank, peer) if sending else (peer, rank)
        group, tag = groups.flow(instruction.channel, *ends)
        ways.append((peer, parts, group, tag, groups.lane(group)))
    self_transfer = self_transfers[instruction.channel]
    if sending:
        return _send(ways, own, self_transfer)
    local_shape = tuple(stop - start for start, stop in mine)
    return _recv(ways, own, self_transfer, local_shape, instruction, device)


_Way = tuple[int, list[tuple[slice, ...]], Any, int, Lane | None]
"""peer, the local boxes of its pieces, process group, tag, where receives wait until they are needed."""


def _send(ways: Sequence[_Way], own: list[tuple[slice, ...]] | None, self_transfer: SelfTransfer) -> Launch:
    def launch(x: Tensor) -> Work:
        if own is not None:
            self_transfer.put(_packed(x, own))
        works, messages = [], []
        for peer, parts, group, tag, _ in ways:
            messages.append(_packed(x, parts))
            works.append(dist.isend(messages[-1], peer, group=group, tag=tag))
        return Work(works, lambda: (*messages,)[:0])

    return launch


def _recv(
    ways: Sequence[_Way],
    own: list[tuple[slice, ...]] | None,
    self_transfer: SelfTransfer,
    shape: tuple[int, ...],
    instruction: Instruction,
    device: Device,
) -> Launch:
    dtype, where = torch_dtype(instruction.dtype), device.torch_device
    sizes = [sum(_count(part) for part in parts) for _, parts, *_ in ways]
    direct = len(ways) == 1 and own is None and len(ways[0][1]) == 1  # one piece is the whole output

    def launch() -> Work:
        output = torch.empty(shape, dtype=dtype, device=where)
        sequence = self_transfer.next_sequence() if own is not None else -1
        receives, arrived = [], []
        for (peer, _, group, tag, lane), size in zip(ways, sizes, strict=True):
            arrived.append(output.view(-1) if direct else torch.empty(size, dtype=dtype, device=where))
            receives.append(_Receive(partial(dist.irecv, arrived[-1], peer, group=group, tag=tag), lane))

        def result() -> tuple[Tensor, ...]:
            if own is not None:
                _unpack(output, own, self_transfer.take(sequence, instruction.name))
            if not direct:
                for (_, parts, *_), message in zip(ways, arrived, strict=True):
                    _unpack(output, parts, message)
            return (output,)

        return Work(receives, result)

    return launch


class _Receive:
    """A receive that starts at once, or, in a lane, when its message is needed."""

    __slots__ = ("_begin", "_handle", "_lane", "_number")

    def __init__(self, begin: Callable[[], Any], lane: Lane | None) -> None:
        self._begin, self._lane, self._handle = begin, lane, None
        self._number = 0 if lane is None else lane.post(self._start)
        if lane is None:
            self._start()

    def _start(self) -> None:
        self._handle = self._begin()

    def wait(self) -> None:
        """Start the receive if it has not started, and wait for its message."""
        if self._lane is not None:
            self._lane.start_until(self._number)
        assert self._handle is not None
        self._handle.wait()


def _local(region: Region, mine: Region) -> tuple[slice, ...]:
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(region, mine, strict=True))


def _count(part: tuple[slice, ...]) -> int:
    return math.prod(each.stop - each.start for each in part)


def _packed(x: Tensor, parts: Sequence[tuple[slice, ...]]) -> Tensor:
    """The boxes of `x` as one flat tensor; no copy if one box is all of a contiguous `x`."""
    if len(parts) == 1:
        return x[parts[0]].contiguous().view(-1)
    return torch.cat([x[part].reshape(-1) for part in parts])


def _unpack(output: Tensor, parts: Sequence[tuple[slice, ...]], message: Tensor) -> None:
    start = 0
    for part in parts:
        box = output[part]
        box.copy_(message[start : start + box.numel()].view(box.shape))
        start += box.numel()
