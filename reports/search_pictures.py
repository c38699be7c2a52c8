"""Charts of search results: time against memory of all forecasts, and operators under the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plans.errors import TwofoldError
from reports.charts import Chart, Scale, Series, roofline_chart, series_chart
from reports.tables import Table
from reports.units import Bytes, Quantity, Seconds, Share, time_unit
from search.result import pareto_front

if TYPE_CHECKING:
    from search.devices.operators import OperatorCost

__all__ = ["Configuration", "roofline_parts", "trade_picture"]

_GB = 10**9
_FARTHEST = 1.25
"""Configurations slower than the fastest by more than this factor are described in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A configuration with its forecast."""

    name: str
    step_s: float
    peak_bytes: int


def trade_picture(found: Sequence[Configuration], *, title: str, limit_bytes: int | None = None) -> Chart:
    """A point for every configuration, time across and memory up; a line joins those that none beats in both.

    Args:
        found: in any order.
        title: title of the chart.
        limit_bytes: what a device has for tensors, drawn as a line.

    Raises:
        TwofoldError: nothing to draw.
    """
    if not found:
        raise TwofoldError(f"no configurations to draw for {title!r}")
    fastest = min(each.step_s for each in found)
    near = [each for each in found if each.step_s <= _FARTHEST * fastest]
    unit_s, unit = time_unit(max(each.step_s for each in near))
    front = pareto_front(near, lambda each: (each.step_s, each.peak_bytes))

    def points(some: Sequence[Configuration]) -> list[tuple[float, float, str]]:
        return [
            (each.step_s / unit_s, each.peak_bytes / _GB,
             f"{each.name}: {Seconds(each.step_s)}, {Bytes(each.peak_bytes)}")
            for each in some
        ]  # fmt: skip

    series = [
        Series(name="others forecast", points=points([each for each in near if each not in front])),
        Series(name="none is better in both", points=points(front), curve=[point[:2] for point in points(front)]),
    ]
    if limit_bytes is not None:
        edges = [each.step_s / unit_s for each in near]
        curve = [(min(edges), limit_bytes / _GB), (max(edges), limit_bytes / _GB)]
        series.append(Series(name=f"room of a device, {Bytes(limit_bytes)}", curve=curve, dashed=True))
    beyond = len(found) - len(near)
    note = f"{beyond} of more than {_FARTHEST:g} times the fastest are not shown." if beyond else ""
    return series_chart(series, Scale(x=f"forecast step ({unit})", y="forecast peak (GB)"), title=title, caption=note)


def roofline_parts(
    operators: Sequence[OperatorCost], peak_flops_per_s: float, memory_Bps: float
) -> tuple[Chart, Table]:
    """The operators of a block that have products, in the chosen layout, under the peaks: what limits each of them.

    Args:
        operators: costs, those of other layouts among them.
        peak_flops_per_s: of a device, in the dtype of the model.
        memory_Bps: of its memory.

    Returns:
        A point for every operator, and the same as a table.
    """
    points, rows = [], []
    for each in operators:
        if not (each.chosen and each.flops):
            continue
        slope = each.flops_per_byte * memory_Bps
        rate, share = each.flops_per_s / 1e12, Share(each.flops_per_s / min(peak_flops_per_s, slope))
        limit = "arithmetic" if slope > peak_flops_per_s else "memory"
        tooltip = f"{each.operator}: {rate:.3g} TFLOP/s, {share} of what {limit} allows"
        points.append((each.flops_per_byte, rate, tooltip))
        rows.append(
            (each.operator, Quantity(each.flops_per_byte), Quantity(rate), share, limit, Seconds(each.compute_s))
        )
    chart = roofline_chart(
        [Series(name="operators of a block", points=points)], peak_flops_per_s, memory_Bps,
        title="Roofline: operators of a block on a device",
        caption="Forecast rates, forward and backward, with what is recomputed. Under the slope the memory limits an "
        "operator, under the level the arithmetic.",
    )  # fmt: skip
    table = Table(
        title="Roofline: operators of a block on a device",
        columns=("operator", "FLOPs per byte", "TFLOP/s", "of its limit", "limit", "time of a step"), rows=tuple(rows),
    )  # fmt: skip
    return chart, table
