"""Columns of the memory that devices have, which look like columns of the memory that runs take."""

from __future__ import annotations

import re
from collections.abc import Sequence

from interop.measurements.cells import REMARK
from interop.measurements.devices import UnknownDevice, capacities_of, is_device
from interop.measurements.headers import figure_named, is_memory

__all__ = ["CAPACITY", "capacity_place", "with_capacity"]

CAPACITY = "memory of the device"
"""Column of the capacity of a row's device. No header has this name: the cells decide."""

_OF_RUNS = re.compile(
    r"peak|max|used|usage|alloc|reserv|active|footprint|util|%|\u5cf0\u503c|\u5360\u7528|spitze|belegt", re.I
)
"""Words in headers of the memory that a run takes."""

_CAPACITY = re.compile(r"\b(?:capacity|size|installed)\b", re.I)
_RAM = re.compile(r"(?<=\bgpu )ram\b|(?<=\bdevice )ram\b", re.I)
_GIGABYTES = re.compile(r"(\d+)(?:\.0+)? *(?:g(?:i?b)?)?(?: *hbm\w*)?", re.I)
_DEVICES = ("gpu_type", "gpu_count", "source")
"""Columns that may name the device."""


def capacity_place(
    rows: Sequence[Sequence[str]], headers: Sequence[str], columns: Sequence[str], device: str
) -> int | None:
    """The column whose cells are all capacities of the devices of their rows; None if there is none.

    A header that mentions a peak, or used, allocated or reserved memory, is not of a capacity.

    Args:
        rows: the first rows of the table.
        headers, columns: of the table.
        device: from the table's title; "" if it states none.

    >>> rows = [["A100", "40", "150"], ["A100", "80", "155"]]
    >>> capacity_place(rows, ["GPU", "Memory (GB)", "TFLOPS"], ["gpu_type", "", ""], "")
    1
    """
    places = [place for place, header in enumerate(headers) if not columns[place] and _may_be(header)]
    if not places:
        return None
    devices: list[str] = []
    for row in rows:
        named = (cell for cell, column in zip(row, columns, strict=True) if column in _DEVICES and is_device(cell))
        devices.append(next(named, devices[-1] if devices else device))
    for place in places:
        filled = [_is_capacity(row[place], own) for row, own in zip(rows, devices, strict=True) if row[place]]
        if any(filled) and False not in filled:
            return place
    return None


def _may_be(header: str) -> bool:
    """Whether a header is of memory, and does not state that a run takes it."""
    bare = _RAM.sub("memory", _CAPACITY.sub("", header)).strip()
    figure = figure_named(bare)
    is_figure = figure is not None and figure.metric.startswith("peak_memory") and not figure.of_memory
    return (is_figure or is_memory(bare)) and not _OF_RUNS.search(header)


def _is_capacity(cell: str, device: str) -> bool | None:
    """Whether a cell is a capacity of a device; None if the device is not in the catalogue."""
    found = _GIGABYTES.fullmatch(cell)
    try:
        return int(found.group(1)) in capacities_of(device) if found else False
    except UnknownDevice:
        return None


def with_capacity(row: dict[str, str], header: str) -> dict[str, str]:
    """A row whose device has the memory that its column of capacities states."""
    made = {name: cell for name, cell in row.items() if name != CAPACITY}
    found = _GIGABYTES.fullmatch(row.get(CAPACITY, ""))
    if found is None:
        return made
    remark = f"{header} {row[CAPACITY]!r}: the capacity of the device, no figure"
    made[REMARK] = "; ".join(filter(None, (made.get(REMARK), remark)))
    device = made.get("gpu_type", "")
    if device and not re.search(r"\d ?gi?b?\b", device, re.I):
        made["gpu_type"] = f"{device} {found.group(1)}GB"
    return made
