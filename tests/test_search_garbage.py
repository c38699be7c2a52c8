"""A command that searches degrees looks for no garbage from its search to the end of its process."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from twofold.cli import main

SMALL = [
    "plan", "llama-3-8b", "--layers", "2", "--machine", "h100-sxm-x8", "--devices", "2", "--global-batch", "2",
    "--tp", "2", "--recompute", "none", "--zero", "0", "--simulate", "0", "--out",
]  # fmt: skip

ENDS = """
import atexit, gc, sys
from twofold.cli import main
atexit.register(lambda: print("frozen", gc.get_freeze_count() > 0))
sys.exit(main(sys.argv[1:]))
"""


def test_the_end_of_a_search_is_not_looked_through(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ENDS, *SMALL, str(tmp_path / "plan")], capture_output=True, text=True, check=True
    )
    assert ran.stdout.endswith("frozen True\n")


def test_who_calls_the_command_keeps_its_collection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gc.isenabled()
    before = gc.get_freeze_count()
    assert main([*SMALL, str(tmp_path / "plan")]) == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before
    assert "llama-3-8b" in capsys.readouterr().out
