"""A body of a program as priced operations, and what it does to the clocks of its rank.

A rank has clocks: when its **host** is free, when its compute **stream** is free, when each communication channel is.
Compute starts when host and stream are free. A collective is issued by the host and starts after the compute issued
before it and after what went over its channel before; a WAIT holds up the stream. Without contention every operation
moves a clock to the latest of some clocks plus a constant, so a whole body does too: it is linear in (max, +)
(Baccelli et al., "Synchronization and Linearity", 1992, chapter 3). The coefficients of one clock are found by walking
the body once, backwards, as an adjoint: what is asked for is how long before the end each operation must have begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from simulator.forecast.clock_map import NEVER

__all__ = ["ARRIVE", "COMPUTE", "ISSUE", "SEND", "WAIT", "Op", "Row", "last_tokens", "rests", "row"]

COMPUTE, ISSUE, WAIT, ARRIVE, SEND = range(5)


class Op(NamedTuple):
    """One priced operation.

    Args:
        kind: COMPUTE; ISSUE of a collective; WAIT for one; ARRIVE: the wait for the tensor of another pipeline rank;
            SEND of a tensor to another pipeline rank.
        dispatch_ps: host time to issue it.
        work_ps: of compute on the stream, of a collective on its links.
        name: "matrix", "attention" or "memory" of compute (the class that overlap knows), the call of a collective.
        channel: of a collective.
        token: of a collective, and of the WAIT for it.
    """

    kind: int
    dispatch_ps: int
    work_ps: int = 0
    name: str = ""
    channel: str = ""
    token: str = ""


Row = Mapping[str, int]
"""A clock after a body: clock before -> picoseconds; the clock is the latest of their sums.

Clocks before are "host", "stream", "arrival", "channel:NAME", and "token:NAME" of collectives issued in other
bodies."""


def last_tokens(ops: Sequence[Op]) -> dict[str, str]:
    """Channel -> token of the last collective that is issued on it."""
    return {op.channel: op.token for op in ops if op.kind == ISSUE}


def row(ops: Sequence[Op], *, after: str = "", ends: Mapping[str, int] | None = None) -> Row:
    """The coefficients of one clock after a body.

    Args:
        ops: of the body, in program order.
        after: "stream", "host", "sent" (when what it sends is posted), or "" for none of them.
        ends: token -> constant: the clock waits for the end of these collectives plus the constant.

    >>> body = [Op(COMPUTE, 2, 10), Op(ISSUE, 1, 6, channel="tp", token="t"), Op(WAIT, 1, token="t")]
    >>> row(body, after="stream")
    {'stream': 16, 'host': 18, 'channel:tp': 6}
    """
    stream = 0 if after == "stream" else NEVER
    host = 0 if after == "host" else NEVER
    sent = 0 if after == "sent" else NEVER
    arrival = NEVER
    tokens = dict(ends or {})
    previous = _previous(ops)
    for op in reversed(ops):
        kind, dispatch, work, _, _, token = op
        if kind == COMPUTE:
            if stream > NEVER:
                stream += work
                host = max(host, stream)
            host += dispatch
        elif kind == ISSUE:
            end = tokens.pop(token, NEVER)
            if end > NEVER:
                end += work
                stream, host = max(stream, end), max(host, end)
                before = previous.pop()
                tokens[before] = max(tokens.get(before, NEVER), end)
            else:
                previous.pop()
            host += dispatch
        elif kind == WAIT:
            if stream > NEVER:
                tokens[token] = max(tokens.get(token, NEVER), stream)
            host += dispatch
        elif kind == ARRIVE:
            arrival = max(arrival, stream)
            host += dispatch
        else:
            if sent > NEVER:
                stream, host, sent = max(stream, sent), max(host, sent), NEVER
            host += dispatch
    found = {"stream": stream, "host": host, "arrival": arrival}
    for token, constant in tokens.items():
        found[token if token.startswith("channel:") else f"token:{token}"] = constant
    return {clock: constant for clock, constant in found.items() if constant > NEVER // 2}


def rests(ops: Sequence[Op]) -> dict[str, int]:
    """Token of a collective of another body -> how long before the end of these operations it must be over."""
    return {
        clock.removeprefix("token:"): constant
        for clock, constant in row(ops, after="stream").items()
        if clock.startswith("token:")
    }


def _previous(ops: Iterable[Op]) -> list[str]:
    """For each collective the token of the one before it on its channel, "channel:NAME" for the first."""
    last: dict[str, str] = {}
    found: list[str] = []
    for op in ops:
        if op.kind == ISSUE:
            found.append(last.get(op.channel, f"channel:{op.channel}"))
            last[op.channel] = op.token
    return found
