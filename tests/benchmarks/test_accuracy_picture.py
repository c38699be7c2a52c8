"""The picture of errors: a dot for every row where its error is, what is beyond the edge said in words."""

import math
import re

import pytest

from benchmarks.accuracy.picture import Scored, accuracy_picture
from plans.errors import TwofoldError


def dots(chart) -> list[tuple[float, float]]:
    """Places of the dots: all marks have the same outline, each use of it a place."""
    return [
        (float(x), float(y))
        for x, y in re.findall(r'<use [^>]*?x="([\d.]+)" y="([\d.]+)" style="fill: #56b4e9', chart.svg())
    ]


def test_dots_are_at_their_errors_and_never_overlap():
    errors = [-0.1, 0.0, 0.001, 0.002, 0.1, 0.2]
    found = sorted(dots(accuracy_picture([Scored(name="a", detail="b", errors={"step time": errors})], title="t")))
    assert len(found) == len(set(found)) == len(errors)
    low, middle, high = found[0][0], found[1][0], found[-2][0]
    assert middle - low == pytest.approx(high - middle, abs=0.02)
    assert found[-1][0] - middle == pytest.approx(2 * (high - middle), abs=0.02)
    assert len({y for _, y in found[1:4]}) == 3  # nearly equal errors stand above each other


def test_an_error_beyond_the_edge_is_noted():
    text = accuracy_picture([Scored(name="a", detail="b", errors={"step time": [-0.27, 0.01]})], title="t").alone()
    assert "-27 %" in text and "14.0 %, 2 rows" in text


def test_unmeasured_values_are_noted_and_non_numbers_refused():
    tables = [
        Scored(name="a", detail="", errors={"step time": [0.1], "peak memory": []}),
        Scored(name="b", detail="", errors={"step time": [0.1], "peak memory": [0.2]}),
    ]
    assert accuracy_picture(tables, title="t").alone().count("not stated") == 1
    with pytest.raises(TwofoldError, match="not a number"):
        accuracy_picture([Scored(name="a", detail="", errors={"x": [math.nan]})], title="t")
    with pytest.raises(TwofoldError, match="no errors"):
        accuracy_picture([], title="t")
