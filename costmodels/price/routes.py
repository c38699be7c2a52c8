"""Routes and flows on a graph of links: the load of each link by a communication among explicit ranks.

Routes are the shortest by the lengths of their wires; where several leave a node equally short, bytes are split evenly
(ECMP). A communication is a list of phases, each a set of flows at once; it takes as long as the fullest link of every
phase, one phase after the other. All is linear in the bytes, so that it is kept for one byte.

A ring runs as many times side by side as the emptiest node has members, each leaving a node by another device. On a
torus, groups that fill rings of it are reduced along all dimensions and both directions at once: one slice begins with
every dimension and direction (Sack and Gropp 2015), 2 (n-1)/n S / (2 D b) in D equal dimensions of bandwidth b.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from costmodels.machine.links import Graph
from costmodels.machine.machine import Machine
from costmodels.price.traffic import plain_call

__all__ = ["Family", "Pattern", "Routes", "Shape", "family", "pattern", "routes_of"]

Flow = tuple[int, int, float]
"""(from rank, to rank, bytes)."""

Loads = dict[int, float]
"""Directed link -> bytes: wire w from its first end to its second is link 2 w, the other way 2 w + 1."""


class Shape(NamedTuple):
    """The facts on which the time of a communication of one byte depends, apart from its protocol.

    Args:
        near_steps: dependent steps inside nodes.
        far_steps: those between nodes.
        latency_s: of the wires on the way of all these steps.
        far_messages: messages that a rank sends to other nodes one after the other.
        moved_s: the fullest link of every phase, one phase after the other.
    """

    near_steps: int
    far_steps: int
    latency_s: float
    far_messages: int
    moved_s: float


class Pattern(NamedTuple):
    """The load of a communication of one byte on the links: its shape, and the time on each link."""

    shape: Shape
    filled_s: Loads


class Family(NamedTuple):
    """The load of sibling groups: their shapes, and the time on the fullest link."""

    shapes: frozenset[Shape]
    fullest_s: float


class Routes:
    """Shortest routes of a graph."""

    def __init__(self, graph: Graph, num_devices: int) -> None:
        self._number = {str(rank): rank for rank in range(num_devices)}
        self._number |= {name: num_devices + at for at, name in enumerate(graph.switches)}
        self._num_devices = num_devices
        self._forwarding = graph.forwarding
        self.bandwidth_Bps: list[float] = []
        self._latency_s: list[float] = []
        self._out: list[list[tuple[int, int, int]]] = [[] for _ in self._number]  # (link, to, length)
        for wire in graph.wires:
            a, b = (self._number[end] for end in wire.ends)
            for one, other in ((a, b), (b, a)):
                self._out[one].append((len(self.bandwidth_Bps), other, wire.length))
                self.bandwidth_Bps.append(wire.bandwidth_Bps)
                self._latency_s.append(wire.latency_s)
        self._to: dict[int, tuple[list[float], list[int]]] = {}

    def loads(self, flows: Iterable[Flow]) -> Loads:
        """Bytes on every link that some flow uses."""
        by_target: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        for src, dst, size in flows:
            by_target[dst][src] += size
        loads: defaultdict[int, float] = defaultdict(float)
        for target, held in by_target.items():
            distance, order = self._distances(target)
            for at in order:  # the farthest first
                if at == target or at not in held:
                    continue
                ways = self._ways(at, target, distance)
                for link, other in ways:
                    loads[link] += held[at] / len(ways)
                    held[other] += held[at] / len(ways)
        return dict(loads)

    def latency_s(self, src: int, dst: int) -> float:
        """Latencies of the wires on one shortest route."""
        distance, _ = self._distances(dst)
        total_s, at = 0.0, src
        while at != dst:
            link, at = self._ways(at, dst, distance)[0]
            total_s += self._latency_s[link]
        return total_s

    def _ways(self, at: int, target: int, distance: Sequence[float]) -> list[tuple[int, int]]:
        return [
            (link, other)
            for link, other, length in self._out[at]
            if distance[other] == distance[at] - length and (other == target or self._forwards(other))
        ]

    def _forwards(self, node: int) -> bool:
        return self._forwarding or node >= self._num_devices

    def _distances(self, target: int) -> tuple[list[float], list[int]]:
        if target not in self._to:
            distance = [math.inf] * len(self._out)
            distance[target], waiting = 0, [(0.0, target)]
            while waiting:
                far, at = heapq.heappop(waiting)
                if far > distance[at] or (at != target and not self._forwards(at)):
                    continue
                for _, other, length in self._out[at]:
                    if far + length < distance[other]:
                        distance[other] = far + length
                        heapq.heappush(waiting, (far + length, other))
            order = sorted((at for at, far in enumerate(distance) if far < math.inf), key=lambda at: -distance[at])
            self._to[target] = distance, order
        return self._to[target]


@lru_cache(maxsize=16)
def routes_of(machine: Machine) -> Routes:
    """The routes of a machine's graph."""
    assert machine.graph is not None
    return Routes(machine.graph, machine.num_devices)


@lru_cache(maxsize=4096)
def family(machine: Machine, call: str, algorithm: str, groups: tuple[tuple[int, ...], ...]) -> Family:
    """The load of sibling groups on the links of a machine's graph, each for one byte."""
    shapes, filled_s = set(), defaultdict[int, float](float)
    for members in groups:
        own = pattern(machine, call, algorithm, members)
        shapes.add(own.shape)
        for link, seconds in own.filled_s.items():
            filled_s[link] += seconds
    return Family(frozenset(shapes), max(filled_s.values(), default=0.0))


@lru_cache(maxsize=65_536)
def pattern(machine: Machine, call: str, algorithm: str, members: tuple[int, ...]) -> Pattern:
    """The load of a communication among `members` (ascending) on the links of a machine's graph, for one byte.

    Args:
        machine: with a graph.
        call: see `costmodels.price.flows.ALGORITHMS`; of a transfer the members are its source and its target.
        algorithm: ring, tree or pat; of an all-to-all direct messages.
        members: ranks.
    """
    assert machine.graph is not None
    kind = plain_call(call)
    if kind == "transfer":
        return _made(machine, [[(members[0], members[1], 1.0)]], 1)
    if kind == "all_to_all":
        n = len(members)
        every = [(src, dst, 1 / n) for src in members for dst in members if src != dst]
        far = sum(_node(machine, members[0]) != _node(machine, other) for other in members)
        return _made(machine, [every], 1, far_messages=far)
    box = _box(machine.graph.torus, members) if algorithm == "ring" else None
    if box is not None and kind in ("all_reduce", "all_gather", "reduce_scatter"):
        return _torus(machine, kind, members, box)
    if algorithm == "tree":
        return _tree(machine, members)
    if algorithm == "pat":
        n, sends = len(members), list[list[Flow]]()
        for step in range((n - 1).bit_length()):
            size = min(2**step, n - 2**step) / n
            sends.append([(rank, members[(at + 2**step) % n], size) for at, rank in enumerate(members)])
        return _made(machine, sends, 1)
    return _ring(machine, kind, members)


def _made(machine: Machine, phases: Sequence[Sequence[Flow]], steps: int, far_messages: int = 0) -> Pattern:
    """Phases of `steps` dependent steps each."""
    routes = routes_of(machine)
    far = near = 0
    latency_s = 0.0
    for flows in phases:
        is_far = any(_node(machine, src) != _node(machine, dst) for src, dst, _ in flows)
        far, near = far + is_far * steps, near + (not is_far) * steps
        ends = {(src, dst) for src, dst, _ in flows[:: max(1, len(flows) // 64)]}
        latency_s += steps * max((routes.latency_s(*pair) for pair in ends), default=0.0)
    return _filled(machine, [routes.loads(flows) for flows in phases], near, far, latency_s, far_messages)


def _filled(
    machine: Machine, phases: Sequence[Loads], near: int, far: int, latency_s: float, far_messages: int = 0
) -> Pattern:
    bandwidth_Bps, filled_s, moved_s = routes_of(machine).bandwidth_Bps, defaultdict[int, float](float), 0.0
    for loads in phases:
        own = {link: size / bandwidth_Bps[link] for link, size in loads.items()}
        moved_s += max(own.values(), default=0.0)
        for link, seconds in own.items():
            filled_s[link] += seconds
    return Pattern(Shape(near, far, latency_s, far_messages, moved_s), dict(filled_s))


def _node(machine: Machine, rank: int) -> int:
    return rank // machine.devices_per_node


def _nodes(machine: Machine, members: Sequence[int]) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in members:
        nodes.setdefault(_node(machine, rank), []).append(rank)
    return list(nodes.values())


def _ring(machine: Machine, kind: str, members: Sequence[int]) -> Pattern:
    routes, nodes, n = routes_of(machine), _nodes(machine, members), len(members)
    whole = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0}.get(kind, (n - 1) / n)
    rings = min(map(len, nodes)) if len(nodes) > 1 else 1
    flows: list[Flow] = []
    far = near = 0
    latency_s = 0.0
    for ring in range(rings):
        order = [node[(ring + 1 + at) % len(node)] for node in nodes for at in range(len(node))]
        edges = list(zip(order, [*order[1:], order[0]], strict=True))
        if kind in ("broadcast", "reduce"):
            edges.pop()
        flows += [(src, dst, whole / rings) for src, dst in edges]
        if ring == 0:
            rounds = 2 if kind == "all_reduce" else 1
            far = rounds * (len(nodes) - 1)
            near = rounds * (n - 1) - far
            latency_s = rounds * (n - 1) / len(edges) * sum(routes.latency_s(*edge) for edge in edges)
    return _filled(machine, [routes.loads(flows)], near, far, latency_s)


def _tree(machine: Machine, members: Sequence[int]) -> Pattern:
    """A chain inside each node, two mirrored binary trees between nodes, up and down."""
    routes, nodes = routes_of(machine), _nodes(machine, members)
    number, rings = len(nodes), min(map(len, nodes))
    flows: list[Flow] = []
    for ring in range(rings):
        for mirrored in (False, True):
            size = 0.5 / rings
            heads = [node[ring] for node in nodes]
            heads = [*heads[1:], heads[0]] if mirrored and number % 2 else heads[::-1] if mirrored else heads
            for child in range(1, number):
                bit = child & -child
                parent = (child ^ bit) | (bit << 1)
                parent = child ^ bit if parent >= number else parent
                flows += [(heads[child], heads[parent], size), (heads[parent], heads[child], size)]
            for node in nodes:
                chain = node[ring:] + node[:ring]
                for src, dst in pairwise(chain):
                    flows += [(src, dst, size), (dst, src, size)]
    depth, inner = (number - 1).bit_length(), max(map(len, nodes)) - 1
    pairs = {(src, dst) for src, dst, _ in flows[:64]}
    far_s = max((routes.latency_s(*pair) for pair in pairs), default=0.0)
    return _filled(machine, [routes.loads(flows)], 2 * inner, 2 * depth, 2 * (inner + depth) * far_s)


def _box(torus: tuple[int, ...], members: Sequence[int]) -> list[int] | None:
    """The dimensions that `members` fill, if each of a torus is filled or met in one place; None otherwise."""
    if not torus:
        return None
    places, stride = [], math.prod(torus)
    for number in torus:
        stride //= number
        places.append({rank // stride % number for rank in members})
    filled = [dim for dim, (own, number) in enumerate(zip(places, torus, strict=True)) if len(own) == number > 1]
    alike = all(len(own) in (1, number) for own, number in zip(places, torus, strict=True))
    return filled if alike and math.prod(map(len, places)) == len(members) else None


def _torus(machine: Machine, kind: str, members: Sequence[int], dims: list[int]) -> Pattern:
    assert machine.graph is not None
    torus, number = machine.graph.torus, len(dims)
    strides = {dim: math.prod(torus[dim + 1 :]) for dim in dims}
    turns = {"all_reduce": [*range(number), *reversed(range(number))], "all_gather": [*reversed(range(number))]}
    routes, phases, steps, latency_s = routes_of(machine), list[Loads](), 0, 0.0
    for turn in turns.get(kind, list(range(number))):
        flows, longest = list[Flow](), 0
        for piece in range(2 * number):
            dim = dims[(piece % number + turn) % number]
            sides = [torus[dims[(piece % number + before) % number]] for before in range(turn)]
            size = 1 / (2 * number) / math.prod(sides) * (torus[dim] - 1) / torus[dim]
            step = 1 if piece < number else -1
            longest = max(longest, torus[dim] - 1)
            for rank in members:
                at = rank // strides[dim] % torus[dim]
                flows.append((rank, rank + strides[dim] * ((at + step) % torus[dim] - at), size))
        phases.append(routes.loads(flows))
        steps += longest
        latency_s += longest * routes.latency_s(flows[0][0], flows[0][1])
    return _filled(machine, phases, steps, 0, latency_s)
