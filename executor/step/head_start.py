"""Delays compute for a moment, so that collectives that overlap with it start first.

A product takes all multiprocessors of a GPU until it ends. A collective becomes ready a few microseconds after the
kernel that made its operand, because it is on another stream; a product that is issued behind it is ready at once,
begins, and lets the collective wait (`benchmarks.devices.hidden_reductions`). So that product is delayed until the
collective has begun.

That pays where the collective is waited for soon: where only weight gradients lie between it and its WAIT, as with
reductions of tensor parallelism. Gradients in buckets and gathered weights have more compute next to them than they
need. And it pays where a weight gradient fills the device: a smaller one leaves multiprocessors to the collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executor.device import Device
from plans.program import Instruction, Kind, Value

__all__ = ["behind_weight_gradients", "with_head_start"]

_TILE = 128 * 256
"""Elements of its result that a product computes on one multiprocessor at a time (cuBLAS on H200)."""

_BLOCKS = 24
"""Multiprocessors that a collective of NCCL takes (2.28 on 4 H200)."""


def behind_weight_gradients(
    instructions: Sequence[Instruction], values: Mapping[str, Value], num_processors: int
) -> frozenset[int]:
    """The positions of the collectives that a weight gradient would delay and that no other compute hides.

    Args:
        instructions: of a body.
        values: their operands and results.
        num_processors: multiprocessors of the device.
    """
    found = set()
    for position, instruction in enumerate(instructions):
        if instruction.kind is not Kind.COLLECTIVE or instruction.token is None:
            continue
        behind = list(itertools.takewhile(lambda each: each.part == "W", instructions[position + 1 :]))
        end = position + 1 + len(behind)
        if not behind or end == len(instructions) or instructions[end].waits != instruction.token:
            continue
        tiles = max(math.prod(values[name].shape) for each in behind for name in each.outputs) / _TILE
        if tiles + _BLOCKS > num_processors:
            found.add(position)
    return frozenset(found)


def with_head_start(run: Callable[[], None], env: list[Any], token: int, device: Device) -> Callable[[], None]:
    """`run`, which stores the communication that it launches at `env[token]`, then a delay of the current stream."""

    def run_first() -> None:
        run()
        if not env[token].is_finished:
            device.head_start()

    return run_first
