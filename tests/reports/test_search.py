"""The charts of a search: bars are the parts, points are where their forecasts say."""

import re
import xml.etree.ElementTree as ET

import pytest

from plans.errors import TwofoldError
from reports import trade_picture
from reports.charts import seconds_bars
from search.result import pareto_front


def configuration(name: str, step_s: float, peak_gib: float) -> tuple[str, float, int]:
    return name, step_s, int(peak_gib * 2**30)


def test_bars_show_their_parts():
    shares = {"compute": 0.8, "exposed communication": 0.05, "bubble": 0.15}
    rows = {
        name: {part: share * step_s for part, share in shares.items()} for name, step_s in (("1. a", 4), ("2. b", 5))
    }
    svg = seconds_bars(rows, title="t", x="forecast step").svg()
    ET.fromstring(svg)
    assert "<title>1. a: compute 3.2 s</title>" in svg and "<title>2. b: bubble 0.75 s</title>" in svg
    assert "forecast step (s)" in svg and "4.00 s" in svg


def test_points_lie_by_time_and_memory_and_the_front_is_marked():
    found = [configuration("b", 1.05, 60), configuration("a", 1.0, 70), configuration("c", 1.1, 65)]
    assert [each[0] for each in pareto_front(found, lambda each: each[1:])] == ["a", "b"]
    chart = trade_picture([*found, configuration("d", 3.0, 10)], title="t", limit_bytes=75 * 2**30)
    svg = chart.svg()
    ET.fromstring(svg)
    places = {
        match[2]: float(match[1])
        for match in re.finditer(r'<use [^>]*?y="([\d.]+)"[^>]*><title>(\w):', svg)
    }  # fmt: skip
    assert places["a"] < places["b"]  # the faster one needs more memory: it stands higher
    assert "room for tensors, 80.5 GB" in svg and "1 of more than 1.25 times the fastest" in chart.caption


def test_one_configuration_can_be_drawn_and_none_cannot():
    assert "<title>a: 1.00 s" in trade_picture([configuration("a", 1.0, 1)], title="t").svg()
    with pytest.raises(TwofoldError, match="no configurations"):
        trade_picture([], title="t")
    with pytest.raises(TwofoldError, match="nothing to draw"):
        seconds_bars({}, title="t")
