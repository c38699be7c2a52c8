"""What a command says while it works; stdout stays free where it must hold one JSON object."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["Console"]


class Console:
    """Prints progress; with `json` to stderr, so that stdout holds the JSON object only.

    Args:
        json: whether the command ends in one JSON object.
        num_steps: how many numbered steps there will be.
    """

    def __init__(self, *, json: bool = False, num_steps: int = 0) -> None:
        self._out: TextIO = sys.stderr if json else sys.stdout
        self._num_steps, self._step = num_steps, 0
        self._start_s = time.perf_counter()

    def step(self, title: str) -> None:
        """Start the next numbered step."""
        self._step += 1
        self.say(f"[{self._step}/{self._num_steps}] {title}")

    def say(self, text: str, indent: int = 0) -> None:
        """Print lines at once."""
        for line in text.splitlines() or [""]:
            print(" " * indent + line, file=self._out, flush=True)

    def note(self, text: str) -> None:
        """Print indented lines below a step."""
        self.say(text, indent=6)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.perf_counter() - self._start_s
