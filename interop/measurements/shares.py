"""The share of the devices' peak that a figure means, and what follows from it about whose rate the figure is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interop.measurements.case import Case
from interop.measurements.cells import PARTS, Skip
from interop.measurements.numbers import number

__all__ = ["as_read", "is_large_run", "most_share", "share_of_peak", "with_reading"]

_MOST_SHARE = 3.0
"""Shares of the peak above this are those of a wrong unit, whatever sizes a row leaves open."""

_MOST_COUNTED = 1.05
"""The same of figures that count operations, which depend little on the sizes that a row leaves open."""

_LEAST_LARGE = 0.005
"""Shares of the peak below this are those of a wrong unit, where the model is large and no link is slow."""

_SLOW_BPS = 50e9 / 8
"""Bytes per second of links between nodes, below which a real run may reach less than 0.5 % of the peak."""

_IN_THOUSANDS = (0.05, 0.7)
"""Shares of the peak that a figure in thousands of tokens/s or of TFLOP/s may mean."""

_RATES = ("tokens_per_s_per_gpu", "samples_per_s_per_gpu")

_LEAST_SHARE = 0.02
"""No training run has a lower share of the peak."""

_USUAL_SHARES = (0.1, 0.65)
"""Shares of the peak of nearly all training runs (from half the least to 1.4 times the largest of Chowdhery et al.
2022, arXiv 2204.02311, table 3)."""


def share_of_peak(result: Mapping[str, Any], value: float) -> float:
    """The share of the devices' peak in the precision of a row that a measured value means; 0 for memory.

    >>> share_of_peak({"metric": "iteration_time_s", "predicted": 2.0, "mfu": 0.4}, 1.0)
    0.8
    """
    if result["metric"].startswith("peak_memory"):
        return 0.0
    ratio = value / result["predicted"]
    return float(result["mfu"] / ratio if result["metric"] == "iteration_time_s" else result["mfu"] * ratio)


def most_share(metric: str) -> float:
    """The largest share of the peak in its precision that a figure may mean.

    >>> most_share("tflops_per_gpu"), most_share("tokens_per_s_per_gpu")
    (1.05, 3.0)
    """
    return _MOST_COUNTED if metric in ("tflops_per_gpu", "mfu_percent") else _MOST_SHARE


def is_large_run(case: Case) -> bool:
    """Whether a run keeps its devices busy: more than 1e9 parameters, and no link that is stated to be slow."""
    stated_Bps = case.network.per_device_Bps
    return case.config.num_parameters > 1e9 and (stated_Bps is None or stated_Bps >= _SLOW_BPS)


def as_read(
    row: Mapping[str, str], metric: str, value: float, share: float, *, is_large: bool
) -> tuple[float, float | None, tuple[str, ...]]:  # fmt: skip
    """How a figure is read: the factor to that of one device in its unit, the factor of another plausible reading, and
    what is assumed.

    Args:
        row: with `PARTS` where the rate was divided by the number of devices.
        metric, value: of the figure, as its header has it.
        share: of the devices' peak in its precision that this means.
        is_large: whether a very low share must be a wrong unit.

    Raises:
        Skip: the figure is far too low, and in thousands too.
    """
    factor, other, remarks = _whose_rate(row, share)
    if not is_large or factor * share >= _LEAST_LARGE or metric not in (*_RATES, "tflops_per_gpu"):
        return factor, other, remarks
    least, most = _IN_THOUSANDS
    low = f"{value:g} would be {factor * share:.2%} of the device's peak"
    factor, other, remarks = _whose_rate(row, 1000 * share)
    if metric == "samples_per_s_per_gpu" or not least <= 1000 * factor * share <= most:
        raise Skip(f"{metric} {low}", "value")
    remark = f"the figure is in thousands: {low}"
    return 1000 * factor, None if other is None else 1000 * other, (remark, *remarks)


def _whose_rate(row: Mapping[str, str], share: float) -> tuple[float, float | None, tuple[str, ...]]:
    """Whose a rate is: the factor to that of one device, the factor of another plausible reading, and what is assumed.

    The header decides, unless its reading means an impossible share of the peak. A header of a rate that names no
    devices ("tokens/s") means all of them; where that would be an unusually low share and the rate of each device a
    usual one, it is taken as that of each, and the other reading stays plausible.

    Args:
        row: with `PARTS` where the rate was divided by the number of devices.
        share: of the devices' peak in its precision that the rate means, as it was read.
    """
    devices = number(row.get(PARTS) or row.get("gpu_count", "")) or 1
    if row.get(PARTS):
        least, most = _USUAL_SHARES
        if share < _LEAST_SHARE <= share * devices <= 1:
            remark = f"the rate is of each device: of all {devices:g} it would be {share:.2%} of their peak"
            return devices, None, (remark,)
        if _LEAST_SHARE <= share < least <= share * devices <= most:
            remark = (
                f"the rate is of each device or of all {devices:g}: {share * devices:.0%} or {share:.1%} of their peak"
            )
            return devices, 1.0, (remark,)
    elif PARTS not in row and share > 1 >= share / devices >= _LEAST_SHARE and row.get("metric") in _RATES:
        remark = f"the rate is of all {devices:g} devices: of each it would be {share:.0%} of its peak"
        return 1 / devices, None, (remark,)
    return 1.0, None, ()


def with_reading(result: dict[str, Any], factor: float, other: float | None) -> dict[str, Any]:
    """A prediction whose interval covers two readings of the rate: with `factor` and with `other`."""
    if other is None:
        return result
    ratio = factor / other
    reading = {"cells": {"rate": "of all devices"}, "predicted": ratio * result["predicted"]}
    return {
        **result, "low": min(result["low"], ratio * result["low"]), "high": max(result["high"], ratio * result["high"]),
        "readings": [*result["readings"], reading],
    }  # fmt: skip
