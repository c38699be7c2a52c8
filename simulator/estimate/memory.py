"""The memory of a rank, from templates: values that exist all the time, during a micro-batch, and during an action."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from costmodels.widths import MEMORY_ACTIVATIONS, MEMORY_RESERVED, MEMORY_RESIDUAL, NINETY
from plans.degrees import Degrees
from plans.lower.symbolic import ModelTemplate, ParameterTemplate, PartTemplate, PieceTemplate
from plans.model.graph import itemsize
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from plans.schedules import Schedule
from simulator.stacks.base import PieceSizes
from simulator.stacks.footprint import Footprint

__all__ = [
    "Activations",
    "chunk_activations",
    "footprint",
    "makes_gradients",
    "memory_interval",
    "parameter_bytes",
    "peak_activations",
    "piece_sizes",
]


def footprint(
    piece: PieceTemplate, numbers: Sequence[int], arrives: int = 0, comes_back: int = 0, *, split: bool = False
) -> Footprint:
    """The activations of a piece.

    Args:
        piece: its template.
        numbers: the values of the template's monomials.
        arrives: bytes of the tensor that the piece before hands over, which its backward needs again.
        comes_back: bytes of the gradient that the piece behind hands over, which its weight gradients need again.
        split: whether the gradients of inputs and of weights are separate parts.
    """
    kept, forward = (arrives + bytes_ for bytes_ in _net(piece.parts["F"], numbers))
    if not split:
        _, backward = _net(piece.parts["B"], numbers)
        return Footprint(kept=kept, forward=forward, backward=backward)
    inputs = piece.parts["I"]
    change, backward = _net(inputs, numbers)
    more, unreleased = _net(inputs, numbers, releases=False)
    _, weights = _net(piece.parts["W"], numbers)
    return Footprint(
        kept=kept,
        kept_for_weights=kept + change + comes_back,
        forward=forward,
        backward=backward,
        weights=max(0, weights),
        released=more - change,
        unreleased=unreleased,
    )


_ACTIVATIONS = ("silu.forward", "gelu.forward")
"""Activation functions of a gated MLP."""


def piece_sizes(
    template: ModelTemplate, numbers: Sequence[int], config: TransformerConfig, degrees: Degrees
) -> PieceSizes:
    """Facts that the memory of a model's pieces depends on, besides their own tensors.

    Args:
        template: of the model.
        numbers: the values of its monomials.
        config, degrees: the model and its layout.
    """
    head, block = (template.pieces[name].parts["F"].cells for name in ("head", "block"))
    logits = next(cell.shapes[-1] for cell in reversed(head) if cell.call == "linear.forward")
    core = next(cell for cell in block if cell.call == "attention.forward")
    queries, keys, values = ([numbers[size] for size in shape] for shape in core.shapes[:3])
    gates = [cell.shapes[0] for cell in block if config.gated and cell.call in _ACTIVATIONS]
    combined = [cell.shapes[0] for cell in block if cell.call == "combine.forward"]
    item_bytes = itemsize(config.dtype)
    return PieceSizes(
        arrival_bytes=numbers[template.pieces["block"].leaves],
        logits=math.prod(numbers[size] for size in logits), item_bytes=item_bytes,
        gate_bytes=item_bytes * sum(math.prod(numbers[size] for size in gate) for gate in gates),
        combined_bytes=item_bytes * sum(math.prod(numbers[size] for size in slots) for slots in combined),
        ways=degrees.tp, recompute=degrees.recompute, scores=math.prod(queries[:-1]) * keys[-2],
        split_sequence=degrees.sequence_parallel, drops=config.dropout > 0,
        foreign_bytes=item_bytes * (math.prod(keys) + math.prod(values)) * (degrees.cp - 1) // degrees.cp,
    )  # fmt: skip


def _net(part: PartTemplate, numbers: Sequence[int], *, releases: bool = True) -> tuple[int, int]:
    """The bytes that a body adds at its end, and the most it adds in between, also if it releases nothing of earlier
    parts."""
    kept = () if releases else part.earlier
    changes = (sign * numbers[size] * (at not in kept) for at, (_, sign, size, _) in enumerate(part.memory))
    levels = list(accumulate(changes, initial=0))
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
    missing, more = unknown_bytes
    missing = min(missing, memory.get("activation", 0) + memory.get("buffer", 0))  # the rest is there in any case
    below, above = math.hypot(spread, missing), math.hypot(spread, more)
    return total - below, total + above


class Activations(NamedTuple):
    """Bytes of the activations of chunks: numbers, or arrays of any chunks.

    Args:
        kept: as of `Footprint`.
        kept_for_weights: as of `Footprint`.
        during: what F, B, I and W need for themselves; that of F above `kept`.
    """

    kept: Any
    kept_for_weights: Any
    during: tuple[Any, Any, Any, Any]


def chunk_activations(pieces: Sequence[tuple[Footprint, Any]]) -> Activations:
    """The activations of chunks, added up piece by piece.

    A forward holds nothing yet for later pieces, and a backward has already freed theirs.

    Args:
        pieces: in the order of the forward, each with how often a chunk has it: a number, or an array of any chunks.

    >>> plain = Footprint(kept=4, forward=6, backward=3)
    >>> found = chunk_activations([(Footprint(kept=0, backward=9), 1), (plain, 2)])
    >>> found.kept, found.kept_for_weights, [int(size) for size in found.during]
    (8, 0, [2, 3, 3, 0])
    """
    kept = kept_for_weights = 0  # by the pieces behind
    forward = whole = inputs = weights = 0
    for own, count in reversed(pieces):
        there = np.minimum(count, 1)
        more = own.kept_for_weights - own.kept  # that each of them leaves behind its input gradient
        forward = np.maximum(forward, there * (own.forward - own.kept - kept))
        whole = np.maximum(whole, there * (own.backward - kept))
        last = np.maximum(count - 1, 0) * max(more, 0)
        inputs = np.maximum(inputs, there * (own.backward + last + kept_for_weights - kept))
        weights = np.maximum(weights, there * (own.weights - kept_for_weights))
        kept = kept + count * own.kept
        kept_for_weights = kept_for_weights + count * own.kept_for_weights
    return Activations(kept, kept_for_weights, (forward, whole, inputs, weights))


def peak_activations(
    schedule: Schedule,
    kept: Sequence[int],
    kept_for_weights: Sequence[int],
    during: Sequence[tuple[int, int, int, int]],
    gradients: Sequence[int] = (),
) -> list[int]:
    """The most bytes of activations alive at once on every pipeline rank, which does one action at a time.

    A stage's gradients are there from its first whole backward or weight gradient on. Activations that are alive before
    take their place: they count only as far as they exceed the gradients that are still to come.

    Args:
        schedule: schedule of the pipeline.
        kept: per stage, from its forward until its (whole or input-gradient) backward.
        kept_for_weights: per stage, from the input gradient until the weight gradient.
        during: per stage what F, B, I and W need for themselves.
        gradients: per stage the bytes of its gradients; all of them are there from the beginning where absent.
    """
    table = schedule.table
    whole, part = np.array(kept, np.int64)[table.stage], np.array(kept_for_weights, np.int64)[table.stage]
    own = np.array(during, np.int64)[table.stage, table.kind]
    zero = np.zeros_like(whole)
    before = np.choose(table.kind, (whole, zero, zero, zero))  # a forward's own activations count while it runs
    after = np.choose(table.kind, (zero, -whole, part - whole, -part))
    if gradients:
        after = after + np.where(makes_gradients(schedule), np.array(gradients, np.int64)[table.stage], 0)
    peaks = []
    for rank, (first, last) in enumerate(pairwise(table.rank_start.tolist())):
        rows = slice(first, last)
        alive = np.cumsum(before[rows] + after[rows]) - after[rows]
        to_come = sum(gradients[stage] for stage in schedule.stages_of(rank)) if gradients else 0
        peaks.append(max(0, int((alive + own[rows]).max(initial=0)) - to_come))
    return peaks


@lru_cache(maxsize=2048)
def makes_gradients(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """(row of the schedule's table) whether it is the first action of its stage that makes gradients of weights."""
    table = schedule.table
    rows = np.flatnonzero((table.kind == 1) | (table.kind == 3))
    found = np.zeros(len(table.kind), dtype=bool)
    found[rows[np.unique(table.stage[rows], return_index=True)[1]]] = True
    return found
