"""Schedules that repeat one building block ("Pipeline Parallelism with Controllable Memory", arXiv 2405.15362).

Take every action as one unit of time. The **block** says when one micro-batch does its four passes on each rank:
forward on the rank's first chunk, forward on its second, input gradient on the second, input gradient on the first.
The next micro-batch does the same six units later, because with the two weight gradients it keeps a rank busy for six.
If the passes never meet on a rank, its free units are just right for the weight gradients, and the time from the
forwards to their backwards, over six, is the number of activations that stay alive: short blocks need little memory.

The repetition alone wastes time where it begins and ends, so both ends are replayed:

* warm-up (until the first micro-batch is back on rank 0): the passes in the order of the block, each as soon as it can;
* cool-down (from when the last micro-batch enters): whichever pass can run, the earliest in the block first.

In both, a weight gradient fills every unit in which no pass can run. A forward must leave room for all forwards that
the block has before it, so no rank holds more than `max_alive` activations: then what a forward waits for is always
earlier in the block, and the replay cannot get stuck. Between the ends the block is kept, which is what the promises
about unequal times rest on. Only the ends are replayed action by action; the middle is arithmetic on arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from plans.schedules.phases import build, forward, input_gradient, v_placement, weight_gradient
from plans.schedules.schedule import Schedule

__all__ = ["Block", "repeat_block"]

_PERIOD = 6
_F0, _F1, _I0, _I1, _W0, _W1 = (
    step(chunk)[0] for step in (forward, input_gradient, weight_gradient) for chunk in (0, 1)
)
_NUM_STEPS = 8
_WEIGHT_OF = {_I0: _W0, _I1: _W1}


class Block(NamedTuple):
    """The times of the passes of one micro-batch on one rank, in units of one action."""

    forward_first: int
    forward_second: int
    input_second: int
    input_first: int


def repeat_block(name: str, blocks: Sequence[Block], num_micro_batches: int, max_alive: int) -> Schedule:
    """The schedule that repeats `blocks` (one per rank) for every micro-batch, both ends replayed.

    Args:
        name: name of the schedule.
        blocks: the passes must not meet: the four times of a rank differ modulo 6.
        num_micro_batches: at least 1.
        max_alive: the most activations on a rank, in units of one micro-batch on one chunk.
    """
    # Between the ends nothing changes from one micro-batch to the next: both are the same for all larger numbers.
    num_enough = blocks[0].input_first // _PERIOD + 4
    phases = []
    for block, (first, last) in zip(
        blocks, _ends(tuple(blocks), min(num_micro_batches, num_enough), max_alive), strict=True
    ):
        steps = _slots(block, num_micro_batches).steps
        phases.append(first + steps[len(first) : len(steps) - len(last)].tobytes() + last)
    return build(name, phases, num_micro_batches, v_placement(len(blocks)))


@lru_cache(maxsize=256)
def _ends(blocks: tuple[Block, ...], num_micro_batches: int, max_alive: int) -> tuple[tuple[bytes, bytes], ...]:
    """Per rank the steps of the warm-up and those of the cool-down."""
    slots = [_slots(block, num_micro_batches) for block in blocks]
    first_is_back = blocks[0].input_first
    last_enters = max(first_is_back, _PERIOD * (num_micro_batches - 1))
    before = [_part(rank, 0, first_is_back) for rank in slots]
    begun = [_part(rank, 0, last_enters) for rank in slots]
    after = [_part(rank, last_enters, int(rank.times[-1]) + 1) for rank in slots]
    warmup = _replay(before, [_part(rank, 0, 0) for rank in slots], max_alive, is_in_order=True)
    cooldown = _replay(after, begun, max_alive, is_in_order=False)
    return tuple(zip(warmup, cooldown, strict=True))


class _Slots(NamedTuple):
    """Steps of one rank in the order of time."""

    times: NDArray[np.int64]
    steps: NDArray[np.uint8]


def _slots(block: Block, num_micro_batches: int) -> _Slots:
    """The repeated block of one rank, weight gradients in the first free units, the oldest first."""
    starts = np.array(block)[:, None] + _PERIOD * np.arange(num_micro_batches)
    passes = np.repeat(np.array([_F0, _F1, _I1, _I0], np.uint8), num_micro_batches)
    is_free = np.ones(int(starts.max()) + 1 + 2 * num_micro_batches, bool)
    is_free[starts] = False
    free = np.flatnonzero(is_free)
    oldest_first = np.argsort(starts[2:].ravel())
    # The k-th takes the first free unit after its input gradient, but one behind the unit of the one before it.
    count = np.arange(2 * num_micro_batches)
    first_free = np.searchsorted(free, starts[2:].ravel()[oldest_first])
    unit = count + np.maximum.accumulate(first_free - count)
    weights = np.where(oldest_first < num_micro_batches, _W1, _W0).astype(np.uint8)
    times = np.concatenate((starts.ravel(), free[unit]))
    by_time = np.argsort(times)
    return _Slots(times[by_time], np.concatenate((passes, weights))[by_time])


def _part(slots: _Slots, begin: int, end: int) -> _Slots:
    """The passes from `begin` until before `end`."""
    first, last = np.searchsorted(slots.times, (begin, end))
    return _Slots(slots.times[first:last], slots.steps[first:last])


class _Pass(NamedTuple):
    """A forward or input gradient that a rank has to do."""

    time: int
    """In the repeated block."""
    step: int
    micro_batch: int
    previous_rank: int
    previous_step: int
    """The source of the same micro-batch; rank -1 if from outside."""
    num_forwards_before: int
    """Forwards that the block has earlier on this rank; -1 for an input gradient, which needs no room."""


def _replay(todo: Sequence[_Slots], done: Sequence[_Slots], max_alive: int, *, is_in_order: bool) -> list[bytes]:
    """Per rank the steps of `todo` in the order in which they run unit by unit, each pass as soon as it can.

    `done` is finished before. A pass can run when its micro-batch is through the pass before (passes of one step keep
    the order of their micro-batches, so a count says which are through) and, for a forward, when there is room. Among
    those that can, the earliest in the block goes first; with `is_in_order` none overtakes an earlier one.
    """
    num_ranks = len(todo)
    streams = [_streams(rank, num_ranks, todo[rank], done[rank], is_in_order) for rank in range(num_ranks)]
    # counts of finished steps per rank; the last entry is the world outside, from where every micro-batch has come
    num_done = [np.bincount(slots.steps, minlength=_NUM_STEPS).tolist() for slots in done]
    num_done.append([np.inf] * _NUM_STEPS)
    weights = [_pending_weights(slots) for slots in done]
    weights_left = [int(np.isin(slots.steps, (_W0, _W1)).sum()) for slots in todo]
    result = [bytearray() for _ in range(num_ranks)]
    num_left = sum(len(slots.steps) for slots in todo)
    while num_left:
        now = []
        for rank in range(num_ranks):
            room = max_alive + num_done[rank][_W0] + num_done[rank][_W1]
            chosen = None
            for stream in streams[rank]:
                if not stream or (chosen is not None and chosen[0].time < stream[0].time):
                    continue
                head = stream[0]
                is_through = num_done[head.previous_rank][head.previous_step] > head.micro_batch
                if is_through and head.num_forwards_before < room:
                    chosen = stream
            if chosen is not None:
                now.append((rank, chosen.popleft().step))
            elif weights_left[rank] and weights[rank]:
                weights_left[rank] -= 1
                now.append((rank, weights[rank].popleft()))
        assert now  # what a forward waits for is earlier in the block
        for rank, step in now:
            num_done[rank][step] += 1
            result[rank].append(step)
            if step in _WEIGHT_OF:
                weights[rank].append(_WEIGHT_OF[step])
        num_left -= len(now)
    return [bytes(steps) for steps in result]


def _streams(rank: int, num_ranks: int, todo: _Slots, done: _Slots, is_in_order: bool) -> list[deque[_Pass]]:
    """The passes of `todo`: those of a stream keep their order, all in one or one per step."""
    first, last = rank == 0, rank == num_ranks - 1
    previous = {
        _F0: (rank - 1, _F0),
        _F1: (rank, _F0) if last else (rank + 1, _F1),
        _I1: (rank, _F1) if first else (rank - 1, _I1),
        _I0: (rank, _I1) if last else (rank + 1, _I0),
    }
    streams: dict[int, deque[_Pass]] = {}
    count = np.bincount(done.steps, minlength=_NUM_STEPS).tolist()
    for time, step in zip(todo.times.tolist(), todo.steps.tolist(), strict=True):
        if step in previous:
            num_forwards_before = count[_F0] + count[_F1] if step in (_F0, _F1) else -1
            stream = streams.setdefault(0 if is_in_order else step, deque())
            stream.append(_Pass(time, step, count[step], *previous[step], num_forwards_before))
            count[step] += 1
    return list(streams.values())


def _pending_weights(done: _Slots) -> deque[int]:
    """Weight gradients of `done`'s input gradients that are not in `done`; they are done oldest first."""
    inputs = done.steps[np.isin(done.steps, (_I0, _I1))].tolist()
    num_weights = int(np.isin(done.steps, (_W0, _W1)).sum())
    return deque(_WEIGHT_OF[step] for step in inputs[num_weights:])
