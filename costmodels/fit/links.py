"""Costs of collectives on links alone (NCCL, HCCL): latencies, bandwidth by group size; and contention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from costmodels.fit.forms import Floats, log_ratio, overlapped_s, solve
from costmodels.fit.kernels import choose, describe_choice, folds
from costmodels.fit.points import Point
from costmodels.machine.links import Link
from costmodels.machine.sections import COLLECTIVES, Collective, Overlap, Protocol
from costmodels.price.communication import wire_s
from costmodels.price.group import Group, first_group
from costmodels.price.traffic import Traffic, collective_traffic, transfer_traffic
from plans.errors import TwofoldError
from plans.model.graph import itemsize

__all__ = ["NCCL_PROTOCOLS", "BackToBack", "LinkFit", "communication_s", "fit_links", "fit_overlaps", "overlap_s"]

MICRO = 1e-6

TYPICAL_WEIGHT = 0.03
"""Parameters that the points do not determine stay near typical values; a factor of e counts as an error of 3 %."""

CHAINED = 0.3
"""Share of a transfer that no chain hides."""

HOST_BOUND_BYTES = 4_000_000
"""Smaller messages that a host issues back to back measure the host, not the links."""

_NCCL_RINGS = (
    Protocol(name="ring LL", start_s=6.6 * MICRO, hop_s=0.6 * MICRO, cross_s=2.7 * MICRO, share=0.37,
             far_share=0.12),
    Protocol(name="ring LL128", start_s=14.0 * MICRO, hop_s=1.9 * MICRO, cross_s=4.0 * MICRO, share=0.92),
    Protocol(name="ring Simple", start_s=8.4 * MICRO, hop_s=3.4 * MICRO, cross_s=14.0 * MICRO),
)  # fmt: skip

NCCL_PROTOCOLS = {
    "all_reduce": (
        *_NCCL_RINGS,
        Protocol(name="tree LL", algorithm="tree", start_s=6.8 * MICRO, hop_s=0.6 * MICRO, cross_s=5.0 * MICRO,
                 share=0.24, far_share=0.12),
        Protocol(name="tree LL128", algorithm="tree", start_s=14.0 * MICRO, hop_s=1.25 * MICRO, cross_s=8.5 * MICRO,
                 share=0.72),
        Protocol(name="tree Simple", algorithm="tree", start_s=8.4 * MICRO, hop_s=4.0 * MICRO, cross_s=14.0 * MICRO,
                 share=0.92),
    ),
    "ring": (
        *_NCCL_RINGS,
        Protocol(name="PAT Simple", algorithm="pat", start_s=8.4 * MICRO, hop_s=3.4 * MICRO, cross_s=4.0 * MICRO,
                 share=0.75),
    ),
    "direct": (Protocol(name="Simple", start_s=8.4 * MICRO, hop_s=3.4 * MICRO, cross_s=14.0 * MICRO),),
}  # fmt: skip
"""Base latencies, hop latencies over NVLink and network, and bandwidth shares of NCCL's own model.

From NCCL 2.28.3, src/graph/tuning.cc (ncclTunerConstantsDefaults): LL at most half of the bus bandwidth and at most
141 GB/s (Hopper) or 87.7 (Ampere), which is 0.37 of what rings reach on both; LL128 120/128, rounded there to 0.92;
trees 0.92 of it, LL at most 1/3.8, LL128 7/9 inside a node. Between nodes LL is bound to 45 GB/s (Hopper), 0.12 of
what 8 cards of 400 Gb/s reach: fitted to published bandwidths (`benchmarks.accuracy.network`), as is this share. PAT:
0.75 of the bandwidth and 14 / 3.5 us for a step.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackToBack:
    """The difference between back-to-back calls and the time of one call on its links.

    Args:
        host_s: the host issues one in this time: no measurement is below it.
        hidden_s: the part of a call that overlaps with the previous one.
    """

    host_s: float = 0.0
    hidden_s: float = 0.0

    def measured_s(self, point: Point, alone_s: float) -> float:
        """The measured time of a call that takes `alone_s`.

        Recorded launches have no host in them. Of a chain of transfers one way each hides its start behind the one
        before; back and forth (ping_pong) nothing is hidden, nor among recorded collectives, which wait for each other.
        """
        chained = point.options.get("pattern", "ping_pong") == "one_way"
        if point.options.get("recorded"):
            return max(CHAINED * alone_s, alone_s - self.hidden_s) if chained else alone_s
        return max(self.host_s, alone_s - self.hidden_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A fitted kind of communication, how it was measured, and predictions of the points it was fitted to."""

    collective: Collective
    issued: BackToBack
    form: str
    predicted_s: tuple[float, ...]


def protocols_of(call: str, library: str) -> tuple[Protocol, ...]:
    """The protocols a kind of communication is fitted with; HCCL's are not published: one, fitted."""
    if library != "nccl":
        return ()
    return NCCL_PROTOCOLS["all_reduce" if call == "all_reduce" else "ring" if call in _RINGS else "direct"]


_RINGS = ("all_gather", "reduce_scatter")


def communication_s(point: Point, model: Collective, links: Sequence[Link], library: str) -> float:
    """Seconds of a measured collective or transfer by the form, on the tier that a group of its size needs."""
    return wire_s(model, *_way(point, links, library))


def _way(point: Point, links: Sequence[Link], library: str) -> tuple[tuple[Link, ...], Group, str, Traffic]:
    """The facts about a measured call that `wire_s` needs."""
    if point.kind == "transfer":
        return tuple(links), first_group(links, 2), "transfer", transfer_traffic(1, point.size_bytes)
    traffic = collective_traffic(point.call, point.ranks, point.size_bytes, itemsize(point.dtype), library)
    return tuple(links), first_group(links, point.ranks), point.call, traffic


def fit_links(points: Sequence[Point], links: Sequence[Link], library: str) -> LinkFit:
    """The cost of one kind of communication on its links.

    Args:
        points: of one call, device times, none of them held out.
        links: tiers of the machine.
        library: nccl or hccl.

    Raises:
        TwofoldError: fewer than 3 points.
    """
    if len(points) < 3:
        call = points[0].call if points else "a collective"
        raise TwofoldError(f"{call} was measured {len(points)} times; the fit needs at least 3 points: measure again")
    call, seconds = points[0].call, np.array([point.seconds for point in points])
    protocols = protocols_of(call, library)
    several = len({point.ranks for point in points}) > 1

    ways = [_way(point, links, library) for point in points]
    recorded = any(point.options.get("recorded") for point in points)
    typical = {
        "start_s": (2e-6, 1e-8, 1e-4), "latency": (1.0, 0.1, 3.0), "link_fraction": (0.8, 0.02, 1.0),
        "chunk_s": (1e-7, 1e-10, 1e-4), "slow": (1.0, 0.2, 2.0) if protocols else None,
        "gap": (0.1, 1e-4, 1.2) if several else None,
        "host_s": (2.5e-5, 1e-6, 1e-3) if recorded or protocols else None,
        "hidden_s": (3e-6, 1e-9, 3e-5) if recorded else None,
    }  # fmt: skip
    free = {name: value for name, value in typical.items() if value is not None}
    start, lower, upper = np.log(np.array(list(free.values()))).T

    def model_of(q: Floats) -> tuple[Collective, BackToBack]:
        values = {name: float(value) for name, value in zip(free, np.exp(q), strict=True)}
        latency, slow = values["latency"], values.get("slow", 1.0)
        scaled = tuple(
            msgspec.structs.replace(
                protocol, start_s=protocol.start_s * latency, hop_s=protocol.hop_s * latency,
                cross_s=protocol.cross_s, share=min(1.0, protocol.share * (slow if "LL" in protocol.name else 1.0)),
            )
            for protocol in protocols
        )  # fmt: skip
        model = Collective(
            start_s=values["start_s"], link_fraction=min(1.0, values["link_fraction"]), gap=values.get("gap", 0.0),
            chunk_s=values["chunk_s"], protocols=scaled,
        )  # fmt: skip
        return model, BackToBack(host_s=values.get("host_s", 0.0), hidden_s=values.get("hidden_s", 0.0))

    def predict(q: Floats) -> Floats:
        model, issued = model_of(q)
        return np.array([
            issued.measured_s(point, wire_s(model, *way)) for point, way in zip(points, ways, strict=True)
        ])  # fmt: skip

    # a factor of e in a parameter counts as an error of a few percent
    def misfit(q: Floats) -> Floats:
        return np.concatenate([log_ratio(predict(q), seconds), TYPICAL_WEIGHT * (q - start)])

    best, least = start, np.inf
    for tilt in ({}, {"latency": 0.5, "start_s": 4.0}, {"chunk_s": 30.0, "link_fraction": 1.1}):
        first = start + np.log([tilt.get(name, 1.0) for name in free])
        solution = solve(misfit, np.clip(first, lower, upper), lower, upper)
        error = float(np.sum(np.abs(log_ratio(predict(solution), seconds))))
        if error < least:
            best, least = solution, error
    model, issued = model_of(best)
    form = "protocols of NCCL" if protocols else "one protocol"
    return LinkFit(collective=model, issued=issued, form=form, predicted_s=tuple(map(float, predict(best))))


def fit_overlaps(points: Sequence[Point], lengths: Sequence[tuple[float, float]]) -> tuple[tuple[Overlap, ...], str]:
    """The rates of every measured pair of a kind of compute and a collective, and which form was chosen.

    Args:
        points: kind "overlap", none of them held out.
        lengths: of each point's kernel and message alone.
    """
    kept = [number for number, point in enumerate(points) if point.beside in COLLECTIVES]
    points, lengths = [points[number] for number in kept], [lengths[number] for number in kept]
    seconds = np.array([point.seconds for point in points])
    forms: dict[str, Callable[[Point], str]] = {
        "rates of each kind of compute": lambda point: point.call,
        "rates of each pair": lambda point: f"{point.call} {point.beside}",
    }
    errors = {}
    for name, key in forms.items():
        left_out = np.empty(len(points))
        for inside, outside in folds(points):
            fitted = _overlaps([points[at] for at in inside], [lengths[at] for at in inside], key)
            left_out[outside] = [overlap_s(points[at], fitted, *lengths[at]) for at in outside]
        errors[name] = float(np.median(np.abs(log_ratio(left_out, seconds))))
    chosen = choose(errors)
    return _overlaps(points, lengths, forms[chosen]), describe_choice(chosen, errors)


def _overlaps(
    points: Sequence[Point], lengths: Sequence[tuple[float, float]], key: Callable[[Point], str]
) -> tuple[Overlap, ...]:
    groups: dict[str, list[int]] = {}
    for number, point in enumerate(points):
        groups.setdefault(key(point), []).append(number)
    entries = []
    for numbers in groups.values():
        some = [points[number] for number in numbers]
        alone_s, comm_s = (np.array([point.figures[name] for point in some]) for name in ("compute_s", "comm_s"))
        kernel_s, message_s = np.array([lengths[number] for number in numbers]).T
        both_s = np.array([point.seconds for point in some])

        def predict(q: Floats) -> Floats:
            first, second, hold = q
            share = message_s / (message_s + hold * second * kernel_s)  # noqa: B023 - called within the round
            return overlapped_s(alone_s, comm_s, 1 - (1 - first) * share, second * share)  # noqa: B023

        def misfit(q: Floats) -> Floats:
            return log_ratio(predict(q), both_s)  # noqa: B023

        tried = [
            solve(misfit, np.array(start), np.array([0.02, 0.05, 0.0]), np.array([1.0, 1.0, 3.0]))
            for start in ((0.6, 0.8, 0.3), (0.4, 0.6, 0.9), (0.8, 0.9, 0.05))
        ]
        first, second, hold = min(tried, key=lambda q: float(np.sum(np.abs(misfit(np.asarray(q)))))).tolist()
        share = 1 / (1 + hold * second)
        rates = {"compute_rate": 1 - (1 - first) * share, "comm_rate": second * share, "hold": hold}
        pairs = {(point.call, point.beside) for point in some}
        entries += [Overlap(compute=call, collective=beside, **rates) for call, beside in pairs]  # type: ignore[arg-type]
    return tuple(sorted(entries, key=lambda entry: (entry.compute, entry.collective)))


def overlap_s(point: Point, overlaps: Sequence[Overlap], kernel_s: float, message_s: float) -> float:
    """Seconds of a measured pair by its rates, its two times alone, and how long a kernel and a message of it are."""
    pairs: Mapping[tuple[str, str], Overlap] = {(entry.compute, entry.collective): entry for entry in overlaps}
    entry = pairs.get((point.call, point.beside))
    compute_rate, comm_rate = entry.rates(kernel_s, message_s) if entry else (1.0, 1.0)
    alone = (np.array([point.figures["compute_s"]]), np.array([point.figures["comm_s"]]))
    return float(overlapped_s(*alone, compute_rate, comm_rate)[0])
