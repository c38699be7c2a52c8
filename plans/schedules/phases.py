"""The notation in which the generators write a rank's order: phases of repeated steps, as bytes.

One byte is a step: a kind of action on one of the rank's chunks, without a micro-batch. So a warm-up of three forwards
is `forward(0) * 3`, and a steady phase `(backward(0) + forward(0)) * n`. `build` numbers the micro-batches: on each
chunk forwards, and whole or input backwards, take them in their order; the k-th weight gradient of a chunk belongs to
its k-th input gradient. Everything is done on full arrays, so that a schedule of ten thousand actions takes a
millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plans.schedules.errors import ScheduleError
from plans.schedules.schedule import Schedule, ScheduleTable

__all__ = [
    "MAX_CHUNKS",
    "backward",
    "build",
    "check_counts",
    "forward",
    "input_gradient",
    "looped_placement",
    "rounds",
    "steady",
    "v_placement",
    "weight_gradient",
]

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)
_NUM_KINDS = 4

MAX_CHUNKS = 256 // _NUM_KINDS
"""Largest number of chunks per rank that the one-byte steps can represent."""

_MAX_TURNS = 2**22
"""Ranks times micro-batches: larger tables take minutes and many gigabytes, and no training has them."""


def forward(chunk: int) -> bytes:
    """The step: forward on the rank's `chunk`-th chunk."""
    return bytes([chunk * _NUM_KINDS + _FORWARD])


def backward(chunk: int) -> bytes:
    """The step: full backward."""
    return bytes([chunk * _NUM_KINDS + _BACKWARD])


def input_gradient(chunk: int) -> bytes:
    """The step: input gradient."""
    return bytes([chunk * _NUM_KINDS + _INPUT])


def weight_gradient(chunk: int) -> bytes:
    """The step: weight gradient."""
    return bytes([chunk * _NUM_KINDS + _WEIGHT])


def steady(forwards: bytes, backwards: bytes, num_warmup: int, *, weights: bytes = b"", weight_delay: int = 0) -> bytes:
    """Warm-up forwards, then one forward and one backward by turns until the forwards end, then the backwards left.

    With `weights` (as many as backwards), from the `weight_delay`-th backward on each is followed by the oldest weight
    gradient that is still to be done; those left over come last.
    """
    num_turns = len(forwards) - num_warmup
    turns = np.zeros((len(backwards), 3), np.uint8)
    used = np.zeros_like(turns, dtype=bool)
    turns[:num_turns, 0] = np.frombuffer(forwards[num_warmup:], np.uint8)
    used[:num_turns, 0] = True
    turns[:, 1] = np.frombuffer(backwards, np.uint8)
    used[:, 1] = True
    num_late = min(weight_delay, len(weights))
    num_early = len(weights) - num_late
    if num_early:
        turns[num_late:, 2] = np.frombuffer(weights[:num_early], np.uint8)
        used[num_late:, 2] = True
    return forwards[:num_warmup] + turns[used].tobytes() + weights[num_early:]


def rounds(steps: Sequence[bytes], num_micro_batches: int, per_round: int) -> bytes:
    """The steps in rounds: each step for `per_round` micro-batches, then the next step, until all are done."""
    return b"".join(step * per_round for step in steps) * (num_micro_batches // per_round)


def looped_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """The model in loops over the ranks: stage i on rank i mod num_ranks."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again: the first and the last stage are both on rank 0."""
    return tuple(range(num_ranks)) + tuple(reversed(range(num_ranks)))


def check_counts(name: str, num_ranks: int, num_micro_batches: int) -> None:
    """Refuses counts below 1, and tables that no memory holds."""
    if num_ranks < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"{name} of {num_ranks} ranks and {num_micro_batches} micro-batches: both must be at least 1"
        )
    if num_ranks * num_micro_batches > _MAX_TURNS:
        raise ScheduleError(
            f"{name} of {num_ranks} ranks and {num_micro_batches} micro-batches: their product must be at most "
            f"{_MAX_TURNS}; use larger micro-batches or a smaller batch"
        )


def build(
    name: str,
    phases: Sequence[bytes],
    num_micro_batches: int,
    placement: tuple[int, ...],
    *,
    is_backward_reversed: bool = False,
) -> Schedule:
    """The schedule whose rank r does the steps `phases[r]`.

    Chunk c of a rank is the c-th of the stages that `placement` gives it. Steps for micro-batches beyond the last
    are left out (a generator may write its phases for more than there are). With `is_backward_reversed` whole
    backwards take the last micro-batch first.
    """
    steps = np.frombuffer(b"".join(phases), np.uint8)
    lengths = [len(phase) for phase in phases]
    rank = np.repeat(np.arange(len(phases)), lengths)
    chunk, kind = np.divmod(steps, _NUM_KINDS)
    stage = _stages_by_chunk(placement, len(phases))[rank, chunk]
    micro_batch = np.zeros(len(steps), np.int32)
    for rows in (np.flatnonzero(kind == _FORWARD), np.flatnonzero((kind == _BACKWARD) | (kind == _INPUT))):
        micro_batch[rows] = _occurrence(stage[rows])
    if is_backward_reversed:
        micro_batch[kind == _BACKWARD] = num_micro_batches - 1 - micro_batch[kind == _BACKWARD]
    inputs, weights = np.flatnonzero(kind == _INPUT), np.flatnonzero(kind == _WEIGHT)
    by_stage = inputs[np.argsort(stage[inputs], kind="stable")]
    micro_batch[weights[np.argsort(stage[weights], kind="stable")]] = micro_batch[by_stage]
    exists = micro_batch < num_micro_batches
    rank_start = np.concatenate(([0], np.cumsum(np.bincount(rank[exists], minlength=len(phases)))))
    table = ScheduleTable(rank_start, stage[exists], kind[exists].astype(np.int8), micro_batch[exists])
    return Schedule(
        name=name,
        num_stages=len(placement),
        num_micro_batches=num_micro_batches,
        placement=placement,
        table=table,
    )


def _stages_by_chunk(placement: tuple[int, ...], num_ranks: int) -> NDArray[np.int32]:
    owner = np.array(placement)
    return np.argsort(owner, kind="stable").astype(np.int32).reshape(num_ranks, -1)


def _occurrence(keys: NDArray[np.int32]) -> NDArray[np.int64]:
    """The number of equal entries before each entry."""
    by_key = np.argsort(keys, kind="stable")
    ordered = keys[by_key]
    place = np.arange(len(keys))
    is_first = np.ones(len(keys), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    before = np.empty(len(keys), np.int64)
    before[by_key] = place - np.maximum.accumulate(np.where(is_first, place, 0))
    return before
