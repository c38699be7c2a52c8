"""10,000 changed files and command lines, each done or refused (`python -m benchmarks.reliability.fuzz` runs more)."""

from __future__ import annotations

import json

import pytest

from benchmarks.reliability.fuzz import fuzz
from costmodels import Machine
from plans.errors import TwofoldError
from plans.model.transformer import transformer_config
from twofold.cli import main


def test_changed_files_are_read_or_refused():
    assert [found for found in fuzz(9_880, 1, commands=False) if found is not None] == []


def test_changed_inputs_of_commands_are_done_or_refused():
    assert [found for found in fuzz(120, 1) if found is not None] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"host_scale": 1e-308}, "host_scale is 1e-308; it must be between"),
        ({"memory_bytes": 10**17}, "memory_bytes is 1e.17; it must be between"),
        ({"runtime_bytes": 10**12}, "leaves no room for tensors"),
        ({"spreads": {"matrix": 900.0}}, "spreads"),
        ({"launch_s": 1e300}, r"launch_s is 1e\+300"),
    ],
)
def test_figures_that_no_machine_has_are_refused(change, says):
    stated = json.loads(Machine.load("h100-sxm-x8").to_json()) | change
    with pytest.raises(TwofoldError, match=says):
        Machine.from_json(json.dumps(stated).encode(), "m.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_attention_heads", 32.7), ("rope_theta", [1]), ("rms_norm_eps", "x"), ("attention_dropout", "1")],
)
def test_values_of_another_type_in_a_config_are_refused(key, value, tmp_path):
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    stated = sizes | {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64}
    path.write_text(json.dumps(stated))
    assert transformer_config(str(path)).num_layers == 2
    path.write_text(json.dumps(stated | {key: value}))
    with pytest.raises(TwofoldError, match=r"config\.json: "):
        transformer_config(str(path))


def test_a_step_of_more_than_106_days_is_refused(capsys):
    arguments = ["llama-3-8b", "--seq", "16000000", "--machine", "h100-sxm-x8"]
    arguments += ["--micro-batch", "10000000", "--global-batch", "80000000"]
    assert main(["predict", *arguments]) == 2
    assert "takes more than 2^63 picoseconds" in capsys.readouterr().err


def test_printed_text_cannot_control_the_terminal(capsys):
    assert main(["predict", "a\x1b[2J", "--machine", "h100-sxm-x8"]) == 2
    assert main(["simulate", "no such \u009b31m.json", "--machine", "h100-sxm-x8"]) == 2
    told = capsys.readouterr().err
    assert "\x1b" not in told and "\x9b" not in told and told.count("error: ") == 2


def test_a_machine_larger_than_any_is_refused():
    with pytest.raises(TwofoldError, match="9,999,999 devices"):
        Machine.load("h100-sxm-x1000000000000")
