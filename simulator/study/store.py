"""Stores the results of points: one JSON line each, under a hash of the point and of the code that computed it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from plans.errors import TwofoldError
from plans.reading import json_of, read_file

__all__ = ["Store", "code_version", "key_of"]

_PACKAGES = ("plans", "costmodels", "simulator", "search")


@lru_cache(maxsize=1)
def code_version() -> str:
    """A hash of the code and of the shipped machines that predictions depend on."""
    found = hashlib.sha256()
    root = Path(__file__).parents[2]
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".json"):
                found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def key_of(settings: Mapping[str, Any], *, is_searched: bool) -> str:
    """The key of a point: a hash of its settings, of the content of the files that they name, and of the code.

    >>> key_of({"tp": 2, "pp": 4}, is_searched=False) == key_of({"pp": 4, "tp": 2}, is_searched=False)
    True
    """
    named = {name: _content(value) for name, value in settings.items() if name in ("model", "machine", "host")}
    text = json.dumps([code_version(), is_searched, settings, named], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _content(name: str) -> str:
    """A hash of a file's content; "" for names of shipped machines and models."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


class Store:
    """An append-only file of results; without a path they are kept in memory only.

    A line that was cut when its writer was killed is left out; the next one begins on a separate line.

    Args:
        path: path of the file; it is created with the first result.

    Raises:
        TwofoldError: a file that holds something else.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._found: dict[str, dict[str, Any]] = {}
        self._begun = b""
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        content = read_file(path, "the results of a study")
        lines = content.split(b"\n")
        for number, line in enumerate(lines):
            if not line:
                continue
            try:
                entry = json_of(line, str(path))
                self._found[entry["key"]] = entry["figures"]
            except (ValueError, KeyError, TypeError, RecursionError):
                if number == 0 and not line.startswith(b'{"key"'):
                    raise TwofoldError(f"{str(path)!r} has no results of a study; name another file") from None
        self._begun = b"" if content.endswith(b"\n") or not content else b"\n"

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._found[key]

    def add(self, key: str, settings: Mapping[str, Any], figures: dict[str, Any]) -> None:
        """Store the figures of a point; they are on disk when this returns."""
        self._found[key] = figures
        if self.path is None:
            return
        line = json.dumps({"key": key, "settings": settings, "figures": figures})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(self._begun + line.encode() + b"\n")
        self._begun = b""
