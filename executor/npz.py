"""Files of arrays by name, written atomically."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.files import write_atomically

__all__ = ["write_npz"]


def write_npz(path: str | os.PathLike[str], arrays: Mapping[str, npt.NDArray[Any]]) -> Path:
    """Write arrays to an .npz file (no pickle) atomically.

    Raises:
        TwofoldError: the file cannot be written.
    """
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    try:
        return write_atomically(path, content.getvalue())
    except OSError as error:
        raise TwofoldError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from None
