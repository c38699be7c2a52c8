"""Configurations in other programs' words, and `twofold plan` and `simulate --recost` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plans.errors import TwofoldError
from plans.plan import Optimizer, load_plan
from plans.scale import Degrees
from plans.transformer import transformer_config
from search.scale.statement import megatron_flags, read_statement, torchtitan_toml, write_statement
from twofold.cli import main

CONFIG = transformer_config("llama-3-8b")


def degrees(*, zero: int = 1, **values: Any) -> Degrees:
    given = {"dp": 4, "tp": 2, "pp": 2, "micro_batch": 2, "global_batch": 32, "sequence_parallel": True} | values
    optimizer = Optimizer(
        kind="adamw", settings={"lr": 1e-4}, parallel_level=zero, gradient_dtype="float32", master_dtype="float32"
    )
    return Degrees(**given, optimizer=optimizer)


@pytest.mark.parametrize(
    "stated",
    [
        degrees(),
        degrees(zero=0, tp=1, sequence_parallel=False, recompute="selective"),
        degrees(schedule="interleaved_1f1b", virtual=4, recompute="full"),
        degrees(pp=1, zero=3, cp=2),
    ],
)
def test_flags_of_megatron_come_back_as_they_went(stated: Degrees, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    words = " ".join(megatron_flags(CONFIG, stated))
    script.write_text(f"# a job\ntorchrun pretrain_gpt.py \\\n  {words} --world-size {stated.num_ranks}\n")
    found = read_statement(script)
    assert found.seq == 8192
    assert found.degrees() == stated


@pytest.mark.parametrize(
    "stated",
    [
        degrees(zero=3, schedule="zb_v", virtual=2, recompute="full"),
        degrees(zero=2),
        degrees(zero=0, pp=1, recompute="selective_op"),
        degrees(zero=3, pp=1, cp=2),
    ],
)
def test_settings_of_torchtitan_come_back_as_they_went(stated: Degrees, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(torchtitan_toml(CONFIG, stated))
    assert read_statement(file).degrees() == stated


def test_our_own_file_comes_back_as_it_went(tmp_path: Path) -> None:
    stated = degrees(schedule="zb_v", virtual=2, layers=(9, 8, 8, 7))
    found = read_statement(write_statement(tmp_path / "plan.degrees.json", CONFIG, stated))
    assert found.degrees() == stated
    assert found.config is not None and found.config.num_parameters == CONFIG.num_parameters


def test_uneven_layers_are_a_layout_of_megatron_and_fewer_on_the_last_stage_of_torchtitan() -> None:
    uneven = degrees(zero=0, layers=(17, 15))
    flags = megatron_flags(CONFIG, uneven)
    assert flags[flags.index("--pipeline-model-parallel-layout") + 1] == "E" + 17 * "t" + "|" + 15 * "t" + "L"
    assert "pipeline_parallel_last_stage_less_layers = 2" in torchtitan_toml(CONFIG, uneven)


@pytest.mark.parametrize(
    ("write", "stated", "message"),
    [
        (megatron_flags, degrees(schedule="zb_h1"), "no schedule 'zb_h1'"),
        (megatron_flags, degrees(recompute="selective_op"), "by operator"),
        (megatron_flags, degrees(zero=2), "only without pipeline"),
        (torchtitan_toml, degrees(), "level 1"),
        (torchtitan_toml, degrees(zero=3, sequence_parallel=False), "splits the sequence"),
        (torchtitan_toml, degrees(zero=3, recompute="selective"), "by operator"),
        (torchtitan_toml, degrees(zero=3, schedule="v_half", virtual=2), "no schedule 'v_half'"),
        (torchtitan_toml, degrees(zero=3, schedule="zb_v", virtual=2, layers=(9, 8, 7, 8)), "equal but for fewer"),
    ],
)
def test_what_a_program_has_no_words_for_is_refused(write: Any, stated: Degrees, message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        write(CONFIG, stated)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "python train.py", "no flags"),
        ("a.sh", "--micro-batch-size 1 --global-batch-size 8", "world-size"),
        ("a.sh", "--micro-batch-size 1 --global-batch-size 8 --world-size eight", "not a whole number"),
        ("a.sh", "--micro-batch-size 1 --global-batch-size 8 --world-size 8 --tensor-model-parallel-size 3", "divide"),
        ("a.sh", "--num-experts 8 --micro-batch-size 1 --global-batch-size 8 --world-size 8", "num-experts"),
        ("a.toml", "parallelism = 3 =", "not TOML"),
        ("a.toml", "[training]\nseq_len = 3", "parallelism"),
        ("a.json", "{}", "states no degrees"),
    ],
)
def test_files_that_state_nothing_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TwofoldError, match=message):
        read_statement(tmp_path / name)


def test_plan_saves_what_simulate_costs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "plan.json", tmp_path / "report.html"
    asked = ["plan", "llama-3-8b", "--layers", "2", "--seq", "512", "--machine", "h100-sxm-x8", "--devices", "4"]
    pins = ["--global-batch", "8", "--cp", "1", "--recompute", "none", "--micro-batch", "1", "--tp", "2"]
    assert main([*asked, *pins, "--out", str(out), "--report", str(report), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["complete"] and found["gap"] == 0 and found["best"]["tp"] == 2
    assert found["physics_bound_s"] <= found["lower_bound_s"] <= found["best"]["step_s"]
    assert load_plan(out).num_ranks == 4 and found["neighbours"]
    assert "One degree changed at a time" in report.read_text()
    assert main(["simulate", str(out), "--recost", "--machine", "h100-sxm-x8", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_s"] == pytest.approx(found["best"]["step_s"]) and again["fits"]
    larger = ["simulate", str(out), "--recost", "--machine", "h100-sxm-x8", "--global-batch", "16", "--json"]
    assert main(larger) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > again["step_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "llama-4-9b", "--machine", "h100-sxm-x8"], "llama-4-9b"),
        (["plan", "llama-3-8b", "--machine", "h900-x8"], "h900-x8"),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--tp", "3"], "tp=3"),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--devices", "0"], "num_devices is 0"),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--method", "magic"], "magic"),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--export", "alpa"], "alpa"),
        (["plan", "llama-3-8b", "--machine", "h100-sxm-x8", "--method", "grid", "--tp", "2"], "takes no pins"),
        (["plan", "mixtral-8x7b", "--machine", "h100-sxm-x8", "--cp", "2"], "which cp splits"),
        (["plan", "executor.networks:multiple_mix", "--machine", "h200-x8", "--tp", "2"], "--tp is for transformers"),
        (["simulate", "nowhere.sh", "--recost", "--machine", "h100-sxm-x8"], "nowhere.sh"),
    ],
)
def test_bad_input_exits_with_2_and_one_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and message in error
