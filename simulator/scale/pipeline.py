"""A pipeline of actions in virtual time: each rank works down its order, each action waits for its tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plans.errors import TwofoldError
from plans.schedules import Schedule
from plans.schedules.dependencies import remote_dependencies
from simulator.scale.action import Stretch

__all__ = ["pipeline_end_ps"]

_LETTERS = "FBIW"


def pipeline_end_ps(
    schedule: Schedule,
    actions: Sequence[Mapping[str, Stretch]],
    updates: Sequence[Stretch],
    transfer_ps: Mapping[tuple[int, int], float],
    send_ps: float,
    *,
    blocking: bool = False,
    synchronises: bool = False,
    together: bool = True,
    fetch_ps: float = 0.0,
) -> float:
    """When the last rank has ended its step; where ranks do not begin together, the longest time of a rank.

    Args:
        schedule: of the pipeline.
        actions: per stage its actions by kind; "F.first" for its first forward, "B.last" or "W.last" for its last
            backward, where they differ.
        updates: per pipeline rank what follows its last action.
        transfer_ps: (sending stage, receiving stage) -> time on the link; absent within a rank.
        send_ps: host time of a send or a receive.
        blocking: a rank goes on only when what it sent has arrived.
        synchronises: the host waits for the device whenever something was received or sent.
        fetch_ps: host time before every forward for its data, after the device has ended what it was given; 0: none.
        together: all ranks begin a step together; else each begins its next one when it has ended this one.

    Raises:
        TwofoldError: a schedule whose ranks wait for each other.
    """
    table = schedule.table
    waits = remote_dependencies(schedule).tolist()
    stages, kinds = table.stage.tolist(), table.kind.tolist()
    starts = table.rank_start.tolist()
    ranks = range(schedule.num_ranks)
    host, stream, row, final = [0.0] * len(ranks), [0.0] * len(ranks), starts[:-1].copy(), [0.0] * len(ranks)
    first_of, last_of = _ends(stages, kinds)
    begins = [0.0] * len(ranks)
    sent: dict[int, float] = {}
    waiting: dict[int, int] = {}
    ready = list(ranks)
    senders = {needed: number for number, needed in enumerate(waits) if needed >= 0}
    while ready:
        rank = ready.pop()
        while row[rank] < starts[rank + 1]:
            at = row[rank]
            stage, letter = stages[at], _LETTERS[kinds[at]]
            arrival, needed = 0.0, waits[at]
            if needed >= 0:
                if needed not in sent:
                    waiting[needed] = rank
                    break
                travel = transfer_ps.get((stages[needed], stage))
                if travel is None:
                    arrival = sent[needed]
                else:
                    arrival = sent[needed] + travel
                    host[rank] += send_ps
            own = actions[stage]
            if letter == "F" and first_of.get(stage) == at:
                stretch = own.get("F.first", own["F"])
            elif last_of.get(stage) == at:
                stretch = own.get(f"{letter}.last", own[letter])
            else:
                stretch = own[letter]
            begun = max(stream[rank], arrival)
            if row[rank] == starts[rank]:
                begins[rank] = begun
            if fetch_ps and letter == "F":
                host[rank] = max(host[rank], stream[rank]) + fetch_ps
            if synchronises and arrival:
                host[rank] = max(host[rank], begun)
            stream[rank] = max(begun + stretch.work_ps, host[rank] + stretch.lead_ps)
            host[rank] += stretch.dispatch_ps
            final[rank] = max(final[rank], stream[rank] + stretch.trailing_ps)
            reader = senders.get(at)
            if reader is not None and (travel := transfer_ps.get((stage, stages[reader]))) is not None:
                host[rank] += send_ps
                sent[at] = max(stream[rank], host[rank])
                if blocking:
                    stream[rank] = sent[at] + travel
                if synchronises:
                    host[rank] = max(host[rank], stream[rank])
            else:
                sent[at] = stream[rank]
            if at in waiting:
                ready.append(waiting.pop(at))
            row[rank] += 1
    if any(row[rank] < starts[rank + 1] for rank in ranks):
        stuck = next(rank for rank in ranks if row[rank] < starts[rank + 1])
        raise TwofoldError(
            f"schedule {schedule.name!r} deadlocks: rank {stuck} waits at {schedule.cell_text(row[stuck])}"
        )
    ends = []
    for rank in ranks:
        begun = max(stream[rank], final[rank])
        end = max(begun + updates[rank].work_ps, host[rank] + updates[rank].lead_ps)
        ends.append(end if together else end - begins[rank])
    return max(ends)


def _ends(stages: Sequence[int], kinds: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Per stage the row of its first forward and of the last action that makes weight gradients."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for row, (stage, kind) in enumerate(zip(stages, kinds, strict=True)):
        if kind == 0:
            first.setdefault(stage, row)
        elif _LETTERS[kind] in "BW":
            last[stage] = row
    return first, last
