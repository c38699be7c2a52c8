"""The links of a machine during a simulation: shared links, slower links, failed links.

Every rank has a port into each tier, used by its transfers in both directions apart. Where a tier has an `uplink_Bps`,
every domain of the tier below shares that bandwidth out of it and as much into it: both transfers and collectives. On a
graph of links, all bytes claim the links of their routes. A communication claims of each link a share: the time for
which its bytes fill the link, over the time that it takes alone (`costmodels.price.links`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec
import numpy as np

from costmodels.machine.machine import Machine
from costmodels.price.group import mesh_group
from costmodels.price.instruction import Cost, price
from costmodels.price.links import Ints, collective_claims, pair_tiers, transfer_claims
from costmodels.price.sharing import claims_of
from plans.errors import TwofoldError
from plans.model.graph import itemsize
from plans.program import GroupProgram, Instruction, Kind, Program
from simulator.engine.exchange import Loads
from simulator.engine.fluid import Claims
from simulator.engine.link_change import LinkChange, graph_with, tiers_of

__all__ = ["Network", "Ports"]

_MOST_TIERS = 64


class Ports:
    """Every rank has one port, which its transfers share; nothing else is shared or changed."""

    def __init__(self) -> None:
        self._links: dict[Hashable, int] = {}
        self._shares: dict[tuple[int, int], int] = {}

    def work_ps(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> int:
        """The work of one meeting, as it was priced."""
        return work_ps

    def claims(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> Claims:
        """The claims of one meeting on shared links; it takes `work_ps` alone."""
        return self.ports(instruction, members) if instruction.kind in (Kind.SEND, Kind.RECV) else ()

    def ports(self, instruction: Instruction, members: tuple[int, ...], tier: int = 0) -> Claims:
        """The claims of one pair on the ports of its ends: the pairs of a transfer side by side cost a full port."""
        src, dst = members
        pieces = instruction.pieces
        size, most = pieces.pairs.get((src, dst), 0), max(pieces.most_sent, pieces.most_received)
        return ((("out", tier, src), Fraction(size, most)), (("in", tier, dst), Fraction(size, most))) if most else ()

    def works_ps(self, instruction: Instruction, members: Ints, work_ps: int) -> Ints:
        """The work of meetings whose members are the rows of `members`, as it was priced."""
        return np.full(len(members), work_ps, dtype=np.int64)

    def loads(self, instruction: Instruction, members: Ints, work_ps: Ints) -> Loads:
        """The claims of meetings whose members are the rows of `members`, and which take `work_ps` alone."""
        if instruction.kind not in (Kind.SEND, Kind.RECV):
            return Loads.none()
        return self.port_loads(instruction, work_ps, np.zeros(len(members), dtype=np.int64))

    def port_loads(self, instruction: Instruction, work_ps: Ints, tiers: Ints) -> Loads:
        """The claims of all pairs of a transfer on ports into tiers."""
        pairs, elements = instruction.pieces.by_pair
        (meeting,) = np.nonzero(work_ps)
        ends = zip(("out", "in"), pairs[meeting].T, strict=True)
        links = [_port_number(way, tiers[meeting], ranks) for way, ranks in ends]
        return Loads(np.tile(meeting, 2), np.concatenate(links), np.tile(elements[meeting], 2))

    def loads_of_claims(self, claims: Iterable[Claims]) -> Loads:
        """The claims of meetings, in columns."""
        rows = [
            (meeting, self.link_number(link), self._shares.setdefault(share.as_integer_ratio(), 1 + len(self._shares)))
            for meeting, own in enumerate(claims)
            for link, share in own
        ]
        return Loads(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def link_number(self, link: Hashable) -> int:
        """The number of a link in `Loads`; those of ports are below 0."""
        match link:
            case ("out" | "in") as way, int(tier), int(rank):
                return int(_port_number(way, np.array(tier), np.array(rank)))
        return self._links.setdefault(link, len(self._links))


def _port_number(way: str, tier: Ints, rank: Ints) -> Ints:
    found: Ints = -1 - (2 * rank + (way == "in")) * _MOST_TIERS - tier
    return found


class Network:
    """The links of a machine, with sharing and changes.

    Args:
        machine: whose links these are.
        program: that communicates over them.
        changes: see `LinkChange`.

    Raises:
        TwofoldError: a change of a tier or rank that is not there; communication of the program that no link is left
            for, named.
    """

    def __init__(self, machine: Machine, program: Program, changes: Sequence[LinkChange] = ()) -> None:
        self.machine = machine
        self._num_ranks = program.num_ranks
        self._changes = [(self._tiers(change), change) for change in changes]
        self._graph = graph_with(machine, changes) if machine.graph is not None and changes else None
        self._group_of: dict[int, GroupProgram] = {}
        self._routes: dict[tuple[int, ...], tuple[int, Machine | None]] = {}
        self._claims: dict[tuple[int, tuple[int, ...]], Claims] = {}
        self._works: dict[tuple[int, tuple[int, ...]], int] = {}
        self._machines: dict[tuple[tuple[int, int, float, float], ...], Machine] = {}
        self._ports = Ports()
        self._shares_ways = machine.shares_ways
        self._is_shared = machine.host_async or self._shares_ways
        if self._changes or self._shares_ways:
            for group in program.groups:
                for block, instruction in group.walk():
                    if instruction.kind not in (Kind.COMPUTE, Kind.WAIT):
                        self._group_of[id(instruction)] = group
                        if self._changes:
                            self._check(group, instruction, f"{block.label}/{instruction.name}")

    @property
    def is_needed(self) -> bool:
        """Whether anything is shared or changed at all."""
        return self._is_shared or bool(self._changes)

    def work_ps(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> int:
        """The work of one collective over changed links; `work_ps` if they are unchanged."""
        if not self._changes:
            return work_ps
        key = (id(instruction), members)
        if key not in self._works:
            changed = self._route(members)[1]
            self._works[key] = work_ps if changed is None else self._price(instruction, changed).work_ps
        return self._works[key]

    def claims(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> Claims:
        """The claims of one meeting on shared links; it takes `work_ps` alone."""
        if not self._is_shared or work_ps == 0:
            return ()
        key = (id(instruction), members)
        if key not in self._claims:
            tier = self._route(members)[0] if self._changes else self.machine.tier(members)
            if instruction.kind in (Kind.SEND, Kind.RECV):
                self._claims[key] = self._transfer(instruction, members, work_ps, tier)
            else:
                self._claims[key] = self._collective(instruction, members, work_ps)
        return self._claims[key]

    # ------------------------------------------------------------------------------ what is shared

    def loads(self, instruction: Instruction, members: Ints, work_ps: Ints) -> Loads:
        """The claims of meetings whose members are the rows of `members`, and which take `work_ps` alone."""
        if not self._is_shared:
            return Loads.none()
        is_transfer = instruction.kind in (Kind.SEND, Kind.RECV)
        if not self._changes and not self._shares_ways:  # then there are ports only
            if not is_transfer:
                return Loads.none()
            return self._ports.port_loads(instruction, work_ps, pair_tiers(self.machine, *members.T))
        rows = zip(map(tuple, members.tolist()), work_ps.tolist(), strict=True)
        return self._ports.loads_of_claims(self.claims(instruction, own, alone_ps) for own, alone_ps in rows)

    def works_ps(self, instruction: Instruction, members: Ints, work_ps: int) -> Ints:
        """`work_ps` of meetings whose members are the rows of `members`."""
        if not self._changes:
            return self._ports.works_ps(instruction, members, work_ps)
        return np.array([self.work_ps(instruction, tuple(each), work_ps) for each in members.tolist()], dtype=np.int64)

    def link_number(self, link: Hashable) -> int:
        """The index of a link in `Loads`."""
        return self._ports.link_number(link)

    def _transfer(self, instruction: Instruction, members: tuple[int, ...], work_ps: int, tier: int) -> Claims:
        pair = members[0], members[1]
        size = instruction.pieces.pairs.get(pair, 0) * itemsize(instruction.dtype)
        has_ports = self.machine.host_async and self.machine.graph is None
        found = list(self._ports.ports(instruction, members, tier)) if has_ports else []
        needed = transfer_claims(self._machine_of(members), pair, size)
        return (*found, *claims_of(needed, work_ps))

    def _collective(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> Claims:
        if not self._shares_ways:
            return ()
        machine = self._machine_of(members)
        mesh = instruction.mesh or self._group_of[id(instruction)].mesh
        group = mesh_group(machine, mesh, instruction.axes)
        size = itemsize(instruction.dtype)
        return claims_of(
            collective_claims(machine, instruction.call, members, instruction.message_bytes, size, group), work_ps
        )  # fmt: skip

    def _machine_of(self, members: tuple[int, ...]) -> Machine:
        """The machine with the links that `members` use after the changes."""
        changed = self._route(members)[1] if self._changes else None
        return self.machine if changed is None else changed

    # ----------------------------------------------------------------------------- what is changed

    def _tiers(self, change: LinkChange) -> tuple[int, ...]:
        if absent := [rank for rank in change.ranks if not 0 <= rank < self._num_ranks]:
            raise TwofoldError(
                f"the link change '{change}' names rank {absent[0]}; the program's ranks are 0 to {self._num_ranks - 1}"
            )
        if self.machine.graph is not None:
            return tuple(range(len(self.machine.links)))
        return tiers_of(self.machine, change)

    def _concerns(self, change: LinkChange, tier: int, members: Sequence[int]) -> bool:
        """Whether `members` use the changed links of `tier`: some two of them meet there and in no faster tier."""
        size, below = self.machine.links[tier].ranks, self.machine.links[tier - 1].ranks if tier else 1
        touched = [rank for rank in members if not change.ranks or rank in change.ranks]
        if change.pair:
            a, b = change.ranks
            return len(touched) == 2 and a // size == b // size and a // below != b // below
        return any(
            rank // size == other // size and rank // below != other // below for rank in touched for other in members
        )

    def _route(self, members: tuple[int, ...]) -> tuple[int, Machine | None]:
        """The slowest tier that `members` use, and the machine to price them on; None if nothing is changed.

        Raises:
            TwofoldError: a failed tier with none beyond.
        """
        if self._graph is not None:
            return self.machine.tier(members), self._graph
        if members not in self._routes:
            links = self.machine.links
            slowest = self.machine.tier(members)
            figures: dict[int, tuple[int, float, float]] = {}
            route = slowest
            for tier in range(slowest + 1):
                taken = tier
                concerned = [
                    (tiers, change) for tiers, change in self._changes if self._concerns(change, tier, members)
                ]
                while failed := [change for tiers, change in concerned if change.failed and taken in tiers]:
                    taken += 1
                    if taken == len(links):
                        raise _Unreachable(failed[0], links[-1].name)
                bandwidth = latency = 1.0
                for tiers, change in concerned:
                    if taken in tiers and not change.failed:
                        bandwidth, latency = bandwidth * change.bandwidth, latency * change.latency
                if (taken, bandwidth, latency) != (tier, 1.0, 1.0):
                    figures[tier] = (taken, bandwidth, latency)
                route = max(route, taken)
            self._routes[members] = (route, self._changed(figures) if figures else None)
        return self._routes[members]

    def _changed(self, figures: Mapping[int, tuple[int, float, float]]) -> Machine:
        """The machine with other figures for some tiers: tier -> (tier whose links are used, factors)."""
        key = tuple((tier, *rest) for tier, rest in figures.items())
        if key not in self._machines:
            links = list(self.machine.links)
            for tier, (taken, bandwidth, latency) in figures.items():
                instead = self.machine.links[taken].scaled(bandwidth, latency)
                instead = msgspec.structs.replace(instead, ranks=links[tier].ranks)
                if tier == 0:
                    instead = msgspec.structs.replace(instead, uplink_Bps=None, ports=None, rails=False)
                links[tier] = instead
            # a separate name: prices are kept by machine
            name = f"{self.machine.name}/links{len(self._machines)}"
            self._machines[key] = msgspec.structs.replace(self.machine, links=tuple(links), name=name)
        return self._machines[key]

    def _price(self, instruction: Instruction, machine: Machine) -> Cost:
        return price(instruction, self._group_of[id(instruction)], machine, self._num_ranks)

    def _check(self, group: GroupProgram, instruction: Instruction, id_: str) -> None:
        if instruction.kind is Kind.COLLECTIVE:
            meetings = {group.members(instruction, rank) for rank in group.ranks}
        else:
            meetings = {*instruction.pieces.pairs}
        for members in sorted(meetings):
            try:
                self._route(members)
            except _Unreachable as found:
                change, name = found.args
                raise TwofoldError(
                    f"{id_!r} needs ranks {', '.join(map(str, members))} to reach each other, but with '{change}' no "
                    f"link is left: {name!r} is the last tier of machine {self.machine.name!r}"
                ) from None


class _Unreachable(Exception):
    """A failed change and the name of the last tier."""
