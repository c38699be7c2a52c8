"""Tables of measurements as people publish them: CSV, TSV or Markdown, columns of many names, one metric a row or
several."""

from __future__ import annotations

import csv
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from interop.measurements.cells import BAD_COLUMN, BAD_REASON, BAD_VALUE
from interop.measurements.composed import BadCell, plain_row
from interop.measurements.devices import UnknownDevice, device_named, devices_meant
from interop.measurements.grids import grid_of
from interop.measurements.headers import COLUMNS, Figure, column_named, figure_named, has_units_in_cells, rank_of
from interop.measurements.numbers import number
from plans.errors import TwofoldError
from plans.reading import read_text

__all__ = ["COLUMNS", "column_named", "read_table", "rows_of"]

_NOTHING = ("", "-", "--", "\u2013", "\u2014", "n/a", "na", "oom", "out of memory", "oor", "x", "\u2717", "failed")
"""Cells of a column of figures in which nothing was measured."""


def read_table(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a table, by the names of `COLUMNS`.

    Commas, semicolons or tabs are between the cells, or bars as in Markdown. A table without the columns "metric" and
    "value" may have a column for each metric, as "TFLOP/s/GPU" or "MFU": every figure of it becomes a row.

    Raises:
        TwofoldError: no such file, no rows, or columns missing.
    """
    rows = list(rows_of(path))
    if not rows:
        raise TwofoldError(f"table {os.fspath(path)!r} has no rows")
    return rows


def rows_of(path: str | os.PathLike[str]) -> Iterator[dict[str, str]]:
    """The rows of `read_table` one after the other, so that a long table is never held as rows.

    Raises:
        TwofoldError: no such file, or columns missing.
    """
    name = os.fspath(path)
    text = read_text(path, "the table")
    try:
        headers, cells = grid_of(text, lambda header: bool(column_named(header) or figure_named(header)))
        yield from _rows(headers, cells, name)
    except csv.Error as error:
        raise TwofoldError(f"cannot read the table {name!r}: {error}") from None


def _rows(headers: Sequence[str], cells: Iterator[list[str]], table: str) -> Iterator[dict[str, str]]:
    columns = [column_named(header) for header in headers]
    figures: list[tuple[int, str, Figure | None]] = []
    if "metric" not in columns:
        figures = [
            (place, header, figure_named(header)) for place, header in enumerate(headers)
            if figure_named(header) or (has_units_in_cells(header) and not columns[place])
        ]  # fmt: skip
    for place, _, _ in figures:
        columns[place] = ""
    _check(columns, headers, figures, table)
    order = sorted((place for place, column in enumerate(columns) if column), key=lambda place: rank_of(headers[place]))
    named = {column: headers[place] for place in reversed(order) for column in [columns[place]]}
    for row in cells:
        made = _row(row, columns, order, named)
        if not figures:
            yield _with_unit(made)
            continue
        for place, header, figure in figures:
            if row[place].lower() not in _NOTHING:
                yield _measured(made, header, row[place], figure)


def _check(columns: Sequence[str], headers: Sequence[str], figures: Sequence[object], table: str) -> None:
    missing = [] if {"model", "hidden"} & set(columns) else ["model"]
    missing += [each for each in ("metric", "value") if each not in columns and not figures]
    if missing:
        shown = ", ".join(repr(header) for header in headers[:8])
        raise TwofoldError(
            f"table {table!r} has no column {', '.join(missing)} (its header: {shown or 'none'}); see `twofold "
            "validate --help`"
        )


def _row(
    cells: Sequence[str], columns: Sequence[str], order: Sequence[int], named: Mapping[str, str]
) -> dict[str, str]:
    """The cells of a row by their columns; where two headers mean one column, the more definite one's."""
    found: dict[str, str] = {}
    bad: BadCell | None = None
    for place in order:
        column, cell = columns[place], cells[place]
        if not cell:
            continue
        if column == "gpu_type" and number(cell) is not None:  # a column "GPU" may count them
            column = "gpu_count"
        if column == "source" and "gpu_type" not in named and _is_device(cell):  # a column "System"
            column = "gpu_type"
        if found.setdefault(column, cell) != cell:
            if column == "notes":
                found[column] += f"; {cell}"
            elif column not in ("source", "provenance", "model"):
                reason = f"two columns for {column} hold {found[column]!r} and {cell!r}"
                bad = bad or BadCell(column, cell, reason)
    try:
        found = plain_row(found, named)
    except BadCell as error:
        bad = bad or error
    if bad is not None:
        found |= {BAD_COLUMN: bad.column, BAD_VALUE: bad.value, BAD_REASON: str(bad)}
    return found


def _is_device(cell: str) -> bool:
    if re.search(r"dgx|hgx|[ahvb]\d00|910", cell.lower()) is None:
        return False
    try:
        return bool(devices_meant(cell) or device_named(cell))
    except UnknownDevice:
        return False


def _with_unit(row: dict[str, str]) -> dict[str, str]:
    """A row with the columns metric and value, in the metrics' own names and units."""
    unit, metric = row.pop("unit", ""), row.get("metric", "")
    named = (f"{metric} ({unit})", metric, unit) if unit else (metric,)
    figure = next((found for words in named if (found := figure_named(words))), None)
    if figure is None:
        return row
    return _measured(row, metric, row.get("value", ""), figure)


def _figure_of_unit(unit: str, header: str, figure: Figure | None) -> Figure | None:
    """What a cell's own unit measures, which may be another figure than its header names; None where it is none."""
    plain = unit.strip(" %")
    if re.fullmatch(r"s|secs?|seconds?|ms|min|minutes?", plain):
        return figure_named(f"step time ({'min' if plain.startswith('min') else plain})")
    bare = re.sub(r"[(\[].*", "", header)
    return figure_named(plain) or figure_named(f"{bare} ({plain})")


def _measured(row: Mapping[str, str], header: str, cell: str, figure: Figure | None) -> dict[str, str]:
    """A row of one figure."""
    text = cell = re.sub(r"(?<=\S) *(?:\u00b1|\+/?-|\(\d[\d.]* ?%\)).*$", "", cell)  # its spread, or its share
    if figure is not None and header.strip().lower() == "tps" and "torchtitan" in row.get("source", "").lower():
        figure = dataclasses.replace(figure, of_all=False)  # of a device, as torchtitan's logs have it
    if figure is None or number(cell) is None:
        found = re.match(r"([~\d.,\s]+[kKM]?)[ ]*([A-Za-z%].*)$", cell)
        unit = None if found is None else _figure_of_unit(found.group(2), header, figure)
        if found is not None and unit is not None:
            text, figure = found.group(1), unit
        elif found is not None and found.group(2).strip() == "%":
            text = found.group(1)
    if figure is None:
        return {**row, "metric": header, "value": cell}
    value = number(text)
    if value is None:
        return {**row, "metric": figure.metric, "value": cell}  # the row says that it is no number
    value *= figure.factor
    if figure.inverse:
        value = 1 / value if value else 0.0
    made = {**row, "metric": figure.metric, "value": f"{value:.12g}"}
    if figure.hardware:
        made["notes"] = f"{made.get('notes', '')}; hardware FLOPs".strip("; ")
    if not figure.of_all:
        return made
    devices = number(row.get("gpu_count", ""))
    if not devices:
        reason = f"{header} is of all devices, and gpu_count is {row.get('gpu_count', '')!r}"
        return {BAD_COLUMN: "gpu_count", BAD_VALUE: row.get("gpu_count", ""), BAD_REASON: reason, **made}
    return made | {"value": f"{value / devices:.12g}"}
