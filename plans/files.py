"""Writes files atomically (a reader finds the old content or the new one, never a part), and JSON without NaN."""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from plans.errors import TwofoldError

__all__ = ["atomic_file", "check_writable", "finite", "replacing_all", "write_atomically"]


def finite(value: Any) -> Any:
    """The same value with None for NaN and infinities, which JSON cannot express.

    >>> finite({"losses": [2.5, float("nan")]})
    {'losses': [2.5, None]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value


_OURS = re.compile(rb"twofold|class=\"tf\"|\"version\":\s*\d|\"environment\"|\"key\"|step_s|^\s*$")
"""Texts at the beginning of the files that twofold writes."""

_TABLE = re.compile(rb"\A[^\n]*\bstep_s\b")
"""Texts in the first line of the tables that twofold writes."""

_replaces_all: ContextVar[bool] = ContextVar("replaces_all", default=False)


@contextlib.contextmanager
def replacing_all() -> Iterator[None]:
    """Let `check_writable` accept files that twofold did not write, for `--force`."""
    before = _replaces_all.set(True)
    try:
        yield
    finally:
        _replaces_all.reset(before)


def check_writable(path: str | os.PathLike[str], *, replaces: bool = True) -> None:
    """Refuse a path that cannot be written, or a file that we did not write, before the work for it starts.

    Its folder is created.

    Args:
        path: path of the file.
        replaces: whether a file there is replaced; one that is read and added to may be anybody's.

    Raises:
        TwofoldError: it cannot.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if path.exists() and not path.is_file():  # such as /dev/null
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        is_ours = not replaces or not path.exists() or _replaces_all.get() or _is_ours(path)
    except (FileExistsError, NotADirectoryError):
        raise TwofoldError(f"{str(path)!r} cannot be written: its folder is a file; name another file") from None
    except OSError as error:
        raise TwofoldError(f"{str(path)!r} cannot be written: {error.strerror or error}; name another file") from None
    if not is_ours:
        raise TwofoldError(f"{str(path)!r} was not written by twofold; name another file, or add --force to replace it")


def _is_ours(path: Path) -> bool:
    """Whether a file begins as those that we write."""
    with path.open("rb") as file:
        begin = file.read(_LOOKED_AT)
    if begin[:2] == b"\x1f\x8b":
        with contextlib.suppress(zlib.error):
            begin = zlib.decompressobj(wbits=31).decompress(begin, _LOOKED_AT)
    if path.suffix == ".ipynb":
        return False
    is_text = b"\0" not in begin and not begin.lstrip().startswith((b"<", b"{", b"["))
    if is_text and begin.strip():  # twofold writes no prose and no code: a text that mentions twofold is the user's own
        return _TABLE.match(begin) is not None
    return _OURS.search(begin) is not None


_LOOKED_AT = 1 << 16


def write_atomically(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write `data` to `path` atomically: the previous content stays until the new one is complete.

    Devices and pipes, such as /dev/null, are written to, never replaced; of a symbolic link, the file that it leads to
    is replaced. An existing file keeps its mode, a new one follows the umask.

    Raises:
        OSError: with the name of what cannot be written.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            with atomic_file(path) as file:
                file.write(data)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None  # not the temporary file's name, or none
    return path


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file whose content takes the place of `path` at the end, or of what a symbolic link leads to.

    Raises:
        OSError: it cannot be written; the previous content stays.
    """
    path = Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else None
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
