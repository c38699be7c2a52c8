"""The memory of a rank, from templates: permanent values, those of a micro-batch, and those of an action."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from costmodels.widths import MEMORY_ACTIVATIONS, MEMORY_RESERVED, MEMORY_RESIDUAL, NINETY
from plans.lower.symbolic import ParameterTemplate, PartTemplate, PieceTemplate
from plans.model.graph import itemsize
from plans.plan import Optimizer
from plans.schedules import Schedule
from simulator.stacks.footprint import Footprint

__all__ = ["footprint", "memory_interval", "parameter_bytes", "peak_activations"]


def footprint(piece: PieceTemplate, numbers: Sequence[int], arrives: int = 0, *, split: bool = False) -> Footprint:
    """The activations of a piece.

    Args:
        piece: its template.
        numbers: the values of the template's monomials.
        arrives: bytes of the tensor that the piece before hands over, which its backward needs again.
        split: whether the gradients of inputs and of weights are separate parts.
    """
    kept, forward = (arrives + bytes_ for bytes_ in _net(piece.parts["F"], numbers))
    if not split:
        _, backward = _net(piece.parts["B"], numbers)
        return Footprint(kept=kept, forward=forward, backward=backward)
    change, backward = _net(piece.parts["I"], numbers)
    _, weights = _net(piece.parts["W"], numbers)
    return Footprint(
        kept=kept, kept_for_weights=kept + change, forward=forward, backward=backward, weights=max(0, weights)
    )


def _net(part: PartTemplate, numbers: Sequence[int]) -> tuple[int, int]:
    """The bytes that a body adds at its end, and the most it adds in between."""
    levels = list(accumulate((sign * numbers[size] for _, sign, size, _ in part.memory), initial=0))
    return levels[-1], max(levels)


def parameter_bytes(
    parameters: Sequence[ParameterTemplate], numbers: Sequence[int], optimizer: Optimizer, shards: int
) -> dict[str, int]:
    """Bytes of the weights, gradients and optimizer states of a piece on one rank.

    Level 1 shards states over `shards` ranks, level 2 gradients too where they are reduced in every micro-batch, level
    3 weights between uses too. A sharded weight is kept next to the gathered one.
    """
    level = optimizer.parallel_level if shards > 1 else 0
    result = {"weight": 0, "gradient": 0, "optimizer": 0}
    for parameter in parameters:
        elements = numbers[parameter.elements]
        shard = -(-elements // shards)
        weight = itemsize(parameter.dtype)
        gradient = itemsize(optimizer.accumulates_in(parameter.dtype))
        states = optimizer.bytes_per_element(parameter.dtype) - weight - gradient
        own_shard = level >= 1 and not optimizer.has_master(parameter.dtype)  # with a master that is the shard
        result["weight"] += weight * ((shard if own_shard else 0) + (elements if level < 3 else 0))
        result["gradient"] += gradient * (shard if level >= 2 and optimizer.reduced_per_micro_batch else elements)
        result["optimizer"] += states * (shard if level >= 1 else elements)
    return result


def memory_interval(
    memory: Mapping[str, int], *, unknown_bytes: tuple[int, int] = (0, 0), reserved: bool = False
) -> tuple[float, float]:
    """The 90 % interval of a peak in bytes.

    It is made of what peaks are off by, of what the code around a stack may keep alive and, where memory is what is
    reserved, of how an allocator's share differs (`costmodels.widths`).

    Args:
        memory: role -> bytes, as of `Forecast.memory`.
        unknown_bytes: that may be missing, and that may be there as well (`Stack.unknown_bytes`).
        reserved: whether what is reserved is meant.

    >>> low, high = memory_interval({"weight": 100, "activation": 100})
    >>> round(low), round(high)
    (187, 213)
    """
    total = sum(memory.values())
    kept = MEMORY_RESERVED * total if reserved else 0.0
    spread = NINETY * math.hypot(MEMORY_RESIDUAL * total, MEMORY_ACTIVATIONS * memory.get("activation", 0), kept)
    below, above = (math.hypot(spread, size) for size in unknown_bytes)
    return total - below, total + above


def peak_activations(
    schedule: Schedule,
    kept: Sequence[int],
    kept_for_weights: Sequence[int],
    during: Sequence[tuple[int, int, int, int]],
) -> list[int]:
    """The most bytes of activations alive at once on every pipeline rank; a rank does one action at a time.

    Args:
        schedule: schedule of the pipeline.
        kept: per stage, from its forward until its (whole or input-gradient) backward.
        kept_for_weights: per stage, from the input gradient until the weight gradient.
        during: per stage what F, B, I and W need for themselves.
    """
    table = schedule.table
    whole, part = np.array(kept, np.int64)[table.stage], np.array(kept_for_weights, np.int64)[table.stage]
    own = np.array(during, np.int64)[table.stage, table.kind]
    zero = np.zeros_like(whole)
    before = np.choose(table.kind, (whole, zero, zero, zero))  # a forward's own activations count while it runs
    after = np.choose(table.kind, (zero, -whole, part - whole, -part))
    peaks = []
    for first, last in zip(table.rank_start[:-1], table.rank_start[1:], strict=True):
        rows = slice(int(first), int(last))
        alive = np.cumsum(before[rows] + after[rows]) - after[rows]
        peaks.append(int((alive + own[rows]).max()))
    return peaks
