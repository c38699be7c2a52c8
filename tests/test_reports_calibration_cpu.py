import json
import re
from dataclasses import dataclass
from html import escape

from costmodels import Machine
from costmodels.fit.points import Point
from reports.calibration_cpu import cpu_calibration_html


@dataclass(frozen=True)
class Ran:
    name: str
    predicted_s: float
    measured_s: float


def test_a_cpu_is_reported_with_its_points_its_probes_and_its_sources():
    points = [
        Point(kind="collective", call="all_reduce", size_bytes=size, ranks=2, active_ranks=4, seconds=1e-4 + size / 1e9)
        for size in (4, 4096, 524_288)
    ]
    machine = Machine.load("cpu-2core-x8")
    html = cpu_calibration_html(machine, points, ["all_reduce: 3 points <fitted>"], [Ran("probe-dp2", 0.02, 0.025)])
    assert "all_reduce: 3 points &lt;fitted&gt;" in html
    assert "-20%" in html
    assert all(escape(says.source) in html for says in machine.provenance.values())
    data = json.loads(re.search(r'id="twofold-data"[^>]*>(.*?)</script>', html, re.S)[1])
    assert [point["measured_s"] for point in data["points"]] == [point.seconds for point in points]
