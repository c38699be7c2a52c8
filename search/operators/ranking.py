"""The order in which shapes are simulated.

A shape is estimated from its additive cost: m - 1 micro-batches of the slowest stage plus one of all stages, as in a
pipeline. The costs of the best shapes are made exact until none of them contains a bound (`shape_costs`). The most
promising shapes are simulated, and the errors of the estimates are fed back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from search.operators.shape_costs import ShapeCosts
from search.operators.shapes import Option

__all__ = ["NUM_NEAR", "Ranking"]

NUM_SHAPES = 12
"""Number of shapes that are simulated, in addition to one for every promising number of stages and micro-batches."""

NUM_NEAR = 24
"""Number of shapes close to the fastest one that are simulated."""

_AGAIN = 0.05
"""By how much an estimate counts as longer for every shape simulated that differs in its widths alone."""


class Ranking:
    """Shapes by their estimated time, corrected by simulations of similar shapes.

    Shapes with the same number of stages and of micro-batches form a group. The simulations of a group show how far its
    estimates are off. A group without simulations gets the most favourable known correction, so that it is tried too.
    """

    def __init__(self, costs: ShapeCosts, options: Sequence[Option]) -> None:
        self.costs, self.options = costs, options
        groups: dict[tuple[int, int], list[int]] = {}
        for at, (count, _, widths) in enumerate(options):
            groups.setdefault((len(widths), count), []).append(at)
        self.place = {group: np.array(members) for group, members in groups.items()}
        self.entries = {
            group: np.array([costs.entries(options[at]) for at in members]) for group, members in groups.items()
        }
        self.done, self.again = np.zeros(len(options), dtype=bool), np.zeros(len(options))
        self.factor: dict[tuple[int, int], float] = {}
        self.best_s = math.inf
        self.left = NUM_SHAPES

    def next(self, is_over: Callable[[], bool]) -> tuple[Option, float] | None:
        """The most promising remaining option, priced, and its estimate; None if there is none or time is up.

        Every group that may hold something faster than what was found gets its turn first.
        """
        while not is_over():
            least = self._estimates()
            usual, fresh = min(self.factor.values(), default=1.0), np.zeros(len(self.options), dtype=bool)
            weighed = least * (1.0 + _AGAIN * self.again)
            for group, members in self.place.items():
                weighed[members] *= self.factor.get(group, usual)
                fresh[members] = group not in self.factor
            weighed[self.done] = np.inf
            is_fresh = bool((fresh := fresh & (weighed < self.best_s)).any())
            if is_fresh:
                weighed[~fresh] = np.inf
            at = int(weighed.argmin())
            if not np.isfinite(weighed[at]) or not (is_fresh or self.left):
                return None
            if not self.costs.price(self.options[at]):
                self.done[at] = True
                self.left -= not is_fresh
                return self.options[at], float(least[at])
        return None

    def take(self, option: Option) -> float:
        """Price an option that is simulated in any case; returns its estimate."""
        at = self.options.index(option)
        self.costs.price(option)
        self.done[at] = True
        return float(self._estimates()[at])

    def near(self, option: Option) -> list[Option]:
        """Options not simulated yet that differ in one boundary, or in one stage's devices, or have one stage more or
        less; the most promising first."""
        estimates = self._estimates()
        found = [at for at in np.flatnonzero(~self.done).tolist() if _is_near(self.options[at], option)]
        return [self.options[at] for at in sorted(found, key=lambda at: (estimates[at], at))]

    def learn(self, option: Option, estimate_s: float, simulated_s: float) -> None:
        """Record the simulated time of an option."""
        group, factor = (len(option[2]), option[0]), simulated_s / estimate_s
        self.factor[group] = min(factor, self.factor.get(group, factor))
        self.best_s = min(self.best_s, simulated_s)
        self.again += np.array([each[:2] == option[:2] for each in self.options], dtype=np.float64)

    def _estimates(self) -> np.ndarray:
        cost, found = np.array(self.costs.seconds), np.full(len(self.options), np.inf)
        for group, entries in self.entries.items():
            each = cost[entries]
            slowest = each.max(axis=1)
            rest = np.where(np.isfinite(slowest), each.sum(axis=1), 0.0) - np.where(np.isfinite(slowest), slowest, 0.0)
            found[self.place[group]] = slowest + rest / group[1]
        return found


def _is_near(one: Option, two: Option) -> bool:
    if one[0] != two[0]:
        return False
    short, long = sorted((one, two), key=lambda each: len(each[2]))
    if len(short[2]) == len(long[2]):
        cuts = sum(a != b for a, b in zip(one[1], two[1], strict=True))
        moved = sum(a != b for a, b in zip(one[2], two[2], strict=True))
        return cuts + moved == 1
    if len(short[2]) + 1 != len(long[2]) or not set(short[1]) <= set(long[1]):
        return False
    return any(short[2][:at] == long[2][:at] and short[2][at + 1 :] == long[2][at + 2 :] for at in range(len(short[2])))
