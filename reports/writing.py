"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from plans.errors import TwofoldError

__all__ = ["write_atomically"]


def write_atomically(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write `content` beside `path` and put it in place at once; the folder is made if it is missing.

    Raises:
        TwofoldError: the folder cannot be written to.
    """
    path, temporary = Path(path), ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise TwofoldError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None
        raise
    return path
