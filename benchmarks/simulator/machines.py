"""The machines that `benchmarks.simulator.one_world` draws from: the shipped examples, and small ones whose 16 ranks
reach every tier or link of a kind of network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from costmodels import Machine
from costmodels.machine.links import Graph, Link, Wire
from costmodels.machine.topologies import leaf_spine, torus

__all__ = ["KINDS", "machines_of"]

KINDS = (
    "one node", "two nodes", "shared uplink", "three tiers", "torus", "leaf-spine", "rail-only", "NVL72", "HCCS",
    "dragonfly",
)  # fmt: skip
"""Kinds of networks."""


@lru_cache(maxsize=1)
def machines_of() -> Mapping[str, tuple[Machine, ...]]:
    """Kind -> its machines."""
    h100 = Machine.load("h100-sxm-x16")
    node, card = h100.links
    inside = Wire(ends=("", "node"), bandwidth_Bps=node.bandwidth_Bps, name="NVLink")
    into_leaf = Wire(ends=("", "leaf"), bandwidth_Bps=card.bandwidth_Bps, latency_s=card.latency_s, name="NDR")
    nvl72, hccs, rails = (Machine.load(name) for name in ("nvl72-x144", "hccs-supernode-x384", "rail-only-x256"))
    own = card.bandwidth_Bps
    return {
        "one node": (Machine.load("h200-x8"),),
        "two nodes": (h100, Machine.load("a100-80gb-x16")),
        "shared uplink": (
            _tiers(h100, "one-card-x16", node, _like(card, uplink_Bps=own)),
            _tiers(h100, "one-card-4x4", _like(node, ranks=4), _like(card, uplink_Bps=own)),
        ),
        "three tiers": (
            _tiers(h100, "leaves-4x2x2", _like(node, ranks=4), _like(card, ranks=8),
                   _like(card, name="spine", uplink_Bps=8 * own / 4)),
            _tiers(h100, "racks-2x4x2", _like(node, ranks=2), _like(card, ranks=8, uplink_Bps=own),
                   _like(card, name="spine", uplink_Bps=own)),
        ),
        "torus": (
            Machine.load("torus-4x4x4"),
            _graph(h100, "torus-4x4", 4, torus((4, 4), 50e9, 1e-6)),
        ),
        "leaf-spine": (
            _graph(h100, "leaf-spine-4x4", 4,
                   leaf_spine(4, 4, nodes_of_leaf=2, spines=2, inside=inside, card=into_leaf, up_Bps=8 * own / 4)),
            _graph(h100, "leaf-spine-2x8", 8,
                   leaf_spine(2, 8, nodes_of_leaf=1, spines=2, inside=inside, card=into_leaf, up_Bps=8 * own / 4)),
        ),
        "rail-only": (
            rails,
            _tiers(rails, "rail-only-4x4", _like(rails.links[0], ranks=4), _like(rails.links[1], ranks=16)),
        ),
        "NVL72": (
            nvl72,
            _tiers(nvl72, "racks-of-8x2", _like(nvl72.links[0], ranks=8), _like(nvl72.links[1], ranks=16)),
        ),
        "HCCS": (
            hccs,
            _tiers(hccs, "hccs-4x4", _like(hccs.links[0], ranks=4), _like(hccs.links[1], ranks=16)),
        ),
        "dragonfly": (Machine.load("dragonfly-x72"),),
    }  # fmt: skip


def _like(link: Link, **changes: Any) -> Link:
    return msgspec.structs.replace(link, **changes)


def _tiers(machine: Machine, name: str, *links: Link) -> Machine:
    first, last = links[0].ranks, links[-1].ranks
    return msgspec.structs.replace(machine, name=name, num_devices=last, devices_per_node=first, links=links)


def _graph(machine: Machine, name: str, per_node: int, graph: Graph) -> Machine:
    return msgspec.structs.replace(machine, name=name, num_devices=16, devices_per_node=per_node, graph=graph)
