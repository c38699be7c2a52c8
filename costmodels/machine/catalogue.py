"""Machines by name: "<device>-x<number>" combines a device file with its template of a node and a network.

The device files are in `machines/devices`. Up to the size of a node, the number is a part of one node. Above it, the
number must be a multiple of the node's size, and the nodes are joined by their network cards: "h100-sxm-x1024" is 128
nodes of 8.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from costmodels.machine.links import Link
from costmodels.machine.sections import (
    MACHINE_VERSION,
    Collective,
    Interval,
    Overlap,
    Provenance,
    Replay,
    Section,
    check_known,
)
from costmodels.price.compute import Compute
from plans.errors import TwofoldError, unknown_name
from plans.extensions import load_extensions
from plans.files import write_atomically
from plans.reading import read_json

__all__ = [
    "CitedProduct",
    "Device",
    "Network",
    "declare_devices",
    "device_names",
    "device_of",
    "device_path",
    "known_names",
    "load_device",
    "save_device",
]

_FOLDER = Path(__file__).parents[1] / "machines"

_DEVICES = [_FOLDER / "devices"]
"""Folders of device files, ours first."""

_NAME = re.compile(r"(?P<device>.+)-x(?P<number>\d+)")


class Network(Section, frozen=True, kw_only=True):
    """The links between nodes, of one device in one direction (see `costmodels.machine.links.Link`)."""

    name: str
    latency_s: float
    bandwidth_Bps: float
    reached_fraction: float | None = None
    ports: Literal["own", "below"] | None = None


class CitedProduct(Section, frozen=True, kw_only=True):
    """A matrix product (m, n, k) whose rate on a device was reported."""

    shape: tuple[int, int, int]
    dtype: str
    flops_per_s: float


class Device(Section, frozen=True, kw_only=True, omit_defaults=False):
    """A device of the catalogue with the node it usually is in; fields are those of `Machine`.

    Args:
        typical_products: of a published table of operators; they set matrix_efficiency where that is not calibrated
            (`costmodels.fit.transfer_calibration`).
        best_product: the fastest that was reported; sets matrix_efficiency where there are no typical ones.
        limit_W: power of a chip by its data sheet, if it is made in TSMC's 4N or 4NP as the H100: those take the same
            energy for an operation (assumed), so the clock under load follows from the limit.
        node: tiers of links inside a node, the last joins all of it.
        pod: a tier that joins several nodes (a super-node), if there is one.
        network: what joins nodes, or pods.
    """

    version: int = MACHINE_VERSION
    name: str
    variant: str
    device: Literal["cuda", "npu", "hpu", "tpu", "neuron"]
    memory_bytes: int
    runtime_bytes: int | None = None
    memory_allowance: float = 0.0
    communicator_bytes: int | None = None
    compute: Compute
    typical_products: tuple[CitedProduct, ...] = ()
    best_product: CitedProduct | None = None
    limit_W: float | None = None
    node: tuple[Link, ...]
    pod: Link | None = None
    network: Network
    collectives: dict[str, Collective]
    dispatch_s: dict[str, float]
    replay: Replay | None = None
    overlap: tuple[Overlap, ...] = ()
    interval: Interval
    spreads: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    price_intervals: dict[str, Interval] = {}  # noqa: RUF012
    provenance: dict[str, Provenance]

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        for entry in self.provenance:
            check_known("provenance entry", entry.partition(".")[0], self.__struct_fields__)

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.node[-1].ranks

    def fields(self, number: int) -> dict[str, Any]:
        """The fields of the machine of `number` devices.

        Raises:
            TwofoldError: more than a node that is not a multiple of it, or none.
        """
        if number < 1 or (number > self.per_node and number % self.per_node):
            below = max(1, number // self.per_node) * self.per_node
            raise TwofoldError(
                f"{self.name}-x{number}: a node has {self.per_node} devices, so a machine has up to {self.per_node} or "
                f"a multiple of it; did you mean {self.name}-x{below} or {self.name}-x{below + self.per_node}?"
            )
        inside = [link for link in self.node if link.ranks <= number and number % link.ranks == 0]
        if number <= self.per_node and (not inside or inside[-1].ranks < number):
            tier = next(link for link in self.node if link.ranks >= number)
            inside.append(msgspec.structs.replace(tier, ranks=number))
        if number > self.per_node:
            inside += self._beyond(number)
        nodes = f"{number} of a node" if number < self.per_node else f"{number // self.per_node} x {self.per_node}"
        fields = {name: getattr(self, name) for name in _SHARED}
        provenance = {}
        for entry, source in self.provenance.items():
            first = entry.partition(".")[0]
            if first in ("node", "pod", "network"):
                if first == "node" or number > self.per_node:
                    provenance["links" + entry[4:] if first == "node" else f"links.{entry}"] = source
            elif first not in ("best_product", "typical_products", "limit_W"):  # figures of compute come from them
                provenance[entry] = source
        return fields | {
            "name": f"{self.name}-x{number}", "variant": f"{self.variant}; {nodes}", "num_devices": number,
            "devices_per_node": min(number, self.per_node), "links": tuple(inside), "host_async": True,
            "provenance": provenance,
        }  # fmt: skip

    def _beyond(self, number: int) -> list[Link]:
        """The tiers that join nodes, for a number of devices."""
        tiers = []
        if self.pod is not None:
            if number > self.pod.ranks and number % self.pod.ranks:
                raise TwofoldError(
                    f"{self.name}-x{number}: a super-node joins {self.pod.ranks} devices, so a machine of more has a "
                    "multiple of it"
                )
            tiers.append(msgspec.structs.replace(self.pod, ranks=min(number, self.pod.ranks)))
        if self.pod is None or number > self.pod.ranks:
            tiers.append(Link(ranks=number, **msgspec.structs.asdict(self.network)))
        return tiers


_SHARED = ("device", "memory_bytes", "runtime_bytes", "memory_allowance", "communicator_bytes", "compute",
           "collectives", "dispatch_s", "replay", "overlap", "interval", "spreads", "price_intervals")  # fmt: skip


def device_of(name: str) -> Path | tuple[Device, int]:
    """Parse the name of a machine (see the module): a shipped file, or a device and a number.

    Raises:
        TwofoldError: an unknown name, with suggestions.
    """
    path = _FOLDER / f"{name}.json"
    if path.is_file():
        return path
    match = _NAME.fullmatch(name)
    if match and match["device"] in device_names():
        if len(match["number"]) > 7:
            raise TwofoldError(f"machine {name[:80]!r}: no network here joins more than 9,999,999 devices; name fewer")
        return load_device(match["device"]), int(match["number"])
    if match and (whole := _whole_file(match["device"])):
        most, wanted = int(whole.rpartition("-x")[2]), match["number"]
        part = f"; `twofold plan` uses {wanted} of them with --machine {whole} --devices {wanted}"
        raise TwofoldError(
            f"machine {name[:80]!r} is not known: {whole} is the file of one machine with {most} devices"
            + (part if len(wanted) < 7 and 0 < int(wanted) < most else "; name it, or the path of a file of your own")
        )
    device = match["device"] if match else name
    names = {known.rpartition("-x")[0]: known for known in known_names()}
    close = [known for known in known_names() if known.startswith(f"{device.lower()}-")][:2]
    near = difflib.get_close_matches(device.lower(), names, n=3, cutoff=0.4)
    others = (*(names[each] for each in near), *(known for known in known_names() if device.lower() in known))
    close += [known for known in dict.fromkeys(others) if known not in close]
    message = unknown_name("machine", name, known_names(), close[:4])
    raise TwofoldError(f"{message} (NAME-xN for N devices, or the path of a machine file)")


def _whole_file(family: str) -> str | None:
    """The shipped file whose name is this and a number of devices; such a machine cannot be made of another number."""
    return next((path.stem for path in _FOLDER.glob("*.json") if path.stem.rpartition("-x")[0] == family), None)


def known_names() -> tuple[str, ...]:
    """Shipped machine files, and every device as one complete node, sorted."""
    files = [path.stem for path in _FOLDER.glob("*.json")]
    return tuple(sorted([*files, *(f"{name}-x{load_device(name).per_node}" for name in device_names())]))


def device_names() -> tuple[str, ...]:
    """The devices of the catalogue, those of extensions included, sorted."""
    load_extensions()
    return tuple(sorted(path.stem for folder in _DEVICES for path in folder.glob("*.json")))


def declare_devices(folder: Path) -> None:
    """Add devices of one's own: files such as those of `machines/devices`, each with its name."""
    _DEVICES.append(folder)


def device_path(name: str) -> Path:
    """The file of a device."""
    for folder in _DEVICES[1:]:
        if (folder / f"{name}.json").is_file():
            return folder / f"{name}.json"
    return _DEVICES[0] / f"{name}.json"


def save_device(device: Device) -> Path:
    """Write the file of a device of the catalogue atomically."""
    load_device.cache_clear()
    text = msgspec.json.format(msgspec.json.encode(device), indent=1)
    return write_atomically(device_path(device.name), text + b"\n")


@lru_cache
def load_device(name: str) -> Device:
    """A device of the catalogue.

    Raises:
        TwofoldError: an unknown name, or a file that is not one of a device.
    """
    path = device_path(name)
    if not path.is_file():
        raise TwofoldError(f"device {name!r} is not known; known: {', '.join(device_names())}")
    return read_json(path, "the device file", Device)
