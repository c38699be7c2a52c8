"""Whether ranks wait for each other for ever, found out without times, and the smallest circle of them that does.

Who meets whom is settled beforehand (`simulator.engine.matching`), and no rank ever chooses what to take next, so
whether a
program comes to its end does not depend on any duration: one step is walked through with everything taking no time, and
what gets stuck there gets stuck always. Steps are alike, as a rank ends each with everything it issued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import simpy

from plans.errors import TwofoldError
from simulator.engine.exchange import Communication, Exchange
from simulator.engine.matching import Links
from simulator.engine.order import ISSUE, RUN, Order

__all__ = ["refuse_deadlock"]


class _Walker:
    """A rank on its way through a step in which everything takes no time."""

    __slots__ = ("_links", "_segments", "_slots", "_todo", "_unwaited", "order", "rank", "waiting_for")

    def __init__(self, rank: int, order: Order, links: Mapping[int, Links]) -> None:
        self.rank = rank
        self.order = order
        self.waiting_for: Communication | None = None
        self._links = links
        self._slots: list[Communication | None] = [None] * order.num_slots
        self._unwaited: list[Communication] = []
        self._segments = iter(order.segments)
        self._todo = iter(self._unwaited)

    def go_on(self, exchange: Exchange) -> None:
        """Walk to the end, or to what is not over yet: that is `waiting_for` then."""
        order, self.waiting_for = self.order, None
        for kind, position, slot in self._segments:
            if kind == RUN:
                continue
            if kind == ISSUE:
                links = self._links[position]
                if not links.keys:
                    continue
                own = Communication(self.rank, 0, position, order.instructions[position], links, 0, 0)
                exchange.post(own, 0)
                if slot >= 0:
                    self._slots[slot] = own
                    if position in order.unwaited:
                        self._unwaited.append(own)
                    continue
            else:
                waited = self._slots[slot]
                if waited is None:
                    continue
                own = waited
            if not own.done:
                self.waiting_for = own
                return
        for own in self._todo:
            if not own.done:
                self.waiting_for = own
                return


def refuse_deadlock(orders: Sequence[Order], links: Mapping[int, Mapping[int, Links]]) -> None:
    """Check that every rank comes to its end.

    Args:
        orders: of all groups.
        links: as `match` gives them.

    Raises:
        TwofoldError: ranks that wait for ever; the message names the smallest circle.
    """
    ended: list[int] = []
    exchange = Exchange(
        simpy.Environment(), lambda own: ended.append(own.rank), None, None, all_on_fabric=False, wires=None
    )
    walkers = {rank: _Walker(rank, order, links[rank]) for order in orders for rank in order.group.ranks}
    for rank in sorted(walkers):
        walkers[rank].go_on(exchange)
    while ended:
        walker = walkers[ended.pop()]
        if walker.waiting_for is not None and walker.waiting_for.done:
            walker.go_on(exchange)
    if any(walker.waiting_for is not None for walker in walkers.values()):
        raise TwofoldError(_culprit(walkers))


def _culprit(walkers: Mapping[int, _Walker]) -> str:
    """What to tell the user, given all ranks after nothing happens any more."""
    order_of = {rank: walker.order for rank, walker in walkers.items()}
    waiting = {rank: walkers[rank].waiting_for for rank in sorted(walkers)}
    stuck = {rank: own for rank, own in waiting.items() if own is not None}
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
    if own.links.is_plain and not own.meetings:
        return [rank for rank in own.links.members[0] if rank != own.rank]
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
    text = f"rank {rank} waits in {order.ids[own.position]!r}"
    if blocking is not own:
        text += f" (held up by {order.ids[blocking.position]!r} on the same channel)"
    return f"{text} for rank {other}"
