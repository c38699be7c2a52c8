"""Progress of a command. With --json it goes to stderr, so that stdout has one JSON object."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["Console", "shortened", "visible"]

_SILENT_S = 2.0
"""Seconds without output after which a command prints what it is doing."""


_LONGEST_LINE, _BEGIN, _END = 1500, 1000, 400
"""Characters of a line of an error, and of its begin and end where it is longer."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    r"""The text with control characters escaped, so that the content of a file cannot control the terminal.

    >>> visible("a\x1b[2J\tb")
    'a\\x1b[2J\tb'
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def shortened(text: str) -> str:
    """The text with the middle of long lines left out: a file may have a value of any length.

    >>> shortened("a" * 5000).count("a"), shortened("as it was")
    (1400, 'as it was')
    """
    return "\n".join(
        line if len(line) <= _LONGEST_LINE else f"{line[:_BEGIN]} ... {line[-_END:]}" for line in text.split("\n")
    )


class Console:
    """Prints progress; with `json` to stderr, so that stdout has the JSON object only.

    Args:
        json: whether the command prints one JSON object.
        command: the command line, which reports repeat.
    """

    def __init__(self, *, json: bool = False, command: str = "") -> None:
        self.command = command
        self._out: TextIO = sys.stderr if json else sys.stdout
        self._num_steps = self._step = 0
        self._start_s = self._printed_s = time.perf_counter()

    def count_steps(self, num_steps: int) -> None:
        """Set the number of numbered steps."""
        self._num_steps = num_steps

    def step(self, title: str) -> None:
        """Start the next numbered step."""
        self._step += 1
        self.print(f"[{self._step}/{self._num_steps}] {title}")

    def print(self, text: str, indent: int = 0) -> None:
        """Print lines immediately."""
        self._printed_s = time.perf_counter()
        for line in text.splitlines() or [""]:
            print(" " * indent + visible(line), file=self._out, flush=True)

    def note(self, text: str) -> None:
        """Print indented lines below a step."""
        self.print(text, indent=6)

    @contextmanager
    def doing(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Print `what` and the elapsed time on stderr whenever the body prints nothing for more than 2 s.

        Args:
            what: a text such as "simulating 64 ranks", or a function that returns one.
        """
        ended = threading.Event()
        begin_s = self._printed_s = time.perf_counter()

        def watch() -> None:
            wait_s = _SILENT_S
            while not ended.wait(min(0.5, wait_s)):
                now_s = time.perf_counter()
                if now_s - self._printed_s >= wait_s:
                    self._printed_s, wait_s = now_s, min(30.0, 2 * wait_s)
                    text = what if isinstance(what, str) else what()
                    print(f"... {text}, {now_s - begin_s:.0f} s", file=sys.stderr, flush=True)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.perf_counter() - self._start_s
