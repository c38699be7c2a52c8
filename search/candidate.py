"""A configuration with its forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plans.degrees import ORDER, Degrees
from simulator.forecast import Forecast

__all__ = ["Candidate", "describe", "identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration and its forecast."""

    degrees: Degrees
    forecast: Forecast

    @property
    def key(self) -> tuple[Any, ...]:
        """Orders what is equally fast: less memory first, then smaller degrees."""
        each = self.degrees
        return (
            self.forecast.step_s, self.forecast.peak_bytes, each.pp, each.tp, each.cp, each.ep,
            each.micro_batch, each.schedule,
            each.virtual, each.recompute, each.recompute_layers or 0, each.optimizer.parallel_level,
            each.sequence_parallel, each.layers or (),
            each.order != ORDER, each.order,
        )  # fmt: skip


def identity(degrees: Degrees) -> tuple[Any, ...]:
    """What tells configurations of one problem apart."""
    return (
        degrees.dp, degrees.cp, degrees.tp, degrees.pp, degrees.ep, degrees.micro_batch,
        degrees.schedule, degrees.virtual,
        degrees.recompute, degrees.recompute_layers, degrees.optimizer.parallel_level, degrees.sequence_parallel,
        degrees.layers, degrees.order,
    )  # fmt: skip


def describe(degrees: Degrees) -> str:
    """One line of plain words.

    >>> describe(Degrees(dp=2, tp=4, pp=2, micro_batch=1, global_batch=16))
    'dp 2 tp 4 pp 2, micro-batch 1 x 8, 1f1b, recompute none, optimizer level 0'
    """
    parts = [f"{name} {value}" for name in ("dp", "ep", "cp", "tp", "pp") if (value := getattr(degrees, name)) > 1]
    schedule = degrees.schedule if degrees.virtual == 1 else f"{degrees.schedule} x {degrees.virtual}"
    micro = f"micro-batch {degrees.micro_batch} x {degrees.num_micro_batches}"
    recompute = degrees.recompute
    if degrees.recompute_layers is not None:
        recompute += f" in {degrees.recompute_layers} of a chunk's blocks"
    text = (
        f"{' '.join(parts) or 'one device'}, {micro}, {schedule}, "
        f"recompute {recompute}, optimizer level {degrees.optimizer.parallel_level}"
    )
    if degrees.sequence_parallel:
        text += ", sequence parallel"
    if degrees.order != ORDER:
        text += f", order {'-'.join(axis for axis in degrees.order if getattr(degrees, axis) > 1)}"
    return text + (f", layers {_runs(degrees.layers)}" if degrees.layers else "")


def _runs(layers: Sequence[int]) -> str:
    """3, 4, 4, 4, 1 as "3 4x3 1"."""
    parts: list[list[int]] = []
    for each in layers:
        if parts and parts[-1][0] == each:
            parts[-1][1] += 1
        else:
            parts.append([each, 1])
    return " ".join(f"{value}x{count}" if count > 1 else str(value) for value, count in parts)
