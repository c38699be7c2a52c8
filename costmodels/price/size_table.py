"""A smooth correction factor by the sizes of a matrix product, for the library's choice of kernels.

A form knows tiles and waves, but not which of hundreds of kernels a library chooses. Neighbouring sizes mostly use the
same kernel, so the residual is smooth on a scale of a few octaves. It is modelled as a Gaussian process over the
logarithms of the three sizes, stored at the knots of a coarse grid and interpolated linearly (Rasmussen and Williams
2006, Gaussian Processes for Machine Learning, section 2.2). Far from measured products the factor is 1.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt

from costmodels.machine.sections import Section
from plans.errors import TwofoldError

__all__ = ["SizeTable", "fit_size_table", "knot_shapes", "knot_weights"]

Floats = npt.NDArray[np.float64]

FIRST, STEP, NUMBER = 3.0, 2.0, 8
"""Knots are at sizes of 8, 32, 128, ... 131072."""

OCTAVES = 2.0
"""Over which the factor keeps its value: the length scale."""

AMPLITUDE = 0.08
"""Standard deviation of the factor's logarithm before anything was measured."""

NOISE = 0.05
"""Standard deviation of the part that neighbours do not explain: the choice of a kernel for one shape, the chip's
clock."""

MOST = 0.35
"""Logarithms of errors beyond this count as this much: strays."""


class SizeTable(Section, frozen=True, kw_only=True):
    """Factors on the time of a product (m, n, k), linear in the logarithms of its sizes; held at the edges.

    Args:
        first: power of two of the first knot of each size.
        step: powers of two between knots.
        number: knots of each size.
        factors: number^3 of them, k the fastest.

    Raises:
        TwofoldError: a wrong number of factors, one that is not above 0.

    >>> table = SizeTable(first=3.0, step=1.0, number=2, factors=(1.0, 1.2) * 4)
    >>> table.factor(8, 8, 8), round(table.factor(8, 8, 8 * 2**0.5), 3), table.factor(8, 8, 4096)
    (1.0, 1.1, 1.2)
    """

    first: float
    step: float
    number: int
    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.number < 2 or self.step <= 0 or len(self.factors) != self.number**3:
            raise TwofoldError(
                f"a table of {self.number} knots each, {self.step} octaves apart, has {len(self.factors)} factors; it "
                "needs at least 2 knots, a step above 0, and number^3 factors"
            )
        if not all(math.isfinite(factor) and factor > 0 for factor in self.factors):
            raise TwofoldError("every factor of a table of sizes is a finite figure above 0")

    def factor(self, m: int, n: int, k: int) -> float:
        """The factor on the time of a product."""
        (i, a), (j, b), (h, c) = (self._place(size) for size in (m, n, k))
        number, factors, total = self.number, self.factors, 0.0
        for di, wi in ((0, 1 - a), (1, a)):
            for dj, wj in ((0, 1 - b), (1, b)):
                at = ((i + di) * number + j + dj) * number + h
                total += wi * wj * ((1 - c) * factors[at] + c * factors[at + 1])
        return total

    def _place(self, size: int) -> tuple[int, float]:
        place = min(max((math.log2(size) - self.first) / self.step, 0.0), self.number - 1.0)
        knot = min(int(place), self.number - 2)
        return knot, place - knot


def knot_weights(shapes: Floats) -> Floats:
    """The weight of each knot for each product (m, n, k): one row per product."""
    place = np.clip((np.log2(np.maximum(shapes, 1.0)) - FIRST) / STEP, 0.0, NUMBER - 1.0)
    knot = np.minimum(place.astype(int), NUMBER - 2)
    part, rows = place - knot, np.arange(len(shapes))
    weights = np.zeros((len(shapes), NUMBER**3))
    for corner in itertools.product((0, 1), repeat=3):
        at, weight = np.zeros(len(shapes), dtype=int), np.ones(len(shapes))
        for size, up in enumerate(corner):
            at = at * NUMBER + knot[:, size] + up
            weight = weight * (part[:, size] if up else 1 - part[:, size])
        weights[rows, at] += weight
    return weights


def fit_size_table(shapes: Floats, errors: Floats, noise: Floats | float, plain: Floats) -> SizeTable:
    """The most probable factors given the residuals of a form, such that a larger knot never takes less time.

    Args:
        shapes: (m, n, k) of measured products.
        errors: log(measured / form) of each.
        noise: how many times as noisy as usual each of them is.
        plain: seconds by the form at every knot, k the fastest.
    """
    place = FIRST + STEP * np.arange(NUMBER)
    alike = np.exp(-0.5 * ((place[:, None] - place[None]) / OCTAVES) ** 2)
    prior = AMPLITUDE**2 * np.kron(np.kron(alike, alike), alike)
    weights = knot_weights(shapes)
    counted = weights / np.broadcast_to((NOISE * np.asarray(noise)) ** 2, len(shapes))[:, None]
    # the same as in terms of points, (prior W^T) (W prior W^T + noise)^-1 errors, with as many unknowns as knots
    logs = np.linalg.solve(
        np.eye(NUMBER**3) + prior @ (counted.T @ weights), prior @ (counted.T @ np.clip(errors, -MOST, MOST))
    )  # fmt: skip
    grid = (NUMBER,) * 3
    longer = _growing(np.log(plain).reshape(grid) + logs.reshape(grid)) - np.log(plain).reshape(grid)
    factors = tuple(round(float(factor), 4) for factor in np.exp(longer).ravel())
    return SizeTable(first=FIRST, step=STEP, number=NUMBER, factors=factors)


def _growing(logs: Floats) -> Floats:
    """The mean of the least array above and the greatest below `logs` that fall along no axis."""
    above, below = logs, logs
    for axis in range(logs.ndim):
        above = np.maximum.accumulate(above, axis=axis)
        below = np.flip(np.minimum.accumulate(np.flip(below, axis), axis=axis), axis)
    return np.asarray((above + below) / 2)


def knot_shapes() -> Floats:
    """(m, n, k) of every knot, k the fastest."""
    place = 2.0 ** (FIRST + STEP * np.arange(NUMBER))
    return np.array(list(itertools.product(place, repeat=3)))
