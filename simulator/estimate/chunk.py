"""The content of one virtual stage of a pipeline."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from plans.lower.symbolic import KEPT

__all__ = ["Chunk"]


class Chunk(NamedTuple):
    """The content of one virtual stage: the number of blocks, and whether it has the embedding and the head.

    `num_dense` of the blocks, the first ones, have a plain MLP in a model whose other blocks have experts. `num_kept`
    of them, the last ones, keep everything where the others recompute.
    """

    num_blocks: int
    has_embedding: bool
    has_head: bool
    num_dense: int = 0
    num_kept: int = 0

    @property
    def pieces(self) -> tuple[tuple[str, int], ...]:
        """(piece, how often), in the order of the forward."""
        return _pieces(self)


@lru_cache(maxsize=1024)
def _pieces(chunk: Chunk) -> tuple[tuple[str, int], ...]:
    blocks = chunk.num_blocks - chunk.num_dense
    kept = min(chunk.num_kept, blocks)
    dense = chunk.num_kept - kept
    counts = (
        ("embedding", int(chunk.has_embedding)), ("dense_block", chunk.num_dense - dense),
        (KEPT + "dense_block", dense), ("block", blocks - kept),
        (KEPT + "block", kept), ("head", int(chunk.has_head)),
    )  # fmt: skip
    return tuple((name, count) for name, count in counts if count)
