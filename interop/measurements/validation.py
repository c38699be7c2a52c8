"""Predict every row of a table of measurements, and score the predictions (`interop.measurements.scores`)."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from costmodels.price.torch_hosts import load_host
from interop.measurements.case import Case, products_of
from interop.measurements.cells import (
    BAD_COLUMN,
    BAD_REASON,
    BAD_VALUE,
    FIGURE,
    OUT_OF_MEMORY,
    READ_AS,
    ROW,
    Cells,
    Skip,
)  # fmt: skip
from interop.measurements.forecasts import MEMORY_MARGIN, MEMORY_UNITS, measured_as, model_flops, run_of
from interop.measurements.headers import METRICS
from interop.measurements.machines import load_machine
from interop.measurements.precisions import has_products
from interop.measurements.readings import Filling, least_split, needed_fillings, other_fillings
from interop.measurements.rows import case_of
from interop.measurements.scores import LESS_IS_BETTER, score
from interop.measurements.shares import as_read, is_large_run, most_share, share_of_peak, with_reading
from interop.measurements.tables import rows_of
from plans.errors import TwofoldError
from plans.shown import Shown
from simulator.stacks import stack_named

__all__ = ["Validation", "validate"]

_SAYS_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, repr=False)
class Validation(Shown):
    """Predictions of a table.

    Args:
        sources: per source and metric the scores, as `--json` prints them.
        rows: per predicted row the measured and the predicted value with its interval.
        skipped: number of the row and the reason.
        out_of_memory: of the skipped rows whose runs ran out of memory the number, the predicted peak with its
            interval, the room of the device, all in GB, and whether the prediction says so too (`agrees`).
    """

    sources: tuple[dict[str, Any], ...]
    rows: tuple[dict[str, Any], ...]
    skipped: tuple[dict[str, Any], ...]
    out_of_memory: tuple[dict[str, Any], ...] = ()

    def __repr__(self) -> str:
        errors_text = ", ".join(
            f"{source['metric']} {source['mape']:.1%} of {source['rows']} rows" for source in self.sources[:3]
        )
        more = f" and {len(self.sources) - 3} more" if len(self.sources) > 3 else ""
        return f"<Validation: mean error {errors_text}{more}; {len(self.skipped)} rows skipped>"

    def to_json(self) -> dict[str, Any]:
        """The JSON object of `twofold validate`."""
        return {
            "sources": list(self.sources), "rows": list(self.rows), "skipped": list(self.skipped),
            "out_of_memory": list(self.out_of_memory),
        }  # fmt: skip


def validate(
    path: str | os.PathLike[str], *, stack: str | None = None, machine: str | None = None, host: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Validation:  # fmt: skip
    """Predict every row of a table of measurements.

    Args:
        path: a table (see `interop.measurements.tables.read_table`).
        stack: the software that ran all rows; by default determined from each row.
        machine: the machine of all rows; by default determined from each row.
        host: host file of the host on which all rows ran; by default the measured hosts.
        on_progress: called every few seconds with the number of finished rows.

    Raises:
        TwofoldError: a table that cannot be read or has no row that can be predicted; an unknown stack or machine.

    >>> validation = validate("measurements.csv", stack="megatron")  # doctest: +SKIP
    """
    if stack is not None:
        stack_named(stack)
    if host is not None:
        load_host(host)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    out_of_memory: list[dict[str, Any]] = []
    groups: dict[tuple[str, str], list[tuple[tuple[str, ...], dict[str, Any]]]] = {}
    seen: dict[bytes, int] = {}
    reader = _Reader(_Given(stack=stack, machine=machine, host=host))
    said_s = time.monotonic()
    for count, row in enumerate(rows_of(path)):
        number = int(row.pop(ROW))
        if on_progress is not None and time.monotonic() - said_s > _SAYS_EVERY_S:
            said_s = time.monotonic()
            on_progress(f"{count:,} rows, {len(reader.known):,} of them different")
        try:
            if (earlier := seen.setdefault(_identity(row), number)) != number:
                raise Skip(f"it repeats row {earlier}")
            group, result = reader.read(row, number)
        except Skip as skip:
            if OUT_OF_MEMORY in row and (peak := reader.peak_of(row, number)) is not None:
                out_of_memory.append(peak)
            if (skipped_row := _skipped(row, number, skip)) not in skipped[-len(METRICS) :]:
                skipped.append(skipped_row)
            continue
        groups.setdefault((result["source"], result["metric"]), []).append((group, result))
        rows.append(result)
    if not rows and not skipped:
        raise TwofoldError(f"table {os.fspath(path)!r} has no rows")
    sources = tuple(score(source, metric, found) for (source, metric), found in groups.items())
    return Validation(
        sources=sources, rows=tuple(rows), skipped=tuple(skipped), out_of_memory=tuple(out_of_memory)
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """The caller's settings for all rows, as of `validate`; None: as in the rows."""

    stack: str | None
    machine: str | None
    host: str | None


class _Known(NamedTuple):
    """A row without its value.

    Args:
        group: of the row.
        result: what `Validation.rows` says of it.
        is_large: whether it cannot be slow, as of `shares.is_large_run`.
        counted: the operations that its metric counts, over those of one forward and backward.
    """

    group: tuple[str, ...]
    result: dict[str, Any]
    is_large: bool
    counted: float


class _Reader:
    """Predicts rows; those that differ in their value only are read and priced once."""

    def __init__(self, given: _Given) -> None:
        self.given = given
        self.known: dict[bytes, _Known | Skip] = {}

    def read(self, row: Mapping[str, str], number: int) -> tuple[tuple[str, ...], dict[str, Any]]:
        """The group of a row and what `Validation.rows` says of it.

        Raises:
            Skip: it cannot be predicted.
        """
        if self.given.machine is not None and not row.get("gpu_type"):
            row = {**row, "gpu_type": self.given.machine.rpartition("-x")[0]}
        _, value, assumed = Cells(row).measured()
        key = _digest((name, cell) for name, cell in row.items() if name not in ("value", FIGURE, READ_AS))
        if key not in self.known:
            try:
                case, result = _read(row, number, self.given)
                counted = model_flops(case) / model_flops(dataclasses.replace(case, counts_recompute=False))
                self.known[key] = _Known(case.group, result, is_large_run(case), counted)
            except Skip as skip:
                self.known[key] = skip
            except (TwofoldError, OverflowError) as error:
                reason = "its sizes are beyond what can be counted" if isinstance(error, OverflowError) else str(error)
                self.known[key] = Skip(reason)
        found = self.known[key]
        if isinstance(found, Skip):
            raise found
        group, result, large, counted = found
        if (unit := MEMORY_UNITS.get(result["metric"])) is not None:
            room_bytes = load_machine(result["machine"]).memory_bytes
            if value * unit > MEMORY_MARGIN * room_bytes:
                raise Skip(f"{result['metric']} {value:g}, but the device has {room_bytes / unit:.4g}", "value")
        share = share_of_peak(result, value)
        narrower = any("tf32" in reading["cells"].get("stack", "") for reading in result["readings"])
        if not (narrower and share > 1):
            factor, other, remarks = as_read(row, result["metric"], value, share, is_large=large)
            value, assumed, result = factor * value, (*assumed, *remarks), with_reading(result, factor, other)
            device = result["machine"].rpartition("-x")[0]
            if factor * share > 1 and not row.get("precision") and device and has_products(device, "float8"):
                group, result = self.read({**row, "precision": "fp8"}, number)
                remark = (
                    f"precision not stated: fp8, as the figure is {factor * share:.0%} of the peak of 16-bit products"
                )
                return group, {**result, "assumed": [remark, *result["assumed"]]}
            if (reached := counted * factor * share) > most_share(result["metric"]):
                raise Skip(f"{result['metric']} {value:g} would be {reached:.0%} of the device's peak", "value")
        return group, {**result, "row": number, "value": value, "assumed": [*assumed, *result["assumed"]]}

    def peak_of(self, row: Mapping[str, str], number: int) -> dict[str, Any] | None:
        """What `Validation.out_of_memory` says of a row; None if it cannot be predicted."""
        cells = {name: cell for name, cell in row.items() if name not in (BAD_COLUMN, BAD_REASON, BAD_VALUE)}
        cells |= {"metric": "peak_memory_GB", "value": "1"}
        found = _priced(cells, number, self.given, needed_fillings(cells), fits_only=False)
        if isinstance(found, Exception):
            return None
        peaks = [result for _, _, result in found]
        room_GB = load_machine(peaks[0]["machine"]).free_bytes / 1e9
        most = max(each["high"] for each in peaks)
        return {
            "row": number, "source": row.get("source", ""), "predicted": peaks[0]["predicted"],
            "low": min(each["low"] for each in peaks), "high": most, "room": room_GB, "agrees": most > room_GB,
        }  # fmt: skip


def _skipped(row: Mapping[str, str], number: int, skip: Skip) -> dict[str, Any]:
    """A skipped row: its number, the reason, the column and the cell."""
    value = row.get(BAD_VALUE, row.get(skip.column, "")) if skip.column else ""
    return {"row": number, "column": skip.column, "value": value, "reason": str(skip), "source": row.get("source", "")}


def _identity(row: Mapping[str, str]) -> bytes:
    """A digest that is equal for rows of the same measurement: all cells but remarks."""
    return _digest((name, cell) for name, cell in row.items() if name not in ("notes", "provenance"))


def _digest(cells: Iterable[tuple[str, str]]) -> bytes:
    return hashlib.blake2b(repr(sorted(cells)).encode(), digest_size=16).digest()


_Reading = tuple[Filling, Case, dict[str, Any]]
"""How the blank cells of a row are filled, the configuration, and its prediction."""


def _read(row: Mapping[str, str], number: int, given: _Given) -> tuple[Case, dict[str, Any]]:
    """The configuration of a row and its prediction, over all plausible readings of what the row leaves open.

    The prediction is that of the most plausible reading; where a cell is missing that has no usual value it is that of
    the middle one. The interval spans all of them. A reading that does not fit the device is left out where another
    fits: the row ran.
    """
    found = _priced(row, number, given, needed_fillings(row))
    if isinstance(found, Exception):
        raise found
    found = list(_least_split(found))
    filled, case, result = _middle(found)
    others = [each for each in found if each[0] != filled]
    base = {**row, **filled}
    more = _others(base, case, number, given, is_split="tp" in filled)
    if not result["runs"] and more and more[0][2]["fits"]:  # it ran, so it was not this one
        (fitting, case, result), *fit_too = more
        base |= fitting
        more = [*fit_too, *_others(base, case, number, given, is_split="tp" in filled)]
        cells_text = ", ".join(f"{name} {cell}" for name, cell in fitting.items())
        result["assumed"].append(f"{cells_text}: the first reading that fits the device")
    others += [each for each in more if each[2]["fits"] or not result["runs"]]
    result["readings"] = [
        {"cells": dict(filling), "predicted": other["predicted"]} for filling, _, other in others
    ]  # fmt: skip
    result["low"] = min(result["low"], *(other["low"] for _, _, other in others), result["low"])
    result["high"] = max(result["high"], *(other["high"] for _, _, other in others), result["high"])
    for name, cell in filled.items():
        which = f", the middle of {len(found)} readings" if len(found) > 1 else ""
        result["assumed"].append(f"{name} not stated: {cell}{which}")
    return case, result


def _least_split(found: Sequence[_Reading]) -> Sequence[_Reading]:
    """Of readings of degrees that a row does not state, those that split the model least; if none fits, the one that
    splits it most."""
    if not any(name in each[0] for each in found for name in ("tp", "ep", "gpu_count")):
        return found
    if not found[0][2]["fits"]:
        return found[-1:]
    chosen = least_split([each[0] for each in found])
    return [each for each in found if each[0] in chosen]


def _middle(found: Sequence[_Reading]) -> _Reading:
    """The middle one of readings by their predictions; if none fits the device, the first, of the smallest values."""
    if not any(each[2]["fits"] for each in found):
        return found[0]
    order = sorted(found, key=lambda each: each[2]["predicted"] * (1 if each[1].metric in LESS_IS_BETTER else -1))
    return order[(len(order) - 1) // 2]


def _others(
    base: Mapping[str, str], case: Case, number: int, given: _Given, *, is_split: bool
) -> list[_Reading]:  # fmt: skip
    """Other readings of a row, given its most plausible one, whose tensor and pipeline degrees may be assumed."""
    fillings = list(other_fillings(base, case, stack_is_given=given.stack is not None, is_split=is_split))
    found = _priced(base, number, given, fillings)
    return [] if isinstance(found, Exception) else found


def _priced(
    row: Mapping[str, str], number: int, given: _Given, fillings: Sequence[Filling], *, fits_only: bool = True
) -> list[_Reading] | Exception:
    """Every filling with its configuration and prediction; the reason if there is none.

    Args:
        row, number, given: as of the reader.
        fillings: of blank cells.
        fits_only: whether those that do not fit the device are left out where others do: the row ran.
    """
    found: list[_Reading] = []
    reason: Exception = Skip("nothing in it is open")
    for filling in fillings:
        try:
            case = case_of({**row, **filling}, number, given.stack)
            found.append((filling, case, _row(case, given)))
        except (Skip, TwofoldError) as error:
            reason = error
    fitting = [each for each in found if each[2]["fits"]] if fits_only else []
    return fitting or found or reason


def _row(case: Case, given: _Given) -> dict[str, Any]:
    run = run_of(case, machine=given.machine, host=given.host)
    found = run.found
    predicted, low, high = (measured_as(case, found, seconds) for seconds in (found.step_s, found.low_s, found.high_s))
    low, high = min(low, high), max(low, high)
    assumed = [*map(sys.intern, case.assumed), *run.assumed]
    share = dataclasses.replace(case, metric="mfu_percent", counts_recompute=False, peak=products_of(case.stack))
    if case.metric.startswith("peak_memory"):
        unit = predicted / found.peak_bytes
        low, high = (unit * edge for edge in run.memory)
    return {
        "row": case.row, "source": case.source, "metric": case.metric, "value": case.value, "predicted": predicted,
        "low": low, "high": high, "mfu": measured_as(share, found, found.step_s) / 100,
        "machine": given.machine or case.machine, "stack": case.stack, "fits": run.fits, "runs": run.runs,
        "assumed": assumed,
    } | {_SHOWN[name]: sys.intern(text) for name, text in case.labels.items() if name in _SHOWN}  # fmt: skip


_SHOWN = {
    name: f"label_{name}" for name in (
        "model", "seq", "global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "cp", "schedule", "sequence_parallel",
        "recompute", "zero_level", "compile", "gpu_count",
    )
}  # fmt: skip
"""Column -> its name next to a prediction."""
