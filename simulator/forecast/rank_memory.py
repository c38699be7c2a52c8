"""The memory of a pipeline rank over a step: the peak of its program in instruction order.

The peak equals that of `simulator.timeline.memory.peak_of_order` for the lowered program.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from plans.schedules import Schedule
from plans.schedules.arrivals import releases_of_rows
from plans.schedules.variants import VARIANTS, variant_of_rows
from simulator.forecast.held import Change, ChunksMemory, State, added

__all__ = ["RankMemory"]

Ints = npt.NDArray[np.int64]


class RankMemory:
    """The memory of a pipeline rank.

    Args:
        parts: its chunks as they are lowered together, with their number, in the order of the model.
        arrival_bytes: of the tensor between stages, and of its gradient.
    """

    def __init__(self, parts: Sequence[tuple[ChunksMemory, int]], arrival_bytes: int) -> None:
        self._parts = [part for part, _ in parts]
        self._chunks = [(at, chunk) for at, (_, num_chunks) in enumerate(parts) for chunk in range(num_chunks)]
        self._arrival_bytes = arrival_bytes

    @cached_property
    def kept(self) -> dict[str, int]:
        """Role -> bytes that are allocated during the entire step."""
        found, constants = dict[str, int](), dict[str, int]()
        for part in self._parts:
            found = added(found, part.kept)
            constants |= part.constants
        return added(found, {"weight": sum(constants.values())} if constants else {})

    def peak(
        self, schedule: Schedule, stages: Sequence[int], *, posts_ahead: bool = True
    ) -> tuple[int, dict[str, int]]:
        """The peak of the step and its composition.

        Args:
            schedule: schedule of the pipeline.
            stages: stages of the rank's chunks.
            posts_ahead: whether receives are posted one action ahead.
        """
        table, rank = schedule.table, schedule.placement[stages[0]]
        rows = slice(int(table.rank_start[rank]), int(table.rank_start[rank + 1]))
        chunks = np.searchsorted(stages, table.stage[rows])
        names, kinds = variant_of_rows(schedule)[rows], table.kind[rows]
        is_later = np.ones(len(chunks), dtype=np.int64)
        is_later[np.unique(4 * chunks + kinds, return_index=True)[1]] = 0
        keys, firsts, number = np.unique(
            2 * (len(VARIANTS) * chunks + names) + is_later, return_index=True, return_inverse=True
        )
        opened, states = Change(), list[State]()
        for part in self._parts:
            change, state = part.after(part.start, "begin")
            opened = opened.then(change)
            states.append(state)
        changes = [Change()] * len(keys)
        for place in np.argsort(firsts).tolist():
            at = firsts[place]
            at_part, chunk = self._chunks[int(chunks[at])]
            key = chunk, VARIANTS[int(names[at])], bool(is_later[at])
            changes[place], states[at_part] = self._parts[at_part].after(states[at_part], key)
        closed = Change()
        for end in range(self._parts[0].num_ends):
            for at_part, part in enumerate(self._parts):
                change, states[at_part] = part.after(states[at_part], end)
                closed = closed.then(change)
        released = self._arrival_bytes * releases_of_rows(schedule)[rows]
        return self._highest(opened, changes, number, self._received(schedule, rows, posts_ahead), released, closed)

    def _received(self, schedule: Schedule, rows: slice, posts_ahead: bool) -> Ints:
        """For each action, the bytes of the receive posted just before it: its own, or that of the next action."""
        table, last = schedule.table, schedule.num_stages - 1
        kind, stage = table.kind[rows], table.stage[rows]
        receives = ((kind == 0) & (stage > 0)) | (((kind == 1) | (kind == 2)) & (stage < last))
        own = np.where(receives, self._arrival_bytes, 0).astype(np.int64)
        if not posts_ahead:
            return own
        posted = np.append(own[1:], 0)
        posted[0] += own[0]
        return posted

    def _highest(
        self, opened: Change, changes: Sequence[Change], number: Ints, posted: Ints, released: Ints, closed: Change
    ) -> tuple[int, dict[str, int]]:
        """The peak from the changes of actions.

        Args:
            opened, closed: by the blocks at the start and at the end of the step.
            changes: the kinds of changes.
            number: the kind of each action.
            posted: bytes that are received into, taken just before each action.
            released: bytes of earlier sends, released just after each action.
        """
        nets = np.array([change.net_bytes for change in changes], dtype=np.int64)[number]
        peaks = np.array([change.peak_bytes for change in changes], dtype=np.int64)[number]
        before = opened.net_bytes + np.cumsum(posted) + np.cumsum(nets - released) - nets + released
        tops = before + peaks
        count = len(number)
        after = int(before[-1] + nets[-1] - released[-1]) if count else opened.net_bytes
        best = int(np.argmax(tops)) if count else -1
        highest = max(opened.peak_bytes, int(tops.max(initial=0)), after + closed.peak_bytes)
        if highest == opened.peak_bytes:
            roles = added(self.kept, opened.at_peak)
        else:
            stop = count if best < 0 or highest > int(tops[best]) else best
            roles = added(self.kept, opened.net)
            for own, times in zip(changes, np.bincount(number[:stop], minlength=len(changes)).tolist(), strict=True):
                roles = added(roles, own.repeated(times))
            roles = added(roles, {"activation": int(posted[: stop + 1].sum() - released[:stop].sum())})
            roles = added(roles, closed.at_peak if stop == count else changes[number[stop]].at_peak)
        return sum(self.kept.values()) + highest, {role: size for role, size in sorted(roles.items()) if size}
