"""Raw measured points: written by calibration runs and read by fits.

Two forms of file: one JSON object (`save_points`), and JSON lines (`PointLog`), to which points are appended as
they are measured, so that an interrupted run loses nothing and the next one skips existing points.
"""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.model.graph import itemsize
from plans.reading import json_of, read_file

__all__ = ["Point", "PointLog", "held_out", "load_points", "save_points"]

_FIGURES = (
    "seconds", "cpu_s", "outside_cores", "low_s", "high_s", "repeats", "figures", "clock_MHz", "temperature_C",
    "power_W", "flag", "held_out",
)  # fmt: skip


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One measured figure. All times are of one call.

    Args:
        kind: matrix, memory, attention, rule, dispatch, replay, sharing, collective, transfer, overlap, clock,
            allocation, or step.
        call: the torch call, the kind of collective, or (dispatch) the class of instruction, call, module or action.
        shape: (m, n, k) of a matrix product: rows and columns of the result, length of the sums; (batch, heads, kv
            heads, queries, keys, head dim) of attention; dims of the main tensor (memory); (nodes,) of a recording that
            is replayed; () elsewhere.
        form: of a matrix product: "nt" a[m, k] b[n, k]^T, as a linear's forward; "nn" a[m, k] b[k, n], as its gradient
            of the input; "tn" a[k, m]^T b[k, n], as its gradient of the weight.
        batch: equal products in one call.
        size_bytes: bytes read and written (memory), or of the larger of input and output of one rank (communication).
        ranks: members of one group.
        active_ranks: ranks that worked at the same time, all groups together; the others slept.
        dtype: dtype of the tensors; "tf32" for float32 products on the matrix units' tf32 mode.
        stack: dispatch: whose habit it is, such as twofold, torch, backward, dtensor, fsdp2.
        beside: overlap: the collective that ran during the compute `call`.
        options: further properties of the point, such as {"causal": 1}.
        held_out: chosen before measuring to be reported on, never fitted.
        seconds: median over repeats of the time of one call; for communication until the last group was through; for
            dispatch of the host to issue it.
        cpu_s: processor seconds that one member spent on one call, its mean over members; 0 where it was not taken.
        outside_cores: cores that other processes kept busy meanwhile; 0 where it was not taken.
        low_s: the fastest repeat.
        high_s: the slowest repeat.
        repeats: repeats of which each is a mean over many calls.
        figures: further measured numbers, SI with the unit in the name.
        clock_MHz: the device's clock right after the repeats; 0 where unknown, as the next two.
        temperature_C: of the device.
        power_W: of the device.
        flag: "unsteady" or "clock" where the repeats differ or the clock moved; such points are kept.
    """

    kind: str
    call: str
    shape: tuple[int, ...] = ()
    form: str = ""
    batch: int = 1
    size_bytes: int = 0
    ranks: int = 1
    active_ranks: int = 1
    dtype: str = "float32"
    stack: str = ""
    beside: str = ""
    options: dict[str, int | float | str] = {}
    held_out: bool = False
    seconds: float
    cpu_s: float = 0.0
    outside_cores: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    repeats: int = 1
    figures: dict[str, float] = {}
    clock_MHz: float = 0.0
    temperature_C: float = 0.0
    power_W: float = 0.0
    flag: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of a measurement, without its results.

        >>> a, b = Point(kind="memory", call="relu", seconds=1.0), Point(kind="memory", call="relu", seconds=2.0)
        >>> a.key == b.key
        True
        """
        names = (name for name in self.__struct_fields__ if name not in _FIGURES)
        return tuple(
            tuple(sorted(value.items())) if isinstance(value := getattr(self, name), dict) else value for name in names
        )

    @property
    def flops(self) -> float:
        """Operations of a matrix product or of attention, whose backward has 2.5 times those of its forward.

        >>> Point(kind="matrix", call="mm", shape=(2, 3, 4), batch=5, seconds=1.0).flops
        240.0
        """
        if self.kind == "matrix":
            m, n, k = self.shape
            return 2.0 * self.batch * m * n * k
        batch, heads, _, queries, keys, dim = self.shape
        share = (0.5 if self.options.get("causal") else 1.0) * (2.5 if self.call.endswith("backward") else 1.0)
        return 4.0 * batch * heads * queries * keys * dim * share

    @property
    def flops_per_byte(self) -> float:
        """FLOPs per byte of a matrix product or attention, counting its operands and its result once."""
        if self.kind == "matrix":
            m, n, k = self.shape
            items = self.batch * (m * k + n * k + m * n)
        else:
            batch, heads, kv_heads, queries, keys, dim = self.shape
            items = dim * batch * (2 * heads * queries + 2 * kv_heads * keys)
        return self.flops / (itemsize("float32" if self.dtype == "tf32" else self.dtype) * items)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    environment: dict[str, str]
    points: tuple[Point, ...]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    environment: dict[str, str]


class PointLog:
    """A file of JSON lines to which points are appended one at a time.

    Args:
        path: path of the file; it is made when the first line is written.

    A last line that was cut off (a process ended while writing) is dropped when the file is opened. `environments` are
    all that the file names, in its order; `environment` is the last of them over those before it.

    Raises:
        TwofoldError: a line that is not a point, or one whose time nothing can take; a file that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.points: list[Point] = []
        self.environments: list[dict[str, str]] = []
        if self.path.exists():
            content = read_file(self.path, "the measured points")
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                write_atomically(self.path, whole)
            self.points, self.environments = _lines(whole, self.path)
        self._keys = {point.key for point in self.points}

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the measurements; if several runs differ, that of the last one."""
        return _joined(self.environments)

    def __contains__(self, point: Point) -> bool:
        """Whether there is a point with the same key."""
        return point.key in self._keys

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def begin(self, environment: Mapping[str, str]) -> None:
        """Write the environment of the following points, unless the file has it already."""
        if dict(environment) != self.environment:
            self._append(msgspec.json.encode(_Header(environment=dict(environment))))
            self.environments.append(dict(environment))

    def add(self, point: Point) -> None:
        """Append a point; it is on disk when this returns."""
        self._append(msgspec.json.encode(point))
        self.points.append(point)
        self._keys.add(point.key)

    def _append(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(line + b"\n")
            file.flush()


def save_points(path: str | os.PathLike[str], points: Iterable[Point], environment: Mapping[str, str]) -> None:
    """Write points with the versions, date and machine they were taken on, atomically.

    The name decides the form: .jsonl or .jsonl.gz for JSON lines, else one JSON object.
    """
    name = os.fspath(path)
    if not name.endswith((".jsonl", ".jsonl.gz")):
        file = _File(environment=dict(environment), points=tuple(points))
        write_atomically(path, msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
        return
    lines = [_Header(environment=dict(environment)), *points]
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    write_atomically(path, gzip.compress(data, mtime=0) if name.endswith(".gz") else data)


def load_points(path: str | os.PathLike[str], *, measured: bool = True) -> tuple[tuple[Point, ...], dict[str, str]]:
    """The points of a file of either form and the environment they were taken in.

    A file that several runs appended to has several environments: later entries win.

    Args:
        path: path of the file.
        measured: False for requested points, whose times are 0.

    Raises:
        TwofoldError: no such file, truncated, an unknown key (with its path), a time that nothing can take.
    """
    name, content = os.fspath(path), read_file(path, "the measured points")
    if name.endswith((".jsonl", ".jsonl.gz")):
        points, environments = _lines(content, Path(path), measured=measured)
        return tuple(points), _joined(environments)
    file = json_of(content, name, _File, advice="measure again")
    for number, point in enumerate(file.points, 1):
        if measured:
            _check_times(point, f"{name}, point {number}")
    return file.points, file.environment


def _joined(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for environment in environments for name, value in environment.items()}


def _check_times(point: Point, where: str) -> None:
    """Refuse impossible times. Allocations have no time: their measurements are in their figures."""
    least_s = min(point.seconds, point.cpu_s, point.low_s, point.high_s)
    if point.kind != "allocation" and not (0 < point.seconds < math.inf and least_s >= 0):
        figure = f"{point.seconds:g} s" if not 0 < point.seconds < math.inf else f"a time of {least_s:g} s"
        raise TwofoldError(
            f"{where}: {point.kind} {point.call} says {figure}, which nothing takes; delete it, and the same command "
            "measures it again"
        )


def _lines(content: bytes, path: Path, *, measured: bool = True) -> tuple[list[Point], list[dict[str, str]]]:
    points: list[Point] = []
    environments: list[dict[str, str]] = []
    for number, line in enumerate(content.splitlines(), 1):
        where = f"{path}, line {number}"
        if line.startswith(b'{"environment"'):
            environments.append(json_of(line, where, _Header, advice="measure again").environment)
        elif line:
            points.append(json_of(line, where, Point, advice="measure again"))
            if measured:
                _check_times(points[-1], where)
    return points, environments


def held_out(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """The points to fit and those to report on."""
    return [point for point in points if not point.held_out], [point for point in points if point.held_out]
