"""The machine: everything that prices are computed from, as a value and as a file.

A machine file is JSON, versioned, written atomically; unknown keys are refused with their path. Figures are SI with the
unit in the name. Every section says where its figures come from (`Provenance`).
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from plans.errors import TwofoldError
from plans.files import write_atomically

__all__ = [
    "COLLECTIVES",
    "DISPATCH_CLASSES",
    "MACHINE_VERSION",
    "Collective",
    "Compute",
    "Interval",
    "Link",
    "Machine",
    "Overlap",
    "Provenance",
    "shipped_machines",
]

MACHINE_VERSION = 1

DISPATCH_CLASSES = ("matrix", "memory", "view", "update", "collective", "transfer", "wait")
"""What the host issues, by how long that takes it."""

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "transfer")
"""Kinds of communication; the flat variants of the optimizer are priced as the plain ones."""

_FOLDER = Path(__file__).with_name("machines")
_POSITIVE = ("_Bps", "_per_s", "sharpness", "_rate", "_efficiency", "_fraction", "_scale", "_bytes")


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A part of a machine file; refuses figures that are negative, not finite, or 0 where they divide."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check_figure(name, getattr(self, name))


class Compute(_Section, frozen=True, kw_only=True):
    """One device's rates.

    A matrix product (m, n, k) takes, alone, the time a of its arithmetic and b of its memory traffic, joined with
    `sharpness` p to (a^p + b^p)^(1/p): p = 1 adds them, large p is the roofline max(a, b). Its arithmetic takes
    2 m n k / rate times (1 + half_rows / min(m, n)) (1 + half_depth / k): the rate is halved at these sizes and
    saturates beyond.

    Args:
        matrix_flops_per_s: dtype -> peak rate of matrix products.
        vector_flops_per_s: dtype -> peak rate of everything else.
        memory_Bps: peak memory bandwidth.
        matrix_efficiency: share of the matrix peak that large products reach.
        memory_efficiency: share of the memory peak that large kernels reach.
        half_rows: see above.
        half_depth: see above.
        sharpness: see above, at least 1.
        kernel_s: the least time of a kernel on the device.
    """

    matrix_flops_per_s: dict[str, float]
    vector_flops_per_s: dict[str, float]
    memory_Bps: float
    matrix_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    half_rows: float = 0.0
    half_depth: float = 0.0
    sharpness: float = 2.0
    kernel_s: float = 0.0

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.sharpness < 1:
            raise TwofoldError(f"sharpness is {self.sharpness}; it is at least 1 (1 adds the two times)")
        for name in ("matrix_efficiency", "memory_efficiency"):
            _check_share(name, getattr(self, name))
        if not self.matrix_flops_per_s or not self.vector_flops_per_s:
            raise TwofoldError("matrix_flops_per_s and vector_flops_per_s need a rate for at least one dtype")


class Link(_Section, frozen=True, kw_only=True):
    """A tier of links: ranks with the same `rank // ranks` reach each other through it.

    Args:
        name: such as "NVLink".
        ranks: size of the domain; a multiple of the size of the tier below.
        latency_s: of one hop.
        bandwidth_Bps: of one rank in one direction, to all peers together.
        peer_Bps: in a full mesh of links that of one rank to one peer, so that a rank with p peers reaches p times as
            much, up to bandwidth_Bps; None behind a switch, where one peer may have it all.
    """

    name: str
    ranks: int
    latency_s: float
    bandwidth_Bps: float
    peer_Bps: float | None = None

    def reach_Bps(self, num_peers: int) -> float:
        """Bandwidth of one rank that talks to `num_peers` at once."""
        return self.bandwidth_Bps if self.peer_Bps is None else min(self.bandwidth_Bps, num_peers * self.peer_Bps)

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.ranks < 1:
            raise TwofoldError(f"link tier {self.name!r} joins {self.ranks} ranks; it must join at least 1")


class Collective(_Section, frozen=True, kw_only=True):
    """What one kind of communication costs beside the figures of the links.

    With n members the algorithm takes `hops` dependent steps, sends `messages` per member and moves `moved` bytes to
    each (`costmodels.traffic`). On its links it takes start_s + hops (hop_s + latency) + moved / (bandwidth x
    link_fraction) + size / copy_Bps. Where the processor carries it (gloo), every member spends cpu_start_s +
    messages x cpu_message_s + moved / cpu_Bps.

    Args:
        start_s: fixed part.
        hop_s: of every dependent step, beside the link's latency.
        link_fraction: share of the link's bandwidth that is reached.
        copy_Bps: passing the whole message through the member's memory; None: no such part.
        cpu_start_s: processor time of a member, fixed part.
        cpu_message_s: processor time of a member for every message.
        cpu_Bps: bytes that a member's processor moves per second; None: not limited by it.
    """

    start_s: float = 0.0
    hop_s: float = 0.0
    link_fraction: float = 1.0
    copy_Bps: float | None = None
    cpu_start_s: float = 0.0
    cpu_message_s: float = 0.0
    cpu_Bps: float | None = None


class Overlap(_Section, frozen=True, kw_only=True):
    """The rates (1 = alone) at which a kind of compute and a collective proceed while both run."""

    compute: Literal["matrix", "memory", "attention"]
    collective: str
    compute_rate: float
    comm_rate: float

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        _check_known("collective of an overlap", self.collective, COLLECTIVES)
        _check_share("compute_rate", self.compute_rate)
        _check_share("comm_rate", self.comm_rate)


class Interval(_Section, frozen=True, kw_only=True):
    """The 90 % interval of a step time, as factors of the prediction."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if not 0 < self.low <= 1 <= self.high:
            raise TwofoldError(f"the interval {self.low} to {self.high} must be factors with 0 < low <= 1 <= high")


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Where figures come from."""

    status: Literal["measured", "interpolated", "assumed", "cited"]
    source: str
    date: str = ""


class Machine(_Section, frozen=True, kw_only=True, omit_defaults=False):
    """A machine of `num_devices` equal devices.

    Args:
        name: of the machine.
        device: cpu, cuda or npu.
        num_devices: ranks that can run on it.
        devices_per_node: ranks that share a host.
        memory_bytes: per device.
        compute: rates of one device.
        links: tiers from the fastest to the slowest; the last joins all devices.
        collectives: costs by kind, one for each of `COLLECTIVES`.
        dispatch_s: host time to issue an instruction, for each of `DISPATCH_CLASSES`.
        host_async: True: compute runs behind the host (GPU, NPU); False: the host thread computes (CPU).
        cores_per_node: cores shared by all ranks of a node, on machines whose hosts compute; None elsewhere.
        overlap: how compute and collectives slow each other.
        host_scale: one factor on every price, from probe programs that were run and simulated.
        interval: of step times.
        provenance: section or "section.field" -> where its figures come from.

    Raises:
        TwofoldError: a figure that is negative, not a number or 0 where it must not be; a missing or unknown entry.

    >>> Machine.load("h200-x4").num_devices
    4
    """

    version: int = MACHINE_VERSION
    name: str
    device: Literal["cpu", "cuda", "npu"]
    num_devices: int
    devices_per_node: int
    memory_bytes: int
    compute: Compute
    links: tuple[Link, ...]
    collectives: dict[str, Collective]
    dispatch_s: dict[str, float]
    host_async: bool
    cores_per_node: int | None = None
    overlap: tuple[Overlap, ...] = ()
    host_scale: float = 1.0
    interval: Interval
    provenance: dict[str, Provenance]

    def __post_init__(self) -> None:
        _Section.__post_init__(self)
        if self.version != MACHINE_VERSION:
            raise TwofoldError(f"version is {self.version}, this twofold reads {MACHINE_VERSION}")
        for name in ("num_devices", "devices_per_node", "cores_per_node"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise TwofoldError(f"{name} is {getattr(self, name)}; it is at least 1")
        if not self.host_async and self.cores_per_node is None:
            raise TwofoldError("host_async is false (hosts compute): cores_per_node must say how many cores they share")
        _check_keys("dispatch_s", self.dispatch_s, DISPATCH_CLASSES)
        _check_keys("collectives", self.collectives, COLLECTIVES)
        self._check_links()
        for entry in self.provenance:
            _check_known("provenance entry", entry.partition(".")[0], self.__struct_fields__)

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.num_devices, self.host_scale, self.compute.memory_Bps))

    def _check_links(self) -> None:
        sizes = [link.ranks for link in self.links]
        if not sizes or sizes[-1] < self.num_devices:
            raise TwofoldError(f"the link tiers join {sizes} ranks; the last must join all {self.num_devices} devices")
        for small, large in itertools.pairwise(sizes):
            if large <= small or large % small:
                raise TwofoldError(f"the link tiers join {sizes} ranks; each must be a multiple of the one before")

    @property
    def library(self) -> str:
        """The communication library that its collectives run on: gloo, nccl or hccl."""
        return {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[self.device]

    def tier(self, ranks: Sequence[int]) -> int:
        """The number of the fastest tier of links that joins all of `ranks`.

        Raises:
            TwofoldError: a rank that the machine does not have.
        """
        if max(ranks) >= self.num_devices:
            raise TwofoldError(
                f"rank {max(ranks)} takes part, but machine {self.name!r} has {self.num_devices} devices; "
                "plan for fewer devices or load a larger machine"
            )
        for number, link in enumerate(self.links):
            if len({rank // link.ranks for rank in ranks}) == 1:
                return number
        raise AssertionError("the last tier joins all devices")

    @classmethod
    def load(cls, name_or_path: str | os.PathLike[str]) -> Machine:
        """The machine of a shipped name such as "h200-x4", or of a file.

        Raises:
            TwofoldError: an unknown name (with suggestions), no such file, or what `from_json` refuses.
        """
        text = os.fspath(name_or_path)
        path = Path(text)
        if path.suffix != ".json" and not path.is_file():
            if len(path.parts) == 1 and text not in shipped_machines():
                close = difflib.get_close_matches(text.lower(), shipped_machines(), n=3, cutoff=0.4)
                hint = f"did you mean {' or '.join(close)}? " if close else ""
                raise TwofoldError(
                    f"machine {text!r} is not known; {hint}Shipped are {', '.join(shipped_machines())}; "
                    "or give the path of a machine file"
                )
            path = _FOLDER / f"{text}.json" if len(path.parts) == 1 else path
        try:
            content = path.read_bytes()
        except OSError as error:
            raise TwofoldError(f"cannot read the machine file {str(path)!r}: {error.strerror}") from None
        return cls.from_json(content, str(path))

    @classmethod
    def from_json(cls, text: bytes, source: str = "machine") -> Machine:
        """The machine of a file's bytes.

        Raises:
            TwofoldError: not JSON, truncated, an unknown or missing key (with its path), another version, a bad figure.
        """
        try:
            version = msgspec.json.decode(text, type=_Version).version
            if version != MACHINE_VERSION:
                raise TwofoldError(
                    f"{source}: machine version {version}, this twofold reads {MACHINE_VERSION}; calibrate again"
                )
            return msgspec.json.decode(text, type=cls)
        except msgspec.ValidationError as error:
            raise TwofoldError(f"{source}: {error}") from None
        except msgspec.DecodeError as error:
            raise TwofoldError(f"{source}: not a whole JSON file ({error}); calibrate again") from None

    def to_json(self) -> bytes:
        """The file form."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the machine file, whole or not at all."""
        return write_atomically(path, self.to_json() + b"\n")


def shipped_machines() -> tuple[str, ...]:
    """The names of the machines that come with twofold, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


class _Version(msgspec.Struct):
    version: int


def _check_figure(name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_figure(f"{name}.{key}", entry)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value) or value < 0:
            raise TwofoldError(f"{name} is {value}; it must be a finite figure of at least 0")
        if value == 0 and name.partition(".")[0].endswith(_POSITIVE):
            raise TwofoldError(f"{name} is 0; it must be above 0")


def _check_share(name: str, value: float) -> None:
    if value > 1:
        raise TwofoldError(f"{name} is {value}; it is a share, at most 1")


def _check_known(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
        raise TwofoldError(f"{what} {name!r} is not known{hint}")


def _check_keys(section: str, entries: dict[str, Any], known: Sequence[str]) -> None:
    for name in entries:
        _check_known(f"the entry of {section}", name, known)
    if missing := [name for name in known if name not in entries]:
        raise TwofoldError(f"{section} lacks {', '.join(missing)}")
