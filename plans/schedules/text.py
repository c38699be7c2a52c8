"""The text form of a schedule: rows of cells, and the errors of people who write them by hand."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

from plans.schedules.action import Action
from plans.schedules.errors import ScheduleError
from plans.schedules.grid import format_cells

__all__ = ["Header", "read_rows", "write_rows"]

_HEADER = re.compile(
    r"#\s*schedule\s+stages=(\d{1,18})\s+micro_batches=(\d{1,18})\s+placement=((?:\d{1,18},)*\d{1,18},?)\s+name=(\S.*)"
)
_OVERLAP = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_[FB]|RECV_[FB])\d*")
_SEPARATOR = re.compile(r"[;+/|\s]+")


class Header(NamedTuple):
    """The comment line of a schedule; None without such a line."""

    num_stages: int | None = None
    num_micro_batches: int | None = None
    placement: tuple[int, ...] | None = None
    name: str | None = None


def write_rows(cells: Sequence[Sequence[str]]) -> str:
    """One line per rank; a rank without actions is one quoted empty cell, so that its line is not lost."""
    return "".join(",".join(row) + "\n" if row else '""\n' for row in cells)


def read_rows(text: str) -> tuple[Header, list[list[Action]]]:
    """The header, if there is one, and per rank the actions.

    Raises:
        ScheduleError: a line or cell that cannot be read.
    """
    header = Header()
    lines = []
    for line in text.strip("\r\n").splitlines():
        if line.lstrip().startswith("#"):
            header = _read_header(line.strip(), header)
        else:
            lines.append(line)
    while lines and not lines[-1].strip():
        lines.pop()
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO("\n".join(lines)))]
    except csv.Error as error:
        raise ScheduleError(f"the schedule is not a table with one line per rank: {error}") from None
    order = []
    for rank, row in enumerate(rows):
        if not row:
            raise ScheduleError(
                f"the line of rank {rank} is empty; every rank needs a line (a comma if it does nothing)"
            )
        order.append([action for position in range(len(row)) for action in _read_cell(rows, rank, position)])
    return header, order


def _read_header(line: str, header: Header) -> Header:
    if not line.lstrip("#").lstrip().startswith("schedule"):
        return header
    match = _HEADER.fullmatch(line)
    if match is None:
        raise ScheduleError(
            f"cannot read the line {line[:200]!r}; it looks like\n"
            "  # schedule stages=4 micro_batches=8 placement=0,1,2,3 name=1f1b"
        )
    stages, micro_batches, placement, name = match.groups()
    ranks = tuple(int(rank) for rank in placement.split(",") if rank)
    return Header(int(stages), int(micro_batches), ranks, name)


def _read_cell(rows: Sequence[Sequence[str]], rank: int, position: int) -> list[Action]:
    text = rows[rank][position]
    if not text:
        return []
    overlap = _OVERLAP.fullmatch(text)
    try:
        return [Action.parse(part) for part in (overlap.groups() if overlap else (text,))]
    except ScheduleError as error:
        if _COMMUNICATION.fullmatch(text):
            reason = f"{text!r} is communication, which follows from the order; omit communication"
        elif _is_several(text):
            reason = f"{text!r} is two actions at once; give each action a cell of its own"
        else:
            reason = str(error)
        grid = format_cells(rows, mark=(rank, position))
        raise ScheduleError(f"rank {rank}, cell {position}: {reason}\n{grid}") from None


def _is_several(text: str) -> bool:
    parts = [part for part in _SEPARATOR.split(text.strip("()[]{} ")) if part]
    try:
        return len([Action.parse(part) for part in parts]) > 1
    except ScheduleError:
        return False
