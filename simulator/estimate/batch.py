"""Pipelines of many configurations with one schedule at once: `pipeline` and `memory` on arrays.

Actions are sorted by the number of actions that must come before them. All actions of one level, for all
configurations, are one array operation. Hosts are never blocked, so their times are sums along each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.schedules import Schedule
from plans.schedules.dependencies import rank_of_rows, remote_dependencies, unit_start_times
from plans.schedules.variants import VARIANTS, variant_of_rows
from simulator.estimate.action import ClockMap
from simulator.estimate.memory import makes_gradients
from simulator.estimate.pipeline import FIRST_FORWARD, PREFETCH, Runtime, clocks_of, gathers_begin

__all__ = ["ActionColumns", "action_columns", "peak_bytes", "pipeline_ends_ps"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_WEIGHTS = 3
"""Kind of an action that makes gradients of weights only."""

_IS_WEIGHTS = np.array([name[0] == "W" for name in VARIANTS])

ActionColumns = npt.NDArray[np.float64]
"""(7, variants) times of a chunk's actions in ps, in the order of `clocks_of`."""


def action_columns(actions: Mapping[str, ClockMap]) -> ActionColumns:
    """The times of the actions of a chunk."""
    return np.array([clocks_of(actions, name) for name in VARIANTS]).T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Levels:
    """A schedule's rows by level.

    Attributes:
        variant: of each row.
        by_level: rows in the order of their levels.
        bounds: first place of each level in it, and the number of rows.
        inputs: (2, rows) for each row in this order where the action before it on its rank, and the one that it waits
            for, are in this order; counted from 1, 0 for none.
        needed: for each row of the table the row it waits for, -1 for none.
        receives, sends: for each row of the table whether what it takes comes from another rank, and whether what it
            makes goes there.
    """

    variant: Ints
    by_level: Ints
    bounds: list[int]
    inputs: Ints
    needed: Ints
    receives: npt.NDArray[np.bool_]
    sends: npt.NDArray[np.bool_]


@lru_cache(maxsize=64)
def _levels(schedule: Schedule) -> _Levels:
    table = schedule.table
    level = unit_start_times(schedule)
    if np.any(level < 0):
        row = int(np.flatnonzero(level < 0)[0])
        raise TwofoldError(f"schedule {schedule.name!r} deadlocks: it waits at {schedule.cell_text(row)}")
    num_rows = len(level)
    by_level = np.argsort(level, kind="stable")
    place = np.empty(num_rows, dtype=np.int64)
    place[by_level] = np.arange(1, num_rows + 1)
    needed, rank = remote_dependencies(schedule), rank_of_rows(table)
    before = np.concatenate([[0], place[:-1]])
    before[table.rank_start[:-1][table.rank_start[:-1] < num_rows]] = 0
    waits = np.where(needed >= 0, place[needed], 0)
    receives = (needed >= 0) & (rank[needed] != rank)
    sends = np.zeros(num_rows, dtype=bool)
    sends[needed[receives]] = True
    ordered = level[by_level]
    return _Levels(
        variant=variant_of_rows(schedule),
        by_level=by_level,
        bounds=np.searchsorted(ordered, np.arange(ordered[-1] + 2)).tolist(),
        inputs=np.stack([before, waits])[:, by_level],
        needed=needed,
        receives=receives,
        sends=sends,
    )


def pipeline_ends_ps(
    schedule: Schedule,
    actions: Floats,
    updates: Floats,
    transfer_ps: Floats,
    send_ps: Floats,
    runtime: Runtime,
    overlap_penalty_ps: Floats | None = None,
) -> Floats:
    """(batch) the end of the last rank's step, or the time to the end of the next step, as `pipeline_end_ps` of each.

    Args:
        schedule: schedule of all of them.
        actions: (7, variants, stages, batch) as `action_columns`.
        updates: (2, ranks, batch) work and cold start of what follows each rank's last action.
        transfer_ps: (stages, batch) from each stage to the next one; ignored within a rank.
        send_ps: (batch) host time of a send or a receive.
        runtime: of the software, whose host never waits.
        overlap_penalty_ps: (stages, batch) instead of that of `runtime`.

    Raises:
        TwofoldError: a schedule whose ranks wait for each other.
    """
    given = actions, updates, transfer_ps, send_ps, runtime, overlap_penalty_ps
    ends = _ends_ps(schedule, *given, np.zeros((schedule.num_ranks, actions.shape[-1])))
    if runtime.together or schedule.num_ranks == 1:
        return np.asarray(ends.max(0))
    return np.asarray(_ends_ps(schedule, *given, ends).max(0) - ends.max(0))


def _ends_ps(
    schedule: Schedule, actions: Floats, updates: Floats, transfer_ps: Floats, send_ps: Floats, runtime: Runtime,
    overlap_penalty_ps: Floats | None, start_ps: Floats,
) -> Floats:  # fmt: skip
    """(ranks, batch) the end of a step that each rank begins at `start_ps`; the rest as of `pipeline_ends_ps`."""
    levels, table = _levels(schedule), schedule.table
    num_rows, num_stages = len(table.stage), schedule.num_stages
    rank, starts = rank_of_rows(table), table.rank_start
    of_row = levels.variant * num_stages + table.stage
    trails = bool(actions[3].any())
    work, lead, dispatch = actions[:3]
    if overlap_penalty_ps is not None and not runtime.blocking:
        slowed = np.where(_IS_WEIGHTS[:, None, None], 0.0, overlap_penalty_ps)
        work, lead = work + slowed, lead + slowed
    work, lead, dispatch = (column.reshape(-1, column.shape[-1])[of_row] for column in (work, lead, dispatch))
    sends = levels.sends[:, None] * send_ps
    issued_ps = (levels.sends.astype(np.int64) + levels.receives)[:, None] * send_ps
    issued_ps += dispatch
    host = np.cumsum(issued_ps, axis=0, out=issued_ps)
    earlier = np.concatenate([np.zeros((1, host.shape[1])), host])[starts[:-1]]
    host -= earlier[rank]  # after the action and its send
    host += start_ps[rank]
    lead -= dispatch
    lead -= sends
    lead += host
    late = lead  # when the host alone has it ended
    known = late.copy() if trails else late
    is_forward = table.kind == 0
    here = np.flatnonzero(levels.receives)
    travel = transfer_ps[np.where(is_forward, table.stage - 1, table.stage)[here]]
    extra: Floats | None = None
    if runtime.blocking:
        extra = np.zeros_like(work)
        senders = levels.needed[here]
        extra[senders] = travel
        work += extra
        known[senders] = np.maximum(known[senders], host[senders])
        known += extra
        here, travel = here[:0], travel[:0]
    hop = work.copy()
    hop[here] += travel
    if actions[PREFETCH].any():
        hop -= actions[PREFETCH].reshape(-1, hop.shape[-1])[of_row]
    if runtime.opens_with_gathers:
        firsts = np.flatnonzero(levels.variant == FIRST_FORWARD)
        stages = table.stage[firsts]
        gathered = actions[PREFETCH][FIRST_FORWARD]
        opened = np.stack(gathers_begin(schedule, list(gathered)))[stages] + start_ps[rank[firsts]] + work[firsts]
        known[firsts] = np.maximum(known[firsts], opened)
    known[here] = np.maximum(known[here], host[levels.needed[here]] + hop[here])
    place = np.empty(num_rows, dtype=np.int64)
    place[levels.by_level] = np.arange(1, num_rows + 1)
    weights = np.empty((2, *work.shape))
    np.take(work, levels.by_level, axis=0, out=weights[0], mode="clip")  # "clip" needs no buffer
    if runtime.opens_with_gathers:
        weights[0, place[firsts] - 1] -= gathered[stages]
    np.take(hop, levels.by_level, axis=0, out=weights[1], mode="clip")
    known = known[levels.by_level]
    has_rows = np.flatnonzero(starts[1:] > starts[:-1])
    opening = place[starts[:-1][has_rows]] - 1
    begun_first = start_ps[has_rows] + weights[0, opening]
    known[opening] = np.maximum(known[opening], begun_first)
    values = np.zeros((num_rows + 1, known.shape[1]))
    inputs, bounds = levels.inputs, levels.bounds
    for first, stop in pairwise(bounds):
        terms = values.take(inputs[:, first:stop], axis=0)
        terms += weights[:, first:stop]
        level = values[first + 1 : stop + 1]
        np.maximum(terms[0], terms[1], out=level)
        np.maximum(level, known[first:stop], out=level)
    last_rows = starts[1:][has_rows] - 1
    begun, issued = start_ps.copy(), start_ps.copy()
    begun[has_rows], issued[has_rows] = values[place[last_rows]], host[last_rows]
    if trails and (trailing := actions[3].reshape(-1, known.shape[1])[of_row]).any():
        last = actions[4].reshape(-1, known.shape[1])[of_row]
        terms = values.take(inputs, axis=0) + weights
        terms[0, opening] = begun_first
        stream = np.empty_like(work)
        stream[levels.by_level] = np.maximum(terms[0], terms[1])
        if runtime.opens_with_gathers:
            stream[firsts] = np.maximum(stream[firsts], opened)
        stream[here] = np.maximum(stream[here], host[levels.needed[here]] + hop[here])
        if extra is not None:
            stream -= extra
        still = np.maximum(stream + trailing, late + last)
        busy = np.cumsum(actions[6].reshape(-1, known.shape[1])[of_row], axis=0)
        # a channel takes the collectives of its rank's chunks one after the other: end = max(still, end before + busy)
        behind = busy[last_rows] + np.maximum.reduceat(still - busy, starts[:-1][has_rows])
        begun[has_rows] = np.maximum(begun[has_rows], behind)
    return np.maximum(begun + updates[0], issued + updates[1])


def peak_bytes(schedule: Schedule, kept: Ints, kept_for_weights: Ints, during: Ints, gradients: Ints) -> Ints:
    """(ranks, batch) the most bytes of activations alive at once on every pipeline rank, as `peak_activations` of each.

    Args:
        schedule: schedule of all of them.
        kept, kept_for_weights: (stages, batch), as there.
        during: (4, stages, batch) what F, B, I and W need for themselves.
        gradients: (stages, batch), as there; 0 where they are there from the beginning.
    """
    table, num_stages = schedule.table, schedule.num_stages
    of_row = table.kind.astype(np.int64) * num_stages + table.stage
    none = np.zeros_like(kept)
    change = np.stack([kept, -kept, kept_for_weights - kept, -kept_for_weights]).reshape(4 * num_stages, -1)[of_row]
    own = (during + np.stack([kept, none, none, none])).reshape(4 * num_stages, -1)[of_row]
    firsts = makes_gradients(schedule)
    change[firsts] += gradients[table.stage[firsts]]
    total = np.cumsum(change, axis=0)
    total -= change
    peaks = np.zeros((schedule.num_ranks, kept.shape[1]), dtype=np.int64)
    has_rows = np.flatnonzero(table.rank_start[1:] > table.rank_start[:-1])
    starts = table.rank_start[:-1][has_rows]
    before = total[starts]
    total += own
    peaks[has_rows] = np.maximum.reduceat(total, starts) - before
    np.add.at(peaks, np.asarray(schedule.placement), -gradients)
    return np.maximum(peaks, 0)
