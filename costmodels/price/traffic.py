"""The number of messages, dependent hops and bytes of a communication, by the algorithm of its library.

NCCL and HCCL: rings. With n members and a message of S bytes (the larger of a member's input and output) each member
sends and receives in n-1 steps S/n bytes for an all-gather or a reduce-scatter, both in turn for an all-reduce
(Thakur, Rabenseifner and Gropp 2005, section 4); an all-to-all sends S/n to each other member at once; a broadcast and
a reduce pass S along a chain. What other algorithms send is in `costmodels.price.flows`.

gloo under torch: an all-reduce cuts its tensor into 2n segments, but none shorter than an element, and lets every
segment go round the ring twice (gloo allreduce.cc); an all-gather cuts each part in two (allgather_ring.cc); a
reduce-scatter is an all-reduce of which each member keeps its part (torch ProcessGroupGloo.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Traffic", "collective_traffic", "plain_call", "transfer_traffic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The traffic of one member.

    Args:
        messages: that it sends.
        hops: dependent steps.
        moved_bytes: that it sends over its link in a ring.
        size_bytes: of the message.
        peers: to how many others it talks at once; None: to all of its domain.
        is_direct: each pair of members exchanges its part, in no ring.
        is_forwarded: passes one more rank of a node on its way to another rail.
    """

    messages: float
    hops: int
    moved_bytes: float
    size_bytes: int
    peers: int | None = field(default=None, repr=False)
    is_direct: bool = field(default=False, repr=False)
    is_forwarded: bool = field(default=False, repr=False)


def plain_call(call: str) -> str:
    """The collective that a call is priced as.

    >>> plain_call("all_gather_flat")
    'all_gather'
    """
    return call.removesuffix("_flat")


def transfer_traffic(peers: int, size_bytes: int, is_forwarded: bool = False) -> Traffic:
    """The traffic of the busiest rank of a transfer: its peers and its bytes."""
    return Traffic(
        messages=peers, hops=min(1, peers), moved_bytes=size_bytes, size_bytes=size_bytes, peers=peers,
        is_forwarded=is_forwarded,
    )  # fmt: skip


def collective_traffic(call: str, members: int, size_bytes: int, itemsize: int = 4, library: str = "nccl") -> Traffic:
    """The traffic of a collective among `members` ranks.

    Args:
        call: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or reduce, or a flat variant.
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
        return Traffic(
            messages=n - 1, hops=n - 1 if library == "gloo" else 1, moved_bytes=once, size_bytes=size_bytes,
            is_direct=library != "gloo",
        )  # fmt: skip
    if call in ("broadcast", "reduce"):  # a chain, through which the message goes in pieces
        return Traffic(messages=1, hops=n - 1, moved_bytes=float(size_bytes), size_bytes=size_bytes)
    if library == "gloo" and call in ("all_reduce", "reduce_scatter"):
        segments = min(2 * n, max(1, size_bytes // itemsize))
        return Traffic(
            messages=2 * (n - 1) * segments / n, hops=2 * (n - 1), moved_bytes=2 * once, size_bytes=size_bytes
        )
    if call == "all_reduce":
        return Traffic(messages=2 * (n - 1), hops=2 * (n - 1), moved_bytes=2 * once, size_bytes=size_bytes)
    segments = 2 if library == "gloo" else 1
    return Traffic(messages=segments * (n - 1), hops=n - 1, moved_bytes=once, size_bytes=size_bytes)
