"""The share of the devices' peak that a figure means, and what follows from it about whose rate the figure is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from interop.measurements.cells import PARTS
from interop.measurements.numbers import number

__all__ = ["in_thousands", "most_share", "share_of_peak", "whose_rate", "with_reading"]

_MOST_SHARE = 3.0
"""Shares of the peak above this are those of a wrong unit, whatever sizes a row leaves open."""

_MOST_COUNTED = 1.05
"""The same of figures that count operations, which depend little on the sizes that a row leaves open."""

_LEAST_LARGE = 0.005
"""Shares of the peak below this are those of a wrong unit, where the model is large and no link is slow."""

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


def in_thousands(metric: str, share: float) -> float:
    """The factor of the unit of a large model's figure: 1000 if it is far too low but usual in thousands, 0 if it is
    not usual in thousands either.

    Args:
        metric: of the figure; only rates can be too low.
        share: of the devices' peak that it means.

    >>> [in_thousands("tokens_per_s_per_gpu", share) for share in (5e-4, 0.3, 5e-6)]
    [1000.0, 1.0, 0.0]
    """
    if metric not in (*_RATES, "tflops_per_gpu") or share >= _LEAST_LARGE:
        return 1.0
    least, most = _IN_THOUSANDS
    return 1000.0 if least <= 1000 * share <= most and metric != "samples_per_s_per_gpu" else 0.0


def whose_rate(row: Mapping[str, str], share: float) -> tuple[float, float | None, tuple[str, ...]]:
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
            return (
                devices,
                None,
                (f"the rate is of each device: of all {devices:g} it would be {share:.2%} of their peak",),
            )
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
