"""Translates the spellings of devices and links in tables of measurements to the names of the catalogue."""

from __future__ import annotations

import re
from dataclasses import dataclass

from costmodels.machine.catalogue import load_device
from interop.measurements.systems import system_named

__all__ = [
    "CARDS", "Network", "UnknownDevice", "capacities_of", "device_named", "devices_meant", "devices_of_instance",
    "is_device", "linked_within_node", "network_of",
]  # fmt: skip


class UnknownDevice(Exception):
    """The catalogue does not have a device, or its links; the message is the reason."""


_INSTANCES = (
    (r"p4de", "a100 80gb"), (r"p4d", "a100 40gb"), (r"p5en", "h200"), (r"p5e", "h200"), (r"p5", "h100 80gb"),
    (r"p3dn", "v100 32gb"), (r"p3", "v100 16gb"), (r"p6 b200", "b200"), (r"p6e? gb200", "gb200"),
    (r"a2 ultragpu", "a100 80gb"), (r"a2 (high|mega)gpu", "a100 40gb"), (r"a3 ultra(gpu)?", "h200"),
    (r"a3 (high|mega|edge)(gpu)?", "h100 80gb"), (r"a4x.*", "gb200"), (r"a4 highgpu", "b200"),
    (r"nd96amsr.*", "a100 80gb"), (r"nd96asr.*", "a100 40gb"), (r"nd96isr.* h100|nd h100", "h100 80gb"),
    (r"nd96isr.* h200", "h200"), (r"bm gpu4 8", "a100 40gb"), (r"dgx 2", "v100 32gb"), (r"dgx 1", "v100 32gb"),
    (r"grace hopper", "gh200"), (r"ampere( 80 ?gb?)?", "a100 80gb"), (r"hopper", "h100 80gb"),
    (r"g4dn", "t4"), (r"g5", "a10g"), (r"g6e", "l40s"), (r"g6|g2 standard", "l4"),
    (r"nc\w* ?a100 v4", "a100 pcie 80gb"), (r"trn1n?", "trainium 1"), (r"trn2u?", "trainium 2"),
    (r"hl ?225\w*", "gaudi 2"), (r"hl ?325\w*", "gaudi 3"),
)  # fmt: skip
"""Instances of EC2, Google Cloud, Azure and Oracle by the devices they have (vendors' pages)."""

_DEVICES_OF_INSTANCES = (
    (r"dgx[ -]?2\b", 16),
    (r"dgx station", 4),
    (r"[dh]gx", 8),
    (r"nd96\w*|nd\w* \w+ v5", 8),
    (r"p3\.2x|p5\.4x|trn1\.2x", 1),
    (r"trn1n?\.32x|trn2u?\.48x", 16),
    (r"p3\.8x", 4),
    (r"p[3-6][a-z]*", 8),
    (r"g[56]e?\.48x|g4dn\.metal|g2-standard-96", 8),
    (r"g[56]e?\.(?:12|24)x|g4dn\.12x|g2-standard-48|nc96\w* a100", 4),
    (r"g2-standard-24|nc48\w* a100", 2),
    (r"g(?:4dn|[56]e?)\.\d*x|g2-standard-\d|nc24\w* a100", 1),
)
"""Patterns of instances and systems -> the devices of one, where its name does not end with their number."""

_SHEETS: tuple[tuple[str, str, int], ...] = (
    (r"rtx ?pro ?6000", "rtx-pro-6000", 96), (r"(?:rtx ?)?6000 ?ada|ada ?6000", "rtx-6000-ada", 48),
    (r"(?:rtx ?)?a6000(?! ?ada)", "rtx-a6000", 48), (r"(?:(?:rtx|geforce) ?)*5090", "rtx-5090", 32),
    (r"(?:(?:rtx|geforce) ?)*4090", "rtx-4090", 24), (r"(?:(?:rtx|geforce) ?)*3090", "rtx-3090", 24),
    (r"(?:(?:rtx|geforce) ?)*2080 ?ti", "rtx-2080-ti", 11), (r"(?:rtx ?)?a5000", "rtx-a5000", 24),
    (r"l20(?!\d)", "l20", 48),
    (r"titan ?rtx|rtx ?titan", "titan-rtx", 24), (r"a40(?!\d)", "a40", 48), (r"a30(?!\d)", "a30", 24),
    (r"a10g", "a10g", 24), (r"a10(?!\d)", "a10", 24), (r"l40s", "l40s", 48), (r"l40(?!\d)", "l40", 48),
    (r"l4(?!\d)", "l4", 24), (r"t4(?!\d)", "t4", 16), (r"mi250x", "mi250x", 64), (r"mi2[15]0", "mi250", 64),
    (r"mi325x?", "mi325x", 256), (r"mi35[05]x?", "mi355x", 288), (r"gaudi ?2", "gaudi-2", 96),
    (r"gaudi ?3", "gaudi-3", 128), (r"mi300a", "mi300a", 128), (r"tpu ?v3|v3(?=[ -]\d)", "tpu-v3", 32),
    (r"tpu ?v4|v4(?=[ -]\d)", "tpu-v4", 32), (r"(?:tpu ?)?v5 ?(?:e|lite ?pod)", "tpu-v5e", 16),
    (r"(?:tpu ?)?v5 ?p", "tpu-v5p", 95), (r"(?:tpu ?)?(?:v6 ?e|trillium)", "tpu-v6e", 32),
    (r"(?:trainium|trn) ?2", "trainium-2", 96), (r"(?:trainium ?1?(?! ?[23])|trn1n?)", "trainium-1", 32),
    (r"p100 ?pcie", "p100-pcie", 16), (r"p100(?! ?pcie)", "p100", 16),
)  # fmt: skip
"""Patterns of devices of one memory, their names in the catalogue and their capacities in GB."""

CARDS = "|".join(
    [pattern.replace(" ?", "[- ]?").replace(")*", ")+") for pattern, _, _ in _SHEETS]
    + [rf"(?<=\d{times})[345]090" for times in ("x", "x ", "\u00d7", "\u00d7 ")]
)
"""A pattern of these devices as they are written in sentences, where "3090" alone may be another number."""

_AS_OTHERS = (
    (r"mi250x(?!.*gcd)", "a GPU is one of the two dies (GCD) of an MI250X"),
    (r"mi250(?!x)(?!.*gcd)", "a GPU is one of the two dies (GCD) of an MI250"),
    (r"mi210", "MI210 as a die of an MI250, which it is"),
    (r"mi350", "MI350X as the MI355X, whose clock is 9 % higher (data sheets)"),
    (r"tpu|\bv[3-6][ep]?-", "a chip of two cores is one device, where there are two"),
    (r"3090 ?ti|4090 ?d\b", "as the card of the same name without a suffix, whose cores differ by a tenth"),
)
"""Words of devices that the catalogue has under another name -> the assumption."""

_CARDS = {
    "v100": {"16": "v100-pcie-16gb", "32": "v100-pcie-32gb"},
    "h200": {"141": "h200-nvl"},
    "a100": {"40": "a100-pcie-40gb", "80": "a100-pcie-80gb"},
    "a800": {"80": "a100-pcie-80gb", "40": "a100-pcie-40gb"},
    "h100": {"80": "h100-pcie", "94": "h100-nvl"},
}
"""PCIe cards by their memory; the A800's differ from the A100's in their bridges only."""

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

_ASCEND_MEMORIES = {"ascend-910b4": 32, "ascend-910c": 128}
"""Capacities in GB of Ascend devices, where they are not 64."""

_KNOWN = (
    "V100, A100, A800, H100, H800, H20, H200, GH200, B200, B300, GB200, GB300, cards of A100 and H100 on PCIe, H100 "
    "NVL, RTX and data-center cards from T4 to RTX PRO 6000, P100, MI250 to MI355X, MI300A, Gaudi 2 and 3, Ascend "
    "910B1 to 910C, TPU v3 to v6e, Trainium 1 and 2"
)

_USUAL = {"a100": "80", "v100": "32", "h100": "80", "h200": "141", "b200": "180", "gh200": "96", "gb200": "186",
          "gb300": "288", "b300": "288", "h800": "80", "a800": "80", "h20": "96", "mi300x": "192"}  # fmt: skip


def device_named(text: str) -> tuple[str, tuple[str, ...]]:
    """The name of a device in the catalogue, and the assumptions that were made.

    Raises:
        UnknownDevice: it is not in the catalogue. The message has the reason.

    >>> device_named("NVIDIA A100-SXM4-40G")[0], device_named("8xH100 80GB HBM3")[0], device_named("p4de.24xlarge")[0]
    ('a100-40gb', 'h100-sxm', 'a100-80gb')
    """
    plain = _plain(text)
    if len(set(re.findall(rf"\d ?x? ?({_KIND.pattern})", plain))) > 1 and re.search(r"[+&]| and ", text):
        raise UnknownDevice(f"device {text!r}: a job on several kinds of devices")
    if (system := system_named(text)) is not None and not _KIND.search(plain):
        text, plain = system.device, _plain(system.device)
    for instance, device in _INSTANCES:
        if re.match(rf"(?:\d+ ?x? (?:nodes? (?:of |with )?)?)?(?:ml |standard )?(?:{instance})(?![a-z0-9])", plain):
            plain = device
            break
    for words, device, _ in _SHEETS:
        if re.search(rf"(?:(?<![a-z0-9])|(?<=\dx))(?:{words})(?:s\b|(?![a-z0-9])|(?<=\d)(?= ?(?:ti|d)\b))", plain):
            return device, tuple(remark for other, remark in _AS_OTHERS if re.search(other, text.lower()))
    if re.search(r"h100.*\bnvl\b(?! ?\d+\b(?! ?g))", plain):
        return "h100-nvl", ()
    if match := re.search(r"910 ?(b[1-4]|c)", plain):
        return f"ascend-910{match.group(1)}", ()
    found = _KIND.search(plain)
    if found is None:
        raise UnknownDevice(f"device {text!r} is not in the catalogue; it has {_KNOWN}")
    kind, behind = re.sub(r"^mi300$", "mi300x", found.group()), plain[found.end() :]
    name, assumed = _of_kind(kind, plain, behind, text)
    if not kind.startswith("g") and set(_KIND.findall(re.split(r"\b(?:vs|than|not)\b", behind)[0])) - {kind}:
        assumed = (*assumed, f"{text!r} names several devices: the {kind.upper()}, which is the first")
    return name, assumed


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


_KIND = re.compile(r"gh200|gb200|gb300|(?<!g)h200|(?<!g)b[23]00|h100|h800|a100|a800|h20(?!\d)|v100|mi300x?(?!a)")


def devices_of_instance(text: str) -> int:
    """The devices of one instance, or of a node of a system, of a name; 0 if it names none.

    >>> devices_of_instance("p4d.24xlarge"), devices_of_instance("a2-ultragpu-4g"), devices_of_instance("8x H100")
    (8, 4, 0)
    """
    low = text.lower()
    if ending := re.search(r"gpu-(\d+)g\b|\bbm\.gpu\S*\.(\d+)\b", low):
        return int(ending.group(1) or ending.group(2))
    if (system := system_named(text)) is not None:
        return system.per_node
    return next((each for words, each in _DEVICES_OF_INSTANCES if re.search(rf"(?<![a-z0-9])(?:{words})", low)), 0)


def _of_kind(kind: str, plain: str, behind: str, text: str) -> tuple[str, tuple[str, ...]]:
    """The catalogued device of a kind, by its form and memory.

    Args:
        kind: key of `_MEMORIES`.
        plain, text: name of the device, in plain letters and as written.
        behind: the part of `plain` after the kind.
    """
    known = _MEMORIES[kind]
    if re.search(r"(?<![a-z0-9])(pci ?e?|nvl(?! ?\d))(?![a-z0-9])", plain):
        if kind not in _CARDS:
            raise UnknownDevice(
                f"device {text!r} is not in the catalogue; its PCIe cards are V100, A100, H100 and H200"
            )
        known = _CARDS[kind]
    memory = re.search(r"(\d+) ?g(?:i?b)?(?![a-z0-9])", behind)
    if kind == "h100" and memory is not None and memory.group(1) == "94" and "sxm" not in plain:
        return "h100-nvl", ()
    if memory is None:
        usual = _USUAL[kind]
        assumed = () if len(known) == 1 else (f"memory of the {kind.upper()} not stated: {usual} GB",)
        return known[usual], assumed
    stated = known.get(memory.group(1))
    if stated is None:
        usual = _USUAL[kind] if _USUAL[kind] in known else next(iter(known))
        near = next((size for size in known if abs(int(size) - int(memory.group(1))) <= 1), usual)  # 95 GiB of 96
        return known[near], (f"{kind.upper()} with {memory.group(1)} GB: as the one with {near} GB",)
    return stated, ()


def devices_meant(text: str) -> tuple[str, ...]:
    """The devices that the name of a family or a system may mean; none if it names one device.

    >>> devices_meant("Ascend 910B"), devices_meant("Ascend 910B3")
    (('Ascend 910B4', 'Ascend 910B3', 'Ascend 910B2', 'Ascend 910B1'), ())
    """
    low = re.sub(r"[-_ ]+", " ", text.lower())
    if re.search(r"910 ?(b[1-4]|c)", low):
        return ()
    if re.search(r"atlas.*\ba3\b|cloudmatrix|910 ?93", low):
        return ("Ascend 910C",)
    if re.search(r"910 ?b?(?![a-z0-9])|atlas.*\ba2\b|^(?:ascend|npu)s?$", low):
        numbers = (4,) if re.search(r"\b32 ?g", low) else (3, 2, 1) if re.search(r"\b64 ?g", low) else (4, 3, 2, 1)
        return tuple(f"Ascend 910B{number}" for number in numbers)
    return ()


def capacities_of(text: str) -> frozenset[int]:
    """The capacities in GB that the device of a name may have.

    Raises:
        UnknownDevice: it is not in the catalogue.

    >>> sorted(capacities_of("A100")), sorted(capacities_of("A100-40GB")), sorted(capacities_of("Ascend 910B"))
    ([40, 80], [40], [32, 64])
    """
    if text and (members := devices_meant(text)):
        return frozenset().union(*map(capacities_of, members))
    name, assumed = device_named(text)
    if name.startswith("ascend"):
        return frozenset({_ASCEND_MEMORIES.get(name, 64)})
    if own := {capacity for _, device, capacity in _SHEETS if device == name}:
        return frozenset(own)
    kind = name.partition("-")[0]
    sizes = (*_MEMORIES.get(kind, {}).items(), *_CARDS.get(kind, {}).items())
    return frozenset(int(size) for size, own in sizes if own == name or assumed)


_LIKE_DEVICES = re.compile(
    r"dgx|hgx|[ahvbp]\d00|\bh20\b|910|mi\d{3}|\b(?:rtx|gtx|geforce|quadro|tpu|gaudi|trainium)|\b(?:2080|[345]090)\b"
    rf"|\b(?:\d+ ?x ?)?(?:{CARDS})\b",
    re.I,
)
"""Words of devices, those that the catalogue lacks among them."""


def is_device(cell: str) -> bool:
    """Whether a cell names a device.

    >>> is_device("DGX H100"), is_device("4090"), is_device("128"), is_device("Llama")
    (True, True, False, False)
    """
    return _LIKE_DEVICES.search(cell) is not None or bool(devices_meant(cell) or system_named(cell))


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links between nodes that a row states.

    Args:
        per_device_Bps: of a device's link to other nodes; None: not stated.
        devices_per_node: None: not stated.
        assumed: what had to be assumed.
    """

    per_device_Bps: float | None = None
    devices_per_node: int | None = None
    assumed: tuple[str, ...] = ()


_BOARDS = r"nv-?link|nvswitch|\bnv\d+\b|sxm|hgx|dgx|c2c|hccs"


_AS_CARDS = {
    "v100-16gb": "v100-pcie-16gb",
    "v100-32gb": "v100-pcie-32gb",
    "a100-40gb": "a100-pcie-40gb",
    "a100-80gb": "a100-pcie-80gb",
    "h100-sxm": "h100-pcie",
}


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
    if "pcie" in name or name.endswith("-nvl") or "PCIe" in load_device(name).node[0].name:
        return name
    without = re.search(r"\b(no|without|lacks?) (nv-?link|nvswitch|hccs)", f"{interconnect}; {notes}", re.I)
    pcie = re.search(r"\bpci-?e?(?![a-z])", interconnect, re.I)
    if not without and (not pcie or re.search(_BOARDS, f"{device}; {interconnect}", re.I)):
        return name
    if name not in _AS_CARDS:
        words = interconnect if pcie or not without else without.group()
        raise UnknownDevice(f"devices linked by {words!r} within a node: the catalogue's {name} has links of its own")
    return _AS_CARDS[name]


_PORTS = {
    "fdr": 56e9, "edr": 100e9, "hdr100": 100e9, "hdr": 200e9, "ndr200": 200e9, "ndr": 400e9, "xdr": 800e9,
    "quantum-2": 400e9, "quantum": 200e9, "spectrum-x": 400e9, "slingshot-11": 200e9, "slingshot-10": 100e9,
    "connectx-5": 100e9, "connectx-6": 200e9, "connectx-7": 400e9, "connectx-8": 800e9, "bluefield-3": 400e9,
    "omni-path": 100e9, "tcpxo": 200e9, "tcpx": 100e9,
}  # fmt: skip
"""Bits per second of a port: InfiniBand generations with four lanes (InfiniBand Trade Association's road map), switches
and cards by their data sheets; GPUDirect-TCPX and -TCPXO are those of Google's a3-highgpu and a3-megagpu machines, of
800 and 1,600 Gb/s for eight devices."""

_PORT = re.compile(
    r"(?:(\d+)(?: ?x ?(?:\w+ )?| )|(?<![a-z]))"
    r"(hdr100|ndr200|hdr|ndr|edr|fdr|xdr|quantum-2|quantum|spectrum-x|slingshot-1[01]|connectx-[5-8]|bluefield-3|omni-path|tcpxo|tcpx)"
    r"(?![a-z])(?: 100)?(?: x ?(\d)\b)?"
)
_NETWORK = (
    r"(?<![a-z])(?:\w*ethernet|eth|roce(?:v2)?|infiniband|ib|rdma|nics?|network|efa\w*|connectx-\d|slingshot|links?)"
    r"(?![a-z])"
)
_RATE = re.compile(
    r"(?:(\d+) ?x ?(?:\w+ )??)?(?<![\d.])(\d+(?:\.\d+)?) ?-?([GgTt])"
    r"(?:(bits?|b|B)?(/s|ps|/sec)|(?:igabit|bit|b)?-?(E\b|(?= ?-?ethernet))|igabit|bit|b)?(?![a-zA-Z0-9])",
)
"""A rate in bits or bytes a second, or of a kind of network by its rate: 10 GbE, 25Gb Ethernet, 100G RoCE."""
_CARDS_OF_NODE = re.compile(r"\b\d ?[x*\u00d7] ?(?:25|50|100|200|400|800) ?G\b", re.I)
_INSIDE = ("nvlink", "nvswitch", "nvl", "pcie", "c2c", "hbm", "xgmi")


def network_of(interconnect: str, notes: str, usual_per_node: int) -> Network:
    """The bandwidth of one device's links to other nodes, read from words about links.

    Raises:
        UnknownDevice: links of no rate.

    A rate is one device's if "per node" is not stated and it is at most 400 Gb/s; "8 x" before it counts the cards of a
    node. Without a rate an InfiniBand generation is one port for each device; else the catalogue's node is meant.

    >>> network_of("NVLink + 4x HDR200 per node", "", 8).per_device_Bps / 1e9
    12.5
    >>> network_of("NVLink; 400 Gb/s RDMA per GPU", "", 8).per_device_Bps / 1e9
    50.0
    """
    per_node = usual_per_node
    stated = None
    text = f"{interconnect}; {notes}"
    if match := re.search(r"(\d+) ?(?:x )?(?:gpus?|devices?|npus?|[ahvb]+\d00s?)(?: per |/| a |-per-)node", text, re.I):
        stated = per_node = max(1, int(match.group(1)))
    for clause in re.split(r"[;,+&]| / |\band\b|\bwith\b", interconnect):
        if any(word in clause.lower() for word in _INSIDE):
            continue
        if _CARDS_OF_NODE.search(clause):  # "XGMI + 8x400G"
            clause = f"network {clause}"
        if (found := _of_each(clause, per_node)) is not None:
            words, bits = found
            if not bits:
                raise UnknownDevice(f"links between nodes of {words!r} in {interconnect!r}")
            note = f"links between nodes: {words!r} read as {bits / 1e9:g} Gb/s of each device"
            return Network(per_device_Bps=bits / 8, devices_per_node=stated, assumed=(note,))
    understood = not re.sub(r"[^a-z]", "", interconnect.lower()) or re.search("|".join(_INSIDE), interconnect, re.I)
    words = "not stated" if understood else f"no rate is read from {interconnect!r}"
    return Network(devices_per_node=stated, assumed=(f"links between nodes: {words}",))


def _of_each(clause: str, per_node: int) -> tuple[str, float] | None:
    """The rate in a clause about links, in words and in bits per second of each device; None if there is none."""
    plain = re.sub(r"(?<=\d) ?[*\u00d7] ?(?=\d)", "x", clause)
    plain = re.sub(r"\bdual[- ]?rail\b", "2x", plain, flags=re.I)
    plain = re.sub(r"\b(?:cx|mlx)[- ]?(?=[5-8]\b)", "connectx-", plain, flags=re.I)
    plain = re.sub(r"\b(connectx|slingshot|bluefield|quantum)[ -]?(?=\d)", r"\1-", plain, flags=re.I)
    low = plain.lower()
    each_device = re.search(r"(?:per|/|each) ?-?(\d+ )?(?:gpus?|devices?|npus?|cards?|accelerators?)\b", low)
    sharing = int(each_device.group(1) or 1) if each_device else 1
    shared = ("node" in low and not re.search(r"between|inter", low)) or "efa" in low or "total" in low
    for found in _RATE.finditer(plain):
        cards, rate, giga, unit, per_second, ethernet = found.groups()
        if giga in "Tt" and unit == "B" and not re.search(_NETWORK, low):  # of a memory: "3.35 TB/s"
            continue
        if per_second is None and ethernet is None and not (each_device or re.search(_NETWORK, low)):
            continue
        bits = float(rate) * (1e12 if giga.lower() == "t" else 1e9) * (8 if unit == "B" else 1)
        if cards is None and (behind := re.match(r" ?[x\u00d7] ?(\d)\b(?! ?g)", plain[found.end() :], re.I)):
            cards = behind.group(1)  # "200 Gb/s x 4"
        several = int(cards or 1)
        if each_device:
            return found.group().strip(), bits * several / max(1, sharing)
        whole = shared or cards is not None or bits > (800e9 if "connectx-8" in low else 400e9)
        return found.group().strip(), bits * several / per_node if whole else bits
    return _of_port(low, per_node, max(1, sharing) if each_device else per_node)


def _of_port(low: str, per_node: int, sharing: int) -> tuple[str, float] | None:
    """The rate of the cards that a clause names, as of `_of_each`; `sharing` devices share a stated number of cards."""
    if (port := _PORT.search(low)) is None:
        return None
    ports, bits = port.group(1) or port.group(3), _PORTS[port.group(2)]
    if ports is not None:
        return port.group().strip(), bits * int(ports) / sharing
    if re.search(r"\b(?:1|one|single) (?:port|nic|card)", low):
        return port.group().strip(), bits / per_node
    halved = per_node == 8 and port.group(2) in ("edr", "fdr", "slingshot-10")  # a card for two devices at that time
    return port.group().strip(), bits / 2 if halved else bits
