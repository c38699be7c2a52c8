"""Raw measured points: what a calibration run writes and what `costmodels.fit` reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from plans.errors import TwofoldError
from plans.files import write_atomically

__all__ = ["Point", "load_points", "save_points"]


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One measured figure.

    Args:
        kind: matrix, memory, dispatch, sharing, collective, transfer, or overlap.
        call: the torch call or the kind of collective; for dispatch the class of instruction.
        shape: (m, n, k) of a matrix product; () elsewhere.
        size_bytes: bytes read and written (memory), or of the larger of input and output of one rank (communication).
        ranks: members of one group.
        active_ranks: ranks that worked at the same time, all groups together; the others slept.
        dtype: of the tensors.
        seconds: median over repeats of the time of one call; for communication until the last group was through.
        cpu_s: processor seconds that one member spent on one call, its mean over members; 0 where it was not taken.
        outside_cores: cores that other processes kept busy meanwhile; 0 where it was not taken.
        low_s: the fastest repeat.
        high_s: the slowest repeat.
        repeats: repeats of which each is a mean over many calls.
    """

    kind: str
    call: str
    shape: tuple[int, ...] = ()
    size_bytes: int = 0
    ranks: int = 1
    active_ranks: int = 1
    dtype: str = "float32"
    seconds: float
    cpu_s: float = 0.0
    outside_cores: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    repeats: int = 1


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    environment: dict[str, str]
    points: tuple[Point, ...]


def save_points(path: str | os.PathLike[str], points: Sequence[Point], environment: dict[str, str]) -> None:
    """Write points with the versions, date and machine they were taken on, whole or not at all."""
    file = _File(environment=environment, points=tuple(points))
    write_atomically(path, msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")


def load_points(path: str | os.PathLike[str]) -> tuple[tuple[Point, ...], dict[str, str]]:
    """The points of a file and the environment they were taken in.

    Raises:
        TwofoldError: no such file, truncated, an unknown key (with its path).
    """
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=_File)
    except OSError as error:
        raise TwofoldError(f"cannot read the measured points {os.fspath(path)!r}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise TwofoldError(f"{os.fspath(path)}: {error}; measure again") from None
    return file.points, file.environment
