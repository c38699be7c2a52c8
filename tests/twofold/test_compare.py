"""`twofold compare`: plans side by side."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from plans.plan import save_plan
from tests.support.reports_example import small_plan
from twofold.cli import main

MACHINE = ["--machine", "h200-x8"]


@pytest.fixture
def plans(tmp_path: Path) -> list[str]:
    several = msgspec.structs.replace(small_plan(), schedule="gpipe")
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, plan in zip(paths, (small_plan(), several), strict=True):
        save_plan(plan, path)
    return paths


def test_plans_are_predicted_as_by_simulate_on_one_page(plans, tmp_path, capsys):
    page = tmp_path / "both.html"
    assert main(["compare", *plans, *MACHINE, "--report", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"]
    for each in found:
        assert main(["simulate", each["plan"], *MACHINE, "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert {key: alone[key] for key in each if key != "plan"} == {k: v for k, v in each.items() if k != "plan"}
    data = json.loads(re.search(r'id="twofold-data">\s*(.*?)\s*</script>', page.read_text(), re.DOTALL)[1])
    assert [each["name"] for each in data["plans"]] == ["a.json", "b.json"]
    assert [each["step_s"] for each in data["plans"]] == [each["step_s"] for each in found]


def test_one_plan_and_seven_are_refused_in_a_line(plans, capsys):
    for count in (1, 7):
        assert main(["compare", *(plans[:1] * count), *MACHINE]) == 2
        said = capsys.readouterr().err
        assert f"compare takes 2 to 6 plan files, not {count}" in said and said.count("\n") == 1
