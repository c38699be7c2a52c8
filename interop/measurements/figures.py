"""Cells with figures: their numbers, units and ranges, and the number of devices that a rate refers to."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from costmodels.machine.catalogue import load_device
from interop.measurements.cells import BAD_COLUMN, BAD_REASON, BAD_VALUE, PARTS, READ_AS
from interop.measurements.counts import USUAL_NODE
from interop.measurements.devices import UnknownDevice, device_named
from interop.measurements.headers import Figure, figure_named, is_memory, is_training_time
from interop.measurements.numbers import number
from interop.measurements.units import figure_of_unit, figure_with_unit

__all__ = ["measured", "with_unit"]


def with_unit(row: dict[str, str]) -> dict[str, str]:
    """A row with the columns metric and value, in the metrics' own names and units."""
    unit, metric = row.pop("unit", ""), row.get("metric", "")
    try:
        figure = figure_with_unit(metric, unit)
    except ValueError as error:
        return {BAD_COLUMN: "unit", BAD_VALUE: unit, BAD_REASON: str(error), **row}
    return row if figure is None else measured(row, metric, row.get("value", ""), figure)


_RANGE = re.compile(r"~?([\d.,]+[kKM]?) *(?:[-~\u2013\u2014\u2026]|\.\.+|to) *([\d.,]+[kKM]?)(?!\d)(.*)$")
"""Two numbers between which a figure is, and the rest of the cell."""


_LOGGED = re.compile(r"^(?!.*\b(?:total|aggregate|all|overall)\b).*\btps\b", re.I)
"""A header of torchtitan's logged rate."""


def measured(row: Mapping[str, str], header: str, cell: str, figure: Figure | None) -> dict[str, str]:
    """A row for one figure, with the columns metric and value. A cell without a number is kept unchanged.

    Args:
        row: the other cells of the row.
        header, cell: of the figure.
        figure: of the header; None if the cell states its unit.

    >>> from interop.measurements.headers import figure_named
    >>> measured({"gpu_count": "8"}, "tokens/s", "80k", figure_named("tokens/s"))["value"]
    '10000'
    """
    row, cell, figure = _as_written(row, header, cell, figure)
    try:
        text, figure = _number_and_unit(header, cell, figure)
    except ValueError as error:
        return {BAD_COLUMN: header, BAD_VALUE: cell, BAD_REASON: str(error), **row, "metric": header, "value": cell}
    value = number(text)
    if figure is not None and text == cell and _is_in_ms(figure, header, value or 0.0):
        row = {**row, READ_AS: f"{header} {cell!r}: unit not stated, ms"}
        figure = dataclasses.replace(figure, factor=1e-3)
    if figure is None or value is None:
        bad = {BAD_COLUMN: header, BAD_VALUE: cell, BAD_REASON: f"{header} is {cell!r}, not a number with a known unit"}
        return {
            **(bad if figure is None else {}),
            **row,
            "metric": header if figure is None else figure.metric,
            "value": cell,
        }
    if figure.of_memory and not (capacity := _memory_GiB(row.get("gpu_type", ""))):
        bad = {BAD_COLUMN: "gpu_type", BAD_VALUE: row.get("gpu_type", ""), BAD_REASON: f"{header} of which device?"}
        return {**bad, **row, "metric": figure.metric, "value": cell}
    if figure.of_memory:
        row = {**row, READ_AS: f"{header}: of {capacity:.4g} GiB"}
        value *= capacity / 100
    elif figure.tokens is not None:
        tokens = figure.tokens or number(row.get("tokens", "").lower().removesuffix("tokens"))
        if not tokens:
            reason = f"{header} of how many tokens is not stated"
            bad = {BAD_COLUMN: "tokens", BAD_VALUE: row.get("tokens", ""), BAD_REASON: reason}
            return {**bad, **row, "metric": figure.metric, "value": cell}
        row = {**row, READ_AS: f"{header}: {tokens:.4g} tokens without any interruption"}
        value = tokens / (value * figure.factor) if value else 0.0
    else:
        value *= figure.factor
        if figure.inverse:
            value = 1 / value if value else 0.0
    made = {**row, "metric": figure.metric, "value": f"{value:.12g}"}
    return _of_one_device(_with_words_of_header(made, header, figure), header, value, figure)


def _as_written(
    row: Mapping[str, str], header: str, cell: str, figure: Figure | None
) -> tuple[Mapping[str, str], str, Figure | None]:  # fmt: skip
    """A row, the cell of its figure as one number with its unit, and the figure."""
    if middle := _middle(cell):
        row = {**row, READ_AS: f"{header} {cell!r}: the middle of it"}
        cell = middle
    if figure is None and is_training_time(header) and (days := _days(cell)):
        figure, cell = figure_named("training days"), f"{days:.12g}"
    cell = _in_seconds(cell)
    row, cell = _without_bound(row, header, cell, figure)
    if figure is None and is_memory(header):
        row, figure = _memory_figure(row, header, cell)
    cell = re.sub(r"(?<=\S) *(?:\u00b1|\+/?-) *[\d.,]+[kKM]?", "", cell)  # its spread
    cell = re.sub(r"(?<=\S) *\([-+\u2212]?\d[\d.]* ?%\).*$", "", cell)  # its share
    if both := re.fullmatch(r"([\d.,]+) *\(([\d.,]+)\)", cell):
        row, cell = {**row, READ_AS: f"{header} {cell!r}: the number in brackets is not read"}, both[1]
    if figure is not None and _LOGGED.search(header) and "torchtitan" in row.get("source", "").lower():
        figure = dataclasses.replace(figure, of_all=False)  # of a device, as torchtitan's logs have it
    return row, cell, figure


def _without_bound(
    row: Mapping[str, str], header: str, cell: str, figure: Figure | None
) -> tuple[Mapping[str, str], str]:  # fmt: skip
    """A row and the cell of its figure without "<" or ">"; one of memory keeps it, as it is the room of the device."""
    if not re.match(r"[<>\u2264\u2265] *\d", cell) or (figure and figure.metric.startswith("peak")):
        return row, cell
    return {**row, READ_AS: f"{header} {cell!r}: the bound itself"}, cell.lstrip("<>\u2264\u2265 ")


def _with_words_of_header(made: dict[str, str], header: str, figure: Figure) -> dict[str, str]:
    """A row with the kind of memory and of operations that the header of its figure states."""
    if figure.metric.startswith("peak_memory") and (kind := re.search(r"reserved|alloc|active", header.lower())):
        made["memory"] = "reserved" if kind.group() == "reserved" else "allocated"
    if figure.hardware:
        made["notes"] = f"{made.get('notes', '')}; hardware FLOPs".strip("; ")
    return made


def _is_in_ms(figure: Figure, header: str, value: float) -> bool:
    """Whether a step time without a unit is too long to be in seconds."""
    is_long = figure.metric == "iteration_time_s" and value > _LONGEST_STEP_S
    return is_long and not _UNIT_OF_TIME.search(header.lower())


def _memory_figure(row: Mapping[str, str], header: str, cell: str) -> tuple[Mapping[str, str], Figure | None]:
    """The row and the figure of a cell of memory whose header states no unit."""
    if "%" in cell:
        return row, figure_named(f"{header} (%)")
    if not (plain := number(cell)):
        return row, None
    unit = "MiB" if plain > _MOST_GIB else "GiB"
    return {**row, READ_AS: f"{header} {cell!r}: unit not stated, {unit}"}, figure_named(f"memory ({unit})")


_LONGEST_STEP_S = 1000.0
"""No published step takes longer; larger numbers without a unit are ms."""

_UNIT_OF_TIME = re.compile(r"(?:\b|_)(?:m?s|sec\w*|min\w*|milli\w*|hours?)(?:\b|_)|\u79d2")
"""Units of time in headers."""

_MOST_GIB = 1024
"""No device has more memory in GiB; larger numbers are MiB."""


def _memory_GiB(device: str) -> float:
    """The memory of a device; 0 where it is not in the catalogue."""
    try:
        return load_device(device_named(device)[0]).memory_bytes / 2**30
    except UnknownDevice:
        return 0.0


def _number_and_unit(header: str, cell: str, figure: Figure | None) -> tuple[str, Figure | None]:
    """The text of a cell's number, and its metric and unit, which may differ from those of its header.

    Raises:
        ValueError: a unit that is unknown.
    """
    if figure is not None and number(cell) is not None:
        return cell, figure
    found = re.match(
        r"[~\u2248\u223c ]*(?:ca\. ?|about )?([\d.,\s]+(?:e[+-]?\d+|[kKM](?!i?B)|[BT](?= ?tok))?)[ ]*([A-Za-z%].*)$",
        cell,
    )
    if found is None:
        return cell, figure
    unit = figure_of_unit(found.group(2), header)
    return (found.group(1), unit or figure) if unit or found.group(2).strip() == "%" else (cell, figure)


def _of_one_device(made: dict[str, str], header: str, value: float, figure: Figure) -> dict[str, str]:
    """A row whose rate is of one device."""
    if figure.of_node:
        node = re.search(r"(\d+) GPUs per node", made.get("notes", ""))
        return made | {"value": f"{value / int(node.group(1) if node else USUAL_NODE):.12g}"}
    if not figure.of_all:
        return made
    if not any(made.get(name) for name in _COUNTS) and made.get("gpu_type"):
        count = math.prod(max(1, int(number(made.get(name, "")) or 1)) for name in ("tp", "pp", "cp"))
        remark = f"{header}: number of devices not stated, of the {count} of one replica"
        made = made | {"gpu_count": str(count), READ_AS: remark}
    devices = number(made.get("gpu_count", ""))
    if not devices:
        reason = f"{header} is of all devices, and gpu_count is {made.get('gpu_count', '')!r}"
        return {BAD_COLUMN: "gpu_count", BAD_VALUE: made.get("gpu_count", ""), BAD_REASON: reason, **made}
    parts = "" if _TOTAL.search(header) else f"{devices:g}"
    return made | {"value": f"{value / devices:.12g}", PARTS: parts}


_COUNTS = ("gpu_count", "dp", "nodes")
"""Columns from which the number of devices follows."""

_TOTAL = re.compile(r"total|aggregate|overall|cluster|system|global|\ball\b|pflop|peta", re.I)
"""Words in headers of rates that are certainly of all devices."""


def _in_seconds(cell: str) -> str:
    """A cell with minutes and seconds in seconds; other cells unchanged.

    >>> _in_seconds("1m 52s"), _in_seconds("1 min 2.5 sec"), _in_seconds("3 min")
    ('112 s', '62.5 s', '3 min')
    """
    found = re.fullmatch(r"(\d+) ?m(?:ins?|inutes?)? ?(\d+(?:\.\d+)?) ?s(?:ec|ecs|econds?)?", cell)
    return f"{60 * int(found[1]) + float(found[2]):g} s" if found else cell


_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(weeks?|w|days?|d|hours?|hrs?|h|minutes?|mins?|m)\b *", re.I)
_DAYS = {"w": 7.0, "d": 1.0, "h": 1 / 24, "m": 1 / 1440}
"""First letter of a unit of time -> days."""


def _days(cell: str) -> float:
    """The days of a duration in words; 0 if it is none.

    >>> _days("10d 12h"), _days("36 hours"), _days("3.2")
    (10.5, 1.5, 0)
    """
    parts = _DURATION.findall(cell.strip("~ "))
    is_all = re.sub(r"[\s,~]|and", "", _DURATION.sub("", cell)) == ""
    return sum(float(count) * _DAYS[unit[0].lower()] for count, unit in parts) if is_all else 0


def _middle(cell: str) -> str:
    """A cell with the middle of its range; "" if it is not a range.

    >>> _middle("61-63 GiB"), _middle("61.2")
    ('62 GiB', '')
    """
    found = _RANGE.match(cell)
    if found is None:
        return ""
    unit = found[2][-1:] if found[2][-1:] in "kKM" and found[1][-1:] not in "kKM" else ""  # "3.1-3.3k"
    first, last = number(f"{found[1]}{unit}"), number(found[2])
    return f"{(first + last) / 2:.12g}{found[3]}" if first is not None and last is not None and first < last else ""
