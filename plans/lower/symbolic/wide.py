"""Buckets over blocks that represent several equal blocks.

Only a few of many equal blocks are lowered. Small parameters, such as those of norms, may share one bucket from the
first block of a chunk to its last. The bucket then has the sizes of all blocks, but contains names of the lowered
blocks only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from plans.lower.buckets import Bucket
from plans.lower.optimizer import ChunkParameters
from plans.program import Instruction

__all__ = ["WideBucket", "block_number", "is_wide", "with_all_blocks", "with_wide_buckets"]

_BLOCK_NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, eq=False)
class WideBucket(Bucket):
    """A bucket whose `counts` has the number of equal parameters that each of its parameters represents."""

    counts: tuple[int, ...]

    @cached_property
    def name(self) -> str:
        """The key of a bucket with all of them."""
        return f"{self.first.name}+{sum(self.counts) - 1}"

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of one shard of each of them all."""
        return tuple(
            size
            for parameter, count in zip(self.parameters, self.counts, strict=True)
            for size in [parameter.shard_size] * count
        )


@lru_cache(maxsize=65_536)
def block_number(name: str) -> int | None:
    """The number of the block in a name, None if there is none.

    >>> block_number("g:layers.12.attention_norm.weight#flat"), block_number("norm.weight")
    (12, None)
    """
    match = _BLOCK_NUMBER.search(name)
    return None if match is None else int(match.group())


def with_wide_buckets(chunk: ChunkParameters, copies: Mapping[int, int]) -> ChunkParameters:
    """The same parameters with wide buckets over blocks that represent several blocks.

    Args:
        chunk: whose buckets were filled with the parameters of a few blocks.
        copies: number of blocks that a block represents, by its number, if it represents more than itself.
    """
    wide: dict[Bucket, Bucket] = {}

    def widened(bucket: Bucket) -> Bucket:
        if bucket not in wide:
            wide[bucket] = _widened(bucket, copies)
        return wide[bucket]

    return replace(
        chunk,
        gathers=[widened(bucket) for bucket in chunk.gathers],
        reductions={name: widened(bucket) for name, bucket in chunk.reductions.items()},
    )


def _widened(bucket: Bucket, copies: Mapping[int, int]) -> Bucket:
    """A bucket that is closed within a period is in no more blocks than a period has, and one: it cannot hold
    parameters from before, in and behind repeated blocks."""
    blocks = [block_number(name) for name in bucket.names]
    alone = [block for block in blocks if block is not None and block not in copies]
    if not any(block in copies and min(alone, default=block) < block < max(alone, default=block) for block in blocks
               if block is not None):  # fmt: skip
        return bucket
    counts = tuple(1 if block is None else copies.get(block, 1) for block in blocks)
    return WideBucket(parameters=bucket.parameters, counts=counts)


def is_wide(line: Instruction) -> bool:
    """Whether an instruction packs or unpacks a wide bucket, and so has more operands than it names."""
    if line.call not in ("flat_pack", "flat_unpack"):
        return False
    return len(line.attrs["sizes"]) > len(line.inputs if line.call == "flat_pack" else line.outputs)


def with_all_blocks(line: Instruction, copies: Mapping[int, int]) -> Instruction:
    """The packing or unpacking of a wide bucket with all its operands; those of equal blocks are named alike."""
    parts = line.inputs if line.call == "flat_pack" else line.outputs
    shapes = line.shapes[: len(parts)] if line.call == "flat_pack" else line.shapes[-len(parts) :]
    numbers = [block_number(name) for name in parts]
    counts = [1 if number is None else copies.get(number, 1) for number in numbers]
    names = tuple(name for name, count in zip(parts, counts, strict=True) for _ in range(count))
    sizes = tuple(shape for shape, count in zip(shapes, counts, strict=True) for _ in range(count))
    if line.call == "flat_pack":
        return replace(line, inputs=names, shapes=(*sizes, *line.shapes[len(parts) :]))
    return replace(line, outputs=names, shapes=(*line.shapes[: -len(parts)], *sizes))
