"""The number of devices of a row, from its cells about devices and nodes."""

from __future__ import annotations

import re

from interop.measurements.batches import count_of, fill, product_of
from interop.measurements.cells import REMARK
from interop.measurements.devices import devices_of_instance, is_device
from interop.measurements.numbers import number
from interop.measurements.systems import System, system_in, system_named

__all__ = ["USUAL_NODE", "count_devices"]

USUAL_NODE = 8
"""Devices of a node if the number is not stated."""

_BEFORE = re.compile(
    r"(?:up to |ca\. )?(\d+)(?: ?[x\u00d7*] ?(\d+)(?= *[x\u00d7* ]))?(?: ?[卡张] ?|(?: ?[x\u00d7*] ?| *\(| +))"
    r"(?=[a-z]|910|[345]090)",
    re.I,
)
"""Devices before their name: "64x A100", "128 A100", "1x8 910B", "16 x DGX H100" (of eight)."""

_INSIDE = re.compile(
    r"(?<=[\w,] )(\d+) ?[x\u00d7*] ?(?=[a-z]|910|[345]090)"
    r"|(?<=[( ])(\d+) ?(?:gpus?|npus?|gcds|devices|cards|[卡张])(?! ?(?:per|/|a|each))",
    re.I,
)
"""The same behind other words: "Lambda 8x H100", "GB200 NVL72 (72 GPUs)"."""

_GRID = re.compile(r"(\d+)n(\d+)g\b", re.I)
"""Nodes and the devices of each: "4n8g"."""

_SLICE = re.compile(r"(?<![a-z0-9])v(?:[34]|5(?:e|p|litepod)|6e)-(\d+)", re.I)
"""A slice of TPUs by the number of its cores, or of its chips where they have one core: "v4-256", "v5e-256"."""

_BEHIND = re.compile(r"\w.*?\)? *(?<!rt)(?<!gt)[x\u00d7*] *(\d+)(?: *(?:gpus?|npus?|devices|cards))?$", re.I)
"""Devices behind their name: "H200 x 8"."""

_NODES = re.compile(r"\b(\d+) nodes?\b", re.I)
_NODES_OF = re.compile(r"\d+ nodes?,? *(?:[x\u00d7*]|of|with) *(\d+)", re.I)


def count_devices(row: dict[str, str]) -> None:
    """Fill in the number of devices of a row.

    Raises:
        BadCell: nodes or devices per node that are no number.

    >>> row = {"gpu_type": "2 x DGX H100"}
    >>> count_devices(row)
    >>> row["gpu_count"]
    '16'
    """
    device, name = re.sub(r"(?<=\d),(?=\d{3}\b)", "", row.get("gpu_type", "")), row.pop("system", "")  # "1,024 H100"
    if (system := system_named(name or device) or system_in(row.get("source", ""))) is not None:
        _of_system(row, system, name or device)
        device = row["gpu_type"]
    fill(row, _stated_with(device, number(row.get("nodes", ""))))
    counted = re.fullmatch(
        r"(\d+) ?(?:nodes?)? ?(?:[x\u00d7*] ?(\d+)?| ?(?=[a-z]+\d))(.*)", row.get("gpu_count", "").lower()
    )
    if counted:  # "8x8", "64 x A100" or "64 A100"
        row["gpu_count"] = str(int(counted.group(1)) * int(counted.group(2) or 1))
        if not counted.group(2) or is_device(counted.group(3)):  # "8x8", "64 A100", "4 x 8 A100"
            fill(row, {"gpu_type": counted.group(3).strip()})
    _of_nodes(row, each := devices_of_instance(device))
    is_open = each and system is None and not (row.get("gpu_count") or row.get("dp"))
    if is_open and each % product_of(row, ("tp", "pp", "cp")) == 0:
        row["gpu_count"] = str(each)
        row[REMARK] = "; ".join(filter(None, (row.get(REMARK), f"number of devices not stated: one {device}")))


def _of_system(row: dict[str, str], system: System, name: str) -> None:
    """Fill in the device of a system, the devices of a node and their links to others, where the row leaves them
    blank."""
    fill(row, {"gpu_type": system.device, "per_node": str(system.per_node)})
    links_text = f"{system.link_Gbps:.4g} Gb/s per GPU" if system.link_Gbps else ""
    fill(row, {"interconnect": links_text})
    remark = ", ".join(filter(None, (f"{name}: nodes of {system.per_node} {system.device}", links_text)))
    row[REMARK] = "; ".join(filter(None, (row.get(REMARK), remark)))


def _stated_with(device: str, nodes: float | None) -> dict[str, str]:
    """The cells that the cell of a device states: devices, nodes, devices per node.

    Args:
        device: the cell.
        nodes: that another cell states.
    """
    own, each = _NODES.search(device), devices_of_instance(device)
    stated = {"nodes": own.group(1)} if own else {}
    nodes = nodes or (float(own.group(1)) if own else None)
    if both := _NODES_OF.match(device):
        return stated | {"per_node": both.group(1)}
    if part := _SLICE.search(device):
        cores = 2 if re.search(r"v(?:[34]|5p)-", device.lower()) else 1
        return {"gpu_count": str(max(1, int(part.group(1)) // cores))}
    if grid := _GRID.search(device):
        return {"gpu_count": str(int(grid.group(1)) * int(grid.group(2)))}
    if (found := _BEFORE.match(device)) and not _NODES.match(device):
        several = devices_of_instance(device[found.end() :].split("(")[0]) > 0
        count = int(found.group(1)) * int(found.group(2) or (each if several else 1))
        in_all = several or not nodes or (count > USUAL_NODE and count % nodes == 0)
        return stated | {"gpu_count" if in_all else "per_node": str(count)}  # "16x A100 (2 nodes)"
    if behind := _BEHIND.search(device):  # "A100 (80GB) x 8"
        return stated | {"gpu_count": str(int(behind.group(1)) * (each or 1))}
    if inside := _INSIDE.search(device):
        return stated | {"gpu_count": inside.group(1) or inside.group(2)}
    return stated


def _of_nodes(row: dict[str, str], each_of: int) -> None:
    """Replace nodes and devices per node by the number of devices and a note.

    Args:
        row: changed in place.
        each_of: devices of an instance of the row's name; 0 if its name tells none.
    """
    nodes, each = row.pop("nodes", ""), row.pop("per_node", "")
    if named := re.match(r"(\d+) *[x\u00d7*]? *((?:nvidia )?[a-z]{1,5}\d+.*)", each, re.I):  # "4 x V100"
        each = named.group(1)
        fill(row, {"gpu_type": named.group(2)})
    if grid := re.fullmatch(r"(\d+) ?[x\u00d7*] ?(\d+)", nodes):  # "2x8"
        nodes, each = grid.group(1), each or grid.group(2)
    if not each and each_of not in (0, USUAL_NODE):
        each = str(each_of)
    if each:
        row["notes"] = f"{row.get('notes', '')}; {count_of('per_node', each)} GPUs per node".strip("; ")
    if nodes and not row.get("gpu_count"):
        per = count_of("per_node", each) if each else USUAL_NODE
        row["gpu_count"] = str(count_of("nodes", nodes) * per)
