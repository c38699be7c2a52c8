"""Seconds of a communication: its start, its dependent steps, and the bytes on its fullest link."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from costmodels.machine.links import Link
from costmodels.machine.sections import Collective, Protocol
from costmodels.price.flows import Flows, Load, can_run, flows
from costmodels.price.group import Group
from costmodels.price.traffic import Traffic

__all__ = [
    "Carried",
    "carried",
    "fill_s",
    "load_s",
    "processor_s",
    "start_s",
    "usable_protocols",
    "wire_s",
    "with_unmeasured",
]

_PLAIN = (Protocol(name="plain"),)


@dataclass(frozen=True, slots=True)
class Carried:
    """The algorithm and protocol of a communication.

    Args:
        alone_s: seconds from the arrival of its last member, while its siblings are silent.
        together_s: while all of its siblings communicate too and share their ways out of domains.
        shared_s: (seconds for which one group fills a shared way out, groups that share it), of every tier.
        protocol: that the library takes.
        flows: what goes over which links.
    """

    alone_s: float
    together_s: float
    shared_s: tuple[tuple[float, float], ...]
    protocol: Protocol
    flows: Flows


def start_s(model: Collective, protocol: Protocol, traffic: Traffic, *, spans_nodes: bool) -> float:
    """Seconds of a communication next to its steps and the bytes on links."""
    copied_s = traffic.size_bytes / model.copy_Bps if model.copy_Bps else 0.0
    return model.start_s + protocol.start_s + copied_s + (model.far_start_s if spans_nodes else 0.0)


def fill_s(model: Collective, protocol: Protocol, members: int, far_steps: int, moved_s: float) -> float:
    """Seconds that filling and draining the pipeline takes, of a message that takes `moved_s` on its fullest link."""
    chunk_s = model.chunk_s + protocol.member_chunk_s * members + model.far_chunk_s * far_steps
    return 2 * math.sqrt(chunk_s * moved_s)


def usable_protocols(model: Collective, group: Group, call: str) -> tuple[Protocol, ...]:
    """The protocols of the library for a call of a group; a single one without figures if it has none."""
    usable = tuple(
        protocol
        for protocol in model.protocols
        if can_run(protocol.algorithm, call, group, protocol.least_members, protocol.far_share is not None)
    )
    return usable or _PLAIN


def carried(model: Collective, links: tuple[Link, ...], group: Group, call: str, traffic: Traffic) -> Carried:
    """The fastest protocol of a communication, and its time (see `Collective`)."""
    known: dict[str, Flows] = {}
    best: Carried | None = None
    for protocol in usable_protocols(model, group, call):
        way = known.get(protocol.algorithm)
        if way is None:
            way = known[protocol.algorithm] = flows(links, group, call, protocol.algorithm, traffic)
        alone_s, shared_s = _seconds(model, links, group, traffic, protocol, way)
        together_s = max([alone_s, *(seconds * sharing for seconds, sharing in shared_s)])
        if best is None or together_s < best.together_s:
            best = Carried(alone_s, together_s, shared_s, protocol, way)
    assert best is not None
    return best


def wire_s(model: Collective, links: tuple[Link, ...], group: Group, call: str, traffic: Traffic) -> float:
    """Seconds on the links of a communication alone."""
    return carried(model, links, group, call, traffic).alone_s


def load_s(
    model: Collective, links: tuple[Link, ...], group: Group, traffic: Traffic, protocol: Protocol, load: Load
) -> float:
    """Seconds that the bytes of one group take on one of its links."""
    link = links[load.tier]
    if load.is_uplink:
        assert link.way_out_Bps is not None
        bandwidth_Bps = link.way_out_Bps
    else:
        otherwise = model.link_fraction * (1 - model.gap / max(2, group.members))
        bandwidth_Bps = link.port_Bps(_peers(group, traffic, load.tier), otherwise)
    return load.size_bytes / (bandwidth_Bps * _share(protocol, group, load.tier))


def with_unmeasured(model: Collective, own: Collective, members: int) -> Collective:
    """`model`, measured in small groups of one node, with the figures of `own` for others: the switch protocols at the
    bandwidth that they reach there among `members`, and what spanning nodes costs."""
    reached = own.link_fraction * (1 - own.gap / members) / (model.link_fraction * (1 - model.gap / members))
    plain = tuple(protocol for protocol in model.protocols if protocol.algorithm != "switch")
    switched = tuple(
        msgspec.structs.replace(
            protocol, share=protocol.share * reached,
            far_share=None if protocol.far_share is None else protocol.far_share * reached,
        )
        for protocol in own.protocols
        if protocol.algorithm == "switch"
    )  # fmt: skip
    return msgspec.structs.replace(
        model, protocols=(*plain, *switched), far_start_s=own.far_start_s, far_chunk_s=own.far_chunk_s
    )


def processor_s(model: Collective, traffic: Traffic) -> float:
    """Processor seconds of every member, where processors carry the messages."""
    spent_s = model.cpu_start_s + traffic.messages * model.cpu_message_s
    return spent_s + (traffic.moved_bytes / model.cpu_Bps if model.cpu_Bps else 0.0)


def _seconds(
    model: Collective, links: tuple[Link, ...], group: Group, traffic: Traffic, protocol: Protocol, way: Flows
) -> tuple[float, tuple[tuple[float, float], ...]]:
    moved_s, shared_s = 0.0, list[tuple[float, float]]()
    for load in way.loads:
        own_s = load_s(model, links, group, traffic, protocol, load)
        moved_s = max(moved_s, own_s)
        if load.is_uplink:
            shared_s.append((own_s, load.sharing))
    step_s = way.near_steps * (model.hop_s + protocol.hop_s + links[0].latency_s)
    for count, tier in way.far_steps:
        step_s += count * (model.hop_s + protocol.cross_s + links[tier].latency_s)
    step_s += way.far_messages * protocol.peer_s
    far_steps = sum(count for count, _ in way.far_steps)
    alone_s = start_s(model, protocol, traffic, spans_nodes=group.top > 0) + step_s + moved_s
    alone_s += fill_s(model, protocol, group.members, far_steps, moved_s)
    return alone_s, tuple(shared_s)


def _peers(group: Group, traffic: Traffic, tier: int) -> int:
    """To how many others a member talks at once over a tier."""
    return max(1, group.tiers[tier].fullest - 1) if traffic.peers is None else traffic.peers


def _share(protocol: Protocol, group: Group, tier: int) -> float:
    """Of the bandwidth: the cost of a switch depends on the tier where it adds."""
    if protocol.algorithm == "switch" and tier:
        return 1.0
    return protocol.share if group.top == 0 or protocol.far_share is None else protocol.far_share
