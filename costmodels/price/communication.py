"""Seconds of a collective or a transfer on its links: latencies of dependent steps, and bytes over bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from costmodels.machine.sections import Collective, Link, Protocol
from costmodels.price.traffic import Traffic

__all__ = ["Route", "processor_s", "route", "wire_s", "with_switch"]

_PLAIN = (Protocol(name="plain"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a group has of the links.

    Args:
        bandwidth_Bps: of one member inside the fastest domain it needs, of which a collective reaches its own share.
        reached_Bps: what a member reaches between domains, while all of them communicate; infinite inside one.
        domains: into how many domains of the fastest tier the group falls.
        near_s: latency of a step inside a domain of the fastest tier.
        far_s: latency of a step between them.
    """

    bandwidth_Bps: float
    reached_Bps: float
    domains: int
    near_s: float
    far_s: float


def route(links: tuple[Link, ...], tier: int, together: int, members: int, num_peers: int) -> Route:
    """The way through the slowest tier used.

    Args:
        links: of the machine.
        tier: the slowest that the group uses.
        together: how many members of a group leave a domain below together, each by its own link.
        members: of the group.
        num_peers: to how many others a member talks at once.
    """
    link = links[tier]
    inside = link.reach_Bps(num_peers) * together  # rings run through the NICs of all members of a node at once
    reached = math.inf
    if tier:
        if link.reached_fraction is not None:
            reached, inside = inside * link.reached_fraction, math.inf
        inside = min(inside, links[tier - 1].reach_Bps(num_peers))
        uplinks = [entry.uplink_Bps for entry in links[1 : tier + 1] if entry.uplink_Bps is not None]
        reached = min([reached, *uplinks])  # alone; what runs beside it shares them in the simulator
    domains = -(-members // max(1, together)) if tier else 1
    near_s = links[0].latency_s if tier else link.latency_s
    return Route(bandwidth_Bps=inside, reached_Bps=reached, domains=domains, near_s=near_s, far_s=link.latency_s)


def wire_s(model: Collective, traffic: Traffic, members: int, way: Route) -> float:
    """Seconds on the links from the arrival of the last member, with the fastest protocol (see `Collective`)."""
    usable = [
        protocol
        for protocol in model.protocols
        if members >= protocol.least_members and (protocol.algorithm != "switch" or way.domains == 1)
    ]
    return min(_with(model, traffic, members, way, protocol) for protocol in usable or _PLAIN)


def with_switch(model: Collective, own: Collective, members: int) -> Collective:
    """`model` with the switch protocols of `own`, at the bandwidth that they reach there among `members`."""
    reached = own.link_fraction * (1 - own.gap / members) / (model.link_fraction * (1 - model.gap / members))
    plain = tuple(protocol for protocol in model.protocols if protocol.algorithm != "switch")
    switched = tuple(
        msgspec.structs.replace(protocol, share=protocol.share * reached)
        for protocol in own.protocols
        if protocol.algorithm == "switch"
    )
    return msgspec.structs.replace(model, protocols=(*plain, *switched))


def processor_s(model: Collective, traffic: Traffic) -> float:
    """Processor seconds of every member, where processors carry the messages."""
    spent_s = model.cpu_start_s + traffic.messages * model.cpu_message_s
    return spent_s + (traffic.moved_bytes / model.cpu_Bps if model.cpu_Bps else 0.0)


def _with(model: Collective, traffic: Traffic, members: int, way: Route, protocol: Protocol) -> float:
    hops, moved = traffic.hops, traffic.moved_bytes
    rounds = max(1, round(hops / max(1, members - 1)))
    crossings = min(hops, rounds * (way.domains - 1))
    if protocol.algorithm == "tree":
        # NCCL: a chain inside each node, a binary tree between nodes, up and down (its tuning.cc)
        crossings = 2 * max(0, way.domains - 1).bit_length()
        hops, moved = 2 * (-(-members // way.domains) - 1) + crossings, 2.0 * traffic.size_bytes
    elif protocol.algorithm == "switch":
        hops, moved = 2 + crossings, float(traffic.size_bytes)
    step_s = (hops - crossings) * (model.hop_s + protocol.hop_s + way.near_s)
    step_s += crossings * (model.hop_s + protocol.cross_s + way.far_s)
    bandwidth_Bps = way.bandwidth_Bps * model.link_fraction * (1 - model.gap / max(2, members))
    bandwidth_Bps = min(bandwidth_Bps, way.reached_Bps) * protocol.share
    copied_s = traffic.size_bytes / model.copy_Bps if model.copy_Bps else 0.0
    moved_s = moved / bandwidth_Bps
    return model.start_s + protocol.start_s + step_s + moved_s + 2 * math.sqrt(model.chunk_s * moved_s) + copied_s
