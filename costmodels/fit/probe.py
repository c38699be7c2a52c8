"""One overall factor and the interval of a machine, from small programs that were both simulated and run.

Micro-benchmarks do not show the behaviour of an operating system with many processes on few cores. A few probe
programs, with other widths and layouts than the reported ones, determine the factor by which predictions are off, and
its spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from costmodels.machine.machine import Interval, Machine, Provenance
from plans.errors import TwofoldError

__all__ = ["ProbeFit", "ProcessorFit", "fit_probe", "fit_processor", "with_probe", "with_processor"]

PRIOR_SPREAD = 0.12
"""Spread of log(measured / predicted) from program to program that is expected before any probe ran (assumed)."""

PRIOR_PROBES = 6
"""Number of probes for which that expectation counts."""

FLOOR = 0.10
"""The least half-width of the interval, even with few probes: a probe is not the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFit:
    """Factors by which programs take more processor time than their instructions alone in a loop.

    Caches are cold between different instructions, and processes are switched: micro-benchmarks cannot show that.

    Args:
        compute: on computing and on issuing it.
        communication: on everything that communication makes the processor do.
        spread: median relative misfit of the ranks' processor time.
    """

    compute: float
    communication: float
    spread: float


def fit_processor(rows: Sequence[tuple[float, float, float]]) -> ProcessorFit:
    """Factors a, b that best explain ranks' processor seconds per step as a x compute + b x communication.

    Args:
        rows: per rank of each probe: predicted seconds of computing, of communication, and measured seconds.

    Non-negative least squares on relative errors; factors below 1 are taken as 1 (a program is not faster than its
    parts), and where the rows cannot tell the two apart both are their common ratio.

    Raises:
        TwofoldError: no rows, or measured seconds that are not positive.

    >>> fit = fit_processor([(1.0, 1.0, 5.0), (2.0, 1.0, 7.0), (1.0, 3.0, 11.0)])
    >>> round(fit.compute, 6), round(fit.communication, 6)
    (2.0, 3.0)
    """
    import numpy as np
    from scipy.optimize import nnls

    if not rows or any(not measured > 0 for _, _, measured in rows):
        raise TwofoldError("processor times of probes are missing or not above 0; run the probes again")
    table = np.array(rows)
    scaled = table[:, :2] / table[:, 2:]
    if np.linalg.cond(scaled) > 1e6:
        common = float(np.median(1 / scaled.sum(axis=1)))
        factors = np.array([common, common])
    else:
        factors, _ = nnls(scaled, np.ones(len(scaled)))
    factors = np.maximum(factors, 1.0)
    misfit = float(np.median(np.abs(scaled @ factors - 1.0)))
    return ProcessorFit(compute=float(factors[0]), communication=float(factors[1]), spread=misfit)


def with_processor(machine: Machine, fit: ProcessorFit, *, date: str) -> Machine:
    """The machine whose processor times are those of complete programs."""
    replace = msgspec.structs.replace
    communicating = ("collective", "transfer")
    source_text = (
        f"micro-benchmarks x {fit.compute:.2f} (computing) and x {fit.communication:.2f} (communication), the "
        f"processor times of probe programs, median misfit {fit.spread:.0%}"
    )
    measured = Provenance(status="measured", source=source_text, date=date)
    return replace(
        machine,
        compute=replace(
            machine.compute,
            matrix_efficiency=machine.compute.matrix_efficiency / fit.compute,
            memory_efficiency=machine.compute.memory_efficiency / fit.compute,
            kernel_s=machine.compute.kernel_s * fit.compute,
        ),
        dispatch_s={
            name: seconds * (fit.communication if name in communicating else fit.compute)
            for name, seconds in machine.dispatch_s.items()
        },
        collectives={
            name: replace(
                collective,
                cpu_start_s=collective.cpu_start_s * fit.communication,
                cpu_message_s=collective.cpu_message_s * fit.communication,
                cpu_Bps=None if collective.cpu_Bps is None else collective.cpu_Bps / fit.communication,
            )
            for name, collective in machine.collectives.items()
        },
        provenance={**machine.provenance, "compute": measured, "dispatch_s": measured, "collectives": measured},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFit:
    """The results of the probes.

    Args:
        host_scale: geometric mean of measured / predicted.
        low: factor of a scaled prediction, 5 % of programs are expected to run faster.
        high: factor of a scaled prediction, 5 % of programs are expected to run slower.
        spread: standard deviation of log(measured / predicted), of the probes alone; 0 for one probe.
        num_probes: how many.
    """

    host_scale: float
    low: float
    high: float
    spread: float
    num_probes: int


def fit_probe(
    predicted_s: Sequence[float],
    measured_s: Sequence[float],
    *,
    prior_spread: float = PRIOR_SPREAD,
    prior_probes: int = PRIOR_PROBES,
    floor: float = FLOOR,
) -> ProbeFit:
    """The factor and the 90 % prediction interval for one more program.

    Log ratios are taken as normal with unknown mean and spread. The spread of few probes is itself uncertain: it is
    pooled with `prior_spread`, which counts as `prior_probes` degrees of freedom, and the interval is that of
    Student's t for a new observation, t_0.95 s sqrt(1 + 1/n) (Gelman et al., Bayesian Data Analysis, section 3.3).

    Raises:
        TwofoldError: no probes, unequal counts, a time that is not positive.

    >>> fit = fit_probe([1.0, 2.0, 4.0], [1.2, 2.4, 4.8])
    >>> round(fit.host_scale, 6), fit.low < 1 < fit.high
    (1.2, True)
    """
    from scipy.stats import t

    if not predicted_s or len(predicted_s) != len(measured_s):
        raise TwofoldError(
            f"{len(predicted_s)} predicted and {len(measured_s)} measured step times were given; "
            "every probe needs one of each, and at least one probe must have run"
        )
    for seconds in (*predicted_s, *measured_s):
        if not (math.isfinite(seconds) and seconds > 0):
            raise TwofoldError(f"a probe took {seconds} s; step times are above 0: run the probes again")
    ratios = [math.log(measured / predicted) for predicted, measured in zip(predicted_s, measured_s, strict=True)]
    count = len(ratios)
    mean = sum(ratios) / count
    squares = sum((ratio - mean) ** 2 for ratio in ratios)
    freedom = prior_probes + count - 1
    pooled = math.sqrt((prior_probes * prior_spread**2 + squares) / freedom)
    half = max(floor, float(t.ppf(0.95, freedom)) * pooled * math.sqrt(1 + 1 / count))
    return ProbeFit(
        host_scale=math.exp(mean),
        low=math.exp(-half),
        high=math.exp(half),
        spread=math.sqrt(squares / (count - 1)) if count > 1 else 0.0,
        num_probes=count,
    )


def with_probe(machine: Machine, fit: ProbeFit, *, date: str, source: str = "probe programs") -> Machine:
    """The machine with its prices scaled and its interval set; the probes were simulated on `machine` unchanged."""
    source_text = f"{fit.num_probes} {source}, spread of the log ratios {fit.spread:.3f}"
    measured = Provenance(status="measured", source=source_text, date=date)
    return msgspec.structs.replace(
        machine,
        host_scale=machine.host_scale * fit.host_scale,
        interval=Interval(low=fit.low, high=fit.high),
        provenance={**machine.provenance, "host_scale": measured, "interval": measured},
    )
