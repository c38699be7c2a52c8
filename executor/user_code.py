"""Functions and values that a command line names: package.module:name or file.py:name."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from plans.errors import TwofoldError

__all__ = ["UserCodeError", "each_of", "load_named", "running_user_code"]

_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"], "<frozen")


class UserCodeError(TwofoldError):
    """Code of the user raised an exception, which is the cause of this one."""


@contextlib.contextmanager
def running_user_code(what: str) -> Iterator[None]:
    """Turn an exception of the user's code, `SystemExit` included, into a message with its place.

    Raises:
        UserCodeError: as above.

    >>> with running_user_code("data 'train.py:batches'"):
    ...     {}["images"]
    Traceback (most recent call last):
        ...
    executor.user_code.UserCodeError: data 'train.py:batches' raised KeyError: 'images'
    """
    try:
        yield
    except TwofoldError:
        raise
    except (Exception, SystemExit) as error:
        lines = str(error).splitlines() or [""]
        message = f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
        place = "" if isinstance(error, SyntaxError) else _place_of(error.__traceback__)
        raise UserCodeError(f"{what} raised {message}{place}") from error


def each_of(what: str, items: Iterable[Any]) -> Iterator[Any]:
    """The items of the user's iterable; see `running_user_code`."""
    with running_user_code(what):
        iterator = iter(items)
    over = object()
    while True:
        with running_user_code(what):
            item = next(iterator, over)
        if item is over:
            return
        yield item


def _place_of(raised: TracebackType | None) -> str:
    """The last line of a traceback that is not in a library."""
    frames = [frame for frame in traceback.extract_tb(raised) if not frame.filename.startswith(_LIBRARIES)]
    own = frames[2:]  # the first two are `running_user_code` and its caller
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _place_and_name(spec: str, what: str) -> tuple[str, str]:
    """The module or file and the name in it, before anything is imported.

    Raises:
        TwofoldError: another form, no such file.
    """
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise TwofoldError(f"{what} {spec!r} must be package.module:function or file.py:function")
    if place.endswith(".py") and not Path(place).is_file():
        raise TwofoldError(f"{what} {spec!r}: there is no file {place!r}")
    return place, name


def load_named(spec: str, what: str) -> Any:
    """The object that "package.module:name" or "file.py:name" names.

    Args:
        spec: see above.
        what: it is for, for messages: "model" or "data".

    Raises:
        TwofoldError: no such file, module or name, or an exception of the file or module (`UserCodeError`).
    """
    place, name = _place_and_name(spec, what)
    try:
        with running_user_code(f"{what} {spec!r}"):
            if place.endswith(".py"):
                found = importlib.util.spec_from_file_location(Path(place).stem, place)
                assert found is not None and found.loader is not None
                module = importlib.util.module_from_spec(found)
                sys.modules[found.name] = module
                found.loader.exec_module(module)
            else:
                module = importlib.import_module(place)
    except UserCodeError as raised:
        error = raised.__cause__
        if not isinstance(error, ImportError):
            raise
        if not isinstance(error, ModuleNotFoundError):
            raise TwofoldError(f"{what} {spec!r} cannot be imported: {error}") from None
        if error.name is not None and place.split(".")[0] == error.name.split(".")[0]:
            raise TwofoldError(
                f"{what} {spec!r}: there is no module {error.name!r}; name an installed one, or a file as in "
                "file.py:function"
            ) from None
        raise TwofoldError(f"{what} {spec!r} needs {error.name!r}, which is not installed") from None
    try:
        return getattr(module, name)
    except AttributeError:
        known = [var for var in vars(module) if not var.startswith("_")]
        close = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise TwofoldError(f"{what} {spec!r}: {place} has no {name!r}{hint}") from None
