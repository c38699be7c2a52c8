"""The price of a communication on its links, in tiers or as a graph, and its claims on each shared link.

Two figures: `alone_ps`, and `together_ps` while all siblings of the group communicate too, when each gets a fair share
of the fullest link. A simulation that knows concurrent communication uses the first, with the claims of
`collective_claims` and `transfer_claims`; forecasts and folded simulations take the second. Both agree where exactly
the siblings run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from costmodels.machine.machine import Machine
from costmodels.machine.sections import Collective, Protocol
from costmodels.price.communication import Carried, carried, fill_s, load_s, processor_s, start_s, usable_protocols
from costmodels.price.flows import Load, double_tree_out
from costmodels.price.group import Group, pair_group
from costmodels.price.routes import Shape, family, pattern
from costmodels.price.traffic import Traffic, collective_traffic, plain_call, transfer_traffic
from plans.errors import TwofoldError
from plans.redistribution import TransferPieces

__all__ = [
    "Links",
    "collective_claims",
    "collective_links",
    "is_forwarded",
    "pair_tiers",
    "pieces_links",
    "transfer_claims",
    "transfer_group",
    "transfer_links",
    "transfer_on_graph",
]

PS_PER_S = 10**12

Ints = npt.NDArray[np.int64]

_PRICED_AS = {"broadcast": "all_gather", "reduce": "reduce_scatter"}
"""Calls without separate figures -> those whose figures they take."""


@dataclass(frozen=True, slots=True)
class Links:
    """Picoseconds of a communication on links, and of every member's processor."""

    alone_ps: int
    together_ps: int
    cpu_ps: int


def collective_links(machine: Machine, call: str, group: Group, size_bytes: int, item_bytes: int) -> Links:
    """The time of a group's collective on the links.

    Raises:
        TwofoldError: a call that has no price.
    """
    model, traffic = _model(machine, call), _traffic(machine, call, group.members, size_bytes, item_bytes)
    if traffic.messages == 0:
        return Links(0, 0, 0)
    cpu_ps = _ps(machine, processor_s(model, traffic))
    if group.ranks:
        cost = _on_graph(machine, call, group, traffic)
        return Links(cost.alone_ps, cost.together_ps, cpu_ps)
    way = carried(model, machine.links, group, call, traffic)
    return Links(_ps(machine, way.alone_s), _together_ps(machine, way), cpu_ps)


def transfer_links(
    machine: Machine, num_peers: int, size_bytes: int, group: Group, *, is_forwarded: bool = False
) -> Links:
    """The time of a transfer on links in tiers.

    Args:
        machine: it runs on.
        num_peers: number of peers of its busiest rank.
        size_bytes: that this rank sends or receives.
        group: see `pair_group`.
        is_forwarded: the other end is on another rail, so that the bytes pass a rank of a node between.
    """
    model, traffic = machine.collectives["transfer"], transfer_traffic(num_peers, size_bytes, is_forwarded)
    if traffic.messages == 0:
        return Links(0, 0, 0)
    way = carried(model, machine.links, group, "transfer", traffic)
    return Links(_ps(machine, way.alone_s), _together_ps(machine, way), _ps(machine, processor_s(model, traffic)))


@lru_cache(maxsize=1024)
def pieces_links(machine: Machine, pieces: TransferPieces, item_bytes: int) -> Links:
    """The time of a transfer of several pairs at once; the pieces of a pair go as one message."""
    if not (most_bytes := max(pieces.most_sent, pieces.most_received) * item_bytes):
        return Links(0, 0, 0)
    ranks, _ = pieces.by_pair
    pairs = ranks[ranks[:, 0] != ranks[:, 1]].T
    most_peers = max(int(np.bincount(end).max()) for end in pairs)
    sizes = {pair: elements * item_bytes for pair, elements in pieces.pairs.items()}
    if machine.graph is not None:
        return _graph_pieces(machine, sizes, most_peers)
    tier = int(pair_tiers(machine, *pairs).max())
    forwarded = any(link.rails for link in machine.links) and any(is_forwarded(machine, *pair) for pair in sizes)
    own = transfer_links(machine, most_peers, most_bytes, pair_group(tier), is_forwarded=forwarded)
    ways: Counter[Hashable] = Counter()
    for pair, size in sizes.items() if machine.shares_ways else ():
        for way, needed_ps in transfer_claims(machine, pair, size).items():
            ways[way] += needed_ps
    return Links(own.alone_ps, max([own.alone_ps, *ways.values()]), own.cpu_ps)


def pair_tiers(machine: Machine, src_ranks: Ints, dst_ranks: Ints) -> Ints:
    """`Machine.tier` of many pairs of ranks.

    Raises:
        TwofoldError: a rank that the machine does not have.
    """
    tiers = np.full(len(src_ranks), machine.tier((int(max(src_ranks.max(), dst_ranks.max())),)), dtype=np.int64)
    for number in range(len(machine.links) - 1, -1, -1):
        tiers[src_ranks // machine.links[number].ranks == dst_ranks // machine.links[number].ranks] = number
    return tiers


def collective_claims(
    machine: Machine, call: str, members: Sequence[int], size_bytes: int, item_bytes: int, group: Group
) -> dict[Hashable, int]:
    """Shared link -> picoseconds for which a collective of `members` fills it.

    Args:
        machine: it runs on.
        call: of the collective.
        members: of this group.
        size_bytes: of the larger of a member's input and output.
        item_bytes: of an element.
        group: the members and their siblings, for which the library chose its algorithm.
    """
    if len(members) == 1 or not machine.shares_ways:
        return {}
    model, traffic = _model(machine, call), _traffic(machine, call, len(members), size_bytes, item_bytes)
    if group.ranks:
        return dict(_graph_claims(machine, call, tuple(sorted(members)), group, traffic))
    way = carried(model, machine.links, group, call, traffic)
    claims: dict[Hashable, int] = {}
    for tier in range(1, group.top + 1):
        below = machine.links[tier - 1]
        inside = Counter(member // below.ranks for member in members)
        if machine.links[tier].way_out_Bps is None or len(inside) == 1:
            continue
        ways = {below.way_out(member, machine.links[0]) for member in members}
        for domain, count in inside.items():
            own = [way for way in ways if way[0] == domain]
            size = _leaving(machine, tier, call, way.protocol, traffic, inside, count) / len(own)
            seconds = load_s(model, machine.links, group, traffic, way.protocol, Load(tier, True, size))
            for each in own:
                for direction in ("up", "down"):
                    claims[direction, tier, *each] = _ps(machine, seconds)
    return claims


def transfer_claims(machine: Machine, pair: tuple[int, int], size_bytes: int) -> dict[Hashable, int]:
    """Shared link -> picoseconds for which bytes from one rank to another fill it."""
    if machine.graph is not None:
        return dict(_graph_claims(machine, "transfer", pair, pair_group(0), transfer_traffic(1, size_bytes)))
    claims: dict[Hashable, int] = {}
    for tier in range(1, machine.tier(pair) + 1):
        below, reached_Bps = machine.links[tier - 1], machine.links[tier].way_out_Bps
        if reached_Bps is None:
            continue
        (src_domain, _), (dst_domain, rail) = (below.way_out(rank, machine.links[0]) for rank in pair)
        for way in (("up", tier, src_domain, rail), ("down", tier, dst_domain, rail)):  # on the rail where it ends
            claims[way] = _ps(machine, size_bytes / reached_Bps)
    return claims


def transfer_group(machine: Machine, src_rank: int, dst_rank: int, pairs: int) -> Group:
    """Two ranks, of as many pairs of neighbours (src + i, dst + i) that send at once."""
    sharing = tuple(float(max(1, min(pairs, link.ranks))) for link in machine.links)
    return pair_group(machine.tier((src_rank, dst_rank)), sharing)


def is_forwarded(machine: Machine, src_rank: int, dst_rank: int) -> bool:
    """Whether a message passes through a third rank of a node, because the two ranks are on different rails."""
    if not any(link.rails for link in machine.links):
        return False
    tier = machine.tier((src_rank, dst_rank))
    rails = any(link.rails for link in machine.links[1 : tier + 1])
    return rails and (dst_rank - src_rank) % machine.links[0].ranks != 0


def _model(machine: Machine, call: str) -> Collective:
    kind = plain_call(call)
    kind = _PRICED_AS.get(kind, kind)
    if kind not in machine.collectives or kind == "transfer":
        known = sorted({*machine.collectives, *_PRICED_AS} - {"transfer"})
        raise TwofoldError(f"the collective {call!r} has no price; priced are {', '.join(known)}")
    return machine.collectives[kind]


def _traffic(machine: Machine, call: str, members: int, size_bytes: int, item_bytes: int) -> Traffic:
    return collective_traffic(call, members, size_bytes, item_bytes, machine.library)


def _leaving(
    machine: Machine, tier: int, call: str, protocol: Protocol, traffic: Traffic, inside: Mapping[int, int], count: int
) -> float:
    """Bytes that leave a domain with `count` of the members (`costmodels.price.flows`)."""
    n, size = sum(inside.values()), traffic.size_bytes
    if plain_call(call) == "all_to_all" and traffic.is_direct:
        return count * (n - count) / n * size
    if protocol.algorithm == "pat":
        return (n - count) / n * size
    if protocol.algorithm in ("tree", "switch"):
        return machine.links[tier].reduced_bytes(double_tree_out(len(inside)) * size, float(size))
    return traffic.moved_bytes


# -- on a graph --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OnGraph:
    alone_ps: int
    together_ps: int
    protocol: Protocol


def _on_graph(machine: Machine, call: str, group: Group, traffic: Traffic) -> _OnGraph:
    model = _model(machine, call)
    best: _OnGraph | None = None
    for protocol in usable_protocols(model, group, call):
        if protocol.algorithm in ("switch", "hierarchical"):
            continue  # in tiers only
        siblings = family(machine, call, protocol.algorithm, group.ranks)
        members = len(group.ranks[0])
        alone_s = max(_shape_s(model, protocol, members, traffic, shape) for shape in siblings.shapes)
        together_s = max(alone_s, siblings.fullest_s * traffic.size_bytes / _reached(model, protocol, members))
        cost = _OnGraph(_ps(machine, alone_s), _ps(machine, together_s), protocol)
        if best is None or cost.together_ps < best.together_ps:
            best = cost
    assert best is not None
    return best


def _reached(model: Collective, protocol: Protocol, members: int) -> float:
    """Share of every wire's bandwidth."""
    return model.link_fraction * (1 - model.gap / max(2, members)) * protocol.share


def _shape_s(model: Collective, protocol: Protocol, members: int, traffic: Traffic, shape: Shape) -> float:
    """Seconds of a communication alone."""
    moved_s = shape.moved_s * traffic.size_bytes / _reached(model, protocol, members)
    steps_s = shape.near_steps * (model.hop_s + protocol.hop_s) + shape.far_steps * (model.hop_s + protocol.cross_s)
    waited_s = start_s(model, protocol, traffic, spans_nodes=shape.far_steps > 0) + steps_s + shape.latency_s
    waited_s += shape.far_messages * protocol.peer_s
    return waited_s + moved_s + fill_s(model, protocol, members, shape.far_steps, moved_s)


def _graph_claims(
    machine: Machine, call: str, members: tuple[int, ...], group: Group, traffic: Traffic
) -> dict[Hashable, int]:
    model = machine.collectives["transfer"] if call == "transfer" else _model(machine, call)
    if call == "transfer":
        protocol = usable_protocols(model, group, call)[0]
    else:
        protocol = _on_graph(machine, call, group, traffic).protocol
    size = traffic.size_bytes / _reached(model, protocol, len(members))
    filled_s = pattern(machine, call, protocol.algorithm, members).filled_s
    return {("link", link): _ps(machine, seconds * size) for link, seconds in filled_s.items()}


def _graph_pieces(machine: Machine, sizes: Mapping[tuple[int, int], int], num_peers: int) -> Links:
    model = machine.collectives["transfer"]
    filled: Counter[Hashable] = Counter()
    alone_ps = 0
    for pair, size in sizes.items():
        own_ps = transfer_on_graph(machine, pair, size).alone_ps
        alone_ps = max(alone_ps, own_ps)
        filled.update(transfer_claims(machine, pair, size))
    cpu_ps = _ps(machine, processor_s(model, transfer_traffic(num_peers, max(sizes.values()))))
    alone_ps = max([alone_ps, *filled.values()])
    return Links(alone_ps, alone_ps, cpu_ps)


@lru_cache(maxsize=65_536)
def transfer_on_graph(machine: Machine, pair: tuple[int, int], size_bytes: int) -> Links:
    """The time of a transfer between two ranks on a graph of links."""
    model, traffic = machine.collectives["transfer"], transfer_traffic(1, size_bytes)
    protocols = usable_protocols(model, pair_group(0), "transfer")
    seconds = min(
        _shape_s(model, protocol, 2, traffic, pattern(machine, "transfer", protocol.algorithm, pair).shape)
        for protocol in protocols
    )
    alone_ps = _ps(machine, seconds)
    return Links(alone_ps, alone_ps, _ps(machine, processor_s(model, traffic)))


def _together_ps(machine: Machine, way: Carried) -> int:
    """Whole picoseconds of each group's claims, so that they add up to the price."""
    claimed = [round(sharing * _ps(machine, seconds)) for seconds, sharing in way.shared_s]
    return max([_ps(machine, way.alone_s), *claimed])


def _ps(machine: Machine, seconds: float) -> int:
    picoseconds = seconds * machine.host_scale * PS_PER_S
    if not math.isfinite(picoseconds):
        raise TwofoldError(f"a message takes forever on machine {machine.name!r}: see its links and collectives")
    return round(picoseconds)
