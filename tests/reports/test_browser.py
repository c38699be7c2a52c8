"""Reports in a headless browser: nothing goes wrong, and every control does what it says."""

import json
import re
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

import twofold as tf
from costmodels import Machine
from costmodels.fit.points import Point
from plans.timeline import Span, Timeline
from reports import Check, Report
from reports.calibration import CalibrationReport, calibration_page
from reports.html import step_page
from reports.live import LiveTimeline
from reports.page import Page, Section
from reports.validation import validation_page
from simulator.study.sweep import Workers
from tests.support.reports_example import measured, predicted, small_plan, small_program
from twofold.cli import main

pytestmark = pytest.mark.needs("chromium")

WATCH = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
console.error = (...words) => problems.push(words.join(" "));
</script>"""

DRIVER = Path(__file__).with_name("driver.html").read_text()


def large_timeline() -> Timeline:
    """100,000 spans of 16 ranks, with different lengths and names."""
    spans = [
        Span(rank=rank, stream="compute", start_ps=at * 10**7 + rank, end_ps=at * 10**7 + 9 * 10**6 - at % 7, step=0,
             id=f"{rank}{'FB'[at % 2]}{at // 100}/layers.{at % 100}.attention.projection.linear.F",
             call="linear.forward", part="FB"[at % 2])
        for rank in range(16) for at in range(6250)
    ]  # fmt: skip
    return Timeline.from_spans(spans, kind="predicted", num_ranks=16)


def validation_document() -> dict:
    values = [("a100", 1.0, 1.1), ("h100", 2.0, 1.0), ("b200", 4.0, 4.4), ("h200", 3.0, 30.0)]
    rows = [
        {"row": at, "source": "paper", "machine": machine, "stack": "torch", "metric": "iteration_time_s",
         "value": value, "predicted": found, "low": 0.8 * found, "high": 1.2 * found}
        for at, (machine, value, found) in enumerate(values, 1)
    ]  # fmt: skip
    score = {"source": "paper", "metric": "iteration_time_s", "rows": 4, "mape": 0.1, "median_ape": 0.1, "bias": 0.0,
             "within_interval": 1.0, "pair_order": None}  # fmt: skip
    return {"rows": rows, "sources": [score], "skipped": []}


def prediction_page(file: Path) -> str:
    words = "predict llama-3-8b --layers 2 --machine h200-x8 --tp 2 --pp 2 --dp 2 --global-batch 8"
    assert main([*words.split(), "--report", str(file)]) == 0
    return file.read_text()


def plan_pages(folder: Path) -> dict[str, str]:
    """The reports of a search, of a comparison and of a what-if, as the commands write them."""
    machine, plan = ["--machine", "h200-x8"], str(folder / "plan.json")
    small = ["--layers", "2", "--global-batch", "8", "--tp", "2", "--pp", "2", "--dp", "2", "--micro-batch", "1",
             "--schedule", "1f1b"]  # fmt: skip
    asked = {
        "plan": ["plan", "llama-3-8b", *machine, *small, "--out", plan],
        "comparison": ["compare", plan, plan.replace(".json", ".degrees.json"), *machine],
        "what-if": ["whatif", plan, *machine, "--bandwidth", "0.5", "2", "--sensitivity"],
    }
    for name, command in asked.items():
        assert main([*command, "--report", str(folder / f"{name}.html")]) == 0
    return {name: (folder / f"{name}.html").read_text() for name in asked}


def cpu_calibration() -> str:
    points = [
        Point(kind="collective", call="all_reduce", size_bytes=size, ranks=2, active_ranks=4, seconds=1e-4 + size / 1e9)
        for size in (4, 4096, 524_288)
    ]
    return calibration_page(CalibrationReport(machine=Machine.load("cpu-2core-x8"), points=points)).html()


def study_page(file: Path) -> str:
    base = {"model": "llama-3-8b", "layers": 2, "machine": "h200-x8", "global_batch": 16, "dp": 2}
    axes = {"tp": [1, 2, 4], "pp": [1, 2], "micro_batch": [1, 2, 4, 8], "recompute": ["none", "full"]}
    return tf.study(base, axes, workers=Workers(backend="sequential")).write_report(file).read_text()


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    verified = Report(
        title="step", plan=small_plan(), program=small_program(), predicted=predicted(3), measured=measured(),
        checks=[Check(name="loss", value=3e-7, high=2e-6)], losses={"8 ranks": [2.0, 1.0], "one": [2.0, 1.0]},
        step_times_s=[0.003, 0.004], memory_limit_bytes=4_000_000,
    )  # fmt: skip
    live = LiveTimeline(timelines=[large_timeline()])
    return {
        "step": step_page(verified).html(),
        "large": Page(kind="prediction", title="large", sections=[Section(id="a", title="A", parts=[live])]).html(),
        "validation": validation_page("a.csv", validation_document()).html(),
        "prediction": prediction_page(tmp_path_factory.mktemp("pages") / "prediction.html"),
        **plan_pages(tmp_path_factory.mktemp("plans")),
        "calibration": cpu_calibration(),
        "study": study_page(tmp_path_factory.mktemp("pages") / "study.html"),
    }


@pytest.fixture(scope="module")
def found(pages, chromium, tmp_path_factory) -> dict:
    """What one browser process saw of all pages, each in a frame of a telephone's width."""
    frames = ""
    for name, page in pages.items():
        watched = escape(page.replace("<head>", "<head>" + WATCH, 1))
        frames += f'<iframe id="{name}" width="390" height="800" srcdoc="{watched}"></iframe>'
    folder = tmp_path_factory.mktemp("browser")
    (folder / "driver.html").write_text(DRIVER.replace("FRAMES", frames))
    command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu",
               f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000",
               "--dump-dom", f"file://{folder / 'driver.html'}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = re.findall(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert said, done.stderr[-2000:]
    return json.loads(unescape(said[-1]))


def test_no_page_has_a_problem_or_is_wider_than_a_telephone(pages, found):
    seen = {name: (each["problems"], each["wide"] <= 0) for name, each in found.items()}
    assert seen == dict.fromkeys(pages, ([], True)) and len(seen) == 9


def test_zoom_changes_the_axis(found):
    (low, high), (first, last) = found["step"]["whole"], found["step"]["zoomed"]
    assert (low, high) == (0, pytest.approx(found["step"]["longest"]))
    assert last - first == pytest.approx((high - low) / 2)
    assert float(found["step"]["zoomedTicks"][0]) > 0


def test_a_click_opens_the_span_with_its_cost_and_what_it_waited_for(found):
    step = found["step"]
    facts = step["facts"]
    assert (facts["instruction"], facts["operator"], facts["call"]) == (step["id"], "layer2.linear", "linear.forward")
    assert {"takes", "measured", "waited for", "memory then"} <= set(facts)
    assert facts["waited for"].startswith(step["causeShown"])  # the link leads there


def test_the_pipeline_of_a_prediction_lives(found):
    assert found["prediction"]["spans"] > 100


def test_search_finds_spans_and_ranks_fold(found):
    count = int(found["step"]["hits"].split()[0].replace(",", ""))
    assert count > 50 and "layer2.linear" in found["step"]["foundOne"]
    assert found["step"]["folded"] == 2


def test_sorting_sorts(found):
    up, down = ([float(cell.removesuffix(" %")) for cell in found["validation"][way]] for way in ("up", "down"))
    assert up == sorted(up) and down == sorted(down, reverse=True) and len(up) == 4
    steps = [float(time.split()[0]) for time in found["study"]["down"]]
    assert len(steps) == 20 and steps == sorted(steps, reverse=True)
    assert found["validation"]["words"] == ["a100", "b200", "h100", "h200"]


def test_a_hundred_thousand_spans_are_small_and_drawn_at_once(found, pages):
    assert found["large"]["spans"] == 100_000
    assert len(pages["large"].encode()) < 5_000_000
