"""A body of a program as priced operations, and its effect on the clocks of its rank.

A rank has clocks: when its **host** is free, when its compute **stream** is free, when each communication channel is.
Compute starts when host and stream are free. The host issues a collective, which starts after the compute issued before
it and after earlier collectives of its channel; a WAIT blocks the stream. Without contention every operation sets a
clock to the latest of some clocks plus a constant. A full body does the same: it is linear in (max, +) (Baccelli et
al., "Synchronization and Linearity", 1992, chapter 3). One backward pass over the body finds the coefficients of a
clock: how long before the end each operation must have begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from simulator.forecast.clock_map import NEVER
from simulator.lines import Payload

__all__ = [
    "ARRIVE", "COMPUTE", "ISSUE", "SEND", "WAIT", "Op", "Opened", "Row", "Steps", "opened", "rests", "row",
    "steps_of",
]  # fmt: skip

COMPUTE, ISSUE, WAIT, ARRIVE, SEND = range(5)


class Op(NamedTuple):
    """One priced operation.

    Args:
        kind: COMPUTE; ISSUE of a collective; WAIT for one; ARRIVE: the wait for the tensor of another pipeline rank;
            SEND of a tensor to another pipeline rank.
        dispatch_ps: host time to issue it.
        work_ps: of compute on the stream, of a collective on its links, next to its siblings.
        name: "matrix", "attention" or "memory" of compute (the class that overlap knows), the call of a collective.
        channel: of a collective.
        token: of a collective, and of the WAIT for it.
        payload: for a collective, its bytes.
        energy_pJ: of compute (`costmodels.price.instruction.Cost`).
        alone_ps: work of a collective without its siblings; 0 where it is the same.
    """

    kind: int
    dispatch_ps: int
    work_ps: int = 0
    name: str = ""
    channel: str = ""
    token: str = ""
    payload: Payload | None = None
    energy_pJ: int = 0
    alone_ps: int = 0


Row = Mapping[str, int]
"""A clock after a body: clock before -> picoseconds; the clock is the latest of their sums.

Clocks before are "host", "stream", "arrival", "channel:NAME", and "token:NAME" of collectives issued in other
bodies."""


class Steps(NamedTuple):
    """A body in a compact form, for walking it several times.

    Args:
        backwards: its steps, the last one first: (kind, dispatch_ps, work_ps, lead_ps, token, token of the collective
            before it on its channel). A run of COMPUTE is one step: a host that begins to issue it leaves the stream
            busy until `lead_ps` later at least.
        last: channel -> token of the last collective that is issued on it.
    """

    backwards: tuple[tuple[int, int, int, int, str, str], ...]
    last: Mapping[str, str]


def steps_of(ops: Iterable[Op]) -> Steps:
    """The operations of a body in a compact form.

    >>> steps_of([Op(COMPUTE, 2, 10), Op(COMPUTE, 30, 1)]).backwards
    ((0, 32, 11, 33, '', ''),)
    """
    last: dict[str, str] = {}
    found: list[tuple[int, int, int, int, str, str]] = []
    host = work = lead = 0
    for kind, dispatch_ps, work_ps, _, channel, token, _, _, _ in ops:
        if kind == COMPUTE:
            host += dispatch_ps
            work += work_ps
            lead = (lead if lead > host else host) + work_ps
            continue
        if lead or host:
            found.append((COMPUTE, host, work, lead, "", ""))
            host = work = lead = 0
        if kind == ISSUE:
            found.append((ISSUE, dispatch_ps, work_ps, 0, token, last.get(channel, f"channel:{channel}")))
            last[channel] = token
        else:
            found.append((kind, dispatch_ps, 0, 0, token, ""))
    if lead or host:
        found.append((COMPUTE, host, work, lead, "", ""))
    return Steps(tuple(found[::-1]), last)


def row(steps: Steps, *, after: str = "", ends: Mapping[str, int] | None = None) -> Row:
    """The coefficients of one clock after a body.

    Args:
        steps: steps of the body.
        after: "stream", "host", "sent" (when what it sends is posted), or "" for none of them.
        ends: token -> constant: the clock waits for the end of these collectives plus the constant.

    >>> body = [Op(COMPUTE, 2, 10), Op(ISSUE, 1, 6, channel="tp", token="t"), Op(WAIT, 1, token="t")]
    >>> row(steps_of(body), after="stream")
    {'stream': 16, 'host': 18, 'channel:tp': 6}
    """
    stream = 0 if after == "stream" else NEVER
    host = 0 if after == "host" else NEVER
    sent = 0 if after == "sent" else NEVER
    arrival = NEVER
    tokens = dict(ends or {})
    for kind, dispatch, work, lead, token, before in steps.backwards:
        host += dispatch
        if kind == COMPUTE:
            if stream > NEVER:
                host = max(host, stream + lead)
                stream += work
        elif kind == ISSUE:
            end = tokens.pop(token, NEVER)
            if end > NEVER:
                end += work
                stream, host = max(stream, end), max(host, end + dispatch)
                tokens[before] = max(tokens.get(before, NEVER), end)
        elif kind == WAIT:
            if stream > NEVER:
                tokens[token] = max(tokens.get(token, NEVER), stream)
        elif kind == ARRIVE:
            arrival = max(arrival, stream)
        elif sent > NEVER:
            stream, host, sent = max(stream, sent), max(host, sent + dispatch), NEVER
    found = {"stream": stream, "host": host, "arrival": arrival}
    for token, constant in tokens.items():
        found[token if token.startswith("channel:") else f"token:{token}"] = constant
    return {clock: constant for clock, constant in found.items() if constant > NEVER // 2}


def rests(steps: Steps) -> dict[str, int]:
    """For the token of each collective of another body, the time before the end of these operations by which it must
    have ended.
    """
    return {
        clock.removeprefix("token:"): constant
        for clock, constant in row(steps, after="stream").items()
        if clock.startswith("token:")
    }


class Opened(NamedTuple):
    """The times at which stream and host are free after a body whose clocks all begin at zero, and at which its
    collectives end."""

    stream_ps: int
    host_ps: int
    ends_ps: Mapping[str, int]


def opened(ops: Iterable[Op]) -> Opened:
    """The map of a body that begins a step and waits for nothing before it.

    >>> opened([Op(ISSUE, 1, 6, channel="dp", token="t"), Op(COMPUTE, 2, 10)])
    Opened(stream_ps=13, host_ps=3, ends_ps={'t': 7})
    """
    stream = host = 0
    channels: dict[str, int] = {}
    ends: dict[str, int] = {}
    for kind, dispatch_ps, work_ps, _, channel, token, _, _, _ in ops:
        host += dispatch_ps
        if kind == COMPUTE:
            stream = max(stream, host) + work_ps
        elif kind == ISSUE:
            ends[token] = channels[channel] = max(stream, host, channels.get(channel, 0)) + work_ps
        elif kind == WAIT:
            stream = max(stream, ends.get(token, 0))
    return Opened(stream, host, ends)
