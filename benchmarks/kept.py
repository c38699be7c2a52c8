"""Files of results, with the command, the date, the commit and the machine that they were measured with."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import FOLDER
from executor.device import Device, environment, pick_device
from plans.files import write_atomically

__all__ = ["keep", "measured_with", "write_results"]

_ROOT = FOLDER.parent


def measured_with(device: Device | None = None) -> dict[str, Any]:
    """The command that runs, the date, the commit of this tree, and the machine; None: its CPU."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    program = getattr(sys.modules["__main__"].__spec__, "name", "").removesuffix(".__main__")
    command = " ".join([f"python -m {program}", *sys.argv[1:]])
    used = environment(device or pick_device("cpu"))
    return {"command": command, "date": now, "commit": _commit(), "environment": used}


def _commit() -> str:
    """The commit of this tree, with "-dirty" if files differ from it; "" without git."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    try:
        return subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def write_results(path: Path, found: dict[str, Any]) -> None:
    """Write a file of results atomically."""
    write_atomically(path, json.dumps(found, indent=1).encode() + b"\n")


def keep(path: Path, part: str, found: dict[str, Any]) -> None:
    """Write a part of a file of results; its other parts stay.

    Args:
        path: JSON file.
        part: name.
        found: figures.
    """
    whole = json.loads(path.read_text()) if path.exists() else {}
    write_results(path, whole | {part: measured_with() | found})
