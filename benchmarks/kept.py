"""Files of results, with the command, the date, the commit and the machine that they were measured with."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import FOLDER
from executor.device import Device, environment, pick_device
from plans.files import write_atomically

__all__ = ["keep", "measured_with", "write_results", "write_rows"]

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


def write_rows(
    path: Path, rows: dict[str, Any], order: Iterable[str], total: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:  # fmt: skip
    """Write the rows of a run as "models"; of a run in parts, into the file of the others.

    Args:
        path: JSON file.
        rows: name -> what was found.
        order: all names; if `rows` lacks some, those stay as they are in the file, where "remeasured" says which were
            made later.
        total: figures of all rows.
    """
    names = list(order)
    facts = measured_with()
    if rows.keys() != set(names):
        kept = json.loads(path.read_text())
        later = {name: {key: facts[key] for key in ("date", "commit")} for name in rows}
        rows = {name: row for name in names if (row := (kept["models"] | rows).get(name)) is not None}
        facts = kept | {"remeasured": kept.get("remeasured", {}) | later}
    write_results(path, facts | total(rows) | {"models": rows})
