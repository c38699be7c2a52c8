"""Studies: their points, results that are kept, processes, and what single settings come to."""

import csv
import json
import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

import twofold as tf
from costmodels import Machine, executing
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.transformer import transformer_config
from simulator.forecast import forecast
from simulator.forecast.turns import program_of
from simulator.predict import outcome
from simulator.study import store
from simulator.study.axes import AXES
from simulator.study.configured import Configured
from simulator.study.point import figures_of_point
from simulator.study.space import Space
from simulator.study.spares import waiting_share
from simulator.study.store import key_of
from simulator.study.sweep import Workers
from simulator.study.whatif import WhatIf
from twofold.cli import main

BASE = {"model": "llama-3-8b", "layers": 4, "machine": "h100-sxm-x16", "tp": 4, "pp": 2, "dp": 2, "global_batch": 16}
ALONE = Workers(backend="sequential")


def figures(**settings):
    found = figures_of_point({**BASE, **settings})
    assert "refused" not in found, found
    return found


def test_points_of_a_grid_one_at_a_time_and_a_sample():
    axes = {"pp": (1, 2), "zero": (0, 1, 2)}
    grid = list(Space(base={"tp": 2}, axes=axes))
    assert grid == [{"tp": 2, "pp": pp, "zero": zero} for pp in (1, 2) for zero in (0, 1, 2)]
    alone = list(Space(base={"tp": 2, "pp": 2}, axes=axes, points="one-at-a-time"))
    assert alone == [{"tp": 2, "pp": 2}, {"tp": 2, "pp": 1}, *({"tp": 2, "pp": 2, "zero": zero} for zero in (0, 1, 2))]
    large = Space(base={}, axes={name: tuple(range(1, 11)) for name in list(AXES) if AXES[name].type is int},
                  sample=50)  # fmt: skip
    drawn = list(large)
    assert len(drawn) == large.count == 50 and len({json.dumps(each) for each in drawn}) == 50
    assert drawn == list(large)


def test_axes_that_go_together_are_one_axis():
    """A product of an axis with rows of two, and each of them as one change of the base."""
    both = {"tp": (1, 2, 4), "dp": (4, 2, 1)}
    grid = list(Space(base={"pp": 2}, axes={"zero": (0, 1)}, together=[both]))
    assert grid == [
        {"pp": 2, "zero": zero, "tp": tp, "dp": dp} for zero in (0, 1) for tp, dp in ((1, 4), (2, 2), (4, 1))
    ]
    base = {"tp": 2, "dp": 2, "pp": 2}
    alone = list(Space(base=base, axes={"pp": (1, 2)}, together=[both], points="one-at-a-time"))
    assert alone == [base, {**base, "pp": 1}, {**base, "tp": 1, "dp": 4}, {**base, "tp": 4, "dp": 1}]
    large = Space(base={}, axes={"pp": range_of(40)}, together=[{"tp": range_of(50), "dp": range_of(50)}], sample=300)
    assert large.count == 300 and all(point["tp"] == point["dp"] for point in large)
    assert len({(point["pp"], point["tp"]) for point in large}) == 300


def range_of(count: int) -> tuple[int, ...]:
    return tuple(range(1, count + 1))


def test_a_study_of_axes_that_go_together(tmp_path, capsys):
    """The points of a file and of tf.study are those that stand in the product one by one."""
    file = tmp_path / "pairs.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in BASE.items()]
    file.write_text("\n".join(["[base]", *lines, "[[together]]", "tp = [1, 2]", "dp = [4, 2]"]))
    assert main(["study", str(file), "--backend", "sequential", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(point["tp"], point["dp"], point["step_s"]) for point in points] == [
        (tp, dp, figures(tp=tp, dp=dp)["step_s"]) for tp, dp in ((1, 4), (2, 2))
    ]
    found = tf.study(BASE, {}, together=[{"tp": [1, 2], "dp": [4, 2]}], points="one-at-a-time", workers=ALONE)
    said = [row[0] for row in found.table().rows]
    assert found.axes == ("tp", "dp") and "tp = 1, dp = 4" in said
    assert "tp = 1, dp = 4: tokens/s" in found.write_report(tmp_path / "pairs.html").read_text()


def test_a_point_is_the_forecast_of_its_degrees():
    machine = executing(Machine.load("h100-sxm-x16"), "graph")
    config = transformer_config("llama-3-8b", num_layers=4)
    for name, factor in (("bandwidth.1", 0.5), ("bandwidth.NVLink", 0.5), ("compute", 0.7)):
        assert figures(**{name: factor})["step_s"] != figures()["step_s"]
    degrees = Degrees.of({"tp": 4, "pp": 2, "dp": 2, "zero": 1}, global_batch=16, fused=machine.fuses)
    alone = forecast(config, degrees, machine)
    found = figures(zero=1, mixed_precision=False)
    assert (found["step_s"], found["peak_bytes"]) == (alone.step_s, alone.peak_bytes)
    assert found["tokens_per_s"] == 16 * config.seq / alone.step_s


def test_all_tiers_changed_one_by_one_are_the_whole_machine():
    """Fixed parts of collectives belong to the machine, so bandwidth alone is compared."""
    one_by_one = figures(**{"bandwidth.0": 0.5, "bandwidth.1": 0.5})
    assert one_by_one["step_s"] == figures(bandwidth=0.5)["step_s"]


@pytest.mark.parametrize(
    ("degrees", "slow"),
    [
        (Degrees(dp=2, tp=2, pp=4, global_batch=16), {5: 1.3}),
        (Degrees(dp=8, pp=2, global_batch=32, schedule="gpipe"), {10: 1.3, 3: 1.1}),
        (Degrees.of({"dp": 2, "tp": 4, "pp": 2, "zero": 3}, global_batch=8), {0: 1.5}),
        (Degrees(tp=4, pp=4, global_batch=16), {2: 1.0}),
    ],
)
def test_slow_ranks_are_forecast_as_the_engine_simulates_them(degrees, slow):
    """2.4 % is the largest difference that was seen in 24 random cases with ranks of one replica that are slow."""
    machine, config = executing(Machine.load("h100-sxm-x16"), "graph"), transformer_config("llama-3-8b", num_layers=4)
    what_if = WhatIf(slowdown=slow)
    found = Configured(config=config, degrees=degrees, machine=machine).outcome(what_if)
    program = program_of(config, degrees)
    assert found.step_s == pytest.approx(outcome(program, machine, what_if).step_s, rel=0.024)
    assert found.step_s >= forecast(config, degrees, machine).step_s


def test_spares_against_a_simulated_repair_shop():
    devices, mtbf_s, repair_s, draw = 50, 100.0, 3.0, np.random.default_rng(3)
    for spares in (0, 2):
        broken, waited_s, total_s = 0, 0.0, 0.0
        for _ in range(60_000):
            waits = broken > spares
            fails, mends = 0.0 if waits else devices / mtbf_s, broken / repair_s
            passed_s = draw.exponential(1 / (fails + mends))
            waited_s, total_s = waited_s + passed_s * waits, total_s + passed_s
            broken += 1 if draw.random() < fails / (fails + mends) else -1
        expected = waiting_share(spares, devices, device_mtbf_s=mtbf_s, repair_s=repair_s)
        assert waited_s / total_s == pytest.approx(expected, rel=0.05)


def test_checkpoints_failures_and_money():
    whole = figures()
    timed = figures(checkpoint_minutes=1.0, checkpoint_GBps=1.0, price_per_device_hour=2.0)
    every = max(1, round(60 / whole["step_s"]))
    assert timed["effective_step_s"] == pytest.approx(whole["step_s"] + timed["checkpoint_s"] / every)
    price = 2.0 * 16 * timed["effective_step_s"] / 3600 / (16 * 8192) * 1e9
    assert timed["price_per_1e9_tokens"] == pytest.approx(price)
    failing = {"checkpoint_every": 100, "restart_s": 60.0}
    causes = figures(**failing, **{"mtbf_hours.gpu": 2000.0, "mtbf_hours.link": 1000.0})
    assert causes["goodput"] == pytest.approx(figures(**failing, mtbf_hours=2000 / 3)["goodput"], rel=1e-12)
    shares = [figures(**failing, mtbf_hours=200.0, spares=n, repair_hours=24.0)["goodput"] for n in (0, 1, 2, 8)]
    assert all(a < b for a, b in pairwise(shares)) and math.isclose(
        shares[-1], figures(**failing, mtbf_hours=200.0)["goodput"], rel_tol=1e-3
    )


def test_a_search_at_every_point():
    base = {"model": "llama-3-8b", "layers": 4, "machine": "h100-sxm-x8", "global_batch": 16, "recompute": "none",
            "micro_batch": 1, "schedule": "1f1b"}  # fmt: skip
    found = tf.study(base, {"devices": [4, 8]}, search=True, workers=ALONE)
    assert [row["num_devices"] for row in found.rows] == [4, 8]
    for row in found.rows:
        for tp in (1, 2, 4):
            stated = figures_of_point({**base, "devices": row["devices"], "tp": tp})
            assert "refused" in stated or not stated["fits"] or row["step_s"] <= stated["step_s"] * (1 + 1e-9)


# ----------------------------------------------------------------------- results that are kept


@pytest.fixture
def study_file(tmp_path):
    lines = [f"{name} = {json.dumps(value)}" for name, value in BASE.items()]
    file = tmp_path / "links.toml"
    file.write_text("\n".join(["[base]", *lines, "[axes]", "bandwidth.1 = [0.5, 1.0, 2.0]", "micro_batch = [1, 2, 3]"]))
    return file


def test_a_stopped_study_resumes_and_computes_no_point_twice(study_file, capsys):
    assert main(["study", str(study_file), "--json", "--backend", "sequential"]) == 0
    whole = json.loads(capsys.readouterr().out)
    results = study_file.with_suffix(".results.jsonl")
    lines = results.read_bytes().splitlines(keepends=True)
    assert whole["computed"] == len(lines) == 9
    results.write_bytes(b"".join(lines[:4]) + lines[4][:40])  # killed while it wrote the fifth
    again = tf.study(BASE, {"bandwidth.1": [0.5, 1.0, 2.0], "micro_batch": [1, 2, 3]}, results=results, workers=ALONE)
    assert again.rows == whole["points"]
    written = [line for line in results.read_bytes().splitlines() if line != lines[4][:40]]
    assert sorted(json.loads(line)["key"] for line in written) == sorted(json.loads(line)["key"] for line in lines)
    assert main(["study", str(study_file), "--csv", str(study_file.with_suffix(".csv"))]) == 0
    said = capsys.readouterr().out
    assert "0 points computed, 9 read from an earlier run" in said and "3 points are impossible" in said
    assert max(map(len, said.splitlines()[:8])) <= 100


def test_the_command_writes_its_table_in_a_process_of_its_own(study_file):
    """The tests' process has used twofold's face, which the command's has not."""
    table = study_file.with_suffix(".csv")
    asked = [sys.executable, "-m", "twofold", "study", str(study_file), "--csv", str(table), "--backend", "sequential"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with table.open() as file:
        assert len([row for row in csv.DictReader(file) if row["step_s"]]) == 6


def test_a_price_below_zero_is_refused():
    found = tf.study(BASE, {"price_per_device_hour": [-1.0, 2.0]}, workers=ALONE)
    assert "price_per_device_hour must be at least 0, not -1" in json.dumps(found.rows[0])
    assert found.best["price_per_device_hour"] == 2.0


def test_a_changed_file_is_computed_anew(tmp_path):
    machine, results = tmp_path / "machine.json", tmp_path / "results.jsonl"
    slower = WhatIf(compute=0.5).machine(Machine.load("h100-sxm-x16"))
    steps = []
    for each in (Machine.load("h100-sxm-x16"), slower):
        each.save(machine)
        found = tf.study({**BASE, "machine": str(machine)}, {"zero": [1]}, results=results, workers=ALONE)
        steps.append(found.rows[0]["step_s"])
    keys = [key_of({"host": str(machine), "zero": 1}, is_searched=False)]
    machine.write_text("{}")
    keys.append(key_of({"host": str(machine), "zero": 1}, is_searched=False))
    assert keys[0] != keys[1]
    assert steps[0] < steps[1] and len(results.read_text().splitlines()) == 2


@pytest.mark.parametrize("backend", ["loky", pytest.param("dask", marks=pytest.mark.filterwarnings("ignore"))])
def test_processes_give_the_same_results(backend):
    axes = {"bandwidth": [0.5, 1.0], "micro_batch": [1, 2, 4], "zero": [0, 1, 2]}
    one = tf.study(BASE, axes, workers=ALONE)
    many = tf.study(BASE, axes, workers=Workers(backend=backend, jobs=2))
    assert one.rows == many.rows
    assert repr(many) == "<Study of bandwidth, micro_batch, zero: 18 points, 0 refused>"
    frame = many.to_pandas()
    assert list(frame["step_s"]) == [row["step_s"] for row in one.rows] and "<table" in many._repr_html_()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[base]\nmodle = 'gpt2'\n[axes]\ntp = [1]", "'modle' is not an axis; did you mean 'model'?"),
        ("[base]\n[axes]\n'bandwith.NVLink' = [1]", "'bandwith.NVLink' is not an axis; did you mean 'bandwidth'"),
        ("[base]\n[axes]\n'tp.NVLink' = [1]", "'tp.NVLink' is not an axis; did you mean 'tp'?"),
        ("[base]\n[axes]\ntp = 4", "axis tp must be a list of values, such as [1, 2, 4], not 4"),
        ("[base]\n[axes]\ntp = []", "axis tp must be a list of values, such as [1, 2, 4], not []"),
        ("[base]\n[axes]\ntp = [1, 1]", "axis tp has 1 twice"),
        ("[base]\n[axes]\ntp = ['four']", "tp must be a whole number, not 'four'"),
        ("[base]\nzap = 1\n", "the study has no axes; add some"),
        ("[base]\n[[together]]\ntp = [1, 2]\ndp = [4]", "linked axes tp and dp have 2 and 1 values"),
        ("[base]\n[axes]\ntp = [1]\n[[together]]\ntp = [1, 2]\ndp = [4, 2]", "axis tp is given twice"),
        ("[base]\n[[together]]\ntp = [1, 1]\ndp = [4, 4]", "linked axes have tp = 1, dp = 4 twice"),
        ("[base]\n[[together]]\ntp = [1]\nzap = [4]", "zap"),
        ("[base]\n[[together]]", "linked axes is empty"),
        ("[base]\n[together]\ntp = [1]", "Expected `array`, got `object`"),
        ("points = 'all'\n[base]\n[axes]", "points is 'all'; it must be 'grid' or 'one-at-a-time'"),
        ("pionts = 'grid'\n[base]\n[axes]", "unknown key `pionts`"),
        ("base = [", "Invalid value"),
    ],
)  # fmt: skip
def test_bad_studies_are_one_line(text, message, tmp_path, capsys):
    file = tmp_path / "study.toml"
    file.write_text(text)
    assert main(["study", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == error.count("\n") == 1 and message in error


def test_a_grid_of_a_billion_points_suggests_a_sample():
    axes = {name: list(range(1, 1001)) for name in ("tp", "pp", "dp")}
    with pytest.raises(TwofoldError, match=r"1,000,000,000 points.*one-at-a-time.*sample = 10000"):
        tf.study({}, axes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "llama-9"}, "llama-9"),
        ({"bandwidth.rope": 2.0}, "its tiers are NVLink (0), InfiniBand NDR (1)"),
        ({"devices": 8}, "the degrees use 16 devices, not 8"),
        ({"slow": "1/0=2"}, "cannot read slow 1/0=2"),
        ({"slow": "99=2"}, "slowdown of rank 99"),
        ({"slow": "3=0.5"}, "ranks that are faster than others: not supported by forecasts"),
        ({"spares": 2}, "spares need mtbf_hours"),
        ({"restart_s": 2.0}, "restart_s needs mtbf_hours"),
        ({"checkpoint_GBps": 2.0}, "checkpoint_GBps needs checkpoint_every"),
        ({"checkpoint_minutes": 1.0, "checkpoint_every": 2}, "set the same quantity"),
        ({"precision": "float8"}, "float8 is a stack"),
        ({"mtbf_hours": 0.0}, "mtbf_hours must be above 0, not 0.0"),
    ],
)
def test_impossible_points_have_a_reason(settings, message):
    assert message in figures_of_point({**BASE, **settings})["refused"]


def test_the_version_of_the_code_follows_its_files(tmp_path, monkeypatch):
    """A result that older code or another shipped machine gave is not taken for one of today's."""
    for name in ("plans/a.py", "costmodels/machines/devices/h200.json", "search/notes.md", "reports/b.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(store, "__file__", str(tmp_path / "simulator" / "study" / "store.py"))
    version = store.code_version.__wrapped__
    versions = [version()]
    for name in ("search/notes.md", "reports/b.py", "plans/a.py", "costmodels/machines/devices/h200.json"):
        (tmp_path / name).write_text("2")
        versions.append(version())
    assert versions[0] == versions[1] == versions[2] and len({*versions[2:]}) == 3
