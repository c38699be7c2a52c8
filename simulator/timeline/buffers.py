"""Memory that communication takes next to a program's values: messages that are packed, parts that are joined.

The buffers are those of twofold's executor. Reductions of full tensors work in place, and a gather along the first dim
arrives where it is to be; the parts of any other gather are joined when they are there, which takes their size once
more for a moment; what is scattered or exchanged along another dim than the first is laid out again and stays until it
is over, and so does a message of a transfer, packed or to be unpacked, that is not one full piece. Buffers that a
communication library keeps for itself are another matter (`Machine.communicator_bytes`), as are those of a kernel that
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plans.model.graph import itemsize
from plans.program import GroupProgram, Instruction, Kind

__all__ = ["Buffers", "buffers_of", "peak_of_sum"]

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Bytes of one rank for one communication: from its issue until it is over, and for a moment at its end."""

    in_flight_bytes: int = 0
    joining_bytes: int = 0


def buffers_of(instruction: Instruction, group: GroupProgram, rank: int) -> Buffers:
    """The memory of one communication of `rank`, besides its inputs and outputs.

    >>> from plans.layout import Layout
    >>> from plans.program import Value
    >>> values = {"x": Value(name="x", shape=(10,)), "mine": Value(name="mine", shape=(4,))}
    >>> group = GroupProgram(mesh=Layout((3,), ("dp",)), values=values, blocks=())
    >>> scatter = Instruction(
    ...     name="r", kind=Kind.COLLECTIVE, call="reduce_scatter_flat", part="C", inputs=("x",), outputs=("mine",),
    ...     axes=("dp",),
    ... )
    >>> buffers_of(scatter, group, 0)  # padded from 10 to 12 elements
    Buffers(in_flight_bytes=48, joining_bytes=0)
    """
    if instruction.kind in (Kind.SEND, Kind.RECV):
        return Buffers(in_flight_bytes=_messages(instruction, rank))
    members = group.members(instruction, rank)
    if instruction.kind is not Kind.COLLECTIVE or len(members) < 2:
        return Buffers()
    before = sum(group.values[name].span_bytes for name in instruction.inputs)
    after = sum(group.values[name].span_bytes for name in instruction.outputs)
    straight = tuple(sorted(members)) == members
    call = instruction.call
    if call == "reduce_scatter_flat":
        padded = after * len(members)
        return Buffers(in_flight_bytes=padded if padded != before or not straight else 0)
    if call == "all_gather_flat":
        return Buffers(joining_bytes=0 if straight else after)
    step = instruction.attrs.get("step")
    if step is None:
        return Buffers()
    if call == "all_gather":
        return Buffers(joining_bytes=0 if step.dim == 0 and straight else after)
    if call == "reduce_scatter":
        return Buffers(in_flight_bytes=0 if step.dim == 0 and straight else before)
    if call == "all_to_all":
        cut = 0 if step.to_dim == 0 and straight else before
        return Buffers(in_flight_bytes=cut, joining_bytes=0 if step.dim == 0 and straight else after)
    return Buffers()


def _messages(instruction: Instruction, rank: int) -> int:
    """Bytes of the packed messages of a rank; one piece that is all of what a rank holds or gets is not copied."""
    is_send = instruction.kind is Kind.SEND
    pieces = instruction.pieces.of_rank(rank, sends=is_send)
    if instruction.transfer is not None and len(pieces) == 1:
        source, target, shape = instruction.transfer
        whole = (source if is_send else target).region(rank, shape)
        if tuple(map(tuple, pieces[0].region)) == tuple(map(tuple, whole)):
            return 0
    return sum(piece.num_elements for piece in pieces) * itemsize(instruction.dtype)


def peak_of_sum(
    times_ps: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], changes: Sequence[tuple[int, int]]
) -> int:
    """The largest sum of a curve of live bytes and of changes (time, bytes) next to it.

    What happens at one time is taken to overlap: the largest entry of each counts.

    >>> peak_of_sum(np.array([0, 5, 5, 9]), np.array([10, 30, 20, 0]), [(5, 4), (7, -4), (9, 100), (9, -100)])
    120
    """
    times = np.array([time for time, _ in changes], dtype=np.int64)
    size = np.array([size for _, size in changes], dtype=np.int64)
    sequence = np.lexsort((-size, times))
    times, buffers = times[sequence], np.cumsum(size[sequence])
    at = np.concatenate([times_ps, times])
    return int((_at_or_before(times_ps, sizes, at) + _at_or_before(times, buffers, at)).max())


def _at_or_before(times: _Column, sizes: _Column, at: _Column) -> _Column:
    """The largest entry of a step function that holds at some moment of each time, what it was before included."""
    first, stop = np.searchsorted(times, at, "left"), np.searchsorted(times, at, "right")
    before = np.where(first > 0, sizes[np.maximum(first - 1, 0)], 0)
    largest = before.copy()
    widest = int((stop - first).max(initial=0))
    for shift in range(widest):
        here = first + shift < stop
        largest[here] = np.maximum(largest[here], sizes[(first + shift)[here]])
    return largest
