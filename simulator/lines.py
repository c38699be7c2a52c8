"""One priced instruction, as stacks produce it and forecasts use it."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COLLECTIVE", "COMPUTE", "WAIT", "Line", "Payload"]

COMPUTE, COLLECTIVE, WAIT = range(3)


class Payload(NamedTuple):
    """The bytes that a collective moves.

    Args:
        call: such as "all_gather_flat".
        size_bytes: of the larger of a member's input and output.
        item_bytes: of an element.
        copies: of it that every member makes.
    """

    call: str
    size_bytes: int
    item_bytes: int
    copies: int = 0


class Line(NamedTuple):
    """One priced instruction.

    Args:
        kind: COMPUTE, COLLECTIVE (issued asynchronously) or WAIT.
        dispatch_ps: host time to issue it.
        work_ps: on the compute stream, or of the collective next to its siblings.
        name: class of compute for the rates ("matrix", "memory", "attention"), or the collective's call.
        channel: of a collective.
        token: number of a collective in its sequence; a WAIT has that of its communication.
        payload: of a collective, what it moves.
        energy_pJ: of compute (`costmodels.price.instruction.Cost`).
        alone_ps: work of a collective without its siblings; 0 where it is the same.
    """

    kind: int
    dispatch_ps: int
    work_ps: int
    name: str = ""
    channel: str = ""
    token: int = -1
    payload: Payload | None = None
    energy_pJ: int = 0
    alone_ps: int = 0
