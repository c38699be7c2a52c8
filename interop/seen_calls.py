"""Recorded communication, from any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

__all__ = ["ITEM_BYTES", "SeenCall", "SeenCalls", "is_count"]

ITEM_BYTES = {
    "float": 4, "double": 8, "half": 2, "long": 8, "long int": 8, "int": 4, "short": 2, "short int": 2, "byte": 1,
    "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1, "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "uint64": 8, "int32": 4, "uint32": 4, "int16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element by its dtype in the words of torch and of nccl-tests."""


def is_count(found: Any) -> TypeGuard[int]:
    """Whether what a file holds is a number of elements or bytes."""
    return isinstance(found, int) and not isinstance(found, bool) and 0 <= found < 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """One communication of a group of ranks.

    Args:
        call: such as "all_reduce"; "transfer" of (sender, receiver).
        size_bytes: of the larger of a member's input and output.
        item_bytes: of an element.
        ranks: that take part.
        seconds: that it took the rank that came last; None where no time is recorded.
        waited_s: how much longer it took the rank that came first.
        beside: share of that time in which other kernels ran on that rank.
        num_unseen: ranks without a trace, so that `seconds` may hold waiting.
    """

    call: str
    size_bytes: int
    item_bytes: int
    ranks: tuple[int, ...]
    seconds: float | None = None
    waited_s: float = 0.0
    beside: float = 0.0
    num_unseen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCalls:
    """The facts in the files.

    Args:
        calls: in order of their first occurrence.
        source: the kind of files, in words.
        skipped: reason -> communications that were left out.
        assumed: facts that the files lack.
    """

    calls: Sequence[SeenCall]
    source: str
    skipped: Mapping[str, int] = field(default_factory=dict)
    assumed: Sequence[str] = ()
