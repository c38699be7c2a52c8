"""The parts of a forecast step (`plans.step_parts`): compute, exposed communication and host wait of every rank.

The pipeline evaluator (`simulator.forecast.columns`) computes when every tensor arrives. With these times each rank is
simulated alone: its host, its compute stream and the collectives in progress. A body is simulated once for each state
in which it begins; a pipeline in its steady state has few of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from plans.step_parts import PartsTally
from simulator.forecast.body import ARRIVE, COMPUTE, ISSUE, SEND, WAIT, Op

__all__ = ["RankWalk", "Turn"]

Ops = tuple[Op, ...]


class Turn(NamedTuple):
    """One action of a rank's order.

    Args:
        ops: its body.
        arrived_ps: the arrival of the tensor that the body waits for, if it waits for one.
        post_ps: host time to post the receive of that tensor.
        num_releases: number of earlier sends that are waited for after the action.
    """

    ops: Ops
    arrived_ps: int = -1
    post_ps: int = 0
    num_releases: int = 0


class _UnderWay(NamedTuple):
    """A collective in progress; times are relative to the moment at which it is recorded."""

    token: str
    channel: str
    call: str
    issued: int
    start: int
    end: int


class _Walked(NamedTuple):
    """The result of a body without waits for other stages; times as in `_UnderWay`."""

    stream: int
    compute_ps: float
    exposed: tuple[tuple[str, float], ...]
    host_ps: float
    under_way: tuple[_UnderWay, ...]


class _Parts(NamedTuple):
    """A body, cut at its wait for another stage: the operations before and after it with their host times, whether
    there is such a wait, and the number of tensors that the body sends."""

    ops: Ops
    before: tuple[Ops, int]
    wait_dispatch_ps: int
    after: tuple[Ops, int]
    receives: bool
    num_sends: int


class RankWalk:
    """Simulates the steps of ranks with equal bodies, and caches the results of bodies.

    >>> body = (Op(COMPUTE, 2, 10), Op(ISSUE, 1, 6, "all_reduce", "tp", "t"), Op(WAIT, 1, token="t"))
    >>> RankWalk().step((), [Turn(body), Turn(body)], ())
    PartsTally(compute_ps=20, exposed_by_call={'all_reduce': 12}, host_wait_ps=2, end_ps=34)
    """

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self._known: dict[tuple[int, int, tuple[_UnderWay, ...]], _Walked] = {}

    def step(
        self, begin: Ops, turns: Sequence[Turn], end: Ops, *, start_ps: int = 0, launch_ps: int = 0,
        posts_ahead: bool = True, send_wait_ps: int = 0,
    ) -> PartsTally:  # fmt: skip
        """A step of a rank.

        Args:
            begin: the body that opens the step.
            turns: its actions.
            end: the body that closes it.
            start_ps: the time at which the rank begins it.
            launch_ps: host time at the start.
            posts_ahead: whether receives are posted one action ahead.
            send_wait_ps: host time of the WAIT for a send.
        """
        found, num_kept = PartsTally(), 0
        host, stream = start_ps + launch_ps, start_ps
        under_way: tuple[_UnderWay, ...] = ()

        def walk(part: tuple[Ops, int]) -> None:
            nonlocal host, stream, under_way
            ops, dispatch_ps = part
            if not ops:
                return
            lag = max(host - stream, -dispatch_ps)  # a host that is further ahead makes no difference
            key = id(ops), lag, under_way
            own = self._known.get(key)
            if own is None:
                own = self._known[key] = _walked(ops, lag, under_way)
            host += dispatch_ps
            stream += own.stream
            under_way = own.under_way
            found.compute_ps += own.compute_ps
            found.add(own.exposed, own.host_ps)

        walk(self._of(begin).before)
        bodies = [self._of(turn.ops) for turn in turns]
        posts = [turn.post_ps if own.receives else 0 for turn, own in zip(turns, bodies, strict=True)]
        if posts_ahead:
            host += sum(posts[:1])
            posts = [*posts[1:], 0]
        posted = host
        for turn, own, post_ps in zip(turns, bodies, posts, strict=True):
            host += post_ps
            ready, posted = (posted if posts_ahead else host), host  # when its own receive is posted
            walk(own.before)
            host += own.wait_dispatch_ps
            num_kept += own.num_sends - turn.num_releases
            if own.receives and turn.arrived_ps > stream:
                found.host_wait_ps += max(0, min(ready, turn.arrived_ps) - stream)
                under_way = _later(under_way, turn.arrived_ps - stream)
                stream = turn.arrived_ps
            walk(own.after)
            host += turn.num_releases * send_wait_ps
        walk(self._of(end).before)
        while under_way:
            last = under_way[0]
            _wait(found, under_way, last, 0)
            stream, under_way = stream + last.end, _later(under_way, last.end)
        host += num_kept * send_wait_ps
        found.host_wait_ps += max(0, host - stream)
        found.end_ps = max(host, stream)
        return found

    def _of(self, ops: Ops) -> _Parts:
        found = self._parts.get(id(ops))
        if found is None:
            at = next((number for number, op in enumerate(ops) if op.kind == ARRIVE), len(ops))
            before, rest = ops[:at], ops[at + 1 :]
            dispatch_ps = ops[at].dispatch_ps if at < len(ops) else 0
            found = _Parts(
                ops, (before, _dispatch_ps(before)), dispatch_ps, (rest, _dispatch_ps(rest)), at < len(ops),
                sum(op.kind == SEND for op in ops),
            )  # fmt: skip
            self._parts[id(ops)] = found  # it holds the body, so that the id stays its own
        return found


def _dispatch_ps(ops: Ops) -> int:
    return sum(op.dispatch_ps for op in ops)


def _walked(ops: Ops, lag: int, under_way: tuple[_UnderWay, ...]) -> _Walked:
    """Simulate a body. The stream is free at 0, the host at `lag`."""
    found, host, stream = PartsTally(), lag, 0
    flows = list(under_way)
    busy_until = {flow.channel: flow.end for flow in flows}
    for kind, dispatch_ps, work_ps, name, channel, token, *_ in ops:
        host += dispatch_ps
        if kind == COMPUTE:
            if host > stream:
                found.host_wait_ps += host - stream
                stream = host
            stream += work_ps
            found.compute_ps += work_ps
        elif kind == ISSUE:
            start = max(host, stream, busy_until.get(channel, 0))
            busy_until[channel] = start + work_ps
            flows.append(_UnderWay(token, channel, name, host, start, start + work_ps))
        elif kind == WAIT:
            flows = [flow for flow in flows if flow.end > stream]
            flow = next((flow for flow in reversed(flows) if flow.token == token), None)
            if flow is not None:
                _wait(found, flows, flow, stream)
                stream = flow.end
    return _Walked(
        stream, found.compute_ps, tuple(found.exposed_by_call.items()), found.host_wait_ps, _later(flows, stream)
    )


def _later(flows: Iterable[_UnderWay], time: int) -> tuple[_UnderWay, ...]:
    """The collectives that are still in progress after some time."""
    return tuple(
        flow._replace(
            issued=max(0, flow.issued - time), start=max(0, flow.start - time), end=flow.end - time
        ) for flow in flows if flow.end > time
    )  # fmt: skip


def _wait(found: PartsTally, flows: Iterable[_UnderWay], flow: _UnderWay, stream: int) -> None:
    found.add_wait(flow.call, stream, flow.issued, flow.end, [(other.start, other.end) for other in flows])
