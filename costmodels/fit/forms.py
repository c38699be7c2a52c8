"""Fits a few parameters to measured points. Every form is physical; nothing is looked up in a table.

All fits compare logarithms, so that a microsecond and a second count equally, and use a soft L1 loss, which limits the
influence of outliers (Huber-like; scipy.optimize.least_squares). `Residuals` describes the quality of a fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from costmodels.fit.points import Point
from costmodels.machine.machine import Collective, Compute, Link
from costmodels.price.traffic import collective_traffic
from plans.errors import TwofoldError
from plans.units import Change, Share

__all__ = [
    "Residuals",
    "crowding",
    "fit_collective",
    "fit_compute",
    "fit_overlap",
    "log_ratio",
    "overlapped_s",
    "residuals",
    "solve",
    "worked_s",
]

Floats = npt.NDArray[np.float64]

F_SCALE = 0.1
"""Log residuals beyond this weigh linearly."""

TINY_S = 1e-12

TYPICAL_GLOO = (1e-4, 1e-4, 5e-10, 1e-4, 1e-4)
"""cpu_start_s, cpu_message_s, 1 / cpu_Bps, start_s, hop_s: gloo over loopback on a virtual machine of 2 cores."""

TYPICAL_WEIGHT = 0.03
"""Parameters that the points do not determine stay near typical values; a factor of 10 counts as an error of 7 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Errors of predictions: predicted / measured - 1, over `num_points` points."""

    section: str
    num_points: int
    median_error: float
    p95_error: float
    bias: float

    def __str__(self) -> str:
        return (
            f"{self.section}: {self.num_points} points, median error {Share(self.median_error)}, "
            f"95th percentile {Share(self.p95_error)}, bias {Change(self.bias)}"
        )


def residuals(section: str, predicted: Sequence[float] | Floats, measured: Sequence[float] | Floats) -> Residuals:
    """Relative errors of `predicted`; the bias is the median of the signed ones.

    >>> residuals("x", [1.1, 0.9, 2.0], [1.0, 1.0, 2.0]).bias
    0.0
    """
    error = np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float) - 1
    size = np.abs(error)
    return Residuals(
        section=section,
        num_points=len(error),
        median_error=float(np.median(size)),
        p95_error=float(np.quantile(size, 0.95)),
        bias=float(np.median(error)),
    )


def fit_compute(
    points: Sequence[Point],
    *,
    dispatch_s: Mapping[str, float],
    host_async: bool,
    itemsize: int = 4,
    dtype: str = "float32",
    peak_flops_per_s: float | None = None,
    peak_memory_Bps: float | None = None,
) -> tuple[Compute, Residuals, Residuals]:
    """The rates of one device from its matrix products and memory-bound kernels (the form is in `Compute`).

    Where the host runs ahead, back-to-back launches take the longer of issue and work; elsewhere their sum.

    Args:
        points: kinds "matrix" and "memory", of one rank alone.
        dispatch_s: host time of the classes "matrix" and "memory".
        peak_flops_per_s: the vendor's peak, of which the fitted rate is then a share; None: the fitted rate itself.
        peak_memory_Bps: likewise.

    Returns:
        The rates, the residuals of matrix products and those of memory-bound kernels.

    Raises:
        TwofoldError: too few points to fit.
    """
    matrix = [point for point in points if point.kind == "matrix"]
    memory = [point for point in points if point.kind == "memory"]
    if len(matrix) < 4 or len(memory) < 2:
        raise TwofoldError(
            f"{len(matrix)} matrix products and {len(memory)} memory-bound kernels were measured; "
            "the fit needs at least 4 and 2: measure again"
        )
    shapes = np.array([point.shape for point in matrix], dtype=float)
    m, n, k = shapes.T
    flops, touched = 2 * m * n * k, itemsize * (m * k + n * k + m * n)
    matrix_s, memory_s = (np.array([worked_s(point) for point in group]) for group in (matrix, memory))
    memory_bytes = np.array([point.size_bytes for point in memory], dtype=float)

    def issued(kind: str, work_s: Floats) -> Floats:
        return np.maximum(dispatch_s[kind], work_s) if host_async else dispatch_s[kind] + work_s

    def predict(q: Floats) -> tuple[Floats, Floats]:
        rate, bandwidth, half_rows, half_depth = np.exp(q[:4])
        sharpness = 1 + np.exp(q[4])
        arithmetic = flops / rate * (1 + half_rows / np.minimum(m, n)) * (1 + half_depth / k)
        work_s = (arithmetic**sharpness + (touched / bandwidth) ** sharpness) ** (1 / sharpness)
        return issued("matrix", work_s), issued("memory", memory_bytes / bandwidth)

    start = np.log([np.max(flops / matrix_s), np.max(memory_bytes / memory_s), 1.0, 4.0, 1.0])
    lower = np.array([start[0] - 2, start[1] - 2, np.log(1e-2), np.log(1e-2), np.log(1e-2)])
    upper = np.array([start[0] + 2, start[1] + 2, np.log(64), np.log(1024), np.log(7)])
    solved = solve(
        lambda q: np.concatenate([log_ratio(predict(q)[0], matrix_s), log_ratio(predict(q)[1], memory_s)]),
        start,
        lower,
        upper,
    )
    rate, bandwidth, half_rows, half_depth = (float(value) for value in np.exp(solved[:4]))
    compute = Compute(
        matrix_flops_per_s={dtype: peak_flops_per_s or rate},
        vector_flops_per_s={dtype: peak_flops_per_s or rate},
        memory_Bps=peak_memory_Bps or bandwidth,
        matrix_efficiency=min(1.0, rate / peak_flops_per_s) if peak_flops_per_s else 1.0,
        memory_efficiency=min(1.0, bandwidth / peak_memory_Bps) if peak_memory_Bps else 1.0,
        half_rows=half_rows,
        half_depth=half_depth,
        sharpness=1 + float(np.exp(solved[4])),
    )
    predicted = predict(solved)
    return (
        compute,
        residuals("matrix products", predicted[0], matrix_s),
        residuals("memory-bound", predicted[1], memory_s),
    )


def fit_collective(
    points: Sequence[Point],
    *,
    link: Link,
    library: str,
    dispatch_s: float,
    cores: int | None = None,
    itemsize: int = 4,
) -> tuple[Collective, Residuals]:
    """The cost of one kind of communication, from back-to-back calls of it (or of transfers).

    On links alone (`cores` None): time = max(dispatch, start + hops latency + moved / (bandwidth fraction) + size /
    copy). Carried by processors: every member spends cpu = start + messages message + moved / rate, known from its
    processor time; on shared cores that takes `crowding` times as long, and what is left of the measured time is
    waiting: start + hops hop.

    Args:
        points: of one call, any group sizes and sizes, with one group at work or all.
        link: the tier of links that all groups used.
        library: gloo, nccl or hccl (it sets the algorithm, see `costmodels.price.traffic`).
        dispatch_s: host time to issue the call.
        cores: cores that the ranks share, where they carry the messages.

    Raises:
        TwofoldError: too few points to fit.
    """
    if len(points) < 3:
        call = points[0].call if points else "a collective"
        raise TwofoldError(f"{call} was measured {len(points)} times; the fit needs at least 3 points: measure again")
    traffic = [_point_traffic(point, library, itemsize) for point in points]
    messages, hops, moved, sizes = (np.array(column, dtype=float) for column in zip(*traffic, strict=True))
    seconds = np.array([point.seconds for point in points])
    if cores is None:
        return _fit_link(points[0].call, hops, moved, sizes, seconds, link, dispatch_s)
    cpu_s = np.array([point.cpu_s for point in points])
    slowdown = np.array([crowding(point, cores) for point in points])

    def spent(q: Floats) -> Floats:
        return np.asarray(q[0] + q[1] * messages + q[2] * moved)

    def predict(q: Floats) -> Floats:
        wait_s = q[3] + hops * (q[4] + link.latency_s) + moved / link.bandwidth_Bps
        return np.asarray(slowdown * (dispatch_s + spent(q)) + wait_s)

    typical = np.array(TYPICAL_GLOO)

    def misfit(q: Floats) -> Floats:
        fit = [log_ratio(predict(q), seconds), 0.5 * log_ratio(dispatch_s + spent(q), cpu_s)]
        return np.concatenate([*fit, TYPICAL_WEIGHT * np.log(q / typical)])

    solved = typical * np.exp(
        solve(
            lambda q: misfit(typical * np.exp(q)), np.zeros(5), np.full(5, -12.0), np.full(5, 5.0),
            tolerance=_FLAT,
        )
    )  # fmt: skip
    model = Collective(
        start_s=_or_zero(solved[3]),
        hop_s=_or_zero(solved[4]),
        cpu_start_s=_or_zero(solved[0]),
        cpu_message_s=_or_zero(solved[1]),
        cpu_Bps=float(1 / solved[2]),
    )
    return model, residuals(points[0].call, predict(solved), seconds)


def fit_overlap(
    compute_alone_s: Sequence[float], comm_alone_s: Sequence[float], both_s: Sequence[float]
) -> tuple[float, float]:
    """The two rates at which compute and communication proceed while both run, from times alone and together.

    While both run, compute proceeds at a rate a and communication at a rate b (alone: 1); when one is through, the
    other continues alone. So both_s = comm/b + compute - a comm/b if communication ends first, else compute/a + comm -
    b compute/a.

    >>> a, b = fit_overlap([1.0, 3.0, 1.0], [1.0, 1.0, 3.0], [1.5, 3.5, 3.5])
    >>> round(a / 2 + b / 2, 3)
    0.667
    """
    alone_a, alone_b, both = (np.asarray(column, dtype=float) for column in (compute_alone_s, comm_alone_s, both_s))

    def predict(q: Floats) -> Floats:
        return overlapped_s(alone_a, alone_b, float(q[0]), float(q[1]))

    solved = solve(lambda q: log_ratio(predict(q), both), np.array([0.7, 0.7]), np.full(2, 0.05), np.full(2, 1.0))
    return float(solved[0]), float(solved[1])


def worked_s(point: Point) -> float:
    """Seconds of a call made by one rank alone, without what other processes took of its core where that is known."""
    return min(point.seconds, point.cpu_s) if point.cpu_s else point.seconds


def crowding(point: Point, cores: int) -> float:
    """The factor by which work on the processors slows down while `active_ranks` share the remaining cores."""
    return max(1.0, point.active_ranks / max(0.5, cores - point.outside_cores))


def overlapped_s(compute_s: Floats, comm_s: Floats, compute_rate: float, comm_rate: float) -> Floats:
    """Seconds until compute and communication have both ended (see `fit_overlap`)."""
    first = comm_s / comm_rate
    ends_first = compute_s - compute_rate * first >= 0
    second = compute_s / compute_rate
    return np.asarray(
        np.where(ends_first, first + compute_s - compute_rate * first, second + comm_s - comm_rate * second)
    )


def _point_traffic(point: Point, library: str, itemsize: int) -> tuple[float, float, float, float]:
    if point.kind == "transfer":
        return 1, 1, point.size_bytes, point.size_bytes
    traffic = collective_traffic(point.call, point.ranks, point.size_bytes, itemsize, library)
    return traffic.messages, traffic.hops, traffic.moved_bytes, traffic.size_bytes


def _fit_link(
    call: str, hops: Floats, moved: Floats, sizes: Floats, seconds: Floats, link: Link, dispatch_s: float
) -> tuple[Collective, Residuals]:
    def predict(q: Floats) -> Floats:
        start, fraction, copy = np.exp(q)
        work_s = start + hops * link.latency_s + moved / (link.bandwidth_Bps * fraction) + sizes / copy
        return np.asarray(np.maximum(dispatch_s, work_s))

    start = np.log([1e-5, 0.6, 1e12])
    lower, upper = np.log([1e-7, 0.02, 1e10]), np.log([1e-3, 1.0, 1e16])
    solved = solve(lambda q: log_ratio(predict(q), seconds), start, lower, upper)
    model = Collective(
        start_s=float(np.exp(solved[0])),
        link_fraction=float(np.exp(solved[1])),
        copy_Bps=float(np.exp(solved[2])) if solved[2] < np.log(1e15) else None,
    )
    return model, residuals(call, predict(solved), seconds)


def log_ratio(predicted: Floats, measured: Floats) -> Floats:
    """log(predicted / measured), the quantity that all fits minimise."""
    return np.asarray(np.log(np.maximum(predicted, TINY_S) / np.maximum(measured, TINY_S)))


_FLAT = 1e-12
"""If one kind of group was measured, only the sum of the times of a start and of a hop is determined: the minimum is so
flat that with the usual tolerance other linear algebra libraries end up to 1e-3 away."""


def solve(
    misfit: Callable[[Floats], Floats], start: Floats, lower: Floats, upper: Floats, *, tolerance: float = 1e-8
) -> Floats:
    """Parameters within bounds with the least soft L1 loss of `misfit`, until it falls by less than a `tolerance`."""
    from scipy.optimize import least_squares

    inside = np.clip(start, lower + 1e-9, upper - 1e-9)
    solved = least_squares(
        misfit, inside, bounds=(lower, upper), loss="soft_l1", f_scale=F_SCALE, ftol=tolerance, xtol=tolerance
    )
    return np.asarray(solved.x)


def _or_zero(seconds: float) -> float:
    """A fixed time of less than a nanosecond is a bound that the fit reached, and counts as 0."""
    return float(seconds) if seconds > 1e-9 else 0.0
