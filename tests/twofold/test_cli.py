"""The command line: exit codes, one JSON object, errors that name the input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from costmodels import Machine
from interop.statement import write_statement
from plans.degrees import Degrees
from plans.model.mlp import mlp_graph
from plans.model.transformer import transformer_config
from plans.plan import load_plan, save_plan
from search import search
from tests import ROOT
from twofold.cli import main


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        (
            ["simulate", "PLAN", "--machine", "h300-x8"],
            "machine 'h300-x8' is not known; did you mean h800-x8 or h200-x8",
        ),
        (["plan", "gpt2", "--machine", "cpu-2core-x2"], "with --machine cpu-2core-x8 --devices 2"),
        (["plan", "gpt2", "--machine", "cpu-2core-x99"], "cpu-2core-x8 is the file of one machine with 8 devices"),
        (["demo", "--case", "multiple_max"], "case 'multiple_max' is not known"),
        (["demo", "--steps", "0"], "--steps must be at least 1, not 0"),
        (["demo", "--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["plan", "nothing:here", "--machine", "h200-x8"], "nothing:here"),
        (["plan", "executor.networks:multiple_mix", "--machine", "h200-x8", "--stages", "9"], "9 pipeline stages"),
        (["verify", "PLAN", "--model", "", "--machine", "h200-x8"], "--model is empty"),
        (["simulate", "PLAN", "--machine", "h200-x2"], "has 2 devices; plan for fewer devices or use a larger"),
        (
            [
                "predict",
                "--model",
                "gpt2",
                "--machine",
                "h200-x2",
                "--global-batch",
                "2",
                "--sequence-parallel",
                "True",
            ],
            "--sequence-parallel is a switch and takes no value",
        ),
        (
            [
                "plan",
                "gpt2",
                "--machine",
                "h200-x2",
                "--devices",
                "2",
                "--global-batch",
                "2",
                "--pp",
                "2",
                "--schedule",
                "1f1b",
            ],
            "gpt2: the head shares its weights with the embedding",
        ),
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


def with_key(*path: str) -> Callable[[str], str]:
    """Writes an unknown key into a file."""

    def changed(text: str) -> str:
        found = json.loads(text)
        at = found
        for name in path[:-1]:
            at = at[name]
        at[path[-1]] = 1
        return json.dumps(found)

    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "not a complete JSON file"),
        (with_key("config", "hiden"), "config.hiden is not a key of such files; did you mean 'hidden'?"),
        (with_key("config", "rope", "zzz"), "config.rope.zzz is not a key of such files; remove it from the file"),
        (with_key("degrees", "microbatch"), "degrees.microbatch is not a degree; did you mean 'micro_batch'?"),
    ],
)
def test_mistakes_in_a_file_of_degrees_are_named(
    change: Callable[[str], str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformer_config("llama-3-8b", num_layers=2)
    file = write_statement(tmp_path / "a.degrees.json", config, Degrees(), stack="twofold")
    file.write_text(change(file.read_text()))
    assert main(["simulate", str(file), "--machine", "h200-x2"]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == error.count("\n") == 1 and str(file) in error and message in error


def test_tiers_that_do_not_divide_the_devices_are_refused(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "machine.json"
    found = json.loads(msgspec.json.encode(Machine.load("h100-sxm-x16")))
    file.write_text(json.dumps({**found, "num_devices": 12, "devices_per_node": 4}))
    assert main(["simulate", str(plan_file), "--machine", str(file)]) == 2
    assert "joins 8 ranks, which do not divide num_devices = 12; give a multiple of 8" in capsys.readouterr().err


def test_help_names_every_command() -> None:
    done = subprocess.run([sys.executable, "-m", "twofold", "--help"], capture_output=True, text=True, check=True)
    for command in ("demo", "plan", "simulate", "run", "verify", "calibrate"):
        assert command in done.stdout


def test_the_version_is_that_of_the_package(capsys):
    said = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert main(["--version"]) == 0
    assert said is not None and capsys.readouterr().out == f"twofold {said[1]}\n"


def test_an_interrupt_before_a_command_begins_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tyro.cli", interrupt)
    assert main(["simulate", "plan.json", "--machine", "h200-x8"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


_INSTALLED = "import sys; from twofold.cli import main; sys.exit(main())"
"""What the installed script `twofold` does."""


@pytest.mark.parametrize(("start", "options"), [(["-m", "twofold"], []), (["-c", _INSTALLED], ["--json"])])
def test_an_output_that_nobody_reads_ends_quietly(plan_file: Path, start: list[str], options: list[str]) -> None:
    command = [sys.executable, *start, "simulate", str(plan_file), "--machine", "h200-x8", *options]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["simulate", "--json"]])
def test_a_full_device_as_output_is_an_error_of_one_line(plan_file: Path, arguments: list[str]) -> None:
    more = [str(plan_file), "--machine", "h200-x8"] if "simulate" in arguments else []
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "twofold", *arguments, *more],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.endswith("error: the output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr
