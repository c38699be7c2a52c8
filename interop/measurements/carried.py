"""Rows of a table that depend on the rows above them: ditto marks, blank cells below merged ones, group headings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from interop.measurements.capacities import CAPACITY

__all__ = ["Carried", "heading_of", "with_cells_above"]

_DITTO = re.compile(
    "[\"'\u2033\u3003\u201d\u201c\u201e]{1,2}|,,|ditto|idem|dito|same(?: as above)?"
    "|\u540c\u4e0a|\u2193|\u2191|\\.\\.\\.|\u2026",
    re.I,
)
"""Cells that repeat the cell above."""

_ADDED = re.compile(r"\+ ?[A-Za-z]")
"""A first cell that adds to that of the row above: "+ async TP"."""

_NEEDED = ("model", "gpu_type")
"""Columns without which a row means nothing: a blank cell repeats the one above, wherever it stands."""

_SHARED = ("global_batch", "seq")
"""Columns whose merged cells may stand behind others: a blank cell repeats the one above if the row begins with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A row with the cells that it shares with the rows above.

    Args:
        cells: as long as the header.
        places: of the cells that were taken from the row above.
        heading: the nearest line above that has one cell only; "" where there is none.
    """

    cells: Sequence[str]
    places: tuple[int, ...] = ()
    heading: str = ""


def with_cells_above(
    rows: Iterable[Sequence[str]], headers: Sequence[str], columns: Sequence[str], figures: Collection[int]
) -> Iterator[Carried]:
    """The rows of a table, completed from the rows above them. Repeated headers and group headings are left out.

    Blank cells at the beginning of a row are those of merged cells, as spreadsheets export them. A table with the
    columns metric and value has one row for each figure and states every cell, so only ditto marks count there.

    >>> rows = [["A100", "7B", "1", "150"], ["", "", "2", "140"], ["H100", "ditto", "4", "400"]]
    >>> [each.cells for each in with_cells_above(rows, list("abcd"), ["gpu_type", "model", "tp", ""], {3})][1:]
    [['A100', '7B', '2', '140'], ['H100', '7B', '4', '400']]
    """
    above: Sequence[str] = ()
    heading = ""
    merges = bool(figures)
    needed = {place for place, column in enumerate(columns) if column in _NEEDED} if "hidden" not in columns else set()
    shared, devices, capacities = (
        {place for place, column in enumerate(columns) if column in names}
        for names in (_SHARED, ("gpu_type",), (CAPACITY,))
    )
    lower = [header.lower() for header in headers]
    for row in rows:
        if row[0].lower() == lower[0] and [cell.lower() for cell in row] == lower:
            continue
        if merges and (group := heading_of(row)):
            heading, above = group, ()
            continue
        anywhere = needed | shared if above and above[0] and not row[0] else needed
        if not any(row[place] for place in devices):
            anywhere = anywhere | capacities
        places = _repeated(row, above, figures, anywhere, merges=merges) if above else ()
        cells = [above[place] if place in places else cell for place, cell in enumerate(row)] if places else row
        if above and _ADDED.match(cells[0]):
            cells = [f"{above[0]} {cells[0]}", *cells[1:]]
        above = cells
        yield Carried(cells=cells, places=places, heading=heading)


def heading_of(row: Sequence[str]) -> str:
    """The heading of the rows below, if a row has no other cell; "" for other rows.

    >>> heading_of(["H100 SXM", "", ""]), heading_of(["8", "1", ""])
    ('H100 SXM', '')
    """
    return row[0] if len(row) > 2 and row[0] and set(row[1:]) <= {"", row[0]} else ""


def _repeated(
    row: Sequence[str], above: Sequence[str], figures: Collection[int], needed: Collection[int], *, merges: bool
) -> tuple[int, ...]:
    """The places of the cells of a row that repeat the row above."""
    blank = next((place for place, cell in enumerate(row) if cell), len(row)) if merges else 0
    return tuple(
        place for place, cell in enumerate(row)
        if above[place] and (
            _DITTO.fullmatch(cell)
            or (merges and not cell and place not in figures and (place < blank or place in needed))
        )
    )  # fmt: skip
