"""Writing files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write `data` to `path`, whole or not at all; what stood there before stays until then.

    What is no file of its own, such as /dev/null or a pipe, is written to, never replaced.

    Raises:
        OSError: with the name of what cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return path
