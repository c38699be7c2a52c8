"""How well the cost models predict measured points that they were not fitted to.

    python -m benchmarks.calibration                              held-out errors of the shipped points, a few seconds
    python -m benchmarks.calibration POINTS... --device h200      of other points, fitted anew
    python -m benchmarks.calibration --ship                       also writes the device files
    python -m benchmarks.calibration --report calibration.html    also the calibration report

Points are in benchmarks/data/<device>-*.jsonl[.gz], as `twofold calibrate` writes them, with date, versions and
command. Shipping fits the device itself and carries its figures over to those that were never measured. Held-out points
were chosen by seed and are not fitted. No step time of any training run is used.
"""

from __future__ import annotations

import argparse
import datetime
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import costmodels
from costmodels.carry import carried
from costmodels.catalogue import device_names, load_device, save_device
from costmodels.fit_device import TARGETS, DeviceFit, fit_device, scoreboard
from costmodels.points import Point, load_points, save_points

__all__ = ["DATA", "fitted", "held_out_table", "main"]

DATA = Path(__file__).with_name("data")

FOLDERS = (DATA, Path(costmodels.__file__).with_name("points"))
"""Where files of points are looked for."""

HELD_OUT_SHARE = 0.25
HOST_BOUND_S = 1.2e-5
"""Back-to-back launches that take less than this were bound by the host that issued them, not by the device."""

HOST_BOUND_BYTES = 4_000_000
"""Likewise for communication of smaller messages."""


def fitted(device: str = "h200", paths: Sequence[str | Path] = ()) -> DeviceFit | None:
    """A device of the catalogue fitted to its points; None where there are none.

    Args:
        device: name in the catalogue.
        paths: files of points; by default those of benchmarks/data.
    """
    found = [path for folder in FOLDERS for path in folder.glob(f"{device}-*.jsonl*")]
    files = [Path(path) for path in paths] or sorted(found)
    points: list[Point] = []
    environment: dict[str, str] = {}
    # of an instruction whose code has changed the last points count
    for some, where in sorted(map(load_points, files), key=lambda read: read[1].get("taken", "")):
        points += some
        environment |= where
    return fit_device(points, environment, load_device(device)) if points else None


def held_out_table(fit: DeviceFit) -> list[dict[str, object]]:
    """One row per section: points, median and 95th percentile of the relative error, bias, target."""
    rows: list[dict[str, object]] = []
    for entry in fit.held_out:
        median, p95 = TARGETS[entry.section]
        kept = entry.median_error <= median and (p95 is None or entry.p95_error <= p95)
        rows.append({
            "section": entry.section, "points": entry.num_points, "median_error": round(entry.median_error, 4),
            "p95_error": round(entry.p95_error, 4), "bias": round(entry.bias, 4), "target_median": median,
            "target_p95": p95, "kept": kept, "inside": fit.inside(entry.section),
        })  # fmt: skip
    return rows


def first_points(path: str | Path, seed: int = 5) -> list[Point]:
    """Points of the first micro-benchmarks (plain records) without those bound by the host, a quarter held out."""
    content = msgspec.json.decode(Path(path).read_bytes())
    points = []
    for records in (content["h200x2"], content["h200x4"]):
        points += [point for record in records if (point := _first_point(record)) is not None]
    rng = random.Random(seed)
    return [msgspec.structs.replace(point, held_out=rng.random() < HELD_OUT_SHARE) for point in points]


def _first_point(record: Mapping[str, float | str]) -> Point | None:
    kind, seconds = str(record["kind"]), float(record.get("t", 0))
    number = {name: int(value) for name, value in record.items() if isinstance(value, int)}
    if kind == "matmul" and seconds > HOST_BOUND_S:
        shape = (number["m"], number["n"], number["k"])
        return Point(kind="matrix", call="mm", shape=shape, dtype="bfloat16", seconds=seconds)
    if kind in ("relu", "copy") and seconds > HOST_BOUND_S:
        return Point(kind="memory", call=kind, size_bytes=4 * number["elems"], dtype="bfloat16", seconds=seconds)
    if kind == "sdpa_fwd":
        sizes = (number["b"], number["h"], number["h"], number["s"], number["s"], number["d"])
        return Point(kind="attention", call="sdpa_forward", shape=sizes, dtype="bfloat16", options={"causal": 1},
                     seconds=seconds)  # fmt: skip
    size = number.get("bytes", number.get("bytes_out", number.get("bytes_in", 0)))
    if kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all") and size >= HOST_BOUND_BYTES:
        return Point(kind="collective", call=kind, size_bytes=size, ranks=number["g"], dtype="bfloat16",
                     seconds=seconds)  # fmt: skip
    if kind == "p2p" and size >= HOST_BOUND_BYTES:
        return Point(kind="transfer", call="transfer", size_bytes=size, ranks=2, dtype="bfloat16", seconds=seconds)
    if kind == "overlap":
        alone = {"compute_s": float(record["t_mm"]), "comm_s": float(record["t_ar"])}
        shape = (number["m"], number["n"], number["k"])
        return Point(kind="overlap", call="matrix", beside="all_reduce", shape=shape, size_bytes=size, figures=alone,
                     dtype="bfloat16", seconds=float(record["t_both"]))  # fmt: skip
    return None


def ship(fit: DeviceFit) -> list[str]:
    """Write the fitted device and carry it over to every device whose figures were carried from it before."""
    save_device(fit.device)
    written, today = [fit.device.name], datetime.date.today().isoformat()
    for name in device_names():
        device = load_device(name)
        if name != fit.device.name and any(fit.device.name in says.source for says in device.provenance.values()):
            save_device(carried(device, fit.device, date=today))
            written.append(name)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scoreboard; exit code 1 where there are no points."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("points", nargs="*", help="files of points")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--ship", action="store_true", help="write the device files")
    parser.add_argument("--report", help="write the calibration report to this HTML file")
    parser.add_argument("--first", help="JSON of the first micro-benchmarks, written to benchmarks/data as points")
    options = parser.parse_args(arguments)
    if options.first:
        where = {"date": "2026-11-21", "device": "2 and 4 H200 SXM", "torch": "2.11.0+cu130",
                 "command": f"python -m benchmarks.calibration --first {Path(options.first).name}",
                 "timing": "median of 3 x 20 back-to-back launches by events"}  # fmt: skip
        save_points(DATA / "h200-first.jsonl", first_points(options.first), where)
    fit = fitted(options.device, options.points)
    if fit is None:
        print(f"no points of {options.device} in {DATA}", file=sys.stderr)
        return 1
    for name, form in fit.forms.items():
        print(f"form of {name}: {form}")
    for kind, entries in (("fitted", fit.residuals), ("held out", fit.held_out)):
        for entry in entries:
            print(f"{kind:9s} {entry}")
    for entry in scoreboard(fit.held_out_at_clock):
        print(f"held out, at the clock recorded beside each point: {entry}")
    for row in held_out_table(fit):
        inside = "" if row["inside"] is None else f"; {row['inside']:.0%} inside the 90 % interval"
        print(f"target of {row['section']}: {'kept' if row['kept'] else 'missed'}{inside}")
    counted = [(row["points"], row["inside"]) for row in held_out_table(fit) if row["inside"] is not None]
    total = sum(int(str(points)) for points, _ in counted)
    if total:
        pooled = sum(int(str(points)) * float(str(inside)) for points, inside in counted) / total
        print(f"inside the 90 % interval, pooled over {total} held-out points: {pooled:.0%}")
    if options.ship:
        print("written:", ", ".join(ship(fit)))
    if options.report:
        from reports.calibration import write_calibration_report

        print("report:", write_calibration_report(options.report, fit))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
