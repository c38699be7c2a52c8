"""Measurement jobs as values, and the random operands that they work on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.timing import Call
from executor.device import Device

__all__ = ["DTYPES", "Job", "OperandPool", "bytes_of", "in_order"]

DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "tf32": torch.float32,
    "float8": torch.float8_e4m3fn, "float8_precise": torch.float8_e4m3fn, "float8_rowwise": torch.float8_e4m3fn,
}  # fmt: skip
"""Name in a `Point` -> torch dtype. Products of float8 have one scale a tensor, with fast accumulation or with sums in
float32 ("precise"), or one a row with fast accumulation."""

ROTATED = 2.5
"""Operands rotate through this many times the cache."""

MAX_ROTATIONS = 32


def no_calls(pool: OperandPool) -> Sequence[Call]:
    """Marks jobs whose calls depend on the other ranks."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One point to be measured, or several that only one measurement gives.

    Args:
        point: what it is; its figures are still empty.
        others: further points of the same measurement.
        make: from the pool, the calls that do it, each on operands of its own.
        tier: 0 for the most informative; taken in this order.
        needs_bytes: of device memory for one set of operands.
        work: floating-point operations of one call (bytes, of a memory-bound kernel), or 0 where they do not matter.
    """

    point: Point
    others: tuple[Point, ...] = ()
    make: Callable[[OperandPool], Sequence[Call]] = no_calls
    tier: int = 1
    needs_bytes: int = 0
    work: float = 0.0


@dataclass(slots=True, kw_only=True)
class OperandPool:
    """Random operands on one device, as parts of one block of random numbers per dtype.

    Real values matter: a product of zeros draws less power and runs faster.

    Args:
        device: where they live.
        block_bytes: of a dtype's block, unless one operand is larger.
    """

    device: Device
    block_bytes: int
    _blocks: dict[torch.dtype, Tensor] = field(default_factory=dict)
    _next: dict[torch.dtype, int] = field(default_factory=dict)

    def tensor(self, *shape: int, dtype: str = "bfloat16") -> Tensor:
        """A contiguous tensor of normal random numbers; it may overlap earlier ones."""
        kind, count = DTYPES[dtype], math.prod(shape)
        block = self._blocks.get(kind)
        if block is None or block.numel() < count:
            size = max(count, self.block_bytes // kind.itemsize)
            self._blocks.pop(kind, None)
            drawn = torch.bfloat16 if kind.itemsize == 1 else kind
            block = torch.empty(size, dtype=drawn, device=self.device.torch_device).normal_().to(kind)
            self._blocks[kind], self._next[kind] = block, 0
        start = self._next[kind]
        if start + count > block.numel():
            start = 0
        self._next[kind] = start + -(-count // 256) * 256
        return block[start : start + count].view(shape)

    def ids(self, *shape: int, below: int) -> Tensor:
        """Random integers of at least 0 and less than `below`."""
        return torch.randint(below, shape, device=self.device.torch_device)

    def sets(self, size_bytes: int) -> range:
        """The number of operand sets with which a call reads from memory instead of the cache."""
        sets = math.ceil(ROTATED * self.device.cache_bytes / max(1, size_bytes))
        return range(max(1, min(MAX_ROTATIONS, sets)))

    def clear(self) -> None:
        """Let go of all blocks."""
        self._blocks.clear()
        self._next.clear()


def bytes_of(dtype: str, *shapes: Sequence[int]) -> int:
    """Bytes of tensors of these shapes together.

    >>> bytes_of("bfloat16", (2, 3), (3,))
    18
    """
    return DTYPES[dtype].itemsize * sum(math.prod(shape) for shape in shapes)


def in_order(jobs: Iterable[Job], seed: int = 0) -> list[Job]:
    """By tier, shuffled inside each, so that neighbours in a grid are measured at different times."""
    mixed = list(jobs)
    random.Random(seed).shuffle(mixed)
    return sorted(mixed, key=lambda job: job.tier)
