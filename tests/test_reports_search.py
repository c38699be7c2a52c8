"""The pictures of a search: bars are the parts, dots are where their forecasts say."""

import xml.etree.ElementTree as ET

import pytest

from plans.errors import TwofoldError
from reports import Configuration, shares_picture, trade_picture

SVG = "{http://www.w3.org/2000/svg}"


def configuration(name: str, step_s: float, peak_gib: float) -> Configuration:
    parts = {"compute": 0.8 * step_s, "exposed communication": 0.05 * step_s, "waiting": 0.15 * step_s}
    return Configuration(name=name, step_s=step_s, peak_bytes=int(peak_gib * 2**30), parts=parts)


def shapes(picture, kind: str, style: str) -> list[dict[str, str]]:
    root = ET.fromstring(picture.alone())
    return [each.attrib for each in root.iter(f"{SVG}{kind}") if each.get("class") == style]


def test_bars_are_as_long_as_their_parts():
    picture = shares_picture([configuration("a", 4.0, 10), configuration("b", 5.0, 10)], title="t")
    computes, waits = (
        [float(each["width"]) for each in shapes(picture, "rect", style) if float(each["height"]) == 18]
        for style in ("sky", "idle")
    )
    assert computes[0] / computes[1] == pytest.approx(0.8, rel=1e-3)
    assert waits[1] / computes[1] == pytest.approx(0.15 / 0.8, rel=1e-3)
    assert "forecast step (s)" in picture.alone()


def test_dots_lie_by_time_and_memory_and_the_front_is_marked():
    found = [configuration("b", 1.05, 60), configuration("a", 1.0, 70), configuration("c", 1.1, 65)]
    picture = trade_picture([*found, configuration("d", 3.0, 10)], title="t", limit_bytes=75 * 2**30)
    front = shapes(picture, "circle", "orange")
    assert len(front) == 2 and len(shapes(picture, "circle", "sky")) == 1
    by_time = sorted((float(each["cx"]), float(each["cy"])) for each in front)
    assert by_time[0][1] < by_time[1][1]  # the faster one needs more memory: it stands higher
    text = picture.alone()
    assert "room of a device 80.5 GB" in text and "1 of more than 1.25 times the fastest" in text


def test_one_configuration_can_be_drawn_and_none_cannot():
    assert len(shapes(trade_picture([configuration("a", 1.0, 1)], title="t"), "circle", "orange")) == 1
    for draw in (shares_picture, trade_picture):
        with pytest.raises(TwofoldError, match="no configurations"):
            draw([], title="t")
