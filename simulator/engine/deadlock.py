"""Detects deadlocks between ranks without times, and finds the smallest cycle of ranks that wait for each other.

Partners are determined beforehand (`simulator.engine.matching`) and no rank chooses its next instruction, so whether a
program ends does not depend on durations. One step is executed with all durations zero; whatever blocks there always
blocks. All steps are equal, because a rank ends each step with all its communication complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plans.errors import TwofoldError
from simulator.engine.exchange import Communication
from simulator.engine.matching import Matching
from simulator.engine.order import Order
from simulator.engine.record import Recorder
from simulator.engine.walk import Walk

__all__ = ["refuse_deadlock"]


class _Nothing:
    """Prices of a step in which everything takes no time."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.dispatch_ps = self.work_ps = self.cpu_ps = [0] * len(order.instructions)
        self.runs = [(0, 0, 0)] * len(order.runs)


def refuse_deadlock(orders: Sequence[Order], matching: Matching) -> None:
    """Check that every rank reaches its end.

    Args:
        orders: of all groups.
        matching: as `match` gives it.

    Raises:
        TwofoldError: ranks that wait forever; the message names the smallest circle.
    """
    order_of = {rank: order for order in orders for rank in order.group.ranks}
    nothing = {id(order): _Nothing(order) for order in orders}

    def stuck(matching: Matching) -> Mapping[int, object]:
        walk = Walk(
            matching, lambda rank, _: nothing[id(order_of[rank])], Recorder(order_of), num_steps=1, host_async=True
        )
        walk.run()
        return walk.waiting_for

    if stuck(matching):
        # again with every transfer as a separate meeting, which knows who is missing
        waiting = stuck(replace(matching, pairs=()))
        parts = {rank: waiting[rank] for rank in sorted(waiting)}
        raise TwofoldError(
            _culprit({rank: part for rank, part in parts.items() if isinstance(part, Communication)}, order_of)
        )


def _culprit(stuck: Mapping[int, Communication], order_of: Mapping[int, Order]) -> str:
    """The error message, from what every stuck rank waits for at the end."""
    waits = {rank: _missing(waited) for rank, waited in stuck.items()}
    for rank, waited in stuck.items():
        for other in waits[rank]:
            if other not in stuck:
                return f"{_describe(rank, waited, other, order_of)}, which has ended without reaching it"
    circle = min((_circle(rank, waits) for rank in sorted(waits)), key=len)
    chain = [_describe(rank, stuck[rank], circle[(at + 1) % len(circle)], order_of) for at, rank in enumerate(circle)]
    return f"the program deadlocks: {'; '.join(chain)}. Order their communication in the same way on all ranks"


def _blocking(waited: Communication) -> Communication:
    """The communication that blocks: an earlier one on the same channel may be the cause."""
    while waited.leader is not None and waited.arrived < 0:
        waited = waited.leader
    return waited


def _missing(waited: Communication) -> list[int]:
    """The ranks that have not arrived, in rank order."""
    missing: dict[int, None] = {}
    for meeting in _blocking(waited).meetings:
        if meeting.missing:
            present = {other.rank for other in meeting.present}
            missing.update(dict.fromkeys(rank for rank in meeting.members if meeting.is_local or rank not in present))
    return sorted(missing)


def _circle(start: int, waits: Mapping[int, Sequence[int]]) -> list[int]:
    """The shortest cycle of waits that is reached from a rank."""
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


def _describe(rank: int, waited: Communication, other: int, order_of: Mapping[int, Order]) -> str:
    order, blocking = order_of[rank], _blocking(waited)
    text = f"rank {rank} waits in {order.ids[waited.position]!r}"
    if blocking is not waited:
        text += f" (held up by {order.ids[blocking.position]!r} on the same channel)"
    return f"{text} for rank {other}"
