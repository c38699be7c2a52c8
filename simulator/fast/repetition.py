"""Further periods of a steady state, without evaluating them all.

One period of events is a max-plus map of the periods before it. If every event of a period is later than its fellow in
the period before by some time of its own, the next periods go on in the same way for as long as, for each event, what
it waited for stays the latest: the latest of straight lines is a straight line until another one overtakes. So the
number of periods that follow exactly is known, and is jumped over; then a period is evaluated again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.fast.maxplus import NEVER
from simulator.fast.steady import Cut

__all__ = ["Period", "insert_periods"]

Ints = npt.NDArray[np.int64]

_MANY = 2**62


class Period(NamedTuple):
    """The constants of one period at a cut, (.., events of a period, batch) or (events of a period, batch).

    `fixed`, `own` and `posted` are as in `simulator.fast.known`, of the period before the cut; `own_step` and
    `posted_step` say by how much each further period makes the hosts later. `least_step`: an event must become later
    by so much per period, or the periods must not be repeated.
    """

    weights: Ints
    fixed: Ints
    own: Ints
    own_step: Ints
    posted: Ints
    posted_step: Ints
    least_step: Ints | None

    def of(self, chosen: npt.NDArray[np.int64]) -> Period:
        """The same for some of the batch."""
        return Period(*(None if each is None else each[..., chosen] for each in self))


def insert_periods(cut: Cut, values: Ints, period: Period, repeats: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Insert periods at a cut: in `values` (events, batch) the blocks before the cut become the last ones.

    Returns:
        (batch) how many periods were evaluated, and where the result is exact.
    """
    evaluated = np.zeros(len(repeats), dtype=np.int64)
    fine = np.ones(len(repeats), dtype=bool)
    active = np.flatnonzero(repeats > 0)
    if not len(active):
        return evaluated, fine
    num_blocks, size = cut.blocks.shape
    events = cut.blocks.reshape(-1)
    blocks = np.zeros(((num_blocks + 1) * size, len(active)), dtype=np.int64)
    blocks[:-size] = values[events][:, active]
    state = _State(cut, blocks, period.of(active), repeats[active])
    pause = wait = 1
    while True:
        state.evaluate()
        wait -= 1
        if wait <= 0:
            pause = 1 if state.jump() else min(2 * pause, 16)
            wait = pause
        over = state.left == 0
        if np.any(over):
            ended = active[over]
            values[np.ix_(events, ended)] = state.blocks[size:, over]
            evaluated[ended] = state.evaluated[over]
            fine[ended] = state.fine[over]
            active = active[~over]
            if not len(active):
                return evaluated, fine
            state = state.of(np.flatnonzero(~over))
        state.blocks[:-size] = state.blocks[size:].copy()


class _State:
    """Where the insertion stands: the last blocks with the newest behind them."""

    def __init__(self, cut: Cut, blocks: Ints, period: Period, left: Ints) -> None:
        self._cut = cut
        self._period = period
        self._inputs = np.maximum(cut.inputs, 0)
        self._size = cut.blocks.shape[1]
        self.blocks = blocks
        self.left = left
        self.inserted = np.zeros(len(left), dtype=np.int64)
        self.evaluated = np.zeros(len(left), dtype=np.int64)
        self.fine = np.ones(len(left), dtype=bool)

    def of(self, chosen: npt.NDArray[np.int64]) -> _State:
        """The same for some of the batch."""
        other = _State(
            self._cut, np.ascontiguousarray(self.blocks[:, chosen]), self._period.of(chosen), self.left[chosen]
        )
        other.inserted, other.evaluated = self.inserted[chosen], self.evaluated[chosen]
        other.fine = self.fine[chosen]
        return other

    def evaluate(self) -> None:
        """One more period, into the last block."""
        self.inserted += 1
        self.evaluated += 1
        self.left -= 1
        period, blocks, bounds = self._period, self.blocks, self._cut.bounds
        known = np.maximum(period.fixed, period.own + self.inserted * period.own_step)
        np.maximum(known, period.posted + self.inserted * period.posted_step, out=known)
        newest = blocks[-self._size :]
        for first, stop in zip(bounds[:-1], bounds[1:], strict=True):
            terms = blocks.take(self._inputs[:, first:stop], axis=0)
            terms += period.weights[:, first:stop]
            level = np.maximum.reduce(terms, axis=0)
            np.maximum(level, known[first:stop], out=newest[first:stop])
        if period.least_step is not None:
            self.fine &= np.all(newest - blocks[-2 * self._size : -self._size] >= period.least_step, axis=0)

    def jump(self) -> bool:
        """Leave out the periods that follow by straight lines; whether there were any."""
        period, blocks, size = self._period, self.blocks, self._size
        newest = blocks[-size:]
        step = newest - blocks[-2 * size : -size]
        steady = np.ones(len(self.left), dtype=bool)
        for end in range(size, len(blocks) - size, size):
            steady &= np.all(blocks[end : end + size] - blocks[end - size : end] == step, axis=0)
        if not steady.any():
            return False
        terms = blocks[self._inputs] + period.weights
        reached = np.maximum(terms, NEVER)
        slopes = step[self._inputs % size]
        reached = np.concatenate(
            [
                reached,
                period.fixed[None],
                (period.own + self.inserted * period.own_step)[None],
                (period.posted + self.inserted * period.posted_step)[None],
            ]
        )
        slopes = np.concatenate([slopes, np.zeros_like(step)[None], period.own_step[None], period.posted_step[None]])
        slack = newest - reached
        steady &= np.all(np.any((slack == 0) & (slopes == step), axis=0), axis=0)
        gains = slopes - step
        catching = (gains > 0) & (slack < -(NEVER // 2))
        limit = np.where(catching, slack // np.maximum(gains, 1), _MANY).min(axis=(0, 1))
        if period.least_step is not None:
            steady &= np.all(step >= period.least_step, axis=0)
        count = np.where(steady, np.minimum(self.left, limit), 0)
        if not count.any():
            return False
        for first in range(0, len(blocks), size):
            blocks[first : first + size] += count * step
        self.inserted += count
        self.left -= count
        return True
