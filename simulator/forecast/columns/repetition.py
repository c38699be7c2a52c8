"""Extrapolates further periods of a steady state without evaluating all of them.

One period of events is a max-plus map of the periods before it. After some periods, the events are therefore later than
those a fixed number of periods earlier by constant times. That number is the cyclicity of the map: mostly 1, or the
number of ranks in the slowest loop. This continues as long as each event waits for the same predecessor: the maximum of
straight lines is one of them until another overtakes it. The exact number of equal periods is therefore known and
skipped; then periods are evaluated again. Source: Baccelli et al., "Synchronization and Linearity" (1992), theorem
3.109 (cyclicity).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.forecast.clock_map import NEVER
from simulator.forecast.columns.steady import Cut

__all__ = ["Period", "insert_periods"]

Ints = npt.NDArray[np.int64]

_MANY = 2**62


class Period(NamedTuple):
    """The constants of one period at a cut, (.., events of a period, batch) or (events of a period, batch).

    `fixed`, `own` and `posted` are as in `simulator.forecast.columns.known`, of the period before the cut;
    `own_step` and `posted_step` are the delays of the hosts per further period.
    """

    weights: Ints
    fixed: Ints
    own: Ints
    own_step: Ints
    posted: Ints
    posted_step: Ints

    def of(self, chosen: npt.NDArray[np.int64]) -> Period:
        """The same for a part of the batch."""
        return Period(*(each[..., chosen] for each in self))


def insert_periods(cut: Cut, values: Ints, period: Period, repeats: Ints, most: int) -> Ints:
    """Insert periods at a cut: in `values` (events, batch) the blocks before the cut become the last ones.

    Args:
        cut: where.
        values: values of the events; those before the cut are evaluated.
        period: the constants.
        repeats: (batch) how many periods.
        most: cyclicities up to this one are looked for.

    Returns:
        (batch) how many periods were evaluated.
    """
    evaluated = np.zeros(len(repeats), dtype=np.int64)
    active = np.flatnonzero(repeats > 0)
    if not len(active):
        return evaluated
    num_blocks, _size = cut.blocks.shape
    events = cut.blocks.reshape(-1)
    state = _State(cut, values[events][:, active], period.of(active), repeats[active], most)
    rounds, next_try = 0, 1
    while True:
        state.evaluate()
        rounds += 1
        if rounds == next_try:  # a try costs as much as some periods
            state.jump()
            next_try += max(1, min(rounds // 2, 3 + len(active)))
        over = np.flatnonzero(state.left == 0)
        if len(over):
            ended = active[over]
            values[np.ix_(events, ended)] = state.last(num_blocks)[:, over]
            evaluated[ended] = state.evaluated[over]
            going_on = np.flatnonzero(state.left > 0)
            if not len(going_on):
                return evaluated
            if 2 * len(going_on) <= len(active):
                active = active[going_on]
                state.keep(going_on)


class _State:
    """Position of the insertion; `_blocks` has the newest `_filled` blocks in order."""

    def __init__(self, cut: Cut, blocks: Ints, period: Period, left: Ints, most: int) -> None:
        self._cut = cut
        self._period = period
        self._look_back, self._size = cut.blocks.shape
        self._most = most
        self._inputs = np.where(cut.inputs >= 0, cut.inputs, 0)
        self._capacity = 4 * most + 2 * self._look_back + 8
        self._blocks = np.empty((self._capacity * self._size, len(left)), dtype=np.int64)
        self._blocks[: len(blocks)] = blocks
        self._filled = self._look_back
        self.left = left
        self.inserted = np.zeros(len(left), dtype=np.int64)
        self.evaluated = np.zeros(len(left), dtype=np.int64)

    def keep(self, chosen: npt.NDArray[np.int64]) -> None:
        """Continue with a part of the batch."""
        size = self._filled * self._size
        blocks = np.empty((len(self._blocks), len(chosen)), dtype=np.int64)
        np.take(self._blocks[:size], chosen, axis=1, out=blocks[:size])
        self._blocks = blocks
        self._period = self._period.of(chosen)
        self.left, self.inserted, self.evaluated = (each[chosen] for each in (self.left, self.inserted, self.evaluated))

    def last(self, count: int) -> Ints:
        """The newest blocks."""
        return self._blocks[(self._filled - count) * self._size : self._filled * self._size]

    def _known(self, back: int) -> Ints:
        """The earlier events that the events of the newest block but `back` wait for."""
        period, number = self._period, self.inserted - back
        known = np.maximum(period.fixed, period.own + number * period.own_step)
        return np.maximum(known, period.posted + number * period.posted_step, out=known)

    def evaluate(self) -> None:
        """Evaluate one more period."""
        size = self._size
        if self._filled == self._capacity:
            kept = self._look_back + 2 * self._most + 1
            self._blocks[: kept * size] = self.last(kept).copy()
            self._filled = kept
        self.inserted += 1
        self.evaluated += 1
        self.left -= 1
        first_block = (self._filled - self._look_back) * size
        around = self._blocks[first_block : first_block + (self._look_back + 1) * size]
        newest, known, bounds = around[-size:], self._known(0), self._cut.bounds
        for first, stop in itertools.pairwise(bounds):
            terms = around.take(self._inputs[:, first:stop], axis=0)
            terms += self._period.weights[:, first:stop]
            level = np.maximum.reduce(terms, axis=0)
            np.maximum(level, known[first:stop], out=newest[first:stop])
        self._filled += 1

    def jump(self) -> None:
        """Skip periods whose events grow linearly."""
        cycles = self._cyclicities()
        for cyclicity in np.unique(cycles[cycles > 0]).tolist():
            self._jump(cyclicity, np.flatnonzero((cycles == cyclicity) & (self.left >= cyclicity)))

    def _cyclicities(self) -> Ints:
        """(batch) after how many periods the growth of the newest block was the same, 0 for never."""
        found = np.zeros(len(self.left), dtype=np.int64)
        count = min(self._filled, 2 * self._most + 2)
        blocks = self.last(count).reshape(count, self._size, -1)
        growth = np.diff(blocks, axis=0)
        if count < 3:
            return found
        same = np.all(growth[:-1] == growth[-1], axis=1)[::-1]  # 1, 2, ... periods ago
        lowest = self._look_back - 1
        for cyclicity in range(min(self._most, (count - 1) // 2), lowest, -1):
            if not same[cyclicity - 1].any():
                continue
            repeats = np.all(growth[-cyclicity:] == growth[-2 * cyclicity : -cyclicity], axis=(0, 1))
            found[repeats] = cyclicity
        return found

    def _jump(self, cyclicity: int, chosen: npt.NDArray[np.int64]) -> None:
        """Skip multiples of `cyclicity` periods."""
        if not len(chosen):
            return
        size, span, look_back = self._size, cyclicity * self._size, self._look_back
        period = self._period.of(chosen)
        around = self.last(cyclicity + look_back)[:, chosen]
        newest = around[look_back * size :]
        step = newest - self.last(2 * cyclicity)[:span][:, chosen]
        steady = np.ones(len(chosen), dtype=bool)
        limit = np.full(len(chosen), _MANY)
        number = self.inserted[chosen]
        for place in range(cyclicity):
            own = slice(place * size, (place + 1) * size)
            sources = self._inputs + place * size
            back = number - (cyclicity - 1 - place)
            slopes = step[(sources - look_back * size) % span]
            lines = (
                (around[sources] + period.weights, slopes),
                (period.fixed[None], np.zeros_like(step[own])[None]),
                ((period.own + back * period.own_step)[None], cyclicity * period.own_step[None]),
                ((period.posted + back * period.posted_step)[None], cyclicity * period.posted_step[None]),
            )
            attained = np.zeros(step[own].shape, dtype=bool)
            for reached, slope in lines:
                slack = newest[own] - reached
                attained |= np.any((slack == 0) & (slope == step[own]), axis=0)
                gains = slope - step[own]
                catching = (gains > 0) & (slack < -(NEVER // 2))
                limit = np.minimum(limit, np.where(catching, slack // np.maximum(gains, 1), _MANY).min(axis=(0, 1)))
            steady &= np.all(attained, axis=0)
        count = np.where(steady, np.minimum(self.left[chosen] // cyclicity, limit), 0)
        if not count.any():
            return
        kept = 2 * cyclicity
        blocks = self._blocks[(self._filled - kept) * size : self._filled * size]
        blocks[:, chosen] += np.concatenate([step, step]) * count
        self._shift_older(kept, chosen, count)
        self.inserted[chosen] += count * cyclicity
        self.left[chosen] -= count * cyclicity

    def _shift_older(self, kept: int, chosen: npt.NDArray[np.int64], count: Ints) -> None:
        """Mark older blocks as not comparable with those after a jump."""
        older = self._blocks[: (self._filled - kept) * self._size]
        older[:, chosen] = np.where(count > 0, np.iinfo(np.int64).min // 4, older[:, chosen])
