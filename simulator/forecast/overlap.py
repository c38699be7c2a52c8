"""The times of the operations of a body when compute and communication slow each other.

A body is simulated once, like in the event engine, with a stream that always has work, or with the host setting the
pace if it takes longer than the device. The result is the same operations with longer work, so that all later steps
(`simulator.forecast.body`) need no overlap model.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.channels import Channels, Flow, PairRates
from simulator.forecast.body import ARRIVE, COMPUTE, ISSUE, WAIT, Op

__all__ = ["host_lead_ps", "slowed"]


def slowed(ops: Sequence[Op], rates: PairRates | None, arrival_ps: int = 0) -> tuple[Op, ...]:
    """The operations with the work that they need under mutual slowdown.

    Args:
        ops: of a body, or of bodies that follow each other.
        rates: of pairs; None: overlap costs nothing.
        arrival_ps: picoseconds from their begin to the arrival of the tensor for which an ARRIVE waits.

    >>> body = [Op(ISSUE, 0, 400, "all_reduce", "dp", "t"), Op(COMPUTE, 0, 1000, "matrix"), Op(WAIT, 0, token="t")]
    >>> [op.work_ps for op in slowed(body, lambda *pair: (0.7, 0.5))]
    [800, 1240, 0]
    """
    return _slowed(ops, rates, is_late=_host_sets_the_pace(ops), arrival_ps=arrival_ps)


def host_lead_ps(ops: Sequence[Op], rates: PairRates) -> tuple[int, int]:
    """By how much a body lets its host get ahead, and how much longer its compute takes if the host was ahead before.

    `slowed` assumes that the host sets the pace if it has more work than the device. An earlier body may have given the
    host a lead, through compute or through collectives that the stream waited for. Then more communication overlaps
    with compute.
    """
    is_late = _host_sets_the_pace(ops)
    end_ps, _ = _simulate(ops, rates, is_late=is_late)
    lead_ps = max(0, round(end_ps) - sum(op.dispatch_ps for op in ops))
    if not is_late:
        return lead_ps, 0
    late, early = (_computed(_slowed(ops, rates, is_late=each)) for each in (True, False))
    return lead_ps, abs(early - late)


def _slowed(ops: Sequence[Op], rates: PairRates | None, *, is_late: bool, arrival_ps: int = 0) -> tuple[Op, ...]:
    if rates is None or not any(op.kind == ISSUE for op in ops):
        return tuple(ops)
    _, work_ps = _simulate(ops, rates, is_late=is_late, arrival_ps=arrival_ps)
    longer = list(ops)
    for number, own_ps in work_ps.items():
        if own_ps != ops[number].work_ps:
            longer[number] = ops[number]._replace(work_ps=own_ps)
    return tuple(longer)


def _host_sets_the_pace(ops: Sequence[Op]) -> bool:
    return sum(op.dispatch_ps for op in ops) > _computed(ops)


def _computed(ops: Sequence[Op]) -> int:
    return sum(op.work_ps for op in ops if op.kind == COMPUTE)


def _simulate(
    ops: Sequence[Op], rates: PairRates, *, is_late: bool, arrival_ps: int = 0
) -> tuple[float, dict[int, int]]:
    """When the stream is free after all operations, and the time that those with concurrent work take.

    `is_late`: the host starts with the stream, instead of far ahead of it.
    """
    channels = Channels(rates)
    flows: dict[str, Flow] = {}
    issued: dict[int, Flow] = {}  # tokens may be used again
    work: dict[int, int] = {}
    stream = host = 0.0
    for number, (kind, dispatch_ps, work_ps, name, channel, token, _, _, alone_ps) in enumerate(ops):
        if is_late:
            host += dispatch_ps
        ready = stream if stream >= host else host
        if kind == COMPUTE:
            if channels.num_flows:
                channels.advance(ready)
            if work_ps and channels.num_flows:
                stream = channels.compute(ready, float(work_ps), name)
                work[number] = round(stream) - round(ready)
            else:
                stream = ready + work_ps
        elif kind == ISSUE:
            flow = channels.issue(channel, name, ready, float(work_ps), float(alone_ps))
            flows[token] = issued[number] = flow
        elif kind == WAIT and token in flows:
            channels.advance(stream)
            stream = max(stream, channels.wait(flows[token]))
        elif kind == ARRIVE:
            stream = max(ready, arrival_ps)
    channels.drain()
    work |= {number: round(flow.end_ps) - round(flow.start_ps) for number, flow in issued.items()}
    return stream, work
