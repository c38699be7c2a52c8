"""Temporary folders of launches. The next launch removes those of launchers that were killed.

A launcher holds a lock in its folder, which the system releases when the process ends for any reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["temporary_folder"]

_PREFIX = "twofold-"
_LOCK = ".in-use"
_YOUNG_S = 60.0
"""A folder of this age may not have been locked yet."""


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A folder that is removed at the end. Folders left by killed launchers of this user are removed first.

    >>> with temporary_folder() as folder:
    ...     os.path.basename(folder).startswith("twofold-")
    True
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it has another owner, or no lock, or has gone
            if time.time() - left.lstat().st_mtime > _YOUNG_S and not left.is_symlink():
                with _locked(left, os.O_RDWR | os.O_NOFOLLOW):
                    shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX) as folder,
        _locked(Path(folder), os.O_RDWR | os.O_CREAT | os.O_EXCL),
    ):
        yield folder


@contextlib.contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """Hold the lock of a folder; OSError where another process does."""
    import fcntl

    lock = os.open(folder / _LOCK, how, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
