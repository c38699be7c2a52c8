"""How many messages, dependent hops and bytes a communication takes, by the algorithm of its library.

NCCL and HCCL: rings. With n members and a message of S bytes (the larger of a member's input and output) each member
sends and receives in n-1 steps S/n bytes for an all-gather or a reduce-scatter, both in turn for an all-reduce
(Thakur, Rabenseifner and Gropp 2005, section 4); an all-to-all sends S/n to each other member at once.

gloo as torch runs it: an all-reduce cuts its tensor into 2n segments, but none shorter than an element, and lets every
segment go round the ring twice (gloo allreduce.cc); an all-gather cuts each part in two (allgather_ring.cc); a
reduce-scatter is an all-reduce of which each member keeps its part (torch ProcessGroupGloo.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic", "collective_traffic", "plain_call"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one member does: messages sent, dependent steps, bytes sent over its link, bytes of the message."""

    messages: float
    hops: int
    moved_bytes: float
    size_bytes: int


def plain_call(call: str) -> str:
    """The collective that a call is priced as.

    >>> plain_call("all_gather_flat")
    'all_gather'
    """
    return call.removesuffix("_flat")


def collective_traffic(call: str, members: int, size_bytes: int, itemsize: int = 4, library: str = "nccl") -> Traffic:
    """The traffic of a collective among `members` ranks.

    Args:
        call: all_gather, reduce_scatter, all_reduce or all_to_all, or a flat variant.
        size_bytes: of the larger of a member's input and output.
        itemsize: bytes of an element, which is what gloo does not cut.
        library: gloo, nccl or hccl.

    >>> collective_traffic("all_reduce", 4, 1024)
    Traffic(messages=6, hops=6, moved_bytes=1536.0, size_bytes=1024)
    """
    n, call = members, plain_call(call)
    if n == 1:
        return Traffic(messages=0, hops=0, moved_bytes=0.0, size_bytes=0)
    once = (n - 1) / n * size_bytes
    if call == "all_to_all":
        return Traffic(messages=n - 1, hops=n - 1 if library == "gloo" else 1, moved_bytes=once, size_bytes=size_bytes)
    if library == "gloo" and call in ("all_reduce", "reduce_scatter"):
        segments = min(2 * n, max(1, size_bytes // itemsize))
        return Traffic(
            messages=2 * (n - 1) * segments / n, hops=2 * (n - 1), moved_bytes=2 * once, size_bytes=size_bytes
        )
    if call == "all_reduce":
        return Traffic(messages=2 * (n - 1), hops=2 * (n - 1), moved_bytes=2 * once, size_bytes=size_bytes)
    segments = 2 if library == "gloo" else 1
    return Traffic(messages=segments * (n - 1), hops=n - 1, moved_bytes=once, size_bytes=size_bytes)
