"""The machine: everything that prices are computed from, as a value and as a file.

A machine file is JSON, versioned, written atomically; unknown keys are refused with their path. Figures are SI with the
unit in the name. Every section has the source of its figures (`Provenance`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from costmodels.machine.catalogue import Device, device_of, known_names
from costmodels.machine.links import Graph, Link, Wire, check_tiers
from costmodels.machine.sections import (
    COLLECTIVES,
    MACHINE_VERSION,
    Collective,
    Interval,
    Overlap,
    Protocol,
    Provenance,
    Replay,
    Section,
    check_keys,
    check_known,
)
from costmodels.price.compute import Attention, Compute
from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.reading import json_of, read_file

__all__ = [
    "COLLECTIVES",
    "DISPATCH_CLASSES",
    "MACHINE_VERSION",
    "SPREAD_CLASSES",
    "Attention",
    "Collective",
    "Compute",
    "Graph",
    "Interval",
    "Link",
    "Machine",
    "Overlap",
    "Protocol",
    "Provenance",
    "Wire",
    "shipped_machines",
]

DISPATCH_CLASSES = ("attention", "matrix", "memory", "view", "update", "collective", "transfer", "wait")
"""Kinds of work that the host issues, by the time to issue them."""

SPREAD_CLASSES = ("attention", "matrix", "memory", "update", "dispatch", "collective", "transfer")
"""Kinds of instructions whose prices err together (see `costmodels.interval`)."""


USUAL_GROUPS = 4
"""Groups of ranks that a device communicates in, one for each parallel degree of a large plan: data, tensor, context or
expert, and pipeline."""


class Machine(Section, frozen=True, kw_only=True, omit_defaults=False):
    """A machine of `num_devices` equal devices.

    Args:
        name: name of the machine.
        variant: exact hardware: board, memory, power, network.
        device: cpu, cuda or npu.
        num_devices: number of ranks that can run on it.
        devices_per_node: number of ranks that share a host.
        memory_bytes: memory of a device.
        runtime_bytes: memory that the device's runtime uses before the first tensor: context, kernels.
        memory_allowance: memory that an allocator's fragmentation takes, relative to the peak of the tensors.
        communicator_bytes: memory that the communication library keeps on a device for every group of ranks.
        compute: rates of one device.
        links: the short form: tiers from the fastest to the slowest; the last joins all devices.
        graph: the long form: every link between devices and switches. `links` is then a summary.
        collectives: costs by kind, one for each of `COLLECTIVES`.
        dispatch_s: host time to issue an instruction, for each of `DISPATCH_CLASSES`.
        replay: remaining host time of replayed steps; None: assumed (`costmodels.price.replay`).
        launch_s: host time of a step besides its instructions; above 0 for replayed steps (`executing`).
        host_async: True: compute runs behind the host (GPU, NPU); False: the host thread computes (CPU).
        cores_per_node: cores shared by all ranks of a node, if the hosts compute; None otherwise.
        overlap: how compute and collectives slow each other down.
        host_scale: factor on every price, from probe programs that were run and simulated.
        interval: interval of step times, in addition to the spreads below.
        spreads: standard deviation of log(measured / priced) of instructions, by class of `SPREAD_CLASSES`.
        price_intervals: 90 % interval of a single price, as factors of it, by class of `SPREAD_CLASSES`.
        provenance: source of the figures, by section or "section.field".

    Raises:
        TwofoldError: a figure that is negative, not a number or 0 where it must not be; a missing or unknown entry.

    >>> Machine.load("h200-x4").num_devices
    4
    """

    version: int = MACHINE_VERSION
    name: str
    variant: str = ""
    device: Literal["cpu", "cuda", "npu", "hpu", "tpu", "neuron"]
    num_devices: int
    devices_per_node: int
    memory_bytes: int
    runtime_bytes: int | None = None
    memory_allowance: float = 0.0
    communicator_bytes: int | None = None
    compute: Compute
    links: tuple[Link, ...] = ()
    graph: Graph | None = None
    collectives: dict[str, Collective]
    dispatch_s: dict[str, float]
    replay: Replay | None = None
    launch_s: float = 0.0
    host_async: bool
    cores_per_node: int | None = None
    overlap: tuple[Overlap, ...] = ()
    host_scale: float = 1.0
    interval: Interval
    spreads: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    price_intervals: dict[str, Interval] = {}  # noqa: RUF012
    provenance: dict[str, Provenance]

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.version != MACHINE_VERSION:
            raise TwofoldError(f"version is {self.version}, this twofold reads {MACHINE_VERSION}")
        for name in ("num_devices", "devices_per_node", "cores_per_node"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise TwofoldError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.runtime_bytes is not None and self.runtime_bytes >= self.memory_bytes:
            raise TwofoldError(
                f"runtime_bytes is {self.runtime_bytes}, of {self.memory_bytes} memory_bytes, which leaves no "
                "room for tensors"
            )
        if not self.host_async and self.cores_per_node is None:
            raise TwofoldError(
                "host_async is false (hosts compute): set cores_per_node, the number of cores that they share"
            )
        check_keys("dispatch_s", self.dispatch_s, DISPATCH_CLASSES)
        check_keys("collectives", self.collectives, COLLECTIVES)
        if self.graph is not None:
            self.graph.check(self.num_devices)
            msgspec.structs.force_setattr(self, "links", self.graph.summary(self.num_devices, self.devices_per_node))
        check_tiers(self.links, self.num_devices)
        for entry in (*self.spreads, *self.price_intervals):
            check_known("entry of spreads and price_intervals", entry, SPREAD_CLASSES)
        for entry in self.provenance:
            check_known("provenance entry", entry.partition(".")[0], self.__struct_fields__)

    def __repr__(self) -> str:
        return f"<Machine {self.name}: {self.num_devices} {self.device} device{'s' * (self.num_devices != 1)}>"

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.num_devices, self.host_scale, self.compute.memory_Bps,
                     self.launch_s))  # fmt: skip

    @property
    def free_bytes(self) -> int:
        """Device memory that its runtime leaves."""
        return self.memory_bytes - (self.runtime_bytes or 0)

    @property
    def room_bytes(self) -> int:
        """Device memory for the tensors of a plan: `free_bytes` without communicators and fragmentation.

        >>> Machine.load("h100-sxm-x1").room_bytes < Machine.load("h100-sxm-x1").free_bytes
        True
        """
        groups = 0 if self.num_devices == 1 else USUAL_GROUPS
        return int((self.free_bytes - groups * (self.communicator_bytes or 0)) / (1.0 + self.memory_allowance))

    @property
    def library(self) -> str:
        """The communication library that its collectives run on: gloo, nccl, or hccl (Huawei's and Habana's).

        Those of TPUs and Trainium are not modelled: nccl stands for them.
        """
        return {"cpu": "gloo", "npu": "hccl", "hpu": "hccl"}.get(self.device, "nccl")

    @property
    def fuses(self) -> bool:
        """Whether twofold's executor runs fused instructions as one kernel (compiled by Inductor, for GPUs)."""
        return self.device == "cuda"

    @property
    def shares_ways(self) -> bool:
        """Whether ranks share links: those of a graph, or uplinks of domains."""
        return self.graph is not None or any(link.uplink_Bps is not None for link in self.links)

    def tier(self, ranks: Sequence[int]) -> int:
        """The number of the fastest tier of links that connects all of `ranks`.

        Raises:
            TwofoldError: a rank that the machine does not have.
        """
        if max(ranks) >= self.num_devices:
            raise TwofoldError(
                f"rank {max(ranks)} is used, but machine {self.name!r} has {self.num_devices} devices; "
                "plan for fewer devices or load a larger machine"
            )
        for number, link in enumerate(self.links):
            if len({rank // link.ranks for rank in ranks}) == 1:
                return number
        raise AssertionError("the last tier joins all devices")

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Machine:
        """Load a machine by a name such as "h200-x4" or "h100-sxm-x1024", or from a file.

        A name is that of a shipped file, or "<device>-x<number>" for a device of the catalogue: part of a node, or
        complete nodes (`costmodels.machine.catalogue`).

        Raises:
            TwofoldError: an unknown name (with suggestions), no such file, or what `from_json` refuses.
        """
        text = os.fspath(name_or_path)
        path = Path(text)
        if path.suffix != ".json" and not path.is_file() and len(path.parts) == 1:
            named = device_of(text)
            if not isinstance(named, Path):
                return cls.of_device(*named)
            path = named
        return cls.from_json(read_file(path, "the machine file"), str(path))

    @classmethod
    def of_device(cls, device: Device, number: int) -> Machine:
        """Make a machine of `number` devices of the catalogue, in their usual nodes and network.

        Raises:
            TwofoldError: more than a node that is not a multiple of it, or none.
        """
        return cls(**device.fields(number))

    @classmethod
    def from_json(cls, text: bytes, source: str = "machine") -> Machine:
        """The machine of a file's bytes.

        Raises:
            TwofoldError: not JSON, truncated, an unknown or missing key (with its path), another version, a bad figure.
        """
        marks = json_of(text, source, _Marks, advice="calibrate again")
        if marks.stages is not None:
            raise TwofoldError(f"{source}: a plan file, not a machine; name a machine such as h200-x8")
        version = marks.version
        if version is None:
            raise TwofoldError(f"{source}: not a machine file, it has no `version`; write one with `twofold calibrate`")
        if version != MACHINE_VERSION:
            raise TwofoldError(
                f"{source}: machine version {version}, this twofold reads {MACHINE_VERSION}; calibrate again"
            )
        machine = json_of(text, source, cls, advice="calibrate again")
        if machine.graph is not None and marks.links:
            stated = msgspec.convert(marks.links, tuple[Link, ...])
            if stated != machine.links:
                raise TwofoldError(f"{source}: `links` contradict `graph`, which determines them; remove `links`")
        return machine

    def to_json(self) -> bytes:
        """The file form."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the machine file atomically."""
        return write_atomically(path, self.to_json() + b"\n")


def shipped_machines() -> tuple[str, ...]:
    """Names that `Machine.load` accepts: the shipped files, and every device of the catalogue as one complete node."""
    return known_names()


class _Marks(msgspec.Struct):
    """What tells a machine file from others; `stages` is a key of plan files only."""

    version: int | None = None
    stages: Any = None
    links: Any = None
