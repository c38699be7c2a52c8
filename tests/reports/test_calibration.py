import itertools
import json
import re
from dataclasses import dataclass

import pytest
from markupsafe import escape

from benchmarks.accuracy.calibration import DATA, fitted
from costmodels import Machine
from costmodels.fit.points import Point
from reports.calibration import CalibrationReport, calibration_page
from reports.charts import Scale, Series, series_chart


@pytest.fixture(scope="module")
def fit():
    fit = fitted("h200", [DATA / "repeat-h200-x2-quick.jsonl.gz"])
    assert fit is not None
    return fit


@pytest.fixture(scope="module")
def html(fit, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "calibration.html"
    return calibration_page(CalibrationReport.of_device(fit)).write(path).read_text()


def test_the_report_holds_every_point_and_names_its_axes(fit, html):
    data = json.loads(re.search(r'id="twofold-data">\s*(.*?)\s*</script>', html, re.DOTALL)[1])
    assert len(data["points"]) == len(fit.predicted)
    for label in ("measured time (µs)", "TFLOP/s", "bytes read and written", "GB/s", "message (bytes)", "rows m"):
        assert label in html
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", html.split("<section", 1)[0])


def test_every_source_is_listed(fit, html):
    assert all(entry in html for entry in fit.device.provenance)
    assert "extrapolated" in html


def test_held_out_points_are_marked_and_curves_drawn():
    series = [
        Series(name="a", points=[(1.0, 1.0, "p")], held_out=[(10.0, 2.0, "<q>")], curve=[(1.0, 1.0), (10.0, 2.0)])
    ]
    svg = series_chart(series, Scale(x="x (s)", y="y (s)", log_x=True), title="t").svg()
    assert "<title>p</title>" in svg and "<title>held out: &lt;q&gt;</title>" in svg
    assert svg.count("stroke: #56b4e9; stroke-width: 1.5") == 1


def test_positions_are_logarithmic():
    series = [Series(name="a", points=[(10.0**power, 1.0, str(power)) for power in range(4)])]
    svg = series_chart(series, Scale(x="x", y="y", log_x=True), title="t").svg()
    across = [float(x) for x in re.findall(r'<use [^>]*?x="([\d.]+)"[^>]*><title>\d', svg)]
    steps = [right - left for left, right in itertools.pairwise(across)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)


def test_captions_state_what_pictures_share(fit, html):
    cells = {(entry.compute_rate, entry.comm_rate) for entry in fit.device.overlap}
    told = re.search(r"The fit found (\d+) pairs of rates for these (\d+) cells", html)
    assert told is not None if len(cells) < len(fit.device.overlap) else told is None
    if told:
        assert (int(told[1]), int(told[2])) == (len(cells), len(fit.device.overlap))
    assert html.count("The curve is for one pattern") == int("transfer" in fit.device.collectives)


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
    html = calibration_page(CalibrationReport(
        machine=machine, points=points, residuals=["all_reduce: 3 points <fitted>"],
        probes=[Ran("probe-dp2", 0.02, 0.025)],
    )).html()  # fmt: skip
    assert "all_reduce: 3 points &lt;fitted&gt;" in html
    assert "-20.0 %" in html
    assert all(str(escape(says.source)) in html for says in machine.provenance.values())
    data = json.loads(re.search(r'id="twofold-data"[^>]*>(.*?)</script>', html, re.S)[1])
    assert [point["measured_s"] for point in data["points"]] == [point.seconds for point in points]
