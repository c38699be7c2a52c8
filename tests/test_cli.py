"""The command line: exit codes, one JSON object, errors that name the input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plans.model.mlp import mlp_graph
from plans.plan import load_plan, save_plan
from search import search
from twofold.cli import main


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from costmodels import Machine

    plan = search(mlp_graph([16, 16, 8], 16), Machine.load("h200-x8"), num_devices=4, num_micro_batches=2).best
    return save_plan(plan, tmp_path_factory.mktemp("plan") / "plan.json")


def test_simulate_prints_one_json_object(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json.gz"
    assert main(["simulate", str(plan_file), "--machine", "h200-x8", "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"step_s", "step_low_s", "step_high_s", "peak_bytes", "bubble_fraction", "exposed_comm_s"}
    assert found["step_low_s"] < found["step_s"] < found["step_high_s"]
    assert trace.is_file()


def test_plan_writes_a_plan_that_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    arguments = ["plan", "executor.networks:multiple_mix", "--machine", "h200-x8", "--devices", "4", "--out", str(out)]
    assert main([*arguments, "--stages", "2", "--micro-batches", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= {"best", "plans", "lower_bound_s", "gap", "search_s"}
    assert load_plan(out).num_ranks == 4 and len(load_plan(out).stages) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "nowhere.json", "--machine", "h200-x8"], "nowhere.json"),
        (["simulate", "PLAN", "--machine", "h300-x8"], "machine 'h300-x8' is not known; did you mean h200-x8"),
        (["demo", "--case", "multiple_max"], "case 'multiple_max' is not known"),
        (["demo", "--steps", "0"], "steps=0"),
        (["demo", "--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["plan", "nothing:here", "--machine", "h200-x8"], "nothing:here"),
        (["plan", "executor.networks:multiple_mix", "--machine", "h200-x8", "--stages", "9"], "9 pipeline stages"),
        (["verify", "PLAN", "--model", "", "--machine", "h200-x8"], "needs the model"),
    ],
)
def test_bad_input_exits_with_2_and_one_error(
    arguments: list[str], message: str, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main([str(plan_file) if argument == "PLAN" else argument for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and message in error
    assert not list(tmp_path.rglob("*.json"))


def test_help_names_every_command() -> None:
    done = subprocess.run([sys.executable, "-m", "twofold", "--help"], capture_output=True, text=True, check=True)
    for command in ("demo", "plan", "simulate", "run", "verify", "calibrate"):
        assert command in done.stdout


def test_the_version_is_that_of_the_package(capsys):
    said = re.search(r'^version = "(.*)"', (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.MULTILINE)
    assert main(["--version"]) == 0
    assert said is not None and capsys.readouterr().out == f"twofold {said[1]}\n"


def test_an_interrupt_before_a_command_begins_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tyro.extras.subcommand_cli_from_dict", interrupt)
    assert main(["simulate", "plan.json", "--machine", "h200-x8"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
