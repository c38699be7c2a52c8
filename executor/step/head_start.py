"""Gives collectives a head start before the compute that is to hide them.

A product takes all multiprocessors of a GPU until it ends. A collective becomes ready a few microseconds after the
kernel that made its operand, because it is on another stream; a product that is issued behind it is ready at once,
begins, and lets the collective wait (`benchmarks.hidden_reductions`). So that product is delayed until the collective
has begun.

That pays where the collective is waited for soon: where only weight gradients lie between it and its WAIT, as with
reductions of tensor parallelism. Gradients in buckets and gathered weights have more compute beside them than they
need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from executor.device import Device
from plans.program import Instruction, Kind

__all__ = ["behind_weight_gradients", "with_head_start"]


def behind_weight_gradients(instructions: Sequence[Instruction]) -> frozenset[int]:
    """Positions of the collectives between which and their WAITs there are weight gradients and nothing else."""
    found = set()
    for position, instruction in enumerate(instructions):
        if instruction.kind is not Kind.COLLECTIVE or instruction.token is None:
            continue
        for count, following in enumerate(instructions[position + 1 :]):
            if following.waits == instruction.token and count:
                found.add(position)
            if following.kind is not Kind.COMPUTE or following.part != "W":
                break
    return frozenset(found)


def with_head_start(run: Callable[[], None], env: list[Any], token: int, device: Device) -> Callable[[], None]:
    """`run`, which stores the communication that it launches at `env[token]`, then a delay of the current stream."""
    if not device.own.head_start_cycles:
        return run

    def run_first() -> None:
        run()
        if not env[token].is_finished:
            device.head_start()

    return run_first
