"""The repeating part of a schedule: micro-batches in the middle need not be evaluated one by one.

The schedules of one family differ only in how often the same period of actions is repeated, in one phase (1F1B) or in
several (GPipe: forwards, then backwards). In a schedule with few micro-batches a `Cut` is a level of its events at
which further periods can be inserted: the events of the last period before the cut wait for exactly what those of the
period before them wait for, one period later. `simulator.forecast.columns.repetition` inserts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plans.schedules import Schedule, ScheduleError, make_schedule, schedule_names
from plans.schedules.looped import micro_batches_per_round
from plans.schedules.variants import VARIANTS
from simulator.forecast.columns.structure import (
    ACTION,
    FINAL,
    FROM_CHANNEL,
    FROM_STREAM,
    FROM_TENSOR,
    TRANSFER,
    Structure,
    structure_of,
)

__all__ = ["Cut", "Family", "Steady", "family_of", "steady_of"]

Ints = npt.NDArray[np.int64]

_FIRST = VARIANTS.index("F.first")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """A place at which periods can be inserted.

    Attributes:
        event: the first event behind the cut.
        blocks: (periods, events of one) the events of the last periods before the cut, as many as anything looks back;
            in a column stand the same events one period apart.
        inputs: (slots, events of one) what the events of a further period wait for, as positions in these blocks with
            the new one behind them, flattened; -1 for none.
        bounds: first event of each level of a period, and their number.
        rows: the actions of a period.
    """

    event: int
    blocks: Ints
    inputs: Ints
    bounds: tuple[int, ...]
    rows: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steady:
    """A structure that represents all larger numbers of micro-batches of its family, in steps of `step`.

    Attributes:
        structure: of the small schedule.
        cuts: of its phases, in order.
        num_micro_batches: number of micro batches of the small schedule.
        step: micro-batches of one period.
        far: transfers from a stage in one phase to a stage in another, such as from chunk to chunk of looped BFS. With
            more micro-batches they meet other actions of the sender, so the sender must never be what they wait for.
    """

    structure: Structure
    cuts: tuple[Cut, ...]
    num_micro_batches: int
    step: int
    far: Ints


class Family(NamedTuple):
    """Schedules that differ in the number of micro-batches only."""

    name: str
    num_ranks: int
    virtual: int
    step: int
    """Micro-batches of one period: 1, or a round of an interleaved schedule; 0 where there is no telling (rounds that
    are not as long as there are ranks are only possible for few micro-batches)."""

    def schedule(self, num_micro_batches: int) -> Schedule:
        """The schedule of the family with this many micro-batches."""
        return make_schedule(self.name, self.num_ranks, num_micro_batches, virtual=self.virtual)


def family_of(schedule: Schedule, num_micro_batches: int | None = None) -> Family | None:
    """The family of a schedule that `make_schedule` makes; None for any other order.

    Args:
        schedule: any.
        num_micro_batches: of another member of the family, whose period is needed (rounds may differ in size).
    """
    if schedule.name not in schedule_names() or schedule.num_stages % schedule.num_ranks:
        return None
    virtual = schedule.num_stages // schedule.num_ranks
    try:
        made = make_schedule(schedule.name, schedule.num_ranks, schedule.num_micro_batches, virtual=virtual)
    except ScheduleError:
        return None
    if made is not schedule and made != schedule:
        return None
    wanted = schedule.num_micro_batches if num_micro_batches is None else num_micro_batches
    step = 1
    if schedule.name.startswith("interleaved"):
        per_round = micro_batches_per_round(schedule.name, schedule.num_ranks, wanted)
        step = per_round if per_round == schedule.num_ranks else 0
    return Family(schedule.name, schedule.num_ranks, virtual, step)


_FIRST_TRIED: dict[str, Callable[[int, int], int]] = {
    "1f1b": lambda p, v: 2 * p + 1,
    "dualpipe_v": lambda p, v: 4 * p + 1,
    "gpipe": lambda p, v: p + 5,
    "interleaved_1f1b": lambda p, v: 3 if v == 1 else 5,
    "interleaved_zb": lambda p, v: 4 if v == 1 else 5,
    "looped_bfs": lambda p, v: p + (5 if v == 1 else 13),
    "v_half": lambda p, v: 2 * p + 1,
    "v_min": lambda p, v: p + 5,
    "zb_h1": lambda p, v: 2 * p + 1,
    "zb_h2": lambda p, v: 4 * p + 1,
    "zb_v": lambda p, v: 4 * p + 1,
}
"""Periods after which a steady state shows, nearly always: a hint that spares trying shorter schedules."""


@lru_cache(maxsize=512)
def steady_of(
    family: Family,
    on_channel: tuple[frozenset[str], ...] = (),
    with_final: bool = False,
    posts_ahead: bool = True,
) -> Steady | None:
    """A small member of a family with a steady state that can represent all larger ones, or None.

    Args:
        family: of schedules.
        on_channel, with_final, posts_ahead: as for `structure_of`.
    """
    step = family.step
    first = _FIRST_TRIED[family.name](family.num_ranks, family.virtual)
    for periods in range(first, 4 * first, 1 if step > 1 else max(2, family.num_ranks // 4)):
        size = periods * step
        try:
            structure = structure_of(family.schedule(size), on_channel, with_final, posts_ahead)
        except ScheduleError:  # the family begins later
            continue
        found = _cuts(structure, step, _growing(structure.schedule, family.schedule(size + step), step))
        if found is not None:
            return Steady(structure=structure, cuts=found[0], num_micro_batches=size, step=step, far=found[1])
    return None


def _growing(schedule: Schedule, longer: Schedule, step: int) -> Ints:
    """The classes (stage and kind of action) of which a longer schedule has more, one for each further micro-batch."""
    one, other = (
        np.bincount(each.table.stage * 4 + each.table.kind, minlength=4 * each.num_stages)
        for each in (schedule, longer)
    )
    return np.flatnonzero(other - one == step)


def _cuts(structure: Structure, step: int, growing: Ints) -> tuple[tuple[Cut, ...], Ints] | None:
    """A cut for every phase and the transfers between phases, or None where the schedule is too short to have them."""
    predecessor, by_like = _predecessors(structure, step)
    spans = []
    for number in growing.tolist():
        own = by_like[number]
        own = own[own >= 0]
        own = own[structure.variant[structure.row[own]] < _FIRST]
        span = _longest_run(structure.level[own], step)
        if span is None:
            return None
        spans.append((number, *span))
    phases = _phases(spans)
    phase = np.full(4 * structure.schedule.num_stages, -1)
    for number, (_, _, members) in enumerate(phases):
        phase[members] = number
    far = _between_phases(structure, phase)
    table, row = structure.schedule.table, np.where(structure.receiver >= 0, structure.receiver, structure.row)
    # there is only one of each first and last action, whatever the number of micro-batches
    is_single = (structure.variant[structure.row] >= _FIRST) & (structure.kind != TRANSFER)
    phase_of_event = np.where(is_single, -1, phase[4 * table.stage[row] + table.kind[row]])
    cuts: list[Cut] = []
    for number, (level, period, _) in enumerate(phases):
        # what the next phase receives first may be posted already when this one ends
        repeating = np.where(phase_of_event == number, predecessor, -1)
        tried = (
            _cut(structure, repeating, far, phase_of_event == number, level - back * period, period)
            for back in range(4)
        )
        cut = next((cut for cut in tried if cut is not None), None)
        if cut is None or (cuts and int(cut.blocks.min()) < cuts[-1].event):
            return None
        cuts.append(cut)
    # every stage must have all that it does per micro-batch in some period: else more of them cannot be inserted
    done = np.zeros((structure.schedule.num_stages, 2), dtype=np.int64)
    for cut in cuts:
        kind, stage = table.kind[cut.rows], table.stage[cut.rows]
        np.add.at(done[:, 0], stage[kind == 0], 1)
        np.add.at(done[:, 1], stage[(kind == 1) | (kind == 2)], 1)
    if not cuts or np.any(done != step) or not _in_order(structure, phase, cuts, far):
        return None
    return tuple(cuts), far[far >= int(cuts[0].blocks[-1].min())]


def _predecessors(structure: Structure, step: int) -> tuple[Ints, Ints]:
    """For each event, the corresponding event one period earlier, or -1; (class, occurrence) -> event, or -1."""
    table = structure.schedule.table
    row = np.maximum(np.where(structure.kind == TRANSFER, structure.receiver, structure.row), 0)
    key = (np.maximum(structure.kind, 0) * structure.schedule.num_stages + table.stage[row]) * 4 + table.kind[row]
    occurrence = structure.occurrence
    kinds = int(structure.kind.max()) + 1
    by_like = np.full((4 * kinds * structure.schedule.num_stages, int(occurrence.max()) + 1), -1)
    by_like[key[1:], occurrence[1:]] = np.arange(1, structure.num_events)
    predecessor = np.full(structure.num_events, -1)
    has = np.flatnonzero(occurrence >= step)
    has = has[has > 0]
    predecessor[has] = by_like[key[has], occurrence[has] - step]
    return predecessor, by_like


def _between_phases(structure: Structure, phase: Ints) -> Ints:
    """The transfers whose sender and receiver act in different phases."""
    table = structure.schedule.table
    of_row = phase[4 * table.stage + table.kind]
    events = np.flatnonzero(structure.kind == TRANSFER)
    sender, receiver = of_row[structure.row[events]], of_row[structure.receiver[events]]
    return events[(sender != receiver) & (sender >= 0) & (receiver >= 0)]


def _in_order(structure: Structure, phase: Ints, cuts: Sequence[Cut], far: Ints) -> bool:
    """Whether a transfer between phases, if its receiver is behind its cut, has a sender behind or just before its own:
    then the facts about the sender hold for any number of periods."""
    table = structure.schedule.table
    of_row = phase[4 * table.stage + table.kind]
    events = np.array([cut.event for cut in cuts])
    begins = np.array([int(cut.blocks.min()) for cut in cuts])
    sender, receiver = structure.row[far], structure.receiver[far]
    is_behind = structure.event_of_row[receiver] >= events[of_row[receiver]]
    return bool(np.all(structure.event_of_row[sender[is_behind]] >= begins[of_row[sender[is_behind]]]))


def _longest_run(levels: Ints, step: int) -> tuple[int, int, int] | None:
    """(first level, last level, levels per period) of the longest stretch in which a class comes at equal distances."""
    if len(levels) <= 2 * step:
        return None
    apart = levels[step:] - levels[:-step]
    changes = np.flatnonzero(np.diff(apart)) + 1
    starts = np.concatenate([[0], changes])
    stops = np.concatenate([changes, [len(apart)]])
    longest = int(np.argmax(stops - starts))
    first, stop = int(starts[longest]), int(stops[longest])
    return int(levels[first]), int(levels[stop - 1 + step]), int(apart[first])


def _phases(spans: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, list[int]]]:
    """(level of the cut, levels per period, classes) such that every class has its cut in its steady stretch: a cut is
    where the first of its classes ends."""
    left = sorted(spans, key=lambda span: span[2])
    phases: list[tuple[int, int, list[int]]] = []
    while left:
        _, _, end, period = left[0]
        taken = [span for span in left if span[1] + 2 * span[3] <= end + 1 and span[3] == period]
        if left[0] not in taken:
            left.pop(0)
            continue
        phases.append((end + 1, period, [span[0] for span in taken]))
        left = [span for span in left if span not in taken]
    return phases


def _cut(
    structure: Structure, predecessor: Ints, far: Ints, inside: npt.NDArray[np.bool_], level: int, period: int
) -> Cut | None:
    """The cut before `level`, or None where something before it does not repeat; `inside`: the events of its phase."""
    levels = structure.level
    inputs = structure.inputs.copy()
    inputs[np.array([FROM_STREAM, FROM_TENSOR])[:, None], far] = 0
    inputs[FROM_CHANNEL:, far] = 0
    event = int(np.searchsorted(levels, level))
    begin = int(np.searchsorted(levels, level - period))
    own = np.arange(begin, event)
    if not len(own) or begin == 0 or not _repeats(structure, inputs, predecessor, own, period):
        return None
    slots, at = np.nonzero(inputs[:, begin:])
    sources = inputs[slots, begin + at]
    # what reaches back: from a period to what is before it, and over the cut
    reach = np.where(begin + at < event, levels[begin + at], level) - levels[sources]
    crosses = (sources < event) & inside[sources]
    num_periods = -(-int(reach[crosses].max(initial=period)) // period)
    blocks = [own]
    for _ in range(num_periods - 1):
        blocks.append(predecessor[blocks[-1]])
        if np.any(blocks[-1] < 0) or np.any(levels[blocks[-2]] - levels[blocks[-1]] != period):
            return None
    blocks.reverse()
    first = int(np.searchsorted(levels, level - period * num_periods))
    if event - first != num_periods * len(own):
        return None  # something else happens next to the periods
    place = np.full(structure.num_events + 1, -1)
    place[predecessor[blocks[0]]] = np.arange(len(own))
    place[-1] = -1
    for number, block in enumerate(blocks):
        place[block] = (number + 1) * len(own) + np.arange(len(own))  # one period on
    own_inputs = inputs[:, own]
    bounds = np.searchsorted(levels[own], np.arange(level - period, level + 1))
    return Cut(
        event=event,
        blocks=np.stack(blocks),
        inputs=np.where(own_inputs > 0, place[own_inputs], -1),
        bounds=tuple(bounds.tolist()),
        rows=structure.row[own[structure.kind[own] == ACTION]],
    )


def _repeats(structure: Structure, inputs: Ints, predecessor: Ints, events: Ints, period: int) -> bool:
    """Whether events wait for the same events as those a period earlier, one period later, and for no event of the
    ends.
    """
    before = predecessor[events]
    if np.any(before < 0) or np.any(structure.level[events] - structure.level[before] != period):
        return False
    if np.any(structure.variant[structure.row[events]] >= _FIRST) or np.any(structure.kind[events] == FINAL):
        return False
    following = _following(structure)
    rows, earlier = structure.row[events], structure.row[before]
    if np.any(following[rows] != following[earlier]):  # their receives are posted just before
        return False
    if np.any(structure.releases[rows] != structure.releases[earlier]):
        return False
    own, theirs = inputs[:, events], inputs[:, before]
    return bool(np.all(np.where(own > 0, predecessor[own], 0) == theirs))


def _following(structure: Structure) -> Ints:
    """The class (stage and kind) of the next action on its rank, -1 for none, for each row."""
    table = structure.schedule.table
    following = np.append(4 * table.stage[1:] + table.kind[1:], -1)
    following[table.rank_start[1:] - 1] = -1
    return following
