"""The flags of every command, as scripts spell them: one that goes breaks somebody's script."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import pytest

from twofold.cli import commands

_DEGREES = "dp tp pp cp ep micro-batch schedule virtual recompute recompute-layers zero sequence-parallel order "
_DEGREES += "bucket-bytes interleave overlap-pairs receives"
_FACTORS = "bandwidth latency compute memory dispatch"
_NODES = "nodes node master port"
_LAUNCH = f"steps data emulate dilate out log-dir seed execution fused profile timeout {_NODES}"

FLAGS = {
    "demo": "case steps epochs data machine out log-dir seed port timeout json",
    "plan": f"machine devices global-batch seq layers method {_DEGREES} stage-layers stack stages micro-batches widths "
    "lr memory host execution fused time-limit top-k out report software simulate explain json force",
    "simulate": "machine schedule trace rank-traces report measured steps execution fused fold recost model "
    "global-batch seq stack json force",
    "whatif": f"machine {_FACTORS} slow jitter seed link device beside on checkpoint-every checkpoint-GBps "
    "checkpoint-async device-mtbf-hours restart-s schedule sensitivity by picture report steps simulate json force",
    "study": "axes results csv report top backend jobs scheduler json force",
    "run": f"devices model machine {_LAUNCH} json",
    "train": f"resume max-restarts timeout {_NODES} json",
    "export": "config json force",
    "verify": f"model machine {_LAUNCH} json",
    "calibrate": f"devices out name device points base minutes quick report host timeout {_NODES} json force",
    "predict": f"machine {_DEGREES} stage-layers {_FACTORS} global-batch seq layers mixed-precision stack "
    "host execution fused report json force",
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


def flags_of(options: type) -> Iterator[str]:
    for name, kind in typing.get_type_hints(options).items():
        if dataclasses.is_dataclass(kind):
            yield from flags_of(typing.cast("type", kind))
        elif name in {field.name for field in dataclasses.fields(options)}:
            yield name.replace("_", "-")


@pytest.mark.parametrize("command", FLAGS)
def test_flags_are_spelled_as_they_were(command: str) -> None:
    spelled = list(flags_of(commands()[command]))
    assert len(spelled) == len(set(spelled))
    assert set(spelled) - POSITIONAL.get(command, set()) == set(FLAGS[command].split())


def test_every_command_has_its_flags_listed() -> None:
    assert list(commands()) == [
        "demo", "plan", "simulate", "whatif", "study", "run", "train", "export", "verify", "calibrate",
        "predict", "validate", "compare", "links", "serve",
    ]  # fmt: skip
    assert set(FLAGS) == set(commands())
