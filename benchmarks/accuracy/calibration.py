"""How well the cost models predict measured points that they were not fitted to.

    python -m benchmarks.accuracy.calibration                            held-out errors of the shipped points, a minute
    python -m benchmarks.accuracy.calibration --device h100-sxm          of one device
    python -m benchmarks.accuracy.calibration POINTS... --device h200    of other points, fitted again
    OMP_NUM_THREADS=1 python -m benchmarks.accuracy.calibration --ship   writes the device files; threads change digits
    python -m benchmarks.accuracy.calibration --report calibration.html  also the calibration report

Points are in benchmarks/data/<device>-*.jsonl[.gz], as `twofold calibrate` writes them, with date, versions and
command. Shipping fits the measured devices and carries their figures over to those that were never measured. Held-out
points were chosen by seed and are not fitted; points that other hosts measured again (repeat-*) are only compared. No
step time of any training run is used. unfitted-h100-sxm-x2 has the power of mixtures of kernels and messages of 2 H100:
groups of two alone say nothing about larger ones, and with the power the clocks of seven steps came out 0 to 10 % off.
"""

from __future__ import annotations

import argparse
import datetime
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

import costmodels
from benchmarks import FOLDER
from costmodels.fit.device import DeviceFit, fit_device
from costmodels.fit.points import Point, load_points, save_points
from costmodels.fit.power import SETTLED
from costmodels.fit.predict import TARGETS, scoreboard
from costmodels.fit.transfer_calibration import at_sustained_clock, carried
from costmodels.machine.catalogue import Device, device_names, load_device, save_device
from costmodels.machine.sections import Provenance
from costmodels.machine.topologies import example_machines
from costmodels.widths import STEP_LONGER, UNEXPLAINED
from plans.model.graph import itemsize

__all__ = ["DATA", "clock_exponents", "fitted", "held_out_table", "main", "repeated_table", "ship"]

DATA = FOLDER / "data"

MEASURED = ("h200", "h100-sxm")
"""Devices that have points, the first is carried over to the others."""

SOURCES = dict.fromkeys(("h100-sxm-96gb", "gh200", "h100-pcie", "h100-nvl", "h800"), "h100-sxm")
"""Device -> the measured one it is most like, if that is not the first."""

STATIC_W = 100.0
"""Power that a chip draws at any clock (assumed; the exponent of the clock moves by 0.2 between 50 and 150 W)."""

CLOCK_POWER = 2.5
"""What dynamic power grows with of the clock: between 1, at a fixed voltage, and 3, where voltage goes with it."""

MEMORY_J_PER_BYTE = 36e-12
"""What memory on the package draws for a byte (assumed: 4.5 pJ a bit)."""

LEAST_REPEATED = 8

NEWER = ("third", "fourth", "fifth")
"""Parts of the names of files whose short kernels were taken with the chip kept busy before every single repeat."""

KERNELS = ("matrix", "memory", "attention")

NEW_LINEARS = ((1536, 6144), (2560, 6912), (3072, 8192), (3584, 18944), (6144, 16384), (7168, 2048), (1280, 5120))
"""Features in and out, the latter also split by 2 and 4 ranks, of held-out products of whole families."""

NEW_TOKENS = (256, 1024, 3072, 6144)

HELD_OUT_SHARE = 0.25
SHORT_S = 2e-5
HOST_BOUND_S = 1.2e-5
"""Back-to-back launches that take less than this were bound by the host that issued them, not by the device."""

HOST_BOUND_BYTES = 4_000_000
"""Likewise for communication of smaller messages."""


def files_of(device: str) -> list[Path]:
    """The files of points of a device of the catalogue that are fitted or held out."""
    return sorted(DATA.glob(f"{device}-*.jsonl*"))


def points_of(files: Sequence[Path]) -> tuple[list[Point], dict[str, str]]:
    """The points of files and where they were taken, the latest last; kernels that were taken again in a better way are
    there as they were taken then.
    """
    read = sorted(
        ((load_points(file), any(each in file.name for each in NEWER)) for file in files),
        key=lambda each: _taken(each[0][1]),
    )
    again = {point.key for (some, _), newer in read if newer for point in some if point.kind in KERNELS}
    points: list[Point] = []
    environment: dict[str, str] = {}
    for (some, where), newer in read:
        points += [point for point in some if newer or point.key not in again]
        environment |= where
    return points, environment


def _taken(environment: Mapping[str, str]) -> str:
    return environment.get("taken", "")


def fitted(device: str = "h200", paths: Sequence[str | Path] = (), base: Device | None = None) -> DeviceFit | None:
    """A device of the catalogue fitted to its points; None where there are none.

    Args:
        device: name in the catalogue.
        paths: files of points; by default those of benchmarks/data, without instructions that the first measured
            device was measured with in later code: their rules are carried over.
        base: what is not measured; by default the device as it is in the catalogue.
    """
    files = [Path(path) for path in paths] or files_of(device)
    points, environment = points_of(files)
    if not paths and device != MEASURED[0]:
        outdated = outdated_calls(files, files_of(MEASURED[0]))
        points = [point for point in points if point.kind != "rule" or point.call not in outdated]
    return fit_device(points, environment, base or load_device(device)) if points else None


def outdated_calls(files: Sequence[Path], others: Sequence[Path]) -> frozenset[str]:
    """The executor's calls whose points in `files` are of older code than those in `others`."""
    own, theirs = _last_codes(files), _last_codes(others)
    return frozenset(
        call for call, (taken, code) in own.items()
        if call in theirs and theirs[call][1] != code and theirs[call][0] > taken
    )  # fmt: skip


def _last_codes(files: Sequence[Path]) -> dict[str, tuple[str, str]]:
    """Call -> when its points were taken last, and the digest of its code then."""
    found: dict[str, tuple[str, str]] = {}
    for file in files:
        points, where = load_points(file)
        taken = where.get("taken", where.get("date", ""))
        for point in points:
            if point.kind == "rule" and "code" in point.options:
                found[point.call] = max(found.get(point.call, ("", "")), (taken, str(point.options["code"])))
    return found


def of_new_linears(point: Point) -> bool:
    """Whether a product is one of a linear of a family of transformers that no fitted product was drawn from.

    >>> of_new_linears(Point(kind="matrix", call="mm", form="tn", shape=(3072, 3072, 1024), seconds=1.0))
    True
    """
    if point.kind != "matrix":
        return False
    first, second = {"nt": (2, 1), "nn": (1, 2), "tn": (1, 0)}.get(point.form, (0, 0))
    token_dim = 3 - first - second if first != second else 0
    features_in, features_out = point.shape[first], point.shape[second]
    known = {(one, other // ways) for one, other in NEW_LINEARS for ways in (1, 2, 4)}
    return point.batch == 1 and point.shape[token_dim] in NEW_TOKENS and (features_in, features_out) in known


def repeated_table(device: str) -> list[dict[str, object]]:
    """How far other measurings of the same points on chips and hosts of the same kind are from those that are used.

    Per section and file (repeat-<device>-*): points, the median and the 95th percentile of the relative difference, and
    its bias. No form can predict single measurings better than about 0.7 of that (a difference has both their errors).
    """
    first = {point.key: point for point in points_of(files_of(device))[0]}
    rows: list[dict[str, object]] = []
    for file in sorted(DATA.glob(f"repeat-{device}-*.jsonl*")):
        again = [point for point in load_points(file)[0] if point.key in first]
        for section in (*TARGETS, "dispatch"):
            own = [point for point in again if point.kind == section]
            if len(own) >= LEAST_REPEATED:
                difference = np.array([point.seconds / first[point.key].seconds - 1 for point in own])
                rows.append({
                    "file": file.name, "section": section, "points": len(own),
                    "median": round(float(np.median(np.abs(difference))), 4),
                    "p95": round(float(np.quantile(np.abs(difference), 0.95)), 4),
                    "bias": round(float(np.median(difference)), 4),
                })  # fmt: skip
    return rows


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


def clock_exponents(points: Sequence[Point]) -> tuple[float, float] | None:
    """Between which powers of the clock the power of products grows, of a chip held at its limit; None where unknown.

    The same product runs alone, and for a share d of the time with copies between (kind "clock", calls "sustained"):
    at the limit P in both. With the power Q of copies, products draw (P - (1 - d) Q) / d between copies, at a higher
    clock, which the time of the product tells. Copies alone run at the highest clock ("sustained_memory"): Q is at most
    what they draw there, and at least what is left of it if all but static power and the memory's goes with the clock.

    Args:
        points: of one chip.
    """
    own = [point for point in points if point.kind == "clock" and int(point.options.get("window", 0)) >= SETTLED]
    alone, beside = ([p for p in own if p.call == "sustained" and p.options.get("duty") == duty] for duty in (100, 60))
    copies = [point for point in own if point.call == "sustained_memory" and point.power_W]
    if not (alone and beside and copies):
        return None
    power_W, mixed_W, most_W = (float(np.median([p.power_W for p in some])) for some in (alone, beside, copies))
    first_s, second_s, copied_s = (float(np.mean([p.seconds for p in some])) for some in (alone, beside, copies))
    slower = float(np.mean([p.clock_MHz for p in beside]) / np.mean([p.clock_MHz for p in copies]))
    memory_W = 2 * itemsize(copies[0].dtype) * copies[0].shape[0] / copied_s * MEMORY_J_PER_BYTE

    def exponent(copy_W: float) -> float:
        product_W = (mixed_W - 0.4 * copy_W) / 0.6
        return math.log((product_W - STATIC_W) / (power_W - STATIC_W)) / math.log(first_s / second_s)

    low = high = exponent(most_W)
    for _ in range(20):
        high = exponent(STATIC_W + memory_W + (most_W - STATIC_W - memory_W) * slower**high)
    return low, high


def with_power_limit(device: Device, bounds: tuple[float, float], date: str) -> Device:
    """The device at the clock that its power limit leaves it, with a wider interval.

    Args:
        device: carried over from a chip with a limit of 700 W, with a limit of its own.
        bounds: of the exponent, as `clock_exponents` gives them.
        date: of the carrying.
    """
    limit_W = device.limit_W
    assert limit_W is not None
    share = (limit_W - STATIC_W) / (700.0 - STATIC_W)
    least, clock, most = (round(share ** (1 / power), 4) for power in (bounds[0], CLOCK_POWER, bounds[1]))
    unsure = math.log(most / least) / 4  # the bounds as two standard deviations either side
    text = (
        f"clock at {limit_W:g} instead of 700 W: what is drawn beyond {STATIC_W:g} W as the power {CLOCK_POWER:g} of "
        f"the clock; an H100 held at 700 W by products alone and between copies says {bounds[0]:.1f} to "
        f"{bounds[1]:.1f}, which is {least:.2f} to {most:.2f}"
    )
    spreads = {
        name: round(math.hypot(spread, unsure), 4) if name in ("matrix", "attention") else spread
        for name, spread in device.spreads.items()
    }
    says = Provenance(status="assumed", source=text, date=date)
    return msgspec.structs.replace(
        device, compute=at_sustained_clock(device.compute, clock), spreads=spreads,
        provenance={**device.provenance, "compute.sustained_clock": says},
    )  # fmt: skip


def with_residuals(device: Device, status: Literal["measured", "assumed"], date: str) -> Device:
    """`device` with what distinguishes steps from the prices of their parts, which is measured where its steps were:
    `STEP_LONGER` and `UNEXPLAINED`.
    """
    widens = "60 replayed steps of own transformers on 1 and 2 H200, beyond what the spreads explain"
    lengthens = "median of 222 replayed steps of own transformers (python -m benchmarks.accuracy.residuals)"
    says = {
        "interval": Provenance(status=status, source=widens, date=date),
        "compute.longer_in_steps": Provenance(status=status, source=lengthens, date=date),
    }
    compute = msgspec.structs.replace(device.compute, longer_in_steps=STEP_LONGER)
    return msgspec.structs.replace(
        device, interval=UNEXPLAINED, compute=compute, provenance={**device.provenance, **says}
    )  # fmt: skip


def ship() -> dict[str, DeviceFit]:
    """Fit and write the measured devices, carry them over to every device whose figures were carried over before, and
    write the machines of `costmodels.machine.topologies` again, which consist of such devices.

    Returns:
        The fits of the measured devices.
    """
    today, bounds = datetime.date.today().isoformat(), None
    fits: dict[str, DeviceFit] = {}
    for name in MEASURED:
        base = load_device(name)
        if fits:  # what was not measured on this one
            first = fits[MEASURED[0]].device
            base = carried(base, first, date=today)
            rules = {**base.compute.rules, **first.compute.rules}  # the fit replaces those that have points
            base = msgspec.structs.replace(base, compute=msgspec.structs.replace(base.compute, rules=rules))
        base = with_residuals(base, "measured", today)
        fit = fitted(name, base=base)
        if fit is not None:
            fits[name] = fit
            save_device(fit.device)
        for file in files_of(name):
            bounds = clock_exponents(load_points(file)[0]) or bounds  # of the last, which is most like them
    carry_over({name: fit.device for name, fit in fits.items()}, bounds)
    for name, machine in example_machines().items():
        machine.save(Path(costmodels.__file__).with_name("machines") / f"{name}.json")
    return fits


def carry_over(sources: Mapping[str, Device], bounds: tuple[float, float] | None) -> None:
    """Write every device whose figures were carried over before, from the measured one that it is most like.

    Args:
        sources: name -> measured device.
        bounds: of the power of the clock that power grows with (`clock_exponents`).
    """
    today = datetime.date.today().isoformat()
    for name in device_names():
        device, source = load_device(name), sources.get(SOURCES.get(name, MEASURED[0]))
        if name in MEASURED or source is None:
            continue
        if any("carried over" in says.source for says in device.provenance.values()):
            device = carried(device, source, date=today)
            if device.device == "cuda":
                device = with_residuals(device, "assumed", today)
            # a source with a model of its power gives the clock itself (`costmodels.fit.transfer_calibration`)
            limited = device.limit_W is not None and source.compute.power is None and device.limit_W != source.limit_W
            if limited and bounds is not None:
                device = with_power_limit(device, bounds, today)
            save_device(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scoreboard; exit code 1 where there are no points."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("points", nargs="*", help="files of points")
    parser.add_argument("--device", help="one device; default: all that have points")
    parser.add_argument("--ship", action="store_true", help="write the device files")
    parser.add_argument("--report", help="write the calibration report to this HTML file")
    parser.add_argument("--first", help="JSON of the first micro-benchmarks, written to benchmarks/data as points")
    options = parser.parse_args(arguments)
    if options.first:
        where = {"date": "2026-11-21", "device": "2 and 4 H200 SXM", "torch": "2.11.0+cu130",
                 "command": f"python -m benchmarks.accuracy.calibration --first {Path(options.first).name}",
                 "timing": "median of 3 x 20 back-to-back launches by events"}  # fmt: skip
        save_points(DATA / "h200-first.jsonl", first_points(options.first), where)
    fits = ship() if options.ship else {}
    names = [options.device] if options.device else list(MEASURED)
    for name in names:
        fit = fits.get(name) or fitted(name, options.points)
        if fit is None:
            print(f"no points of {name} in {DATA}", file=sys.stderr)
            return 1
        fits[name] = fit
        say(name, fit)
    if options.report:
        from reports.calibration import CalibrationReport, calibration_page

        report = CalibrationReport.of_device(fits[names[0]])
        print("report:", calibration_page(report).write(options.report))
    return 0


def say(name: str, fit: DeviceFit) -> None:
    """Print how good a fit is, on points that it saw and on those held out."""
    print(f"== {name}")
    for section, form in fit.forms.items():
        print(f"form of {section}: {form}")
    for kind, entries in (
        ("fitted", fit.residuals), ("held out", fit.held_out),
        ("held out, at the clock recorded beside each point", scoreboard(fit.held_out_at_clock)),
    ):  # fmt: skip
        for entry in entries:
            print(
                f"{kind}: {entry.section}: {entry.num_points} points, median error {entry.median_error:.1%}, 95th "
                f"percentile {entry.p95_error:.1%}, bias {entry.bias:+.1%}"
            )
    drawn = [entry for entry in fit.predicted if entry.section == "matrix" and entry.point.held_out]
    parts = {
        "of linears of families that nothing fitted is of": [e for e in drawn if of_new_linears(e.point)],
        "of random sizes": [e for e in drawn if not of_new_linears(e.point)],
        "below 20 us": [e for e in drawn if e.point.seconds < SHORT_S],
        "from 20 us on": [e for e in drawn if e.point.seconds >= SHORT_S],
    }
    for what, some in parts.items():
        for entry in scoreboard(some):
            print(
                f"held out, {what}: {entry.section}: {entry.num_points} points, median error {entry.median_error:.1%}, "
                f"95th percentile {entry.p95_error:.1%}, bias {entry.bias:+.1%}"
            )
    rows = held_out_table(fit)
    for row in rows:
        inside = "" if row["inside"] is None else f"; {row['inside']:.0%} inside the 90 % interval"
        print(f"target of {row['section']}: {'kept' if row['kept'] else 'missed'}{inside}")
    counted = [(row["points"], row["inside"]) for row in rows if row["inside"] is not None]
    total = sum(int(str(points)) for points, _ in counted)
    if total:
        pooled = sum(int(str(points)) * float(str(inside)) for points, inside in counted) / total
        print(f"inside the 90 % interval, pooled over {total} held-out points: {pooled:.0%}")
    for row in repeated_table(name):
        print(
            f"measured again, {row['file']}: {row['section']}: {row['points']} points, median difference "
            f"{row['median']:.1%}, 95th percentile {row['p95']:.1%}, bias {row['bias']:+.1%}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
