"""The bytes that a communication sends over each link, by the algorithm of its library, on links in tiers.

A communication consists of a few rows: bytes on the fullest port of a rank, or on the fullest way out of a domain, for
every tier that it uses; and the dependent steps inside nodes and over every tier beyond. With n members, q of them in a
domain, D domains, and a message of S bytes (the larger of a member's input and output) a domain sends

- ring: 2 (n-1)/n S in an all-reduce, half of it in a gather or a scatter, S in a broadcast or a reduce (each of the
  rings that run side by side leaves a domain once);
- tree: the double binary tree over domains, S/2 times the degree of a domain in both trees: S for two, 3/2 S for
  three, at most 2 S (Sanders, Speck, Traeff 2009; NCCL's trees.cc);
- switch: every rank sends its tensor once to a switch that adds; between nodes the double tree, or S where the
  switches there add too;
- pat: (n-q)/n S in log2 n steps (arXiv 2506.20252);
- direct: q (n-q)/n S, every pair its part;
- hierarchical: the same bytes, exchanged inside each node first, so that each rank has one message for every node
  (NCCL since 2.12, PXN).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from costmodels.machine.links import Link
from costmodels.price.group import Group
from costmodels.price.traffic import Traffic, plain_call

__all__ = ["ALGORITHMS", "Flows", "Load", "can_run", "double_tree_out", "flows", "plane_end"]

ALGORITHMS = {
    "ring": ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "transfer", "all_to_all"),
    "tree": ("all_reduce",),
    "switch": ("all_reduce",),
    "pat": ("all_gather", "reduce_scatter"),
    "hierarchical": ("all_to_all",),
}
"""Algorithm of a protocol -> the calls it is for; of an all-to-all "ring" means direct messages."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bytes on the fullest link of a class.

    Args:
        tier: whose ports, or the ways out of whose domains below.
        is_uplink: a shared way out, not a rank's own port.
        size_bytes: that one group puts on it.
        sharing: groups that do so when all siblings communicate.
    """

    tier: int
    is_uplink: bool
    size_bytes: float
    sharing: float = 1.0


@dataclass(frozen=True, slots=True)
class Flows:
    """The flows of a communication by one algorithm.

    Args:
        loads: bytes on links.
        near_steps: dependent steps inside a domain of the first tier.
        far_steps: (steps, tier) of those beyond.
        far_messages: messages that a rank sends to other nodes one after the other.
    """

    loads: tuple[Load, ...]
    near_steps: int
    far_steps: tuple[tuple[int, int], ...] = ()
    far_messages: int = 0


def can_run(algorithm: str, call: str, group: Group, least_members: int, spans_nodes: bool) -> bool:
    """Whether a library uses an algorithm for a call of a group.

    PAT runs where every node has one member (NCCL 2.23 and later); a switch adds for all of a node's members, and over
    several nodes where `spans_nodes`, if each of them has equally many.
    """
    if plain_call(call) not in ALGORITHMS[algorithm]:
        return False
    first = group.tiers[0]
    if algorithm == "pat":
        return first.number > 1 and first.fullest == 1
    if algorithm == "hierarchical":
        return first.number > 1 and first.fullest > 1
    if algorithm == "switch" and first.number > 1:
        return spans_nodes and first.emptiest == first.fullest >= least_members
    return group.members >= least_members


@lru_cache(maxsize=16_384)
def flows(links: tuple[Link, ...], group: Group, call: str, algorithm: str, traffic: Traffic) -> Flows:
    """The flows of a communication by one algorithm."""
    kind = plain_call(call)
    if kind == "all_to_all" and traffic.is_direct:
        return _exchange(links, group, traffic, algorithm == "hierarchical")
    inside = group.tiers[0].fullest
    if algorithm == "tree":
        return _tree(links, group, traffic.size_bytes, 2.0 * traffic.size_bytes, 2 * (inside - 1))
    if algorithm == "switch":
        return _tree(links, group, traffic.size_bytes, float(traffic.size_bytes), 2)
    if algorithm == "pat":
        return _pat(links, group, traffic.size_bytes)
    return _ring(links, group, traffic)


@lru_cache(maxsize=256)
def plane_end(links: tuple[Link, ...], tier: int) -> int:
    """The last tier that is entered by the same ports as `tier`."""
    while tier + 1 < len(links) and links[tier + 1].is_entered_from_below(tier + 1):
        tier += 1
    return tier


@lru_cache(maxsize=4096)
def double_tree_out(number: int) -> float:
    """The most that one of `number` domains sends in an all-reduce by a double binary tree, in messages.

    >>> [double_tree_out(number) for number in (1, 2, 3, 64)]
    [0.0, 1.0, 1.5, 2.0]
    """
    if number < 2:
        return 0.0
    if number > 64:
        return 2.0
    degree = [0] * number
    for child in range(1, number):
        bit = child & -child
        parent = (child ^ bit) | (bit << 1)
        parent = child ^ bit if parent >= number else parent
        degree[child] += 1
        degree[parent] += 1
    other = degree[::-1] if number % 2 == 0 else [degree[-1], *degree[:-1]]  # mirrored, or turned by one
    return max(one + two for one, two in zip(degree, other, strict=True)) / 2


def _ring(links: Sequence[Link], group: Group, traffic: Traffic) -> Flows:
    total, first = traffic.moved_bytes, group.tiers[0]
    loads = []
    stays = plane_end(tuple(links), 0) == 0
    if group.top == 0 or not stays or first.fullest != first.emptiest or traffic.is_forwarded:
        loads.append(Load(0, False, total))
    elif first.fullest > 1:  # of every ring one link in `fullest` leaves the node
        loads.append(Load(0, False, total * (first.fullest - 1) / first.fullest))
    loads += _leaving(links, group, [total] * group.top)
    rounds = max(1, round(traffic.hops / max(1, group.members - 1)))
    crossings = min(traffic.hops, rounds * (first.number - 1))
    near_steps = traffic.hops - crossings + traffic.is_forwarded
    return Flows(tuple(loads), near_steps, _telescoped(group, crossings, first.number - 1, _less_one))


def _tree(links: Sequence[Link], group: Group, size_bytes: int, inner_bytes: float, near_steps: int) -> Flows:
    leaving = [
        links[tier].reduced_bytes(double_tree_out(group.tiers[tier - 1].number) * size_bytes, float(size_bytes))
        for tier in range(1, group.top + 1)
    ]
    loads = [Load(0, False, inner_bytes), *_leaving(links, group, leaving)]
    depth = _depth(group.tiers[0].number)
    return Flows(tuple(loads), near_steps, _telescoped(group, 2 * depth, depth, _depth))


def _pat(links: Sequence[Link], group: Group, size_bytes: int) -> Flows:
    n = group.members
    leaving = [(n - group.tiers[tier - 1].emptiest) / n * size_bytes for tier in range(1, group.top + 1)]
    depth = _depth(group.tiers[0].number)
    return Flows(tuple(_leaving(links, group, leaving)), 0, _telescoped(group, depth, depth, _depth))


def _exchange(links: Sequence[Link], group: Group, traffic: Traffic, hierarchical: bool) -> Flows:
    n, size, first = group.members, traffic.size_bytes, group.tiers[0]
    loads = []
    for tier in range(group.top + 1):
        end = plane_end(tuple(links), tier)
        reached = group.tiers[end].emptiest if end <= group.top else n
        emptiest = group.tiers[tier - 1].emptiest if tier else 1
        moved = float(reached - emptiest)
        if tier == 0:
            moved = (group.tiers[0].fullest if end == 0 else reached) - 1.0
            if hierarchical:
                moved = (first.fullest - 1) / first.fullest * n + (n - first.emptiest if end else 0)
            elif any(link.rails for link in links[1 : group.top + 1]):
                moved += (n - first.emptiest) * (1 - 1 / first.fullest)  # what goes to another rail
        if moved > 0:
            loads.append(Load(tier, False, moved / n * size))
        if tier and links[tier].way_out_Bps is not None:
            below = group.tiers[tier - 1]
            loads.append(_uplink(links, group, tier, below.cut / n * size))
    hops, crossings = traffic.hops, min(traffic.hops, first.number - 1)
    if hierarchical:
        hops, crossings = hops + 1, 1
    messages = first.number - 1 if hierarchical else n - first.emptiest
    far = ((crossings, group.top),) if crossings else ()
    return Flows(tuple(loads), hops - crossings, far, messages)


def _leaving(links: Sequence[Link], group: Group, leaving: Sequence[float]) -> list[Load]:
    """The loads of what leaves a domain below each further tier, by the ports of as many ranks as it has where a plane
    of ports begins: each of a node's ranks has its own way into the network, also if pairs of them are joined."""
    ports = group.tiers[0].emptiest
    loads = []
    for tier, size_bytes in enumerate(leaving, 1):
        if not links[tier].is_entered_from_below(tier):
            ports = group.tiers[tier - 1].emptiest
        end = min(plane_end(tuple(links), tier), group.top)
        if group.tiers[tier - 1].number > group.tiers[end].number:
            loads.append(Load(tier, False, size_bytes / ports))
        if links[tier].way_out_Bps is not None and group.tiers[tier - 1].number > 1:
            loads.append(_uplink(links, group, tier, size_bytes))
    return loads


def _uplink(links: Sequence[Link], group: Group, tier: int, size_bytes: float) -> Load:
    below = links[tier - 1]
    used, every = below.ways_used(group.tiers[0].emptiest), below.ways_used(links[0].ranks)
    return Load(tier, True, size_bytes / used, max(1.0, group.tiers[tier - 1].sharing * used / every))


def _depth(number: int) -> int:
    """Steps of a binary tree over `number` domains."""
    return max(0, number - 1).bit_length()


def _less_one(number: int) -> int:
    return number - 1


def _telescoped(group: Group, total: int, whole: int, of: Callable[[int], int]) -> tuple[tuple[int, int], ...]:
    """The number of the `total` steps that cross each tier, so that splitting a tier in two changes nothing."""
    if not total or not whole:
        return ()
    steps, left = [], total
    for tier in range(group.top, 0, -1):
        difference = of(group.tiers[tier - 1].number) - of(group.tiers[tier].number)
        count = left if tier == 1 else min(left, total * difference // whole)
        if count:
            steps.append((count, tier))
        left -= count
    return tuple(reversed(steps))
