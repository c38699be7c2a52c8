"""The links of a machine: the short form in tiers, and the long form as a graph of devices, switches and wires.

In the short form, ranks with the same `rank // ranks` share a domain of a tier, and a domain consists of complete
domains of the previous tier. 100,000 ranks are priced as fast as 8. The long form lists the two ends of every wire;
routes are shortest paths, and bytes are split evenly over equally short ones (equal-cost multipath, RFC 2992).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Literal

import msgspec

from costmodels.machine.sections import Section
from plans.errors import TwofoldError

__all__ = ["Graph", "Link", "Wire", "check_tiers"]


class Link(Section, frozen=True, kw_only=True):
    """A tier of links: ranks with the same `rank // ranks` reach each other through it.

    Args:
        name: such as "NVLink".
        ranks: size of the domain; a multiple of the size of the tier below.
        latency_s: of one hop.
        bandwidth_Bps: of one rank in one direction, to all peers together.
        peer_Bps: in a full mesh of links that of one rank to one peer, so that a rank with p peers reaches p times as
            much, up to bandwidth_Bps; None behind a switch, where one peer may have it all.
        uplink_Bps: of one domain of the tier below into this tier, in one direction, shared by all its ranks (a node's
            or a rack's way out); None where every rank has its own. Above a tier of rails: of one rail.
        reached_fraction: share of its bandwidth that communication reaches; None: as `Collective` says.
        ports: "own": ranks enter this tier by separate ports (network cards beside NVLink); "below": by those of
            the tier below, which carry these bytes too (a spine above leaves, a super-node above nodes). None: the
            second tier has its own, a further one uses those below.
        rails: ranks of one number within their domain of the first tier share a switch (a rail); what goes to another
            rail takes the first tier's links before it (NCCL's PXN).
        reduces: its switches add what passes (SHARP), so that an all-reduce sends every byte once up and once down.
        half_duplex: both directions share the bandwidth of a port and of a way out (a bus, a radio link).
    """

    name: str
    ranks: int
    latency_s: float
    bandwidth_Bps: float
    peer_Bps: float | None = None
    uplink_Bps: float | None = None
    reached_fraction: float | None = None
    ports: Literal["own", "below"] | None = None
    rails: bool = False
    reduces: bool = False
    half_duplex: bool = False

    def scaled(self, bandwidth: float, latency: float) -> Link:
        """The same link with its bandwidth, ways out included, and its latency multiplied by these factors."""
        return msgspec.structs.replace(
            self, latency_s=self.latency_s * latency, bandwidth_Bps=self.bandwidth_Bps * bandwidth,
            peer_Bps=None if self.peer_Bps is None else self.peer_Bps * bandwidth,
            uplink_Bps=None if self.uplink_Bps is None else self.uplink_Bps * bandwidth,
        )  # fmt: skip

    def reach_Bps(self, num_peers: int) -> float:
        """The bandwidth of one rank that communicates with `num_peers` at once."""
        return self.bandwidth_Bps if self.peer_Bps is None else min(self.bandwidth_Bps, num_peers * self.peer_Bps)

    def port_Bps(self, num_peers: int, otherwise: float) -> float:
        """The bandwidth that communication reaches on a rank's port; `otherwise` is the share if the tier has none."""
        reached = otherwise if self.reached_fraction is None else self.reached_fraction
        return self.reach_Bps(num_peers) * reached / (2 if self.half_duplex else 1)

    @property
    def way_out_Bps(self) -> float | None:
        """The bandwidth that communication reaches on the uplink of a domain of the tier below; None without
        sharing."""
        if self.uplink_Bps is None:
            return None
        return self.uplink_Bps * (self.reached_fraction or 1.0) / (2 if self.half_duplex else 1)

    def way_out(self, rank: int, first: Link) -> tuple[int, int]:
        """The uplink of this tier that the bytes of a rank use: (domain, rail)."""
        return rank // self.ranks, rank % first.ranks if self.rails else 0

    def ways_used(self, inside: int) -> int:
        """Ways out of a domain of this tier that a group uses with `inside` members in a domain of the first."""
        return inside if self.rails else 1

    def reduced_bytes(self, tree_bytes: float, size_bytes: float) -> float:
        """The bytes that leave a domain below in an all-reduce: by a tree over domains, or added on its way."""
        return size_bytes if self.reduces else tree_bytes

    def is_entered_from_below(self, tier: int) -> bool:
        """Whether ranks enter this tier, number `tier`, through the ports of the tier below."""
        return (self.ports or ("below" if tier > 1 else "own")) == "below"

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.ranks < 1:
            raise TwofoldError(f"link tier {self.name!r} joins {self.ranks} ranks; it must join at least 1")
        if self.reached_fraction is not None and self.reached_fraction > 1:
            raise TwofoldError(
                f"link tier {self.name!r}: reached_fraction must be at most 1, not {self.reached_fraction}"
            )


class Wire(Section, frozen=True, kw_only=True):
    """One link of a graph, between two of its devices or switches, the same in both directions.

    Args:
        ends: a device is its rank, such as "3"; a switch is its name.
        bandwidth_Bps: in one direction.
        latency_s: of passing it.
        length: its cost for a route; routes are the shortest by their sum.
        name: name of its kind, such as "NVLink"; its name in changes of links.
    """

    ends: tuple[str, str]
    bandwidth_Bps: float
    latency_s: float = 0.0
    length: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.ends[0] == self.ends[1]:
            raise TwofoldError(f"a wire joins {self.ends[0]!r} to itself; join it to another device or switch")
        if self.length < 1:
            raise TwofoldError(
                f"the wire {' - '.join(self.ends)} has length {self.length}; with less than 1 routes could go in a "
                "circle"
            )


class Graph(Section, frozen=True, kw_only=True):
    """The long form: which device or switch every wire joins.

    Args:
        switches: names of what forwards and computes nothing.
        wires: see `Wire`; two of the same ends are two links.
        forwarding: whether devices forward traffic of others, as in a torus; else only switches do.
        torus: sizes of a torus of devices, the last dimension the fastest: rings then run along its dimensions, in both
            directions of all of them at once. () elsewhere.

    Raises:
        TwofoldError: an end that is neither a device nor a switch, a switch with a device's name, a torus without its
            wires, devices that no route joins.
    """

    switches: tuple[str, ...] = ()
    wires: tuple[Wire, ...]
    forwarding: bool = False
    torus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if twice := [name for name, number in Counter(self.switches).items() if number > 1]:
            raise TwofoldError(f"the switch {twice[0]!r} is there twice; give every switch a name of its own")
        if numeric := [name for name in self.switches if name.isdecimal()]:
            raise TwofoldError(f"the switch {numeric[0]!r} has a number for a name, as devices have; name it otherwise")

    def check(self, num_devices: int) -> None:
        """Refuse ends that are not there, and devices that cannot reach each other."""
        devices = {str(rank) for rank in range(num_devices)}
        known = devices | set(self.switches)
        for wire in self.wires:
            for end in wire.ends:
                if end not in known:
                    raise TwofoldError(
                        f"the wire {' - '.join(wire.ends)} ends at {end!r}, which is neither a switch nor one of the "
                        f"devices 0 to {num_devices - 1}"
                    )
        neighbours: dict[str, set[str]] = {name: set() for name in known}
        for wire in self.wires:
            a, b = wire.ends
            neighbours[a].add(b)
            neighbours[b].add(a)
        seen, waiting = {"0"}, ["0"]
        while waiting:
            at = waiting.pop()
            if at != "0" and at in devices and not self.forwarding:
                continue
            for other in neighbours[at] - seen:
                seen.add(other)
                waiting.append(other)
        if missing := sorted(map(int, devices - seen)):
            raise TwofoldError(
                f"no route leads from device 0 to device {missing[0]}"
                f"{f' and {len(missing) - 1} others' if len(missing) > 1 else ''}; add wires between them"
                + ("" if self.forwarding else ", or say that devices forward (forwarding)")
            )
        if self.torus:
            self._check_torus(num_devices)

    def _check_torus(self, num_devices: int) -> None:
        joined = {frozenset(wire.ends) for wire in self.wires}
        size = 1
        for number in self.torus:
            size *= number
        if size != num_devices or min(self.torus) < 1:
            raise TwofoldError(f"a torus of {' x '.join(map(str, self.torus))} has {size} devices, not {num_devices}")
        stride = num_devices
        for number in self.torus:
            stride //= number
            for rank in range(num_devices if number > 1 else 0):
                other = rank + stride * ((rank // stride + 1) % number - rank // stride % number)
                if frozenset((str(rank), str(other))) not in joined:
                    raise TwofoldError(
                        f"the torus of {' x '.join(map(str, self.torus))} has no wire {rank} - {other}; add it"
                    )

    def scaled(self, bandwidth: float, latency: float) -> Graph:
        """The graph with the figures of all its wires multiplied."""
        wires = tuple(
            msgspec.structs.replace(
                wire, bandwidth_Bps=wire.bandwidth_Bps * bandwidth, latency_s=wire.latency_s * latency
            )
            for wire in self.wires
        )  # fmt: skip
        return msgspec.structs.replace(self, wires=wires)

    def summary(self, num_devices: int, devices_per_node: int) -> tuple[Link, ...]:
        """A rough summary of the graph in tiers, for code that only needs to know which ranks are near: nodes, and all
        of it.

        Bandwidths are those of a device's wires and the narrowest way out of a node; prices do not use them.
        """
        out_Bps: Counter[str] = Counter()
        node_Bps: Counter[int] = Counter()
        latency_s = min((wire.latency_s for wire in self.wires), default=0.0)
        node_of: dict[str, set[int]] = {}
        for wire in self.wires:
            for end, other in (wire.ends, wire.ends[::-1]):
                if end.isdecimal():
                    out_Bps[end] += wire.bandwidth_Bps  # type: ignore[assignment]
                    node_of.setdefault(other, set()).add(int(end) // devices_per_node)
        port_Bps = min(out_Bps.values(), default=1.0)
        whole = Link(name="graph", ranks=num_devices, latency_s=latency_s, bandwidth_Bps=port_Bps)
        if not 1 < devices_per_node < num_devices or num_devices % devices_per_node:
            return (whole,)
        for wire in self.wires:
            for end, other in (wire.ends, wire.ends[::-1]):
                if end.isdecimal():
                    node = int(end) // devices_per_node
                    away = int(other) // devices_per_node != node if other.isdecimal() else node_of[other] != {node}
                    if away:
                        node_Bps[node] += wire.bandwidth_Bps  # type: ignore[assignment]
        far_Bps = min(node_Bps.values(), default=port_Bps * devices_per_node) / devices_per_node
        inside = Link(name="node", ranks=devices_per_node, latency_s=latency_s, bandwidth_Bps=port_Bps)
        return inside, Link(name="graph", ranks=num_devices, latency_s=latency_s, bandwidth_Bps=min(port_Bps, far_Bps))


def check_tiers(links: tuple[Link, ...], num_devices: int) -> None:
    """Refuse tiers that do not nest, do not join all devices, or have fields that the first tier cannot have."""
    sizes = [link.ranks for link in links]
    if not sizes or sizes[-1] < num_devices:
        raise TwofoldError(f"the link tiers join {sizes} ranks; the last must join all {num_devices} devices")
    for small, large in pairwise(sizes):
        if large <= small or large % small:
            raise TwofoldError(f"the link tiers join {sizes} ranks; each must be a multiple of the one before")
    for link in links[:-1]:
        if num_devices % link.ranks and num_devices > link.ranks:
            raise TwofoldError(
                f"link tier {link.name!r} joins {link.ranks} ranks, which do not divide num_devices = {num_devices}; "
                f"give a multiple of {link.ranks} devices, or a tier of another size"
            )
    first = links[0]
    if first.uplink_Bps is not None:
        raise TwofoldError(f"link tier {first.name!r} is the first: no tier below has an uplink into it")
    if first.rails or first.ports == "below":
        raise TwofoldError(
            f"link tier {first.name!r} is the first: rails and ports of the tier below need one below it"
        )
