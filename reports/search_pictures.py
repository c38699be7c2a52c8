"""Charts of search results: where the step time goes, and time against memory of all forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plans.errors import TwofoldError
from reports.charts import Chart, Scale, Series, bars, series_chart
from reports.units import Bytes, Seconds, time_unit

__all__ = ["Configuration", "pareto_front", "shares_picture", "trade_picture"]

_PART_COLOURS = ("sky", "purple", "grey", "orange", "green", "yellow")
_GB = 10**9
_FARTHEST = 1.25
"""Configurations slower than the fastest by more than this factor are described in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A configuration with its forecast; `parts` are seconds that add up to the step."""

    name: str
    step_s: float
    peak_bytes: int
    parts: Mapping[str, float]


def shares_picture(found: Sequence[Configuration], *, title: str) -> Chart:
    """A bar for every configuration, from its parts.

    Raises:
        TwofoldError: nothing to draw.
    """
    if not found:
        raise TwofoldError(f"no configurations to draw for {title!r}")
    unit_s, unit = time_unit(max(each.step_s for each in found))
    names = dict.fromkeys(part for each in found for part in each.parts)
    parts = [
        (name, colour, [each.parts.get(name, 0.0) / unit_s for each in found])
        for name, colour in zip(names, _PART_COLOURS, strict=False)
    ]
    labels = [f"{number}. {each.name}" for number, each in enumerate(found, 1)]
    ends = [str(Seconds(each.step_s)) for each in found]
    return bars(labels, parts, title=title, x=f"forecast step ({unit})", ends=ends, said=f"{{:.4g}} {unit}".format)


def pareto_front(found: Sequence[Configuration]) -> list[Configuration]:
    """Those that none beats in both time and memory, the fastest first."""
    front: list[Configuration] = []
    for each in sorted(found, key=lambda each: (each.step_s, each.peak_bytes)):
        if not front or each.peak_bytes < front[-1].peak_bytes:
            front.append(each)
    return front


def trade_picture(found: Sequence[Configuration], *, title: str, limit_bytes: int | None = None) -> Chart:
    """A point for every configuration, time across and memory up; a line joins those that none beats in both.

    Args:
        found: in any order.
        title: of the chart.
        limit_bytes: what a device has for tensors, drawn as a line.

    Raises:
        TwofoldError: nothing to draw.
    """
    if not found:
        raise TwofoldError(f"no configurations to draw for {title!r}")
    fastest = min(each.step_s for each in found)
    near = [each for each in found if each.step_s <= _FARTHEST * fastest]
    unit_s, unit = time_unit(max(each.step_s for each in near))
    front = pareto_front(near)

    def points(some: Sequence[Configuration]) -> list[tuple[float, float, str]]:
        return [
            (
                each.step_s / unit_s,
                each.peak_bytes / _GB,
                f"{each.name}: {Seconds(each.step_s)}, {Bytes(each.peak_bytes)}",
            )
            for each in some
        ]

    series = [
        Series(name="others forecast", points=points([each for each in near if each not in front])),
        Series(name="none is better in both", points=points(front), curve=[point[:2] for point in points(front)]),
    ]
    if limit_bytes is not None:
        edges = [each.step_s / unit_s for each in near]
        curve = [(min(edges), limit_bytes / _GB), (max(edges), limit_bytes / _GB)]
        series.append(Series(name=f"room of a device, {Bytes(limit_bytes)}", curve=curve, dashed=True))
    beyond = len(found) - len(near)
    said = f"{beyond} of more than {_FARTHEST:g} times the fastest are not shown." if beyond else ""
    return series_chart(series, Scale(x=f"forecast step ({unit})", y="forecast peak (GB)"), title=title, caption=said)
