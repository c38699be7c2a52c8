"""The scoreboard: every row of a table of measurements predicted, and how far off.

Pair order: of all pairs of rows in a group (same source, model, sequence, precision, switches, devices and global
batch) whose measured values differ by more than 2 %, the share that the predictions order alike, ties as half. Regret:
how much worse the row that the predictions choose measured than the best of its group.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from costmodels import Machine
from plans.errors import TwofoldError
from simulator.scale import Forecast, forecast, stack_named
from simulator.scale.memory import memory_interval
from twofold.tables import Case, Skip, case_of, read_table

__all__ = ["Validation", "measured_as", "validate"]

_DIFFERENT = 0.02
_LESS_IS_BETTER = ("iteration_time_s", "peak_memory_GiB", "peak_memory_GB")


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Predictions of a table.

    Args:
        sources: per source and metric the scores, as `--json` prints them.
        rows: per predicted row the measured and the predicted value with its interval.
        skipped: number of the row and the reason.
    """

    sources: tuple[dict[str, Any], ...]
    rows: tuple[dict[str, Any], ...]
    skipped: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """The fixed form: sources, rows, skipped."""
        return {"sources": list(self.sources), "rows": list(self.rows), "skipped": list(self.skipped)}


def validate(path: str | os.PathLike[str], *, stack: str | None = None, machine: str | None = None) -> Validation:
    """Predict every row of a table of measurements.

    Args:
        path: a CSV table with the columns of `twofold.tables.COLUMNS`.
        stack: the software that ran all rows; by default found from each row.
        machine: the machine of all rows; by default found from each row.

    Raises:
        TwofoldError: a table that cannot be read, or of which no row can be predicted; an unknown stack or machine.
    """
    if stack is not None:
        stack_named(stack)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    cases: list[tuple[Case, dict[str, Any]]] = []
    for number, row in enumerate(read_table(path), start=1):
        try:
            case = case_of(row, number, stack)
            result = _row(case, machine)
        except (Skip, TwofoldError) as reason:
            skipped.append({"row": number, "reason": str(reason), "source": row.get("source", "")})
            continue
        except OverflowError:
            told = "its sizes are beyond what can be counted"
            skipped.append({"row": number, "reason": told, "source": row.get("source", "")})
            continue
        cases.append((case, result))
        rows.append(result)
    groups: dict[tuple[str, str], list[tuple[Case, dict[str, Any]]]] = {}
    for case, result in cases:
        groups.setdefault((case.source, case.metric), []).append((case, result))
    sources = tuple(_score(source, metric, found) for (source, metric), found in groups.items())
    return Validation(sources=sources, rows=tuple(rows), skipped=tuple(skipped))


def _row(case: Case, machine: str | None) -> dict[str, Any]:
    stack = stack_named(case.stack)
    found = forecast(case.config, case.degrees, Machine.load(machine or case.machine), stack=stack)
    predicted, low, high = (measured_as(case, found, seconds) for seconds in (found.step_s, found.low_s, found.high_s))
    low, high = min(low, high), max(low, high)
    if case.metric.startswith("peak_memory"):
        unit = predicted / found.peak_bytes
        unknown = stack.unknown_bytes(case.config, case.degrees)
        edges = memory_interval(found.memory, unknown_bytes=unknown, reserved=stack.reserved)
        low, high = (unit * edge for edge in edges)
    return {
        "row": case.row, "source": case.source, "metric": case.metric, "value": case.value, "predicted": predicted,
        "low": low, "high": high, "machine": machine or case.machine, "stack": case.stack,
        "assumed": list(case.assumed),
    } | {f"label_{name}": text for name, text in case.labels.items() if name in _SHOWN}  # fmt: skip


_SHOWN = ("model", "seq", "global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "cp", "schedule", "sequence_parallel",
          "recompute", "zero_level", "compile", "gpu_count")  # fmt: skip


def measured_as(case: Case, found: Forecast, step_s: float) -> float:
    """A prediction in the unit of a row's metric.

    Model FLOPs are those of Narayanan et al. 2021 (arXiv 2104.04473, eq. 3) without recomputation for `mfu_percent`,
    with what is recomputed for `tflops_per_gpu` as that paper counts them.
    """
    degrees, config = case.degrees, case.config
    gpus = degrees.num_ranks
    if case.metric == "iteration_time_s":
        return step_s
    if case.metric == "tokens_per_s_per_gpu":
        return degrees.global_batch * config.seq / step_s / gpus
    if case.metric == "samples_per_s_per_gpu":
        return degrees.global_batch / step_s / gpus
    if case.metric == "peak_memory_GiB":
        return found.peak_bytes / 2**30
    if case.metric == "peak_memory_GB":
        return found.peak_bytes / 1e9
    flops = model_flops(case)
    if case.metric == "tflops_per_gpu":
        return flops * (4 / 3 if degrees.recompute == "full" else 1) / step_s / gpus / 1e12
    machine = Machine.load(case.machine)
    return 100 * flops / step_s / gpus / machine.compute.matrix_flops_per_s[config.dtype]


def model_flops(case: Case) -> float:
    """Forward and backward of all matrix products and attention of one step."""
    config, tokens = case.config, case.degrees.global_batch * case.config.seq
    wide, narrow = config.num_heads * config.head_size, config.kv_heads * config.head_size
    products = config.hidden * (2 * wide + 2 * narrow) + (3 if config.gated else 2) * config.hidden * config.inner
    attention = 2 * config.seq * wide
    return 6.0 * tokens * (config.num_layers * (products + attention) + config.vocab * config.hidden)


def _score(source: str, metric: str, found: Sequence[tuple[Case, dict[str, Any]]]) -> dict[str, Any]:
    errors = [result["predicted"] / result["value"] - 1 for _, result in found]
    inside = [result["low"] <= result["value"] <= result["high"] for _, result in found]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for case, result in found:
        groups.setdefault(case.group, []).append(result)
    agreed = pairs = 0.0
    regrets: list[float] = []
    sign = 1 if metric in _LESS_IS_BETTER else -1
    for rows in groups.values():
        for one, other in combinations(rows, 2):
            if abs(one["value"] - other["value"]) <= _DIFFERENT * min(one["value"], other["value"]):
                continue
            pairs += 1
            measured, predicted = one["value"] - other["value"], one["predicted"] - other["predicted"]
            agreed += 0.5 if predicted == 0 else float((measured > 0) == (predicted > 0))
        if len(rows) > 1:
            chosen = min(rows, key=lambda row: sign * row["predicted"])["value"]
            best = min(rows, key=lambda row: sign * row["value"])["value"]
            regrets.append(chosen / best - 1 if sign > 0 else best / chosen - 1)
    absolute = [abs(error) for error in errors]
    return {
        "source": source, "metric": metric, "rows": len(errors), "mape": statistics.fmean(absolute),
        "median_ape": statistics.median(absolute), "bias": statistics.fmean(errors),
        "within_interval": sum(inside) / len(inside), "pair_order": agreed / pairs if pairs else None,
        "regret_mean": statistics.fmean(regrets) if regrets else None, "regret_max": max(regrets, default=None),
    }  # fmt: skip
