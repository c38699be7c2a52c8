"""Figures of every step, one JSON object a line, written while a run goes on."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

__all__ = ["Metrics"]


class Metrics:
    """Appends to a file; lines of steps that a resumed run does anew are dropped first.

    Args:
        path: of the file.
        first: the number of steps that were done before.
        predicted_step_s: what the plan was predicted to take, written beside what was measured; None where it was not.
    """

    def __init__(self, path: Path, first: int, predicted_step_s: float | None) -> None:
        kept = []
        with contextlib.suppress(FileNotFoundError):
            kept = [line for line in path.read_text().splitlines() if _step(line) <= first]
        self._file = path.open("w", buffering=1)  # by lines
        self._file.writelines(f"{line}\n" for line in kept if first)
        self._predicted_step_s = predicted_step_s
        self._seen_s: float | None = None

    def add(self, step: int, loss: float, learning_rate: float | None, samples: int) -> None:
        """A step, counted from 0, was done. The first one of a process has no time: it compiles and checks."""
        now_s = time.perf_counter()
        step_s = None if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        figures = {
            "step": step + 1, "loss": loss, "learning_rate": learning_rate, "step_s": step_s,
            "samples_per_s": None if step_s is None else samples / step_s, "predicted_step_s": self._predicted_step_s,
        }  # fmt: skip
        self._file.write(json.dumps(figures) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step(line: str) -> int:
    """The step of a line; a large one where it was cut by the end of its process."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62
