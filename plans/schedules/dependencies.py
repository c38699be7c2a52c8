"""Dependencies of actions on other ranks, and the order replayed with one unit of time per action.

A forward waits for the forward of the stage before, a backward (whole, or of the input) for that of the stage after.
Everything else that an action needs is earlier on its own rank.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plans.schedules.schedule import Schedule, ScheduleTable

__all__ = ["rank_of_rows", "remote_dependencies", "unit_start_times"]

_FORWARD, _WEIGHT = 0, 3


def remote_dependencies(schedule: Schedule) -> NDArray[np.int64]:
    """The row of another stage that each row of `schedule.table` waits for, or -1.

    Every micro-batch must have exactly one forward and one (whole or input) backward on every stage.
    """
    table, num_stages = schedule.table, schedule.num_stages
    forward, backward = table.kind == _FORWARD, (table.kind != _FORWARD) & (table.kind != _WEIGHT)
    key = table.micro_batch.astype(np.int64) * num_stages + table.stage
    row_of = np.full(schedule.num_micro_batches * num_stages, -1)
    waits = np.full(len(key), -1)
    for which, step, edge in ((forward, -1, 0), (backward, 1, num_stages - 1)):
        rows = np.flatnonzero(which)
        row_of[key[rows]] = rows
        inner = rows[table.stage[rows] != edge]
        waits[inner] = row_of[key[inner] + step]
    return waits


def unit_start_times(schedule: Schedule) -> NDArray[np.int64]:
    """The start of each row of the table if every action takes one unit; -1 for those that never run.

    Each rank works down its order and waits at an action until what it needs is done, so ranks that wait for each other
    stop, and the rows from there on keep -1.
    """
    waits = remote_dependencies(schedule).tolist()
    starts = schedule.table.rank_start.tolist()
    next_row, last_row = starts[:-1], starts[1:]
    end = [-1] * len(waits)
    free = [0] * len(next_row)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(next_row)))
    while ready:
        rank = ready.pop()
        row, time = next_row[rank], free[rank]
        while row < last_row[rank]:
            needed = waits[row]
            if needed >= 0:
                if end[needed] < 0:
                    waiting.setdefault(needed, []).append(rank)
                    break
                if end[needed] > time:
                    time = end[needed]
            time += 1
            end[row] = time
            if waiting and row in waiting:
                ready += waiting.pop(row)
            row += 1
        next_row[rank], free[rank] = row, time
    return np.array([time - 1 if time > 0 else -1 for time in end])


def rank_of_rows(table: ScheduleTable) -> NDArray[np.int64]:
    """The rank of every row."""
    return np.repeat(np.arange(len(table.rank_start) - 1), np.diff(table.rank_start))
