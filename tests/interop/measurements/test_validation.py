"""Tables of measurements: reading, scoring, refusing."""

from __future__ import annotations

import json

import pytest

from interop.measurements.cells import Skip
from interop.measurements.rows import case_of
from interop.measurements.tables import read_table
from interop.measurements.validation import validate
from plans.errors import TwofoldError
from reports.validation import validation_page
from tests.interop.measurements.measured_table import write_table
from twofold.cli import main

ROW = {
    "source": "arXiv 2205.05198", "model": "gpt", "layers": "8", "hidden": "1024", "heads": "16", "seq": "1024",
    "global_batch": "16", "micro_batch": "2", "tp": "2", "pp": "2", "dp": "2", "schedule": "1f1b",
    "recompute": "full", "gpu_type": "A100-80GB", "gpu_count": "8", "precision": "fp16", "metric": "iteration_time_s",
    "value": "0.2", "layout_complete": "y",
}  # fmt: skip


def test_row_becomes_a_configuration():
    case = case_of(ROW, 1)
    assert (case.machine, case.stack, case.degrees.num_ranks) == ("a100-80gb-x8", "megatron-2022", 8)
    assert case.config.gated is False and case.config.vocab == 51_200
    llama = case_of(ROW | {"ffn": "2816", "source": "torch", "zero_level": "2"}, 1)
    assert llama.config.gated and llama.stack == "torch" and llama.degrees.optimizer.parallel_level == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"precision": "mxfp8"}, "mxfp8"), ({"async_tp": "y"}, "asynchronous"), ({"layout_complete": "n"}, "layout"),
     ({"gpu_type": "TPU v5"}, "catalogue"), ({"gpu_count": "16"}, "8 ranks"), ({"micro_batch": ""}, "micro_batch"),
     ({"value": "nan"}, "positive"), ({"metric": "joy"}, "metric"), ({"global_batch": "15"}, "divide"),
     ({"global_batch": str(2**19)}, "to 262,144"),
     ({"hidden": "many"}, "hidden"), ({"zero_level": "x"}, "not 'x'"), ({"layers": "inf"}, "layers is 'inf'"),
     ({"layers": "1e30"}, "layers is '1e30'"), ({"zero_level": "inf"}, "zero_level"), ({"tp": "-1"}, "tp is '-1'")],
)  # fmt: skip
def test_unpredictable_rows_are_skipped_with_a_reason(change, reason):
    with pytest.raises(Skip, match=reason):
        case_of(ROW | change, 1)


def test_ends_hold_one_layer_fewer_where_only_that_divides():
    case = case_of(ROW | {"layers": "14", "pp": "4", "dp": "1"}, 1)
    assert case.degrees.layers == (3, 4, 4, 3)


def test_scores_are_those_of_the_rows(tmp_path):
    once = validate(write_table(tmp_path / "a.csv", [ROW]))
    predicted = once.rows[0]["predicted"]
    rows = [
        ROW | {"value": str(predicted * 1.25)},
        ROW | {"value": str(predicted * 0.5), "micro_batch": "1"},
        ROW | {"precision": "int4"},
    ]
    found = validate(write_table(tmp_path / "b.csv", rows))
    first, second = (row["predicted"] / row["value"] - 1 for row in found.rows)
    score = found.sources[0]
    assert first == pytest.approx(-0.2)
    assert score["mape"] == pytest.approx((abs(first) + abs(second)) / 2)
    assert score["bias"] == pytest.approx((first + second) / 2)
    assert score["pair_order"] in (0.0, 1.0) and [each["row"] for each in found.skipped] == [3]
    slower = found.rows[0]["predicted"] < found.rows[1]["predicted"]  # it is chosen, and measured the slower one
    assert score["regret_max"] == pytest.approx(1.5 if slower else 0)


def test_rows_of_impossible_sizes_are_skipped_and_the_others_predicted(tmp_path):
    rows = [ROW | {"layers": "inf"}, ROW, ROW | {"layers": "1e30"}, ROW | {"zero_level": "x"}]
    found = validate(write_table(tmp_path / "a.csv", rows))
    assert [row["row"] for row in found.rows] == [2] and [row["row"] for row in found.skipped] == [1, 3, 4]


def test_tables_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(TwofoldError, match="cannot read"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TwofoldError, match="no column"):
        read_table(tmp_path / "bad.csv")
    write_table(tmp_path / "empty.csv", [])
    with pytest.raises(TwofoldError, match="no rows"):
        read_table(tmp_path / "empty.csv")


def test_a_page_shows_scores_and_the_rows_that_are_furthest_off(tmp_path):
    rows = [ROW | {"value": str(value)} for value in (0.1, 0.2, 40)] + [ROW | {"gpu_type": "TPU v5"}]
    document = validate(write_table(tmp_path / "a.csv", rows)).to_json()
    text = validation_page("a.csv", document).html()
    worst = text[text.index("largest errors first</h2>") :]
    assert worst.index("<td>arXiv 2205.05198</td>") > 0 and worst.index(">40<") < worst.index(">0.2<")
    assert "TPU v5" in text and "rows skipped" in text and "nan" not in text.lower()


def test_json_is_printed_where_no_row_can_be_predicted(tmp_path, capsys):
    table = write_table(tmp_path / "a.csv", [ROW | {"gpu_type": "TPU v5"}])
    assert main(["validate", str(table), "--json"]) != 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [] and "TPU v5" in found["skipped"][0]["reason"]
    assert main(["validate", str(table)]) == 2
    assert "no row of" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "a,b\n1,2\n", "source,model,metric,value\n"])
def test_json_is_printed_where_there_is_no_table(tmp_path, capsys, text):
    path = tmp_path / "table.csv"
    if text is not None:
        path.write_text(text)
    assert main(["validate", str(path), "--json"]) != 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [] and "table" in found["error"]
