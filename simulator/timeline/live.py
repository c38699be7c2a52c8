"""Live bytes of a step over time, by role, and the fullest rank of every group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.program import Program
from plans.timeline import MemoryPeak, Timeline
from simulator.timeline.labels import groups_of, representative_step
from simulator.timeline.memory import Changes, times_of_instructions

__all__ = ["LiveBytes", "live_by_role", "live_of_groups", "worst_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBytes:
    """Live bytes of one rank over a step as a step function: `by_role[role][i]` from `times_ps[i]` on."""

    rank: int
    times_ps: npt.NDArray[np.int64]
    by_role: Mapping[str, npt.NDArray[np.int64]]

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """The total bytes over all roles."""
        return np.sum(np.stack(list(self.by_role.values())), axis=0, dtype=np.int64)

    @property
    def peak(self) -> tuple[int, int]:
        """The first time of the peak, and its bytes."""
        at = int(np.argmax(self.total))
        return int(self.times_ps[at]), int(self.total[at])

    def thinned(self, length_ps: int, num_columns: int = 800) -> LiveBytes:
        """The same with at most two changes in each column of a picture: its highest and its last.

        So a picture stays small where a step has thousands of changes, and no peak that can be seen is lost.
        """
        total = self.total
        rows = np.flatnonzero(np.append(self.times_ps[1:] != self.times_ps[:-1], True))
        column = np.floor(self.times_ps[rows] * (num_columns / length_ps)).astype(np.int64)
        by_height = np.lexsort((total[rows], column))  # the highest of a column is last
        highest = by_height[np.append(column[by_height][1:] != column[by_height][:-1], True)]
        ends = np.flatnonzero(np.append(column[1:] != column[:-1], True))
        kept = rows[np.union1d(highest, ends)]
        by_role = {role: sizes[kept] for role, sizes in self.by_role.items()}
        return LiveBytes(rank=self.rank, times_ps=self.times_ps[kept], by_role=by_role)


def live_by_role(program: Program, timeline: Timeline, rank: int, *, step: int | None = None) -> LiveBytes:
    """Live bytes of a rank over time, from the program's values and the times of its instructions, as
    `simulator.timeline.memory` counts them.

    Args:
        program: that the timeline is of.
        timeline: gives the times.
        rank: which rank.
        step: by default the one that pictures show.
    """
    step = representative_step(timeline) if step is None else step
    for group, of_ranks in times_of_instructions(program, timeline, step=step, ranks={rank}):
        for _, (start, end) in of_ranks:
            changes = Changes(group)
            times, order = changes.in_time(start, end)
            present = [
                role for number, role in enumerate(changes.roles)
                if role in changes.by_role or (changes.role == number).any()
            ]  # fmt: skip
            by_role = {
                role: changes.by_role.get(role, 0)
                + np.cumsum(np.append(0, np.where(changes.role[order] == changes.roles.index(role),
                                                  changes.size[order], 0)))
                for role in present
            }  # fmt: skip
            return LiveBytes(
                rank=rank, times_ps=np.append(0, times[order] - timeline.step_start_ps[step]), by_role=by_role
            )
    raise TwofoldError(f"rank {rank} has no spans in step {step}")


def worst_ranks(timeline: Timeline) -> tuple[MemoryPeak, ...]:
    """The peak of the fullest rank of every group of ranks, in pipeline order."""
    peaks = {peak.rank: peak for peak in timeline.memory}
    worst = []
    for _, ranks in groups_of(timeline):
        mine = [peaks[rank] for rank in ranks if rank in peaks]
        if mine:
            worst.append(max(mine, key=lambda peak: (peak.peak_bytes, -peak.rank)))
    return tuple(worst)


def live_of_groups(timeline: Timeline, program: Program | None = None) -> list[LiveBytes]:
    """Live bytes of the fullest rank of every group: by role with the program, else their sum where it was recorded."""
    if program is not None:
        shown = [peak.rank for peak in worst_ranks(timeline)] or [ranks[0] for _, ranks in groups_of(timeline)]
        return [live_by_role(program, timeline, rank) for rank in shown]
    begin, lives = timeline.step_start_ps[-1], []
    for _, ranks in groups_of(timeline):
        known = [rank for rank in ranks if rank in timeline.memory_curve]
        if known:
            rank = max(known, key=lambda rank: int(timeline.memory_curve[rank][1].max(initial=0)))
            times, sizes = timeline.memory_curve[rank]
            lives.append(LiveBytes(rank=rank, times_ps=times - begin, by_role={"live": sizes}))
    return lives
