"""Configurations that Megatron-LM and torchtitan can express but refuse when they start.

Megatron-LM's checks stand in its training/arguments.py and core/pipeline_parallel/schedules.py, torchtitan's in its
distributed/parallel_dims.py and in torch/distributed/pipelining/schedules.py, all as of late 2025.
"""

from __future__ import annotations

from collections.abc import Callable

from plans.degrees import Degrees
from plans.errors import TwofoldError

__all__ = ["check_megatron", "check_torchtitan"]


def check_megatron(degrees: Degrees, seq: int | None = None) -> None:
    """Refuse what Megatron-LM refuses at its start.

    Args:
        degrees: to be run.
        seq: tokens of a sequence, where known.

    Raises:
        TwofoldError: several chunks of one pipeline rank, or whose ranks do not divide the micro-batches; a sequence
            that context parallelism cannot split.

    >>> check_megatron(Degrees(pp=2, global_batch=4, schedule="interleaved_1f1b", virtual=2))
    """
    pp, num = degrees.pp, degrees.num_micro_batches
    if degrees.virtual > 1 and pp == 1:
        raise TwofoldError(
            "Megatron-LM has several chunks per rank only with pipeline ranks; plan with --schedule 1f1b"
        )
    if degrees.virtual > 1 and num % pp:
        ways = [*_micro_batch(degrees, lambda each: each % pp == 0), "--schedule 1f1b"]
        raise TwofoldError(
            f"Megatron-LM interleaves chunks only where the pipeline ranks divide the micro-batches, not {num} on {pp} "
            f"ranks; plan with {', or '.join(ways)}"
        )
    if seq is not None and degrees.cp > 1 and seq % (2 * degrees.cp):
        raise TwofoldError(
            f"Megatron-LM splits a sequence into 2 x {degrees.cp} parts for {degrees.cp} context-parallel ranks, which "
            f"{seq} tokens do not divide into; plan with --cp 1, or --seq {_next(seq, 2 * degrees.cp)}"
        )


def check_torchtitan(degrees: Degrees, seq: int | None = None) -> None:
    """Refuse what torchtitan, or torch's schedules under it, refuses at its start.

    Args:
        degrees: to be run.
        seq: tokens of a sequence, where known.

    Raises:
        TwofoldError: 1F1B of fewer micro-batches than stages; a sequence that its ranks cannot split.

    >>> check_torchtitan(Degrees(pp=4, global_batch=4))
    """
    pp, num = degrees.pp, degrees.num_micro_batches
    if degrees.schedule == "1f1b" and num < pp:
        ways = _micro_batch(degrees, lambda each: each >= pp) or [f"--global-batch {degrees.dp * pp} --micro-batch 1"]
        raise TwofoldError(
            f"torchtitan's 1F1B needs as many micro-batches as stages, {num} are fewer than {pp}; plan with "
            f"{', or '.join([*ways, '--schedule gpipe'])}"
        )
    parts = degrees.tp * 2 * degrees.cp
    if seq is not None and seq % parts:
        raise TwofoldError(
            f"torchtitan splits a sequence into tp x 2 cp = {parts} parts, which {seq} tokens do not divide into; plan "
            f"with --seq {_next(seq, parts)}, or other --tp and --cp"
        )


def _micro_batch(degrees: Degrees, fits: Callable[[int], bool]) -> list[str]:
    """A flag with the largest micro-batch whose number of micro-batches satisfies `fits`; empty if there is none."""
    share = degrees.global_batch // degrees.dp
    sizes = (size for size in range(degrees.micro_batch, 0, -1) if share % size == 0)
    found = next((size for size in sizes if fits(share // size)), None)
    return [] if found is None else [f"--micro-batch {found}"]


def _next(count: int, divisor: int) -> int:
    return -(-count // divisor) * divisor
