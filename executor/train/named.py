"""Functions and values that a command line names: package.module:name or file.py:name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from plans.errors import TwofoldError

__all__ = ["load_named"]


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
        TwofoldError: no such file, module or name.
    """
    place, name = _place_and_name(spec, what)
    try:
        if place.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules[found.name] = module
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and place.split(".")[0] == error.name.split(".")[0]:
            raise TwofoldError(
                f"{what} {spec!r}: there is no module {error.name!r}; name an installed one, or a file as in "
                "file.py:function"
            ) from None
        raise TwofoldError(f"{what} {spec!r} needs {error.name!r}, which is not installed") from None
    except ImportError as error:
        raise TwofoldError(f"{what} {spec!r} cannot be imported: {error}") from None
    try:
        return getattr(module, name)
    except AttributeError:
        known = [var for var in vars(module) if not var.startswith("_")]
        close = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise TwofoldError(f"{what} {spec!r}: {place} has no {name!r}{hint}") from None
