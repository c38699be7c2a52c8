"""Finds out whether a schedule can run, and shows the cell where it cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plans.errors import whole_number
from plans.schedules.action import KINDS
from plans.schedules.dependencies import rank_of_rows, remote_dependencies, unit_start_times
from plans.schedules.errors import ScheduleError
from plans.schedules.grid import format_cells
from plans.schedules.in_flight import live_counts
from plans.schedules.schedule import Schedule

__all__ = ["validate"]

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)


def validate(schedule: Schedule, *, memory_limit: int | Sequence[int] | None = None) -> None:
    """Checks that the schedule does every action once, on the right rank, and can run to its end.

    Args:
        schedule: what to check.
        memory_limit: the most activations alive at once, in units of one micro-batch on one chunk (as
            `peak_in_flight` counts them): one number for all ranks, or one per rank.

    Raises:
        ScheduleError: an action on a rank that does not own its stage, twice, or missing; a backward before its
            forward; a weight gradient before its input gradient; ranks that wait for each other; more live
            activations than the limit. The message shows the grid (ranks x time) with the culprit as `>1B3<`.

    >>> validate(Schedule.from_text("0F0,0B0\\n1B0,1F0"))
    Traceback (most recent call last):
        ...
    plans.schedules.errors.ScheduleError: schedule 'custom': rank 1 does 1B0 before its forward 1F0
    time    0     1
    rank 0  0F0   0B0
    rank 1 >1B0<  1F0
    """
    _check_owners(schedule)
    _check_each_once(schedule)
    _check_order_on_rank(schedule)
    _check_waiting(schedule)
    if memory_limit is not None:
        _check_memory(schedule, memory_limit)


def _check_owners(schedule: Schedule) -> None:
    table = schedule.table
    owner, rank_of = np.array(schedule.placement)[table.stage], rank_of_rows(table)
    wrong = np.flatnonzero(owner != rank_of)
    if len(wrong):
        row = int(wrong[0])
        reason = f"{schedule.cell_text(row)} is on rank {rank_of[row]}, but rank {owner[row]} owns its stage"
        raise _culprit(schedule, row, reason)


def _check_each_once(schedule: Schedule) -> None:
    """One forward, and one full backward or one input and one weight gradient, per stage and micro-batch."""
    table, num_stages = schedule.table, schedule.num_stages
    key = table.micro_batch.astype(np.int64) * num_stages + table.stage
    for kinds, what in (
        ((_FORWARD,), "forward"),
        ((_BACKWARD, _INPUT), "input gradient"),
        ((_BACKWARD, _WEIGHT), "weight gradient"),
    ):
        rows = np.flatnonzero(np.isin(table.kind, kinds))
        keys, first, count = np.unique(key[rows], return_index=True, return_counts=True)
        if count.max(initial=0) > 1:
            earlier = int(rows[first[np.argmax(count > 1)]])
            row = int(rows[np.flatnonzero(key[rows] == key[earlier])[1]])
            position = earlier - int(table.rank_start[rank_of_rows(table)[earlier]])
            raise _culprit(
                schedule,
                row,
                f"{schedule.cell_text(row)} repeats the {what} of micro-batch {table.micro_batch[row]} on stage "
                f"{table.stage[row]}; {schedule.cell_text(earlier)} at position {position} already ran it",
            )
        if len(keys) < num_stages * schedule.num_micro_batches:
            # the first number that the sorted keys skip
            skipped = int(np.argmax(np.append(keys, -1) != np.arange(len(keys) + 1)))
            raise _missing(schedule, skipped, [KINDS[kind].value for kind in kinds], what)


def _missing(schedule: Schedule, key: int, letters: list[str], what: str) -> ScheduleError:
    micro_batch, stage = divmod(key, schedule.num_stages)
    table, rank = schedule.table, schedule.placement[stage]
    cells = [f"{stage}{letter}{micro_batch}" for letter in reversed(letters)]
    reason = f"rank {rank} has no {what} of micro-batch {micro_batch} on stage {stage}: {' or '.join(cells)} is missing"
    of_same = np.flatnonzero((table.stage == stage) & (table.micro_batch == micro_batch))
    end_of_rank = int(table.rank_start[rank + 1])
    return _culprit(schedule, int(of_same[-1]) if len(of_same) else end_of_rank, reason, rank=rank)


def _check_order_on_rank(schedule: Schedule) -> None:
    table, num_stages = schedule.table, schedule.num_stages
    key = table.micro_batch.astype(np.int64) * num_stages + table.stage
    row_of = np.full((len(KINDS), schedule.num_micro_batches * num_stages), -1)
    row_of[table.kind, key] = np.arange(len(key))
    for later, earlier, what in (
        (_BACKWARD, _FORWARD, "forward"),
        (_INPUT, _FORWARD, "forward"),
        (_WEIGHT, _INPUT, "input gradient"),
    ):
        wrong = np.flatnonzero((row_of[later] >= 0) & (row_of[later] < row_of[earlier]))
        if len(wrong):
            row = int(row_of[later, wrong].min())
            before = schedule.cell_text(int(row_of[earlier, key[row]]))
            rank = int(rank_of_rows(table)[row])
            raise _culprit(schedule, row, f"rank {rank} does {schedule.cell_text(row)} before its {what} {before}")


def _check_waiting(schedule: Schedule) -> None:
    times = unit_start_times(schedule)
    if times.min() >= 0:
        return
    table, waits = schedule.table, remote_dependencies(schedule)
    rank_of = rank_of_rows(table)
    # the action at which each rank stands, None for a rank that is through
    stuck: list[int | None] = []
    for first, last in zip(table.rank_start[:-1], table.rank_start[1:], strict=True):
        blocked = np.flatnonzero(times[first:last] < 0)
        stuck.append(int(first + blocked[0]) if len(blocked) else None)
    rank = next(rank for rank, row in enumerate(stuck) if row is not None)
    visited: list[int] = []
    while rank not in visited:
        visited.append(rank)
        row = stuck[rank]
        assert row is not None  # what a stuck rank waits for is behind another rank's stuck action
        rank = int(rank_of[waits[row]])
    cycle = visited[visited.index(rank) :]
    lines = []
    for rank in cycle:
        row = stuck[rank]
        assert row is not None
        needed = int(waits[row])
        owner = int(rank_of[needed])
        blocker = stuck[owner]
        assert blocker is not None
        after = f"which rank {owner} does after {schedule.cell_text(blocker)}"
        if blocker == needed:
            after = f"at which rank {owner} waits itself"
        lines.append(f"rank {rank} waits at {schedule.cell_text(row)} for {schedule.cell_text(needed)}, {after}")
    first_row = stuck[cycle[0]]
    assert first_row is not None
    raise _culprit(schedule, first_row, "deadlock: " + "; ".join(lines), times=times)


def _check_memory(schedule: Schedule, memory_limit: int | Sequence[int]) -> None:
    each = memory_limit if isinstance(memory_limit, Sequence | np.ndarray) else [memory_limit] * schedule.num_ranks
    limits = [whole_number("memory_limit", limit, least=0) for limit in each]
    if len(limits) != schedule.num_ranks:
        raise ScheduleError(f"memory_limit has {len(limits)} numbers for {schedule.num_ranks} ranks: {limits}")
    table = schedule.table
    rank_of = rank_of_rows(table)
    before_backward, kept = live_counts(schedule)
    live = before_backward + kept
    over = np.flatnonzero(live > np.array(limits)[rank_of])
    if len(over):
        row = int(over[0])
        rank = int(rank_of[row])
        peak = int(live[rank_of == rank].max())
        raise _culprit(
            schedule,
            row,
            f"{schedule.cell_text(row)} keeps {live[row]} activations on rank {rank}, and the limit is "
            f"{limits[rank]}; this order needs {peak}",
            times=unit_start_times(schedule),
        )


def _culprit(
    schedule: Schedule, row: int, reason: str, *, times: NDArray[np.int64] | None = None, rank: int | None = None
) -> ScheduleError:
    """The error that shows `row` in the grid; without `times` the actions stand one after the other."""
    table = schedule.table
    if rank is None:
        rank = int(rank_of_rows(table)[row])
    cells = schedule.cells()
    position = row - int(table.rank_start[rank])
    if times is not None:
        cells, position = _spread(cells, table.rank_start, times, (rank, position))
    return ScheduleError(f"schedule {schedule.name!r}: {reason}\n{format_cells(cells, mark=(rank, position))}")


def _spread(
    cells: list[list[str]], rank_start: NDArray[np.int64], times: NDArray[np.int64], mark: tuple[int, int]
) -> tuple[list[list[str]], int]:
    """The cells at their unit times, those that never run behind everything that does; and the column of the mark."""
    behind = int(times.max()) + 1
    spread = []
    column = mark[1]
    for rank, row in enumerate(cells):
        columns = times[rank_start[rank] : rank_start[rank + 1]].copy()
        never = np.flatnonzero(columns < 0)
        columns[never] = behind + np.arange(len(never))
        line = [""] * (int(columns.max()) + 1)
        for at, text in zip(columns.tolist(), row, strict=True):
            line[at] = text
        spread.append(line)
        if rank == mark[0]:
            column = int(columns[mark[1]])
    return spread, column
