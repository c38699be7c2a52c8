"""The flags of every command, as scripts spell them: one that goes breaks somebody's script."""

from __future__ import annotations

import pytest

from twofold.cli import commands
from twofold.option_list import options_of

_DEGREES = "dp tp pp cp ep micro-batch schedule virtual recompute recompute-layers zero sequence-parallel order "
_DEGREES += "bucket-bytes interleave overlap-pairs receives precision"
_FACTORS = "bandwidth latency compute memory dispatch"
_NODES = "nodes node master port"
_LAUNCH = f"steps data emulate dilate out log-dir seed execution fused profile timeout {_NODES}"

FLAGS = {
    "demo": "case steps epochs data machine out log-dir seed port timeout json",
    "plan": f"machine devices global-batch seq layers capacity-factor method {_DEGREES} stage-layers stack stages "
    "micro-batches widths lr optimizer memory host execution fused time-limit top-k out report for simulate explain "
    "json force",
    "simulate": "machine schedule trace rank-traces report measured steps execution fused fold recost model "
    "global-batch seq stack json force",
    "whatif": f"machine {_FACTORS} slow jitter seed link device beside on checkpoint-every checkpoint-GBps "
    "checkpoint-async device-mtbf-hours restart-s schedule sensitivity by picture report steps simulate json force",
    "study": "axes results csv report top backend jobs scheduler json force",
    "run": f"devices model machine {_LAUNCH} json",
    "train": f"resume allow-changes max-restarts timeout {_NODES} json",
    "export": "config json force",
    "verify": f"model machine {_LAUNCH} json",
    "calibrate": f"devices out name device points base minutes quick report host timeout {_NODES} json force",
    "predict": f"machine {_DEGREES} stage-layers {_FACTORS} global-batch seq layers mixed-precision "
    "capacity-factor stack host execution fused report json force",
    "validate": "stack machine host report json force",
    "compare": "machine steps report json",
    "links": "machine link plan top json",
    "serve": "port open json",
}
POSITIONAL = {
    "plan": {"model"}, "simulate": {"plan"}, "whatif": {"plan"}, "study": {"study"}, "run": {"target", "script-args"},
    "train": {"job"}, "export": {"checkpoint", "file"}, "verify": {"plan"}, "validate": {"table"},
    "links": {"traces"}, "compare": {"plans"}, "serve": {"folder"}, "predict": {"model"},
}  # fmt: skip


@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_spelled_as_they_were(command: str) -> None:
    options = list(options_of(commands()[command]))
    spelled = [option.name.removeprefix("--") for option in options if not option.is_word]
    assert sorted(spelled) == sorted(FLAGS[command].split())
    assert {option.name.replace("_", "-") for option in options if option.is_word} == POSITIONAL.get(command, set())


@pytest.mark.parametrize("command", FLAGS)
def test_every_option_has_a_description(command: str) -> None:
    assert [option.name for option in options_of(commands()[command]) if not option.meaning] == []


def test_every_command_has_its_flags_listed() -> None:
    assert list(commands()) == [
        "demo", "plan", "simulate", "whatif", "study", "run", "train", "export", "verify", "calibrate",
        "predict", "validate", "compare", "links", "serve",
    ]  # fmt: skip
    assert set(FLAGS) == set(commands())
