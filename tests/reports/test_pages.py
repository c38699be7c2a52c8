"""The pages of a prediction and of a study: they hold what the commands print, results first."""

import json
import re
import time
from pathlib import Path

import pytest

import twofold as tf
from plans.errors import TwofoldError
from simulator.study.sweep import Workers
from twofold.cli import main

BASE = {"model": "llama-3-8b", "layers": 4, "machine": "h100-sxm-x16", "tp": 4, "pp": 2, "dp": 2, "global_batch": 16}
ALONE = Workers(backend="sequential")
PREDICT = ["predict", "llama-3-8b", "--layers", "4", "--machine", "h100-sxm-x16", "--tp", "4", "--pp", "2",
           "--dp", "2", "--global-batch", "16"]  # fmt: skip


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="twofold-data">\s*(.*?)\s*</script>', page, re.DOTALL)[1])


def known(said: dict) -> dict:
    """What a page keeps of a JSON object."""
    return {name: value for name, value in said.items() if value is not None}


def sections_of(page: str) -> list[str]:
    return re.findall(r'<(?:section|details) id="([a-z]+)">', page)


def test_the_page_of_a_prediction_holds_what_predict_says(tmp_path: Path, capsys) -> None:
    file = tmp_path / "page.html"
    assert main([*PREDICT, "--report", str(file), "--json"]) == 0
    said, page = json.loads(capsys.readouterr().out), file.read_text()
    assert data_of(page) == known(said)
    assert '<meta name="twofold-report" content="prediction">' in page
    assert sections_of(page) == ["step", "memory", "limits", "pipeline", "further"]
    assert "Made by twofold: <code>twofold predict llama-3-8b" in page
    critical = re.search(r'<p class="caption">Critical path.*?</table>', page, re.DOTALL)[0]
    shares = [float(share) for share in re.findall(r'data-key="([\d.e-]+)">[\d.]+ %', critical)]
    assert len(shares) > 2 and sum(shares) == pytest.approx(1, abs=1e-9)
    stages = re.search(r'aria-label="Where the step of every pipeline rank goes".*?</svg>', page, re.DOTALL)[0]
    for rank in (0, 1):  # parts of a bar add up to the step
        parts = re.findall(rf"<title>pipeline rank {rank}: .+? ([\d.]+) ms</title>", stages)
        assert sum(map(float, parts)) == pytest.approx(1e3 * said["step_s"], rel=2e-3)


def test_other_software_has_no_pipeline_and_oversized_plans_are_marked(tmp_path: Path, capsys) -> None:
    file = tmp_path / "page.html"
    large = [word if word != "16" else "128" for word in PREDICT]
    assert main([*large, "--layers", "80", "--stack", "torchtitan", "--report", str(file)]) == 0
    page = file.read_text()
    assert "pipeline" not in sections_of(page) and "run by torchtitan" in page
    assert "It does not fit." in capsys.readouterr().out and "<p class=fail>It does not fit: " in page


def test_degrees_of_a_file_have_the_page_of_their_prediction(tmp_path: Path, capsys) -> None:
    plan = tmp_path / "plan.json"
    pins = ["--tp", "2", "--dp", "4", "--pp", "1", "--micro-batch", "1", "--schedule", "1f1b", "--recompute", "none"]
    small = ["--layers", "2", "--machine", "h200-x8", "--global-batch", "8"]
    assert main(["plan", "llama-3-8b", *small, *pins, "--out", str(plan)]) == 0
    capsys.readouterr()
    file = tmp_path / "page.html"
    asked = ["simulate", str(plan), "--recost", "--machine", "h200-x8", "--json"]
    assert main([*asked, "--report", str(file)]) == 0
    assert data_of(file.read_text()) == known(json.loads(capsys.readouterr().out))
    assert main([*asked, "--trace", str(tmp_path / "t.json")]) == 2
    assert "--trace is not for --recost" in capsys.readouterr().err


def test_a_page_that_is_anothers_file_is_left_alone(tmp_path: Path, capsys) -> None:
    file = tmp_path / "notes.html"
    file.write_text("mine")
    assert main([*PREDICT, "--report", str(file)]) == 2
    assert "notes.html" in capsys.readouterr().err and file.read_text() == "mine"
    assert main([*PREDICT, "--report", str(file), "--force"]) == 0


def test_the_page_of_a_grid(tmp_path: Path) -> None:
    axes = {"tp": [1, 2, 4], "micro_batch": [1, 2, 3], "recompute": ["none", "full"]}
    found = tf.study({**BASE, "price_per_device_hour": 2.0}, axes, workers=ALONE)
    page = found.write_report(tmp_path / "study.html", name="grid").read_text()
    assert sections_of(page) == ["result", "axes", "trade", "base"]  # 18 rows are all in the first table
    assert data_of(page)["points"] == json.loads(json.dumps(found.rows))
    best = found.best
    assert f"<dd>tp = {best['tp']}, micro_batch = {best['micro_batch']}, recompute = {best['recompute']}</dd>" in page
    fitting = [row for row in found.rows if row.get("fits")]
    highest = {tp: max(row["tokens_per_s"] for row in fitting if row["tp"] == tp) for tp in (1, 2, 4)}
    by_axis = re.search(r'<p class="caption">The best point of every value.*?</table>', page, re.DOTALL)[0]
    change = re.search(r"<td>tp</td>.*?([+-][\d.]+) %</td></tr>", by_axis)[1]
    assert float(change) == pytest.approx(100 * (min(highest.values()) / max(highest.values()) - 1), abs=0.05)
    trade = re.search(r'aria-label="Tokens/s against price of 10\^9 tokens".*?</svg>', page, re.DOTALL)[0]
    assert len(re.findall("<title>tp = ", trade)) == len(fitting)


def test_the_page_of_single_changes(tmp_path: Path, capsys) -> None:
    study, file = tmp_path / "links.toml", tmp_path / "links.html"
    lines = ['points = "one-at-a-time"', "[base]", *(f"{name} = {json.dumps(value)}" for name, value in BASE.items())]
    study.write_text("\n".join([*lines, "[axes]", "bandwidth.1 = [0.5, 2.0]", "compute = [1.1]", "micro_batch = [3]"]))
    assert main(["study", str(study), "--backend", "sequential", "--report", str(file), "--json"]) == 0
    points, page = json.loads(capsys.readouterr().out)["points"], file.read_text()
    assert "<title>Study: links</title>" in page and sections_of(page) == ["result", "base"]
    base, *changed = points
    told = re.findall(r"<title>(.+?): tokens/s ([+-][\d.]+) %</title>", page)[: len(changed)]
    rates = {"bandwidth.1 = 0.5": 1, "bandwidth.1 = 2": 2, "compute = 1.1": 3}
    assert [name for name, _ in told[:3]] == sorted(rates, key=lambda name: -points[rates[name]]["tokens_per_s"])
    for name, said in told[:3]:
        expected = points[rates[name]]["tokens_per_s"] / base["tokens_per_s"] - 1
        assert float(said) == pytest.approx(100 * expected, abs=0.006)
    assert "1 point is impossible: " in page and "<dt>impossible</dt><dd>1</dd>" in page


def test_a_study_of_which_nothing_fits_has_a_page(tmp_path: Path) -> None:
    base = {**BASE, "model": "llama-3-70b", "layers": 80, "machine": "a100-40gb-x16"}
    found = tf.study(base, {"micro_batch": [1, 2]}, workers=ALONE)
    page = found.write_report(tmp_path / "none.html").read_text()
    assert "<dt>fit</dt><dd>none</dd>" in page and sections_of(page) == ["result", "base"]
    with pytest.raises(TwofoldError, match="no point of the study fits"):
        _ = found.best


def test_a_price_that_the_base_does_not_have_is_a_change_like_others(tmp_path):
    base = {"model": "llama-3-8b", "layers": 2, "machine": "h200-x8", "global_batch": 8, "tp": 8}
    found = tf.study(base, {"price_per_device_hour": [2.5]}, points="one-at-a-time", workers=ALONE)
    table = found.table()
    unpriced, priced = (row[table.columns.index("price of 10^9 tokens")] for row in table.rows)
    assert unpriced is None and priced == found.rows[1]["price_per_1e9_tokens"]
    assert "cheapest" in found.write_report(tmp_path / "price.html").read_text()


def test_a_step_of_thousands_of_micro_batches_is_not_simulated_for_a_page(tmp_path: Path) -> None:
    """2,048 micro-batches of 32 layers took five minutes in the event engine."""
    asked = ["predict", "llama-3-8b", "--machine", "h100-sxm-x16", "--tp", "8", "--dp", "2"]
    begun = time.process_time()
    assert main([*asked, "--global-batch", "4096", "--report", str(tmp_path / "long.html")]) == 0
    assert time.process_time() - begun < 20
    assert "pipeline" not in sections_of((tmp_path / "long.html").read_text())
