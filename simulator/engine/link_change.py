"""A change of links, as a value and as text on a command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from costmodels.machine.machine import Machine
from plans.errors import TwofoldError

__all__ = ["LinkChange", "graph_with", "machine_with", "read_ranks", "tiers_of"]

_MOST_RANKS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """Links that are slower than in the machine file, or that have failed.

    Args:
        tier: name or number of the tier, or on a graph of links the name of its wires; None: all.
        ranks: ranks whose ports change: all communication of these ranks over the tier, including whole collectives,
            which are as slow as their slowest member. With `pair`, only communication between the two ranks. (): all
            ranks.
        pair: whether `ranks` are the two ends of one link rather than ports.
        bandwidth: factor on the bandwidth.
        latency: factor on the latency.
        failed: communication uses the next slower tier, if there is one.

    Raises:
        TwofoldError: factors that are not above 0 and finite, a pair that is not two ranks, no change at all.

    >>> LinkChange.parse("NVLink:0-3:bandwidth=0.5")
    LinkChange(tier='NVLink', ranks=(0, 1, 2, 3), pair=False, bandwidth=0.5, latency=1.0, failed=False)
    >>> LinkChange.parse("0:2~5:failed").pair
    True
    """

    tier: str | int | None = None
    ranks: tuple[int, ...] = ()
    pair: bool = False
    bandwidth: float = 1.0
    latency: float = 1.0
    failed: bool = False

    def __post_init__(self) -> None:
        for name in ("bandwidth", "latency"):
            if not 0 < getattr(self, name) < float("inf"):
                raise TwofoldError(f"the {name} factor of a link change must be above 0, not {getattr(self, name)}")
        if self.pair and len(set(self.ranks)) != 2:
            raise TwofoldError(f"a link between a pair of ranks needs two ranks, not {self.ranks}")
        if not self.failed and self.bandwidth == self.latency == 1.0:
            raise TwofoldError("a link change changes nothing; give a bandwidth or latency factor, or failed")

    @classmethod
    def parse(cls, text: str) -> LinkChange:
        """Parse a change of the form "TIER[:RANKS]:CHANGES".

        TIER is a name, a number or "*"; RANKS are "3", "0-3", "0,4" or "2~5" for the link between two ranks; CHANGES
        are "failed", "bandwidth=0.5", "latency=2", or several joined by commas.

        Raises:
            TwofoldError: text of another form.
        """
        tier, _, rest = text.partition(":")
        ranks, _, changes = rest.rpartition(":")
        settings: dict[str, float] = {}
        failed = False
        try:
            for change in changes.split(","):
                name, _, factor = change.strip().partition("=")
                if name == "failed" and not factor:
                    failed = True
                elif name in ("bandwidth", "latency"):
                    settings[name] = float(factor)
                else:
                    raise ValueError(name)
            numbers = read_ranks(ranks) if ranks else ()
        except ValueError:
            raise TwofoldError(
                f"cannot read the link change {text!r}; write it as 'NVLink:bandwidth=0.5', 'IB:0-7:latency=2,"
                "bandwidth=0.8' or '0:2~5:failed'"
            ) from None
        where: str | int | None = None if tier in ("", "*") else int(tier) if tier.isdecimal() else tier
        return cls(tier=where, ranks=numbers, pair="~" in ranks, failed=failed, **settings)

    def __str__(self) -> str:
        ranks = ("~" if self.pair else ",").join(map(str, self.ranks))
        changes = [f"{name}={getattr(self, name):g}" for name in ("bandwidth", "latency") if getattr(self, name) != 1.0]
        changes += ["failed"] if self.failed else []
        tier = "*" if self.tier is None else str(self.tier)
        return ":".join(part for part in (tier, ranks, ",".join(changes)) if part)


def graph_with(machine: Machine, changes: Sequence[LinkChange]) -> Machine:
    """A machine whose links are a graph, with changed wires: those with this name that end at one of the changed ranks.

    Raises:
        TwofoldError: a name that no wire has, devices that no route joins any more.
    """
    assert machine.graph is not None
    names = {wire.name for wire in machine.graph.wires}
    for change in changes:
        if change.tier is not None and change.tier not in names:
            raise TwofoldError(
                f"cannot apply '{change}': machine {machine.name!r} has no wires {change.tier!r}; its wires are "
                f"{', '.join(sorted(names))}"
            )
    wires = []
    for wire in machine.graph.wires:
        bandwidth, latency, failed = 1.0, 1.0, False
        for change in changes:
            ends = {str(rank) for rank in change.ranks}
            at_ends = ends == set(wire.ends) if change.pair else not ends or bool(ends & set(wire.ends))
            if change.tier in (None, wire.name) and at_ends:
                bandwidth, latency = bandwidth * change.bandwidth, latency * change.latency
                failed = failed or change.failed
        if not failed:
            wires.append(
                msgspec.structs.replace(
                    wire, bandwidth_Bps=wire.bandwidth_Bps * bandwidth, latency_s=wire.latency_s * latency
                )
            )
    try:
        torus = machine.graph.torus if len(wires) == len(machine.graph.wires) else ()
        graph = msgspec.structs.replace(machine.graph, wires=tuple(wires), torus=torus)
        return msgspec.structs.replace(machine, graph=graph, name=f"{machine.name}/changed")
    except TwofoldError as error:
        raise TwofoldError(f"with '{', '.join(map(str, changes))}' failed: {error}") from None


def machine_with(machine: Machine, changes: Sequence[LinkChange]) -> Machine:
    """A machine with changes to complete tiers, or to all wires of a name; no link fails.

    Raises:
        TwofoldError: a change of single ranks or a failed link, which only a program shows; an unknown name.

    >>> slow = machine_with(Machine.load("h100-sxm-x64"), [LinkChange.parse("NVLink:bandwidth=0.5")])
    >>> slow.links[0].bandwidth_Bps / Machine.load("h100-sxm-x64").links[0].bandwidth_Bps
    0.5
    """
    if partial := [change for change in changes if change.ranks or change.failed]:
        raise TwofoldError(f"'{partial[0]}' changes single links: simulate a plan instead, with `twofold whatif`")
    if machine.graph is not None:
        return graph_with(machine, changes) if changes else machine
    links = list(machine.links)
    for change in changes:
        for number in tiers_of(machine, change):
            links[number] = links[number].scaled(change.bandwidth, change.latency)
    return msgspec.structs.replace(machine, links=tuple(links))


def tiers_of(machine: Machine, change: LinkChange) -> tuple[int, ...]:
    """Numbers of the tiers of links that a change names.

    Raises:
        TwofoldError: a name or number that no tier has.
    """
    if change.tier is None:
        return tuple(range(len(machine.links)))
    found = tuple(number for number, link in enumerate(machine.links) if change.tier in (number, link.name))
    if not found:
        known = ", ".join(f"{link.name} ({number})" for number, link in enumerate(machine.links))
        raise TwofoldError(
            f"cannot apply '{change}': machine {machine.name!r} has no tier {change.tier!r}; its tiers are {known}"
        )
    return found


def read_ranks(text: str) -> tuple[int, ...]:
    """The ranks of "3", "0-3", "0,4" or "2~5".

    Raises:
        ValueError: text of another form, a run that goes backwards.
    """
    result: list[int] = []
    for part in text.replace("~", ",").split(","):
        low, _, high = part.partition("-")
        first, last = int(low), int(high or low)
        if not 0 <= first <= last < _MOST_RANKS:  # an empty run would stand for all ranks
            raise ValueError(part)
        result += range(first, last + 1)
    return tuple(dict.fromkeys(result))
