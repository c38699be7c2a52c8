"""A command that is silent says what it is doing."""

from __future__ import annotations

import time

import pytest

from twofold import console as console_module
from twofold.console import Console


def test_a_silence_is_broken_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "_SILENT_S", 0.05)
    console = Console()
    with console.doing("waiting for the test"):
        time.sleep(0.4)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("... waiting for the test, ")
    time.sleep(0.2)
    assert capsys.readouterr().err == ""  # it has ended with the body


def test_short_work_is_not_announced(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(json=True)
    with console.doing("nothing"), pytest.raises(ValueError, match="broken"):
        raise ValueError("broken")
    console.print("done")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "done\n")
