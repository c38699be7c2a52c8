"""Sections of a machine file: communication, overlap, interval, and where figures come from.

Every figure is SI with the unit in its name; a section refuses figures that are negative, not finite, or 0 where they
divide. The rates of a device are in `costmodels.price.compute`, links in `costmodels.machine.links`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec

from plans.errors import TwofoldError

__all__ = [
    "COLLECTIVES",
    "MACHINE_VERSION",
    "Collective",
    "Interval",
    "Overlap",
    "Protocol",
    "Provenance",
    "Replay",
    "Section",
    "check_known",
]

MACHINE_VERSION = 2
"""Provenance of machine and device files."""

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "transfer")
"""Kinds of communication; the flat variants of the optimizer are priced as the plain ones."""

_POSITIVE = ("_Bps", "_per_s", "sharpness", "sustained_clock", "_rate", "_efficiency", "_fraction", "_scale", "_bytes")


_PLAUSIBLE = {
    "_per_s": (1.0, 1e30), "_Bps": (1.0, 1e30), "_s": (0.0, 1e5), "_bytes": (0.0, 1e16), "host_scale": (1e-3, 1e3),
    "spreads": (0.0, 10.0), "_pJ": (0.0, 1e9),
}  # fmt: skip
"""Ending of a figure's name -> smallest and largest accepted value, far beyond real hardware; 0 is accepted too."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A part of a machine file; refuses figures that are negative, not finite, or 0 where they divide."""

    def __post_init__(self) -> None:
        for name, least, most, divides in _limits_of(type(self)):
            value = getattr(self, name)
            if value is None or (type(value) is float and (least <= value <= most if value else not divides)):
                continue  # a fit makes hundreds of thousands of sections
            check_figure(name, value)


class Replay(Section, frozen=True, kw_only=True):
    """The remaining host time of a replayed step (`costmodels.price.replay`).

    Args:
        launch_s: of a step: its launch, and the device's pause between two replays.
        node_s: of a node of the recorded graph: how fast the device's front end issues them.
    """

    launch_s: float
    node_s: float


class Protocol(Section, frozen=True, kw_only=True):
    """A protocol of a communication library; for each message the library chooses the fastest.

    Args:
        name: such as "LL", "LL128" or "Simple" (NCCL).
        algorithm: see `costmodels.price.flows.ALGORITHMS`.
        start_s: fixed part, next to that of the collective.
        hop_s: of every dependent step inside a node, next to the link's latency.
        cross_s: of every dependent step between nodes, next to the link's latency.
        peer_s: of every message to another node, where one rank sends several of them.
        member_chunk_s: next to `Collective.chunk_s`, times the members: a switch adds one piece for each of them.
        share: of the bandwidth that the collective reaches with the best protocol.
        far_share: its share where the group spans nodes; None: the same, and of a switch: not used there.
        least_members: groups with fewer members, of a switch with fewer in a node, do not use it.
    """

    name: str
    algorithm: Literal["ring", "tree", "switch", "pat", "hierarchical"] = "ring"
    start_s: float = 0.0
    hop_s: float = 0.0
    cross_s: float = 0.0
    peer_s: float = 0.0
    member_chunk_s: float = 0.0
    share: float = 1.0
    far_share: float | None = None
    least_members: int = 2

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.share == 0 or self.far_share == 0:
            raise TwofoldError(f"protocol {self.name!r} reaches a share of 0 of the bandwidth; it must be above 0")


class Collective(Section, frozen=True, kw_only=True):
    """The cost of one kind of communication, in addition to the figures of the links.

    The algorithm of a protocol p takes dependent steps and puts bytes on every link (`costmodels.price.flows`). On its
    links it takes, with the protocol that is soonest over,

        start_s + p.start_s + steps (hop_s + p.hop_s or p.cross_s + latency)
        + c + 2 sqrt(chunk_s c) + size / copy_Bps,  c = the largest bytes / (bandwidth p.share);

    the root is what filling and draining a pipeline costs whose message is cut into the best number of chunks (chunk_s
    stands for chunk_s + members p.member_chunk_s + steps between nodes x far_chunk_s). Of a port's bandwidth a group of
    n reaches `Link.reached_fraction` or, where that is not given, link_fraction (1 - gap / n).
    Where the processor carries it (gloo), every member spends cpu_start_s + messages x cpu_message_s + moved / cpu_Bps.

    Args:
        start_s: fixed part.
        hop_s: of every dependent step, next to the link's latency and the protocol's.
        link_fraction: share of the link's bandwidth that a large group reaches.
        gap: small groups fill the links less, by gap / n.
        chunk_s: latency of one chunk of a message that goes through in chunks.
        far_start_s: fixed part of groups that span nodes, next to `start_s`.
        far_chunk_s: latency of one chunk for every step between nodes, next to `chunk_s`.
        copy_Bps: passing the full message through the member's memory; None: no such part.
        protocols: none: one without figures of its own.
        cpu_start_s: processor time of a member, fixed part.
        cpu_message_s: processor time of a member for every message.
        cpu_Bps: bytes that a member's processor moves per second; None: not limited by it.
    """

    start_s: float = 0.0
    hop_s: float = 0.0
    link_fraction: float = 1.0
    gap: float = 0.0
    chunk_s: float = 0.0
    far_start_s: float = 0.0
    far_chunk_s: float = 0.0
    copy_Bps: float | None = None
    protocols: tuple[Protocol, ...] = ()
    cpu_start_s: float = 0.0
    cpu_message_s: float = 0.0
    cpu_Bps: float | None = None

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.gap >= 2:
            raise TwofoldError(f"gap is {self.gap}; it must be below 2, or two members would have no bandwidth")


class Overlap(Section, frozen=True, kw_only=True):
    """The rates (1 = alone) at which a kind of compute and a collective proceed while both run.

    A collective needs some of the cores that a kernel holds until it ends: a message waits for `hold` times the length
    of a kernel before it moves, and meanwhile the compute continues undisturbed. So the rates depend on how long the
    two take alone.

    Args:
        compute: kind of compute.
        collective: kind of communication.
        compute_rate: of compute, where a kernel and a message take equally long.
        comm_rate: of the communication, likewise.
        hold: see above.
    """

    compute: Literal["matrix", "memory", "attention"]
    collective: str
    compute_rate: float
    comm_rate: float
    hold: float = 0.0

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        check_known("collective of an overlap", self.collective, COLLECTIVES)
        check_share("compute_rate", self.compute_rate)
        check_share("comm_rate", self.comm_rate)
        if self.hold * self.comm_rate >= 1:
            raise TwofoldError(
                f"hold is {self.hold}; it must be below 1 / comm_rate, or no message would make progress"
            )

    def rates(self, kernel_s: float, message_s: float) -> tuple[float, float]:
        """The rates of compute by kernels of `kernel_s` during messages of `message_s`, both alone.

        >>> pair = Overlap(compute="matrix", collective="all_reduce", compute_rate=0.7, comm_rate=0.5, hold=0.8)
        >>> [tuple(round(rate, 2) for rate in pair.rates(kernel_s, 1e-4)) for kernel_s in (1e-4, 1e-2)]
        [(0.7, 0.5), (0.99, 0.01)]
        """
        if not self.hold or message_s <= 0:
            return self.compute_rate, self.comm_rate
        moving = 1 - self.hold * self.comm_rate  # share of the time, where both take equally long
        alone = self.comm_rate / moving
        share = message_s / (message_s + self.hold * alone * kernel_s)
        return 1 - (1 - self.compute_rate) * share / moving, alone * share


class Interval(Section, frozen=True, kw_only=True):
    """The 90 % interval of a step time, as factors of the prediction."""

    low: float
    high: float

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if not 0 < self.low <= 1 <= self.high:
            raise TwofoldError(f"the interval {self.low} to {self.high} must be factors with 0 < low <= 1 <= high")


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The status, source and date of figures."""

    status: Literal["measured", "interpolated", "assumed", "cited"]
    source: str
    date: str = ""


def check_figure(name: str, value: Any) -> None:
    """Refuse a negative or infinite figure, and 0 where it divides; looks into dicts."""
    if _is_believed(value, *_limits(name.partition(".")[0])):
        return
    if isinstance(value, dict):
        for key, entry in value.items():
            check_figure(f"{name}.{key}", entry)
        return
    if not math.isfinite(value) or value < 0:
        raise TwofoldError(f"{name} is {value}; it must be a finite number of at least 0")
    if value == 0:
        raise TwofoldError(f"{name} is 0; it must be above 0")
    least, most, _ = _limits(name.partition(".")[0])
    raise TwofoldError(f"{name} is {value:g}; it must be between {least:g} and {most:g}")


def _is_believed(value: Any, least: float, most: float, divides: bool) -> bool:
    """A fit makes hundreds of thousands of sections of some hundred figures: nothing is called for one in a dict."""
    if isinstance(value, dict):
        for entry in value.values():
            if type(entry) is float and entry != 0:
                if not least <= entry <= most:
                    return False
            elif not _is_believed(entry, least, most, divides):
                return False
        return True
    if isinstance(value, int | float) and not isinstance(value, bool):
        return not divides if value == 0 else least <= value <= most
    return True


@lru_cache(maxsize=64)
def _limits_of(section: type[Section]) -> tuple[tuple[str, float, float, bool], ...]:
    """The figures of a section with the limits of each."""
    return tuple((name, *_limits(name)) for name in section.__struct_fields__)


@lru_cache(maxsize=256)
def _limits(stem: str) -> tuple[float, float, bool]:
    """Smallest and largest accepted value of a figure (0 is accepted too), and whether it is a divisor."""
    least, most = next((each for ending, each in _PLAUSIBLE.items() if stem.endswith(ending)), (0.0, 1e30))
    return least, most, stem.endswith(_POSITIVE)


def check_share(name: str, value: float) -> None:
    """Refuse a share above 1."""
    if value > 1:
        raise TwofoldError(f"{name} must be a share, at most 1, not {value}")


def check_known(what: str, name: str, known: Sequence[str]) -> None:
    """Refuse a name that is not in `known`, with a suggestion."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
        raise TwofoldError(f"{what} {name!r} is not known{hint}")


def check_keys(section: str, entries: dict[str, Any], known: Sequence[str]) -> None:
    """Refuse a table that has other keys than `known`, or lacks one."""
    for name in entries:
        check_known(f"the entry of {section}", name, known)
    if missing := [name for name in known if name not in entries]:
        raise TwofoldError(f"{section} lacks {', '.join(missing)}")
