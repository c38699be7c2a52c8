"""Files of results, with the command, the date and the machine that they were measured with."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from executor.device import Device, environment, pick_device
from plans.files import write_atomically

__all__ = ["keep", "measured_with", "write_results"]


def measured_with(device: Device | None = None) -> dict[str, Any]:
    """The command that runs, the date, and the machine; None: its CPU."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    program = getattr(sys.modules["__main__"].__spec__, "name", "").removesuffix(".__main__")
    command = " ".join([f"python -m {program}", *sys.argv[1:]])
    return {"command": command, "date": now, "environment": environment(device or pick_device("cpu"))}


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
