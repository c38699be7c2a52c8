"""Published bandwidths of NCCL's own tests against prices: `python -m benchmarks.accuracy.network`.

The points are bus bandwidths that others published (benchmarks/data/nccl-published.csv says where), of A100, H100,
H200, B200 and GB200 nodes, alone and joined by network cards, 1 MiB to 8 GiB. Tables are dealt out in turn: the first,
third, ... are what `--fit` fits, the others are only scored. What was fitted is in the device files (their provenance
says so; `--ship`): what spanning nodes costs, how the switch of a node fills, and what rings reach on Blackwell.

Wanted: within 10 % from 64 MiB on, within 20 % from 1 MiB on. Clusters of equal devices and cards differ by as much:
two nodes of 8 B200 gather at 308 and at 376 GB/s.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import FOLDER
from costmodels.fit.forms import solve
from costmodels.machine.catalogue import Device, device_names, load_device, save_device
from costmodels.machine.links import Link
from costmodels.machine.sections import Collective, Protocol, Provenance
from costmodels.price.communication import carried
from costmodels.price.group import first_group
from costmodels.price.traffic import collective_traffic
from plans.files import write_atomically

__all__ = ["Published", "fitted_constants", "load_published", "main", "predicted_GBps", "with_constants"]

DATA, RESULTS = FOLDER / "data" / "nccl-published.csv", FOLDER / "results" / "network.json"

MIB = 2**20

CONSTANTS = {
    "switch_member_chunk_s": (5e-7, 1e-9, 2e-5), "switch_far_ratio": (0.83, 0.3, 1.5),
    "ll_far_share": (0.12, 0.01, 0.6), "far_start_s": (2e-5, 1e-7, 1e-4), "far_chunk_s": (2e-6, 1e-9, 1e-4),
    "ampere_chunk_s": (2e-6, 1e-8, 5e-6), "blackwell_link_ratio": (1.0, 0.7, 1.3),
    "blackwell_member_chunk_s": (5e-7, 1e-9, 2e-5),
}  # fmt: skip
"""What is fitted: where the search for it starts, and its bounds. Shares of a bandwidth, or seconds.

With longer chunks 8 GiB on 8 A100 would be slower than the 235 GB/s that NCCL's own tables give."""

_AMPERE, _BLACKWELL = ("a100", "a800"), ("b200", "b300", "gb200", "gb300")
"""How the names of their devices begin. Rings and exchanges reach less of Blackwell's NVLink, relative to H200, and its
switch fills more slowly."""

SWITCH_CROSS_S = 14e-6
"""A step between nodes of a switch's tree: NCCL's own model (src/graph/tuning.cc, network, Simple)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published bus bandwidth.

    Args:
        case: which cluster.
        device: device of the catalogue; "gb200" is a B200 in an NVLink domain of up to 72.
        nodes, per_node: NVLink domains and devices in each.
        card_GBps: of the network, for each device.
        call: of a collective.
        algorithm: "ring" where the library was told so; "" where it chose.
        size_bytes: of the larger of input and output.
        bus_GBps: as nccl-tests defines it.
        source: address.
        is_fitted: whether constants may be fitted to it.
    """

    case: str
    device: str
    nodes: int
    per_node: int
    card_GBps: float
    call: str
    algorithm: str
    size_bytes: int
    bus_GBps: float
    source: str
    is_fitted: bool


def load_published(path: Path = DATA) -> list[Published]:
    """All points; tables are dealt out in turn."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    tables = list(dict.fromkeys((row["case"], row["call"]) for row in rows))
    return [
        Published(
            case=row["case"], device=row["device"], nodes=int(row["nodes"]), per_node=int(row["per_node"]),
            card_GBps=float(row["card_GBps"]), call=row["call"], algorithm=row["algorithm"],
            size_bytes=int(row["size_bytes"]), bus_GBps=float(row["bus_GBps"]), source=row["source"],
            is_fitted=tables.index((row["case"], row["call"])) % 2 == 0,
        )
        for row in rows
    ]  # fmt: skip


def predicted_GBps(point: Published, constants: Mapping[str, float] | None = None) -> float:
    """The bus bandwidth by the device file, or with other constants."""
    device = load_device("b200" if point.device == "gb200" else point.device)
    if constants is not None:
        device = with_constants(device, constants)
    links = [msgspec.structs.replace(device.node[-1], ranks=point.per_node)]
    n = point.nodes * point.per_node
    if point.nodes > 1:
        card = {**msgspec.structs.asdict(device.network), "bandwidth_Bps": point.card_GBps * 1e9}
        links.append(Link(ranks=n, **card))
    model = device.collectives[point.call]
    if point.algorithm:
        kept = tuple(protocol for protocol in model.protocols if protocol.algorithm == point.algorithm)
        model = msgspec.structs.replace(model, protocols=kept)
    traffic = collective_traffic(point.call, n, point.size_bytes, 4, "nccl")
    seconds = carried(model, tuple(links), first_group(links, n), point.call, traffic).alone_s
    return (2 if point.call == "all_reduce" else 1) * (n - 1) / n * point.size_bytes / seconds / 1e9


def with_constants(device: Device, constants: Mapping[str, float]) -> Device:
    """The device with fitted constants in place of its own; one without a switch keeps none."""
    is_blackwell = device.name.startswith(_BLACKWELL)

    def changed(call: str, model: Collective) -> Collective:
        protocols = []
        for protocol in model.protocols:
            if protocol.algorithm == "switch":
                protocol = msgspec.structs.replace(
                    protocol, far_share=protocol.share * constants["switch_far_ratio"], cross_s=SWITCH_CROSS_S,
                    member_chunk_s=constants[f"{'blackwell' if is_blackwell else 'switch'}_member_chunk_s"],
                )  # fmt: skip
            elif protocol.name.endswith(" LL"):
                protocol = msgspec.structs.replace(protocol, far_share=constants["ll_far_share"])
            protocols.append(protocol)
        if call == "transfer":  # no published points
            return model
        if device.name.startswith(_AMPERE) and call != "all_to_all":
            model = msgspec.structs.replace(model, chunk_s=constants["ampere_chunk_s"])
        if is_blackwell:
            fraction = load_device("h200").collectives[call].link_fraction * constants["blackwell_link_ratio"]
            protocols = [_with_fraction(protocol, model.link_fraction / fraction) for protocol in protocols]
            model = msgspec.structs.replace(model, link_fraction=fraction)
        return msgspec.structs.replace(
            model, protocols=tuple(protocols), far_start_s=constants["far_start_s"],
            far_chunk_s=constants["far_chunk_s"],
        )  # fmt: skip

    collectives = {call: changed(call, model) for call, model in device.collectives.items()}
    return msgspec.structs.replace(device, collectives=collectives)


def ship(constants: Mapping[str, float]) -> None:
    """Write the device files whose provenance says that they have these constants, to three digits."""
    rounded = {name: float(f"{value:.3g}") for name, value in constants.items()}
    for name in device_names():
        device = load_device(name)
        says = device.provenance.get("collectives.far_start_s")
        if says is None or "published nccl-tests" not in says.source:
            continue
        device = with_constants(device, rounded)
        if name.startswith(_BLACKWELL):
            known = Provenance(
                status="cited", date=says.date,
                source=f"{rounded['blackwell_link_ratio']:g} of the share of H200, {says.source}",
            )  # fmt: skip
            cited = {f"collectives.{call}.link_fraction": known for call in device.collectives if call != "transfer"}
            device = msgspec.structs.replace(device, provenance=device.provenance | cited)
        save_device(device)


def _with_fraction(protocol: Protocol, factor: float) -> Protocol:
    """A switch at the bandwidth that it had before the collective's link fraction became smaller by a factor."""
    if protocol.algorithm != "switch":
        return protocol
    far_share = None if protocol.far_share is None else protocol.far_share * factor
    return msgspec.structs.replace(protocol, share=protocol.share * factor, far_share=far_share)


def fitted_constants(points: Sequence[Published]) -> dict[str, float]:
    """The constants with the least misfit (soft L1) of the points that may be fitted."""
    own = [point for point in points if point.is_fitted]
    start, lower, upper = (np.log(np.array(column)) for column in zip(*CONSTANTS.values(), strict=True))

    def misfit(logs: np.ndarray) -> np.ndarray:
        constants = dict(zip(CONSTANTS, np.exp(logs).tolist(), strict=True))
        errors = np.array([np.log(predicted_GBps(point, constants) / point.bus_GBps) for point in own])
        return np.concatenate([errors, 0.03 * (logs - start)])

    found = solve(misfit, start, lower, upper)
    return dict(zip(CONSTANTS, np.exp(found).tolist(), strict=True))


def _score(rows: Sequence[dict[str, object]], least_bytes: int, most: float) -> dict[str, float]:
    errors = [abs(float(str(row["error"]))) for row in rows if int(str(row["size_bytes"])) >= least_bytes]
    return {
        "points": len(errors), "median": statistics.median(errors), "mean": statistics.fmean(errors),
        "worst": max(errors), "within": sum(error <= most for error in errors) / len(errors),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--ship", action="store_true", help="fit, and write the constants into the device files")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args(arguments)
    points = load_published()
    constants = fitted_constants(points) if given.fit or given.ship else None
    if constants is not None and given.ship:
        ship(constants)
    if constants is not None:
        print(json.dumps(constants, indent=1))
    rows: list[dict[str, object]] = []
    for point in points:
        found = predicted_GBps(point, constants)
        rows.append({
            "case": point.case, "call": point.call, "size_bytes": point.size_bytes, "published_GBps": point.bus_GBps,
            "predicted_GBps": round(found, 2), "error": round(found / point.bus_GBps - 1, 4), "fitted": point.is_fitted,
        })  # fmt: skip
        print(
            f"{'fit  ' if point.is_fitted else 'score'} {point.case:30s} {point.call:14s} "
            f"{point.size_bytes / MIB:7.0f} MiB {point.bus_GBps:7.1f} GB/s, here {found:7.1f} "
            f"{100 * (found / point.bus_GBps - 1):+6.1f} %"
        )
    result: dict[str, object] = {"constants": constants} if constants else {}
    for which, kept in (("scored", False), ("fitted", True)):
        own = [row for row in rows if row["fitted"] is kept]
        for name, least, most in (("from 64 MiB", 64 * MIB, 0.1), ("from 1 MiB", MIB, 0.2)):
            score = _score(own, least, most)
            result[f"{which}, {name}"] = score
            print(
                f"{which}, {name}: {score['points']:.0f} points, error median {100 * score['median']:.1f} %, mean "
                f"{100 * score['mean']:.1f} %, worst {100 * score['worst']:.1f} %; within {100 * most:.0f} %: "
                f"{100 * score['within']:.0f} %"
            )
    if given.save:
        write_atomically(RESULTS, json.dumps(result | {"points": rows}, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
