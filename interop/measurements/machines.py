"""The catalogued machine on which a row of a table ran, with the links that the row states."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from costmodels import Machine
from costmodels.machine.catalogue import load_device
from interop.measurements.devices import Network

__all__ = ["assumed_of", "load_machine", "machine_of"]


@lru_cache(maxsize=256)
def load_machine(name: str) -> Machine:
    """A machine by its name."""
    return Machine.load(name)


@lru_cache(maxsize=256)
def _unit(device: str, devices: int) -> int:
    """The unit that larger machines are multiples of: a node, or a super-node for machines larger than one."""
    found = load_device(device)
    return found.pod.ranks if found.pod is not None and devices > found.pod.ranks else found.per_node


def machine_of(name: str, network: Network) -> Machine:
    """The catalogue's machine of a name with the links that a row states.

    Where the devices fill no whole number of nodes, or of super-nodes, the next larger machine is taken. A job that
    fills no whole number of NVL72 domains has 64 devices in each, as NVIDIA recommends (segments of 16 nodes;
    developer.nvidia.com/blog, "Achieving Peak System and Workload Efficiency on NVIDIA GB200 NVL72 with Slurm Block
    Scheduling").
    """
    device, _, count = name.rpartition("-x")
    devices = int(count)
    node = _unit(device, devices)
    if node == 72 and devices > node and devices % node and devices % 64 == 0 and network.devices_per_node is None:
        return _with_nodes_of(64, load_machine(f"{device}-x{2 * node}"), devices, network)
    if devices > node and devices % node:
        devices = -(-devices // node) * node
    found = load_machine(f"{device}-x{devices}")
    own = network.devices_per_node
    if (
        own is not None
        and own < found.devices_per_node
        and len(found.links) == 1
        and devices > own
        and devices % own == 0
    ):
        whole = load_machine(f"{device}-x{2 * node}")  # smaller nodes than the catalogue's: some links go between them
        found = msgspec.structs.replace(whole, num_devices=devices)
    if len(found.links) < 2:
        return found
    links = list(found.links)
    if own is not None and own < links[0].ranks and links[-1].ranks % own == 0:
        links[0] = msgspec.structs.replace(links[0], ranks=own)
        found = msgspec.structs.replace(found, devices_per_node=own)
    if network.per_device_Bps is not None:
        links[-1] = msgspec.structs.replace(links[-1], bandwidth_Bps=network.per_device_Bps)
    return msgspec.structs.replace(found, links=tuple(links))


def _with_nodes_of(size: int, machine: Machine, devices: int, network: Network) -> Machine:
    """A machine of two nodes as one of `devices` in nodes of a size."""
    inner, outer = machine.links
    bandwidth_Bps = network.per_device_Bps or outer.bandwidth_Bps
    links = (
        msgspec.structs.replace(inner, ranks=size),
        msgspec.structs.replace(outer, ranks=devices, bandwidth_Bps=bandwidth_Bps),
    )
    name = f"{machine.name.rpartition('-x')[0]}-x{devices}"
    return msgspec.structs.replace(machine, name=name, num_devices=devices, devices_per_node=size, links=links)


def assumed_of(machine: Machine, network: Network) -> list[str]:
    """The assumptions of the machine file about the device, in short."""
    notes = machine.provenance
    result = []
    if len(machine.links) > 1:
        where = "" if network.per_device_Bps else (
            f"; the catalogue's {8 * machine.links[-1].bandwidth_Bps / 1e9:.4g} Gb/s of each device"
        )  # fmt: skip
        result = [f"{remark}{where}" for remark in network.assumed]
        if machine.devices_per_node != network.devices_per_node and machine.links[0].ranks == 64:
            result.append("64 of 72 devices of an NVLink domain")
    for entry in ("compute.sustained_clock", "links.network.reached_fraction"):
        if (own := notes.get(entry)) is not None and (len(machine.links) > 1 or "links" not in entry):
            result.append(f"{machine.name.rpartition('-x')[0]}, {entry}: {own.status}: {own.source}")
    carried = sorted(
        entry.removeprefix("compute.") for entry, own in notes.items()
        if own.status == "assumed" and own.source.startswith("carried over")
    )  # fmt: skip
    if carried:
        result.append(f"{machine.name.rpartition('-x')[0]}: carried over from a measured H200: {', '.join(carried)}")
    return result
