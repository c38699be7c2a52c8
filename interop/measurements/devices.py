"""Devices and links as tables of measurements spell them, translated to the names of the catalogue."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Network", "UnknownDevice", "device_named", "devices_meant", "linked_within_node", "network_of"]


class UnknownDevice(Exception):
    """The catalogue does not have a device, or its links; the message is the reason."""


_INSTANCES = (
    ("p4de", "a100 80gb"), ("p4d", "a100 40gb"), ("p5en", "h200"), ("p5e", "h200"), ("p5", "h100 80gb"),
    ("p3dn", "v100 32gb"), ("p3", "v100 16gb"), ("p6 b200", "b200"),
)  # fmt: skip
"""EC2 instances by the devices they have (vendor)."""

_CARDS = {
    "a100": {"40": "a100-pcie-40gb", "80": "a100-pcie-80gb"},
    "h100": {"80": "h100-pcie"},
}
"""PCIe cards by their memory."""

_MEMORIES = {
    "a100": {"40": "a100-40gb", "80": "a100-80gb"},
    "v100": {"16": "v100-16gb", "32": "v100-32gb"},
    "h100": {"80": "h100-sxm", "96": "h100-sxm-96gb"},
    "h200": {"141": "h200", "140": "h200", "144": "h200"},
    "b200": {"180": "b200", "192": "b200", "179": "b200", "183": "b200"},
    "gh200": {"96": "gh200"},
    "gb200": {"186": "gb200", "192": "gb200", "189": "gb200", "184": "gb200"},
    "gb300": {"288": "gb300", "279": "gb300"},
    "b300": {"288": "b300", "270": "b300", "262": "b300"},
    "h800": {"80": "h800"},
    "a800": {"80": "a800"},
    "h20": {"96": "h20"},
    "mi300x": {"192": "mi300x"},
}

_KNOWN = (
    "V100, A100, A800, H100, H800, H20, H200, GH200, B200, B300, GB200, GB300, cards of A100 and H100 on PCIe, "
    "H100 NVL, MI300X and Ascend 910B1 to 910B4 and 910C"
)

_USUAL = {"a100": "80", "v100": "32", "h100": "80", "h200": "141", "b200": "180", "gh200": "96", "gb200": "186",
          "gb300": "288", "b300": "288", "h800": "80", "a800": "80", "h20": "96", "mi300x": "192"}  # fmt: skip


def device_named(text: str) -> tuple[str, tuple[str, ...]]:
    """The catalogue's name of a device, and what had to be assumed.

    Raises:
        UnknownDevice: it is not in the catalogue; says why.

    >>> device_named("NVIDIA A100-SXM4-40G")[0], device_named("8xH100 80GB HBM3")[0], device_named("p4de.24xlarge")[0]
    ('a100-40gb', 'h100-sxm', 'a100-80gb')
    """
    plain = re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
    for instance, device in _INSTANCES:
        if re.match(rf"{instance}\b", plain):
            plain = device
            break
    if re.search(r"h100.*\bnvl\b(?! ?\d+\b(?! ?g))", plain):
        return "h100-nvl", ()
    if match := re.search(r"910 ?(b[1-4]|c)", plain):
        return f"ascend-910{match.group(1)}", ()
    found = re.search(
        r"gh200|gb200|gb300|(?<!g)h200|(?<!g)b200|(?<!g)b300|h100|h800|a100|a800|h20(?!\d)|v100|mi300x?", plain
    )
    if found is None:
        raise UnknownDevice(f"device {text!r} is not in the catalogue; it has {_KNOWN}")
    kind = re.sub(r"^mi300$", "mi300x", found.group())
    known = _MEMORIES[kind]
    if re.search(r"(?<![a-z0-9])(pci ?e?|nvl(?! ?\d))(?![a-z0-9])", plain):
        if kind not in _CARDS:
            raise UnknownDevice(f"device {text!r} is not in the catalogue; of cards on PCIe it has A100 and H100")
        known = _CARDS[kind]
    memory = re.search(r"(\d+) ?g(?:i?b)?(?![a-z0-9])", plain[found.end() :])
    if memory is None:
        usual = _USUAL[kind]
        assumed = () if len(known) == 1 else (f"memory of the {kind.upper()} not stated: {usual} GB",)
        return known[usual], assumed
    if memory.group(1) not in known and kind in ("a100", "v100", "h100"):
        raise UnknownDevice(
            f"device {text!r} is not in the catalogue: it has the {kind.upper()} with {' or '.join(known)} GB"
        )
    stated = known.get(memory.group(1))
    if stated is None:
        return known[_USUAL[kind]], (f"{kind.upper()} with {memory.group(1)} GB: as the one with {_USUAL[kind]} GB",)
    return stated, ()


def devices_meant(text: str) -> tuple[str, ...]:
    """The devices that a name may mean which is that of several; none where it is that of one.

    >>> devices_meant("Ascend 910B"), devices_meant("Ascend 910B3")
    (('Ascend 910B4', 'Ascend 910B3', 'Ascend 910B2', 'Ascend 910B1'), ())
    """
    if re.search(r"910 ?-?b?(?![a-z0-9])", text.lower()) and not re.search(r"910 ?-?(b[1-4]|c)", text.lower()):
        return tuple(f"Ascend 910B{number}" for number in (4, 3, 2, 1))
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a row says of the links between nodes.

    Args:
        per_device_Bps: of a device's link to other nodes; None: not stated.
        devices_per_node: None: not stated.
        assumed: what had to be assumed.
    """

    per_device_Bps: float | None = None
    devices_per_node: int | None = None
    assumed: tuple[str, ...] = ()


_BOARDS = r"nv-?link|nvswitch|\bnv\d+\b|sxm|hgx|dgx|c2c|hccs"


_AS_CARDS = {"a100-40gb": "a100-pcie-40gb", "a100-80gb": "a100-pcie-80gb", "h100-sxm": "h100-pcie"}


def linked_within_node(name: str, device: str, interconnect: str, notes: str) -> str:
    """The catalogue's device of this name, or the card that it is where devices of a node are linked by PCIe.

    Args:
        name: in the catalogue.
        device, interconnect, notes: cells of a row.

    Raises:
        UnknownDevice: the catalogue has no such card.

    >>> linked_within_node("a100-80gb", "A100-80GB", "PCIe Gen4", "")
    'a100-pcie-80gb'
    """
    if "pcie" in name or name.endswith("-nvl"):
        return name
    without = re.search(r"\b(no|without|lacks?) (nv-?link|nvswitch|hccs)", f"{interconnect}; {notes}", re.I)
    pcie = re.search(r"\bpci-?e?(?![a-z])", interconnect, re.I)
    if not without and (not pcie or re.search(_BOARDS, f"{device}; {interconnect}", re.I)):
        return name
    if name not in _AS_CARDS:
        words = interconnect if pcie or not without else without.group()
        raise UnknownDevice(f"devices linked by {words!r} within a node: the catalogue's {name} has links of its own")
    return _AS_CARDS[name]


_GENERATIONS = {"fdr": 56e9, "edr": 100e9, "hdr100": 100e9, "hdr": 200e9, "ndr200": 200e9, "ndr": 400e9, "xdr": 800e9}
"""Bits per second of a port with four lanes (InfiniBand Trade Association's road map)."""

_RATE = re.compile(
    r"(?:(\d+) ?x ?)?(?<![\d.])(\d+(?:\.\d+)?) ?-?([GgTt])"
    r"(?:(bits?|b|B)(?:/s|ps|/sec)(?![a-zA-Z])"
    r"|(?:igabit|bit|b)?-?(?:E\b|(?= ?-?(?:ethernet|eth\b|roce|infiniband|ib\b|rdma|nics?\b|network|efa\b))))",
    re.I,
)
"""A rate in bits or bytes a second, or of a kind of network by its rate: 10 GbE, 25Gb Ethernet, 100G RoCE."""
_INSIDE = ("nvlink", "nvswitch", "nvl", "pcie", "c2c", "hbm", "xgmi")


def network_of(interconnect: str, notes: str, usual_per_node: int) -> Network:
    """The bandwidth of one device's links to other nodes, read from words about links.

    Raises:
        UnknownDevice: links of no rate.

    A rate is one device's where "per node" is not said and it is at most 400 Gb/s; "8 x" before it counts the cards of
    a node. Without a rate an InfiniBand generation is one port for each device; else the catalogue's node is meant.

    >>> network_of("NVLink + 4x HDR200 per node", "", 8).per_device_Bps / 1e9
    12.5
    >>> network_of("NVLink; 400 Gb/s RDMA per GPU", "", 8).per_device_Bps / 1e9
    50.0
    """
    per_node = usual_per_node
    stated = None
    told = f"{interconnect}; {notes}"
    if match := re.search(r"(\d+) ?(?:x )?(?:gpus?|devices?|npus?|[ahvb]+\d00s?)(?: per |/| a |-per-)node", told, re.I):
        stated = per_node = max(1, int(match.group(1)))
    for clause in re.split(r"[;,+&]|\band\b|\bwith\b", interconnect):
        low = clause.lower()
        if any(word in low for word in _INSIDE):
            continue
        shared = ("node" in low and not re.search(r"between|inter", low)) or "efa" in low or "total" in low
        if match := _RATE.search(clause):
            cards, rate, giga, unit = match.groups()
            bits = float(rate) * (1e12 if giga.lower() == "t" else 1e9) * (8 if unit == "B" else 1)
            if not bits:
                raise UnknownDevice(f"links between nodes of {match.group().strip()!r} in {interconnect!r}")
            several = int(cards or 1)
            shared = (shared or several > 1 or bits > 400e9) and "per gpu" not in low
            each = bits * several / per_node if shared else bits
            said = f"{match.group().strip()!r} read as {each / 1e9:g} Gb/s of each device"
            return Network(per_device_Bps=each / 8, devices_per_node=stated, assumed=(f"links between nodes: {said}",))
        if match := re.search(r"(?:(\d+) ?x ?)?\b(hdr100|ndr200|hdr|ndr|edr|fdr|xdr)(?:200|400|100)?\b", low):
            ports, bits = match.group(1), _GENERATIONS[match.group(2)]
            each = bits * int(ports) / per_node if ports else bits
            if ports is None and usual_per_node == 8 and match.group(2) in ("edr", "fdr"):
                each = bits / 2  # nodes of that time had a card for two devices
            said = f"{match.group().strip()} read as {each / 1e9:g} Gb/s of each device"
            return Network(per_device_Bps=each / 8, devices_per_node=stated, assumed=(f"links between nodes: {said}",))
    understood = not re.sub(r"[^a-z]", "", interconnect.lower()) or re.search("|".join(_INSIDE), interconnect, re.I)
    words = "not stated" if understood else f"no rate is read from {interconnect!r}"
    return Network(devices_per_node=stated, assumed=(f"links between nodes: {words}",))
