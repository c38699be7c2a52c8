"""Tables and the HTML report."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from plans.timeline import Span, Timeline
from plans.units import Seconds
from reports import Check, Table, composition_table, plan_table, step_page, verification_table
from reports.html import Report
from reports.plan_tables import parameter_table
from reports.time_tables import comparison_table, timeline_table
from simulator.engine.link_change import read_ranks
from tests.support.reports_example import measured, predicted, small_graph, small_plan

VOID = {"meta", "br", "hr", "img", "link", "input"}  # of SVG every element is closed


class Page(HTMLParser):
    """Checks nesting and collects ids, headings and the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.json = ""
        self.links: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("src", "href") if name in values]
        self.in_data = values.get("id") == "twofold-data"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h2", "summary"):
            self.headings.append(data)
        if self.open and self.open[-1] == "script" and self.in_data:
            self.json += data


def everything() -> dict:
    return {
        "title": "digits <8 ranks>",
        "summary": {"predicted step": "3.00 ms"},
        "plan": small_plan(),
        "predicted": predicted(3),
        "measured": measured(),
        "checks": [Check(name="loss", value=3e-7, high=2e-6), Check(name="bubble", value=0.5, high=0.4)],
        "losses": {"8 ranks": [2.0, 1.0, float("nan")], "single process": [2.0, 1.0, 0.5]},
        "step_times_s": [0.003, 0.004],
        "memory_limit_bytes": 25 * 10**9,
        "machine": {"name": "made up"},
        "environment": {"python": "3.11", "CUDA_DEVICE_MAX_CONNECTIONS": "not set"},
        "tables": [Table(title="More", columns=("a",), rows=(("</script>",),))],
        "notes": ["Not run on Ascend."],
        "command": "twofold demo",
    }


def test_the_report_is_one_well_formed_file_with_every_section(tmp_path):
    path = step_page(Report(**everything())).write(tmp_path / "report.html")
    text = path.read_text()
    page = Page(text)
    assert [link for link in page.links if link[0] != "#"] == ["data:,"]  # nothing is fetched
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)
    sections = [
        "verification",
        "results",
        "pipeline",
        "actions",
        "training",
        "memory",
        "composition",
        "plan",
        "graph",
        "further",
    ]
    assert [each for each in page.ids if each in {*sections, "environment"}] == [*sections, "environment"]
    assert text.index("verification") < text.index('id="pipeline"') < text.index('id="environment"')
    for said in ("PREDICTED", "MEASURED", "CUDA_DEVICE_MAX_CONNECTIONS", "Not run on Ascend.", "FAILED: bubble."):
        assert said in text
    assert "digits &lt;8 ranks&gt;" in text


def test_a_page_has_one_verdict_and_a_step_outside_its_interval_is_in_it():
    checks = [Check(name="loss", value=0.1, high=0.2), Check(name="step", value=3.0, high=2.0, informs=True)]
    text = step_page(Report(title="run", checks=checks)).html()
    assert "<p class=warn>The check passed; outside its interval: step.</p>" in text and "<p class=pass>" not in text


def test_a_run_has_one_step_time_on_its_page():
    """What the run says of all its steps, not what its recorded ones say beside it."""
    given = everything() | {"step_times_s": [0.09, 0.0412, 0.0412, 0.0412], "run_step_s": 0.0412}
    text = step_page(Report(**given)).html()
    step = re.search(r"<tr><td>step</td>.*?</tr>", text)[0]
    assert str(Seconds(0.0412)) in step and f"{Seconds(measured().step_interval_s)}" not in step
    change = 100 * (0.0412 / predicted(3).step_interval_s - 1)
    assert f"{change:+.1f} %" in step
    assert "The measured step is the median of all 4 steps without those of the warm-up" in text
    assert json.loads(Page(text).json)["timelines"][1]["step_s"] == 0.0412


def test_the_data_inside_is_json_of_what_is_shown():
    data = json.loads(Page(step_page(Report(**everything())).html()).json)
    assert data["losses"]["8 ranks"] == [2.0, 1.0, None]
    assert [check["passed"] for check in data["checks"]] == [True, False]
    assert [each["kind"] for each in data["timelines"]] == ["predicted", "measured"]
    assert data["timelines"][0]["step_s"] == predicted(3).step_interval_s
    assert data["plan"]["num_micro_batches"] == 4
    assert data["environment"]["python"] == "3.11"


def test_sections_appear_only_with_their_data():
    page = Page(step_page(Report(title="empty")).html())
    assert page.ids == ["twofold-data"]
    page = Page(step_page(Report(title="predicted only", predicted=predicted())).html())
    assert page.headings == [
        "The step, predicted",
        "Pipeline and memory",
        "The pipeline as a table",
        "Peak memory",
        "Where the time goes, rank by rank and call by call",
        "Further tables",
    ]
    text = step_page(Report(title="emulated", measured=replace(measured(), kind="emulated"))).html()
    assert "EMULATED" in text and "MEASURED" not in text and "PREDICTED" not in text


def test_long_tables_are_cut_with_a_note():
    assert "4 of 9 rows are left out here." in plan_table(small_plan()).html(5)


def test_a_failing_report_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    with pytest.raises(TypeError):
        step_page(Report(title="new", no_such_part=1)).write(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------------------- tables


def test_the_plan_table_names_strategies_layouts_and_what_moves():
    table = plan_table(small_plan())
    rows = {row[3]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["layer2.linear"] == {
        "stage": "1",
        "ranks": "4-7",
        "mesh": "dp=2 tp=2",
        "operator": "layer2.linear",
        "strategy": "b0→dp, k→tp",
        "layouts in": "(dp, tp) (None, tp) (None)",
        "layouts out": "(dp, None) + partial(tp)",
        "communication per micro-batch": "F: receive 4.10 kB; B: send 4.10 kB",
    }
    assert rows["relu2.relu (recomputed)"]["communication per micro-batch"] == "F: all_reduce over tp 8.19 kB"
    assert len(table.rows) == len(small_graph().operators)


def test_the_parameter_table_names_what_moves_once_a_step():
    rows = {row[0]: tuple(map(str, row[1:])) for row in parameter_table(small_plan()).rows}
    moved = "all_gather over dp 803 kB; reduce_scatter over dp 803 kB"
    assert rows["layer1.weight"] == ("512×784", "0-3", "(tp, None)", "803 kB", "cut over dp", moved)
    small = "all_reduce over dp 4.10 kB"  # in one bucket with the weight, which is below the threshold
    assert rows["layer3.bias"] == ("1", "4-7", "(None)", "4 B", "whole", small)


def test_the_shares_of_a_composition_add_up():
    for timeline in (predicted(), measured()):
        *ranks, share = composition_table(timeline).rows
        assert sorted(each for row in ranks for each in read_ranks(row[0])) == list(range(8))
        assert sum(share[2:]) == pytest.approx(1)


def test_times_per_call_are_those_of_a_rank_and_step():
    spans = [
        Span(
            rank=rank, stream="compute", start_ps=0, end_ps=2 * 10**9, step=0, id="0F0/a", call="relu.forward", part="F"
        )
        for rank in (0, 1)
    ]
    one = Timeline.from_spans(spans, kind="predicted", num_ranks=2)
    two = Timeline.from_spans([replace(span, end_ps=3 * 10**9) for span in spans], kind="measured", num_ranks=2)
    assert [tuple(map(str, row)) for row in comparison_table(one, two).rows] == [
        ("relu.forward", "2.00 ms", "3.00 ms", "+50.0 %")
    ]


def test_the_step_table_has_the_difference_and_the_interval():
    timelines = [predicted(3), measured()]
    rows = {row[0]: row[1:] for row in timeline_table(timelines).rows}
    ratio = timelines[1].step_interval_s / timelines[0].step_interval_s - 1
    assert rows["step"][2] == pytest.approx(ratio)
    assert rows["its 90 % interval"][1:] == ("", "")
    assert timeline_table([timelines[0]]).columns == ("quantity", "predicted")


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (Check(name="a", value=1.0, low=0.5, high=2.0), True),
        (Check(name="a", value=1.0, high=0.5), False),
        (Check(name="a", value=1.0, low=1.5), False),
        (Check(name="a", value=float("inf"), low=1.5), False),
        (Check(name="a", value=False), False),
        (Check(name="a", value=True), True),
    ],
)
def test_checks_pass_inside_their_bounds_only(check, passed):
    assert check.passed is passed
    assert verification_table([check]).rows[0][3] == ("pass" if passed else "FAIL")


def test_a_narrow_terminal_breaks_long_cells():
    table = Table(title="T", columns=("name", "what"), rows=(("a", "one two three four five six seven"),))
    assert max(map(len, table.text(26).splitlines())) <= 26
    assert [word for word in table.text(26).split() if "─" not in word] == [
        word for word in table.text().split() if "─" not in word
    ]


def test_tables_give_plain_numbers_to_pandas():
    table = Table(title="T", columns=("name", "step"), rows=(("a", Seconds(0.25)), ("b", None)))
    assert table.to_pandas()["step"].tolist()[0] == 0.25
    assert table.csv().splitlines() == ["name,step", "a,0.25", "b,"]


def test_cells_are_escaped():
    table = Table(title="<T>", columns=("<c>",), rows=(("<script>",),))
    assert "<script>" not in table.html() and "&lt;script&gt;" in table.html()
