"""Simulates a pipeline of actions: each rank runs its actions in order, and each action waits for its input tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.schedules import Schedule
from plans.schedules.dependencies import rank_of_rows, remote_dependencies, unit_start_times
from plans.schedules.variants import VARIANTS, variant_of_rows
from simulator.estimate.action import ClockMap

__all__ = ["FIRST_FORWARD", "PREFETCH", "Runtime", "clocks_of", "gathers_begin", "pipeline_end_ps"]

FIRST_FORWARD = VARIANTS.index("F.first")
"""The row of the first forward in tables of actions."""

PREFETCH = 5
"""The place of the prefetch in `clocks_of`."""

Time = TypeVar("Time", float, npt.NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Sends and starts of a pipeline's software, where they differ from twofold's executor.

    Args:
        blocking: a rank continues only when what it sent has arrived.
        synchronises: the host waits for the device whenever something was received or sent.
        fetch_ps: host time before every forward for its data, after the device has ended what it was given; 0: none.
        together: all ranks begin a step together; else each begins its next one when it has ended this one: steps
            overlap, and the hosts of ranks that end early are ahead in the next one.
        opens_with_gathers: a rank issues the gathers of all its chunks when its step begins, so that those of later
            chunks are hidden behind the forwards of earlier ones; else each gather begins with its first forward.
        overlap_penalty_ps: per stage by how much its compute is slowed by the transfers next to an action; nothing
            where absent.
    """

    blocking: bool = False
    synchronises: bool = False
    fetch_ps: float = 0.0
    together: bool = True
    opens_with_gathers: bool = False
    overlap_penalty_ps: Sequence[float] = ()

    @property
    def holds_host(self) -> bool:
        """Whether the host ever waits before it issues an action."""
        return self.synchronises or self.fetch_ps > 0


_PLAIN = Runtime()


def pipeline_end_ps(
    schedule: Schedule,
    actions: Sequence[Mapping[str, ClockMap]],
    updates: Sequence[ClockMap],
    transfer_ps: Mapping[tuple[int, int], float],
    send_ps: float,
    runtime: Runtime = _PLAIN,
) -> float:
    """The end of the last rank's step; if ranks do not begin together, the time from there to the end of the next step.

    Args:
        schedule: schedule of the pipeline.
        actions: per stage its actions by kind; "F.first" for its first forward, "B.last" or "W.last" for its last
            backward, where they differ.
        updates: per pipeline rank what follows its last action.
        transfer_ps: (sending stage, receiving stage) -> time on the link; absent within a rank.
        send_ps: host time of a send or a receive.
        runtime: of the software.

    Raises:
        TwofoldError: a schedule whose ranks wait for each other.
    """
    ends = _ends_ps(schedule, actions, updates, transfer_ps, send_ps, runtime, [0.0] * schedule.num_ranks)
    if runtime.together or schedule.num_ranks == 1:
        return max(ends)
    return max(_ends_ps(schedule, actions, updates, transfer_ps, send_ps, runtime, ends)) - max(ends)


def _ends_ps(
    schedule: Schedule, actions: Sequence[Mapping[str, ClockMap]], updates: Sequence[ClockMap],
    transfer_ps: Mapping[tuple[int, int], float], send_ps: float, runtime: Runtime, start_ps: Sequence[float],
) -> list[float]:  # fmt: skip
    """Per rank the end of a step that it begins at `start_ps`; other arguments as of `pipeline_end_ps`."""
    num_ranks, penalty_ps = schedule.num_ranks, runtime.overlap_penalty_ps
    host, stream, final = list(start_ps), list(start_ps), list(start_ps)
    rows, pairs = _walk(schedule)
    travels, holds_host = [transfer_ps.get(pair) for pair in pairs] + [None], runtime.holds_host
    of_actions = {id(own): [clocks_of(own, name) for name in VARIANTS] for own in actions}  # of equal chunks the same
    clock_maps = [of_actions[id(own)] for own in actions]
    opened_ps = _opened_ps(schedule, clock_maps) if runtime.opens_with_gathers else ()
    sent = [0.0] * len(rows)
    for at, rank, stage, variant, needed, arrives, leaves in rows:
        free, begun, arrival = host[rank], stream[rank], 0.0
        work, lead, dispatch, trailing, last, ahead, busy = clock_maps[stage][variant]
        if needed >= 0:
            arrival = sent[needed]
            if (travel := travels[arrives]) is not None:
                arrival += travel
                free += send_ps
            begun = max(begun, arrival - ahead)
        if opened_ps and variant == FIRST_FORWARD:
            begun = max(stream[rank] - ahead, arrival - ahead, start_ps[rank] + opened_ps[stage])
        if holds_host:
            free = _host_ready_ps(runtime, VARIANTS[variant], free, stream[rank], begun if arrival else 0.0)
        if penalty_ps and not runtime.blocking and VARIANTS[variant][0] != "W":
            work, lead = work + penalty_ps[stage], lead + penalty_ps[stage]
        late, end = free + lead, begun + work
        if trailing or last or busy:
            # a channel catches up while the host is late; its collectives go behind those of the rank's other chunks
            final[rank] = max(final[rank], end + trailing, late + last, final[rank] + busy if busy else 0.0)
        end = max(end, late)
        final[rank] = max(final[rank], end)
        free += dispatch
        sent[at] = end
        if (travel := travels[leaves]) is not None:
            free, end, sent[at] = _sent_ps(runtime, free + send_ps, end, travel)
        host[rank], stream[rank] = free, end
    ends = []
    for rank in range(num_ranks):
        begun = max(stream[rank], final[rank])
        ends.append(max(begun + updates[rank].work_ps, host[rank] + updates[rank].cold_start_ps))
    return ends


def _opened_ps(schedule: Schedule, clock_maps: Sequence[Sequence[tuple[float, ...]]]) -> list[float]:
    return gathers_begin(schedule, [clocks[FIRST_FORWARD][PREFETCH] for clocks in clock_maps])


def gathers_begin(schedule: Schedule, gathered_ps: Sequence[Time]) -> list[Time]:
    """Per stage the time at which its gather begins: a rank's gathers follow each other in the order of its chunks.

    Args:
        schedule: schedule of the pipeline.
        gathered_ps: per stage the time of its gather, a number or an array.
    """
    free, begins = [0.0 * gathered_ps[0]] * schedule.num_ranks, []
    for rank, gather_ps in zip(schedule.placement, gathered_ps, strict=True):
        begins.append(free[rank])
        free[rank] = free[rank] + gather_ps
    return begins


def _sent_ps(runtime: Runtime, free: float, end: float, travel: float) -> tuple[float, float, float]:
    """When the host and the stream are free after a send that the host has issued at `free`, and when it is sent."""
    sent = max(end, free)
    end = sent + travel if runtime.blocking else end
    return max(free, end) if runtime.synchronises else free, end, sent


def _host_ready_ps(runtime: Runtime, variant: str, free: float, stream: float, received: float) -> float:
    """The time at which the host begins to issue an action: after its inputs are there, and its tensor, if it waits for
    it."""
    if runtime.fetch_ps and variant[0] == "F":
        free = max(free, stream) + runtime.fetch_ps
    return max(free, received) if runtime.synchronises else free


def clocks_of(actions: Mapping[str, ClockMap], name: str) -> tuple[float, ...]:
    """The times of an action in ps: work, cold start, dispatch, tail, tail if host-bound, prefetch, channel busy.

    A variant that a chunk does not have is that of its kind; if there is none, all times are 0.
    """
    own = actions.get(name) or actions.get(name[0]) or ClockMap()
    last_ps = min(own.tail_ps, own.tail_if_host_bound_ps)
    return own.work_ps, own.cold_start_ps, own.dispatch_ps, own.tail_ps, last_ps, own.prefetch_ps, own.channel_busy_ps


_Row = tuple[int, int, int, int, int, int, int]


@lru_cache(maxsize=64)
def _walk(schedule: Schedule) -> tuple[list[_Row], list[tuple[int, int]]]:
    """A schedule's rows in an order in which they can run, and the pairs of stages between which tensors go.

    A row is its number in the table, rank, stage, number of its variant, the row that it waits for or -1, and the
    numbers of the pairs over which its tensor arrives and its own one leaves, -1 for none.
    """
    table = schedule.table
    waits = remote_dependencies(schedule).tolist()
    stages, variants = table.stage.tolist(), variant_of_rows(schedule).tolist()
    pairs: dict[tuple[int, int], int] = {}
    arrives, leaves = [-1] * len(waits), [-1] * len(waits)
    for row, needed in enumerate(waits):
        if needed >= 0:
            arrives[row] = leaves[needed] = pairs.setdefault((stages[needed], stages[row]), len(pairs))
    rank_of, times = rank_of_rows(table).tolist(), unit_start_times(schedule)
    if times.size and times.min() < 0:
        row = int(np.flatnonzero(times < 0)[0])
        raise TwofoldError(
            f"schedule {schedule.name!r} deadlocks: rank {rank_of[row]} waits at {schedule.cell_text(row)}"
        )
    return [
        (row, rank_of[row], stages[row], variants[row], waits[row], arrives[row], leaves[row])
        for row in np.argsort(times, kind="stable").tolist()
    ], list(pairs)
