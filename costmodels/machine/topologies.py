"""Graphs of well-known networks, to write machine files from.

Each function returns the `Graph` of a machine, its devices numbered node by node. The shipped examples in
`costmodels/machines` were written with them (`example_machines`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from costmodels.machine.catalogue import load_device
from costmodels.machine.links import Graph, Link, Wire
from costmodels.machine.machine import Machine
from costmodels.machine.sections import Provenance

__all__ = ["dragonfly", "example_machines", "leaf_spine", "torus"]


def torus(sizes: Sequence[int], bandwidth_Bps: float, latency_s: float = 0.0) -> Graph:
    """Devices in a torus: each has a wire to both neighbours along every dimension, the last counting fastest.

    >>> len(torus((4, 4), 1e9).wires)
    32
    """
    wires = []
    for place in itertools.product(*map(range, sizes)):
        for dim, size in enumerate(sizes):
            if size == 1 or (size == 2 and place[dim]):
                continue
            other = (*place[:dim], (place[dim] + 1) % size, *place[dim + 1 :])
            ends = str(_number(place, sizes)), str(_number(other, sizes))
            wires.append(Wire(ends=ends, bandwidth_Bps=bandwidth_Bps, latency_s=latency_s, name="torus"))
    return Graph(wires=tuple(wires), forwarding=True, torus=tuple(sizes))


def leaf_spine(
    nodes: int, per_node: int, *, nodes_of_leaf: int, spines: int, inside: Wire, card: Wire, up_Bps: float
) -> Graph:
    """Nodes with a separate switch, whose cards meet at leaves that all spines join.

    Args:
        nodes: of `per_node` devices each.
        per_node: devices of a node.
        nodes_of_leaf: nodes whose cards share a leaf.
        spines: switches above the leaves.
        inside: a device's wire into its node's switch (its ends do not matter).
        card: a device's wire into its leaf.
        up_Bps: of one leaf to all spines together, in one direction.
    """
    leaves = -(-nodes // nodes_of_leaf)
    wires = []
    for rank in range(nodes * per_node):
        node = rank // per_node
        wires.append(msgspec.structs.replace(inside, ends=(str(rank), f"node {node}")))
        wires.append(msgspec.structs.replace(card, ends=(str(rank), f"leaf {node // nodes_of_leaf}"), length=2))
    for leaf, spine in itertools.product(range(leaves), range(spines)):
        up = msgspec.structs.replace(
            card, ends=(f"leaf {leaf}", f"spine {spine}"), bandwidth_Bps=up_Bps / spines, name="uplink"
        )
        wires.append(up)
    switches = [f"node {node}" for node in range(nodes)] + [f"leaf {leaf}" for leaf in range(leaves)]
    return Graph(switches=(*switches, *(f"spine {spine}" for spine in range(spines))), wires=tuple(wires))


def dragonfly(devices: int, routers: int, global_ports: int, bandwidth_Bps: float, latency_s: float = 0.0) -> Graph:
    """The canonical dragonfly (Kim, Dally, Scott and Abts 2008) with one global link between any two groups.

    Args:
        devices: devices of each router.
        routers: of each group, all joined to each other.
        global_ports: of each router; there are routers x global_ports + 1 groups.
        bandwidth_Bps: of every wire.
        latency_s: of every wire.
    """
    groups, wires = routers * global_ports + 1, []

    def wire(a: str, b: str, name: str, length: int = 1) -> None:
        wires.append(Wire(ends=(a, b), bandwidth_Bps=bandwidth_Bps, latency_s=latency_s, name=name, length=length))

    for group, router in itertools.product(range(groups), range(routers)):
        own = f"router {group}.{router}"
        for number in range(devices):
            wire(str((group * routers + router) * devices + number), own, "card")
        for other in range(router):
            wire(own, f"router {group}.{other}", "local")
        for port in range(router * global_ports, (router + 1) * global_ports):
            there = (group + 1 + port) % groups
            if group < there:  # so long that no shortest route takes two of them
                wire(own, f"router {there}.{(routers * global_ports - 1 - port) // global_ports}", "global", 3)
    names = [f"router {group}.{router}" for group in range(groups) for router in range(routers)]
    return Graph(switches=tuple(names), wires=tuple(wires))


def example_machines() -> dict[str, Machine]:
    """The shipped example machines by the names of their files, with devices of the catalogue."""
    node = Link(name="NVLink", ranks=8, latency_s=0.0, bandwidth_Bps=450e9)
    card = Link(name="NDR", ranks=64, latency_s=2e-6, bandwidth_Bps=50e9, reached_fraction=0.92)
    spine = msgspec.structs.replace(card, name="spine", ranks=256, latency_s=4e-6, uplink_Bps=64 * 50e9 / 4)
    rack = Link(name="NVLink 5", ranks=72, latency_s=0.0, bandwidth_Bps=900e9)
    unified = Link(name="UB", ranks=16, latency_s=2e-6, bandwidth_Bps=196e9)
    beyond = msgspec.structs.replace(unified, name="UB super-node", ranks=384, latency_s=3e-6, ports="below",
                                     reached_fraction=0.8)  # fmt: skip
    inside = Wire(ends=("", "node"), bandwidth_Bps=450e9, name="NVLink")
    into_leaf = Wire(ends=("", "leaf"), bandwidth_Bps=50e9, latency_s=2e-6, name="NDR")
    as_h100 = "NVLink, cards, latencies and reached fraction as h100-sxm"
    found = {
        "rail-only-x256": _by_rail(_in_tiers(
            "h100-sxm", "nodes of 8 and one switch for each rail, none above",
            (node, msgspec.structs.replace(card, ranks=256, rails=True)),
            {"links": ("assumed", f"the network of Wang et al. 2023, arXiv 2307.12169; {as_h100}"),
             "collectives.protocols.peer_s": ("assumed", "1 us for NCCL's proxy to post and complete a message")},
        )),
        "leaf-spine-x256": _in_tiers(
            "h100-sxm", "8 nodes of 8 a leaf, leaves oversubscribed 4:1", (node, card, spine),
            {"links": ("assumed", f"an uplink of a quarter of the cards of a leaf; {as_h100}")},
        ),
        "nvl72-x144": _in_tiers(
            "b200", "two GB200 NVL72 racks, four devices a host",
            (rack, msgspec.structs.replace(card, ranks=144)),
            {"links": ("cited", "vendor: 900 GB/s a direction and device in a rack of 72, a card of 400 Gb/s each"),
             "links.latency_s": ("assumed", "as h100-sxm"), "links.reached_fraction": ("assumed", "as h100-sxm")},
            per_host=4,
        ),
        "hccs-supernode-x384": _in_tiers(
            "ascend-910c", "a CloudMatrix 384 super-node: 192 modules of two dies, 8 modules a node",
            (unified, beyond),
            {"links": ("cited", "Zuo et al. 2025, arXiv 2506.12708: 196 GB/s a direction and die, through the same "
                       "ports in a node and beyond"),
             "links.latency_s": ("assumed", "as ascend-910c"), "links.reached_fraction": ("assumed", "as ascend-910c")},
        ),
        "leaf-spine-graph-x32": _on_graph(
            32, 8, leaf_spine(4, 8, nodes_of_leaf=2, spines=2, inside=inside, card=into_leaf, up_Bps=16 * 50e9 / 4),
            "4 nodes of 8, two a leaf, leaves oversubscribed 4:1, as a graph",
            ("assumed", f"an uplink of a quarter of the cards of a leaf; {as_h100}"),
        ),
        "torus-4x4x4": _on_graph(
            64, 4, torus((4, 4, 4), 50e9, 1e-6), "a torus of 4 x 4 x 4",
            ("assumed", "six links of 50 GB/s a direction each, as TPU v4 has (Jouppi et al. 2023, arXiv 2304.01433), "
             "between devices of another kind; 1 us each"),
        ),
        "dragonfly-x72": _on_graph(
            72, 2, dragonfly(2, 4, 2, 25e9, 1e-6), "a dragonfly of 9 groups of 4 routers with 2 devices each",
            ("assumed", "200 Gb/s and 1 us a wire, about those of Slingshot 11"),
        ),
    }  # fmt: skip
    return {name: msgspec.structs.replace(machine, name=name) for name, machine in found.items()}


_DATE = "2026-11-22"

_Origin = tuple[Literal["assumed", "cited"], str]


def _in_tiers(
    device: str, variant: str, links: tuple[Link, ...], sources: Mapping[str, _Origin], per_host: int | None = None
) -> Machine:
    known = load_device(device)
    made = Machine.of_device(known, known.per_node)
    provenance = {
        entry: provenance for entry, provenance in made.provenance.items() if entry.partition(".")[0] != "links"
    }
    provenance |= {
        entry: Provenance(status=status, source=source, date=_DATE) for entry, (status, source) in sources.items()
    }  # fmt: skip
    return msgspec.structs.replace(
        made, num_devices=links[-1].ranks, devices_per_node=per_host or links[0].ranks, links=links,
        provenance=provenance, variant=f"example: {variant}",
    )  # fmt: skip


def _by_rail(machine: Machine) -> Machine:
    """All-to-alls also as NCCL sends them since 2.12 (PXN; NCCL's user guide, NCCL_P2P_PXN_LEVEL, 2 by default): each
    rank passes traffic for another rail to its node's rank on that rail, which sends all traffic of the node for one
    rank as one message."""
    exchange = machine.collectives["all_to_all"]
    direct = tuple(msgspec.structs.replace(protocol, peer_s=1e-6) for protocol in exchange.protocols)
    by_rail = tuple(
        msgspec.structs.replace(protocol, name=f"PXN {protocol.name}", algorithm="hierarchical") for protocol in direct
    )
    exchange = msgspec.structs.replace(exchange, protocols=(*direct, *by_rail))
    return msgspec.structs.replace(machine, collectives={**machine.collectives, "all_to_all": exchange})


def _on_graph(number: int, per_node: int, graph: Graph, variant: str, origin: _Origin) -> Machine:
    summary = graph.summary(number, per_node)
    entries: dict[str, _Origin] = {"graph": origin, "links": ("assumed", "the graph, summed up")}
    made = _in_tiers("h100-sxm", variant, summary, entries, per_node)
    return msgspec.structs.replace(made, graph=graph)


def _number(place: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for at, size in zip(place, sizes, strict=True):
        number = number * size + at
    return number
