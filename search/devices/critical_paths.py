"""Longest paths through a schedule, which bound the step of every layer split.

A step takes at least as long as any chain of actions in which each waits for the previous one, on its rank or for its
tensor. Times decide which chain is the longest, but every chain is a bound. The longest chains of some layer splits are
stored as numbers: how often each action of each chunk, and each link, is on them. One matrix product then bounds all
layer splits, layouts and recompute modes with this schedule.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from plans.schedules import Schedule
from plans.schedules.dependencies import rank_of_rows, remote_dependencies, unit_start_times
from plans.schedules.variants import VARIANTS, variant_of_rows
from search.devices.costs import WAYS

__all__ = ["CriticalPaths"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_OF_VARIANT = {
    "F": ("F",), "F.first": ("F.first",), "I": ("I",), "W": ("closing",), "W.last": ("closing.last",),
    "B": ("closing",), "B.last": ("closing.last",),
}  # fmt: skip
"""The ways (`search.devices.costs.WAYS`) that an action of a schedule consists of."""

_WHOLE = ("I", "closing", "joined")
"""Those of a whole backward in a schedule that splits others."""

_NO_LONGER = 1.002
"""A path is kept if it is longer by this factor than those that are known, for the same times."""


class CriticalPaths:
    """The longest paths of a schedule found so far.

    Args:
        schedule: schedule of the pipeline.
        split: whether the schedule splits the backward; a whole one then takes both parts.

    Attributes:
        actions: (path, chunk, way) how often each is on a path.
        links: (path, chunk) how often the link between the chunk before and this one is.
        ends: (path) the rank on which it ends.
    """

    def __init__(self, schedule: Schedule, *, split: bool) -> None:
        self.schedule = schedule
        self.actions = np.zeros((0, schedule.num_stages, len(WAYS)))
        self.links = np.zeros((0, schedule.num_stages))
        self.ends = np.zeros(0, dtype=np.int64)
        table = schedule.table
        ways = np.array([
            [float(way in (_WHOLE if split and name[0] == "B" else _OF_VARIANT[name])) for way in WAYS]
            for name in VARIANTS
        ])  # fmt: skip
        self._ways = ways[variant_of_rows(schedule)]  # (row, way)
        self._stage = table.stage.astype(np.int64)
        self._needed, rank = remote_dependencies(schedule), rank_of_rows(table)
        self._before = np.arange(-1, len(rank) - 1)
        self._before[table.rank_start[:-1][table.rank_start[:-1] < len(rank)]] = -1
        is_remote = (self._needed >= 0) & (rank[self._needed] != rank)
        boundary = np.where(table.kind == 0, self._stage, self._stage + 1)
        self._link = np.where(is_remote, boundary, -1)  # over which a row's tensor comes, as the number of a chunk
        self._last = table.rank_start[1:] - 1

    def __len__(self) -> int:
        return len(self.ends)

    def learn(self, times_s: Floats, hops_s: Floats, *, only_first: bool) -> None:
        """Add the longest paths of some spreads.

        Args:
            times_s: (spread, chunk, way) seconds.
            hops_s: (chunk) seconds on the link from the chunk before.
            only_first: end on the rank of the first chunk.
        """
        ends, came = self._walked(times_s, hops_s)
        last = self._last
        if only_first:
            last = last[[self.schedule.placement[0]]]
        for number, own in enumerate(times_s):
            end = int(last[int(ends[last, number].argmax())])
            if not (self.lengths_s(own[None], hops_s) * _NO_LONGER >= ends[end, number]).any():
                self._keep(end, came[:, number].tolist())

    def lengths_s(self, times_s: Floats, hops_s: Floats) -> Floats:
        """(spread, path) seconds of the paths found so far; arguments as of `learn`."""
        actions = self.actions.reshape(len(self), -1) if len(self) else np.zeros((0, times_s[0].size))
        return times_s.reshape(len(times_s), -1) @ actions.T + self.links @ hops_s

    def _walked(self, times_s: Floats, hops_s: Floats) -> tuple[Floats, Ints]:
        """(row, spread) when each action ends, and the row that it waited for last, -1 for none."""
        level = unit_start_times(self.schedule)
        rows = np.argsort(level, kind="stable")
        bounds = np.searchsorted(level[rows], np.arange(level.max() + 2)).tolist()
        place = np.zeros(len(rows) + 1, dtype=np.int64)  # counted from 1; 0, also of row -1, is that of none
        place[rows] = np.arange(1, len(rows) + 1)
        inputs = np.stack([place[self._before], place[self._needed]])[:, rows]
        work = np.einsum("src,rc->rs", times_s[:, self._stage[rows]], self._ways[rows])
        travel = np.where(self._link >= 0, hops_s[self._link], 0.0)[rows, None]
        ends = np.zeros((len(rows) + 1, len(times_s)))
        for first, stop in pairwise(bounds):
            own, sent = ends.take(inputs[:, first:stop], axis=0)
            sent += travel[first:stop]
            np.maximum(own, sent, out=own)
            np.add(own, work[first:stop], out=ends[first + 1 : stop + 1])
        own, sent = ends.take(inputs, axis=0)
        waited = (sent + travel >= own) & (inputs[1] > 0)[:, None]
        came = np.where(waited, self._needed[rows, None], self._before[rows, None])
        return ends[place[:-1]], came[place[:-1] - 1]

    def _keep(self, end: int, came: list[int]) -> None:
        chain = [end]
        while (row := came[chain[-1]]) >= 0:
            chain.append(row)
        rows = np.array(chain)
        actions = np.zeros(self.actions.shape[1:])
        np.add.at(actions, self._stage[rows], self._ways[rows])
        links = np.zeros(self.links.shape[1])
        over = self._link[rows[:-1][self._needed[rows[:-1]] == rows[1:]]]
        np.add.at(links, over[over >= 0], 1.0)
        self.actions = np.concatenate([self.actions, actions[None]])
        self.links = np.concatenate([self.links, links[None]])
        self.ends = np.append(self.ends, self.schedule.placement[self._stage[end]])
