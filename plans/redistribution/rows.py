"""Collectives along an inner dim: whether each row is a message of its own, or all rows are copied into one message.

The parts of a tensor along an inner dim are contiguous only within a row: one index of the dims before it. A gather or
reduce-scatter of few large rows sends every row as a message of its own, all in one launch, and copies nothing. Many or
small rows are copied before or after the collective and travel as one message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["num_copies", "sends_rows"]

MOST_ROWS = 16
"""Messages of one launch; 16 sequences of a micro-batch are more than devices hold in most steps."""
LEAST_ROW_BYTES = 2**18
"""Bytes of a row from which a message reaches most of the bandwidth of a link inside a node."""


def sends_rows(call: str, num_rows: int, size_bytes: int) -> bool:
    """Whether the rows of a collective are messages of their own.

    Args:
        call: such as "all_gather". The parts of an all-to-all are copied always.
        num_rows: the product of the sizes of the dims before the one that is gathered or cut.
        size_bytes: of the larger of a member's input and output.

    >>> sends_rows("all_gather", 4, 2**24), sends_rows("all_gather", 2048, 2**24), sends_rows("all_to_all", 4, 2**24)
    (True, False, False)
    """
    few_and_large = num_rows <= MOST_ROWS and size_bytes >= num_rows * LEAST_ROW_BYTES
    return call in ("all_gather", "reduce_scatter") and few_and_large


def num_copies(call: str, leading: Sequence[Sequence[int]], size_bytes: int) -> int:
    """How often a collective copies all of its tensor, to cut or to join it along inner dims.

    Args:
        call, size_bytes: as for `sends_rows`.
        leading: the sizes of the dims before each dim that it cuts or joins (`Step.leading`).

    >>> num_copies("all_to_all", [(4, 2048), (4,)], 2**24), num_copies("reduce_scatter", [(4,)], 2**24)
    (2, 0)
    """
    rows = [math.prod(sizes) for sizes in leading]
    return sum(each > 1 and not sends_rows(call, each, size_bytes) for each in rows)
