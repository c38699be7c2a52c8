"""Files of results: each part with the command, the date and the machine that it was measured with."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

from executor.device import environment, pick_device

__all__ = ["keep"]


def keep(path: Path, part: str, found: dict[str, Any]) -> None:
    """Write a part of a file of results; its other parts stay.

    Args:
        path: JSON file.
        part: name.
        found: figures.
    """
    whole = json.loads(path.read_text()) if path.exists() else {}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    program = getattr(sys.modules["__main__"].__spec__, "name", "").removesuffix(".__main__")
    command = " ".join([f"python -m {program}", *sys.argv[1:]])
    whole[part] = {"command": command, "date": now, "environment": environment(pick_device("cpu"))} | found
    path.write_text(json.dumps(whole, indent=1) + "\n")
