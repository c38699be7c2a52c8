"""Why ranks wait for ever: the smallest circle of ranks each of which waits for the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.exchange import Communication
from simulator.order import Order
from simulator.ranks import Rank

__all__ = ["culprit"]


def culprit(ranks: Sequence[Rank], order_of: Mapping[int, Order]) -> str:
    """What to tell the user, given all ranks after nothing happens any more."""
    stuck = {rank.rank: rank.waiting_for for rank in ranks if not rank.is_finished and rank.waiting_for is not None}
    waits = {rank: _missing(own) for rank, own in stuck.items()}
    for rank, own in stuck.items():
        for other in waits[rank]:
            if other not in stuck:
                return f"{_says(rank, own, other, order_of)}, which has ended without coming to it"
    circle = min((_circle(rank, waits) for rank in sorted(waits)), key=len)
    told = [_says(rank, stuck[rank], circle[(at + 1) % len(circle)], order_of) for at, rank in enumerate(circle)]
    return f"the program deadlocks: {'; '.join(told)}. Put their communication into an order that all of them share"


def _blocking(own: Communication) -> Communication:
    """The communication that really waits: an earlier one on the same channel may hold up `own`."""
    while own.held_by is not None and own.arrived < 0:
        own = own.held_by
    return own


def _missing(own: Communication) -> list[int]:
    """The ranks that have not come, in rank order."""
    own = _blocking(own)
    missing: dict[int, None] = {}
    for meeting in own.meetings:
        if meeting.missing:
            present = {other.rank for other in meeting.present}
            local = len(set(meeting.members)) == 1
            missing.update(dict.fromkeys(rank for rank in meeting.members if local or rank not in present))
    return sorted(missing)


def _circle(start: int, waits: Mapping[int, Sequence[int]]) -> list[int]:
    """The shortest way from a rank along its waits to a rank on that way again, from where it closes."""
    before: dict[int, int] = {}
    front = [start]
    seen = {start}
    while front:
        following: list[int] = []
        for rank in front:
            for other in waits[rank]:
                if other == start:
                    way = [rank]
                    while way[-1] != start:
                        way.append(before[way[-1]])
                    return way[::-1]
                if other not in seen:
                    seen.add(other)
                    before[other] = rank
                    following.append(other)
        front = following
    return [start] * (len(waits) + 1)  # not on a circle itself


def _says(rank: int, own: Communication, other: int, order_of: Mapping[int, Order]) -> str:
    order, blocking = order_of[rank], _blocking(own)
    text = f"rank {rank} waits in step {own.step} in {order.ids[own.position]!r}"
    if blocking is not own:
        text += f" (held up by {order.ids[blocking.position]!r} on the same channel)"
    return f"{text} for rank {other}"
