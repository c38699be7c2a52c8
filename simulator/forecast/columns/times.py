"""Evaluates the events of a schedule (`simulator.forecast.columns.structure`) level by level for batches of
configurations.

Every event is the maximum of a few earlier events plus constants, so a level is a gather, a sum and a maximum. If the
schedule belongs to a family, only a few micro-batches are evaluated: once all events of a period are later than those
of a previous period by the same time, the others follow exactly (`simulator.forecast.columns.steady`). Otherwise
everything is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.schedules import Schedule, validate
from plans.schedules.variants import VARIANTS
from simulator.forecast.clock_map import NEVER, Times
from simulator.forecast.columns.costs import Expand, PipelineCosts
from simulator.forecast.columns.known import Closing, Known
from simulator.forecast.columns.repetition import Period, insert_periods
from simulator.forecast.columns.steady import Cut, Family, Steady, family_of, steady_of
from simulator.forecast.columns.structure import (
    CHANNELS,
    FINAL,
    FROM_CHANNEL,
    FROM_CONSTANT,
    FROM_STREAM,
    FROM_TENSOR,
    TRANSFER,
    Structure,
    structure_of,
)

__all__ = ["ActionTimes", "PipelineTimes", "action_times", "pipeline_times"]

Ints = npt.NDArray[np.int64]

_EVENTS_AT_ONCE = 400_000
"""Events times configurations that are evaluated together: enough to make array operations worth while."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTimes:
    """The times at which the ranks of a pipeline end their step. Arrays have the batch axes of the costs first.

    Attributes:
        start_ps, end_ps: (*batch, num_ranks) when each rank began the step, and when all that it issued is over.
        busy_ps: (*batch, num_ranks) what its actions take on its compute stream, waiting for its own collectives
            included, for other ranks not.
        evaluated: (*batch) micro-batches that were evaluated; the others follow by repetition.
    """

    start_ps: Ints
    end_ps: Ints
    busy_ps: Ints
    evaluated: Ints

    @property
    def step_ps(self) -> Ints:
        """(*batch) from the first start to the last end."""
        return np.asarray(self.end_ps.max(-1) - self.start_ps.min(-1))

    @property
    def idle_ps(self) -> Ints:
        """(*batch, num_ranks) the part of the step in which a rank runs no action: the bubble."""
        return np.asarray(self.step_ps[..., None] - self.busy_ps)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionTimes:
    """One configuration in full: for every row of the schedule's table the end of the action on the compute stream, and
    of the tensor that it received (-1 where it receives none)."""

    end_ps: Ints
    received_ps: Ints


def pipeline_times(
    schedule: Schedule,
    costs: PipelineCosts,
    *,
    num_micro_batches: int | npt.ArrayLike | None = None,
    start_ps: Times = 0,
) -> PipelineTimes:
    """The times of one step of a pipeline, as `simulator.run_program` has them, to the picosecond.

    Args:
        schedule: any valid one. A schedule made by `make_schedule` represents its family.
        costs: of one configuration or a batch.
        num_micro_batches: (*batch) for members of the schedule's family with other numbers of micro-batches.
        start_ps: (*batch, num_ranks) when each rank begins its step: the end of the step before.

    Raises:
        TwofoldError: a schedule that cannot run, a map that is missing or has other clocks, shapes that do not fit.

    >>> from plans.schedules import make_schedule
    >>> from simulator.forecast.columns import MaxPlus
    >>> forward, backward = (MaxPlus.identity().wait_for("arrival").compute(0, work) for work in (10, 20))
    >>> costs = PipelineCosts(maps={"F": forward, "B": backward})
    >>> times = pipeline_times(make_schedule("1f1b", 4, 8), costs)
    >>> int(times.step_ps), times.idle_ps.tolist()
    (330, [90, 90, 90, 90])
    >>> many = pipeline_times(make_schedule("1f1b", 4, 8), costs, num_micro_batches=[8, 100, 1000])
    >>> many.step_ps.tolist()
    [330, 3090, 30090]
    """
    num_ranks = schedule.num_ranks
    if num_micro_batches is None:
        num_micro_batches = schedule.num_micro_batches
    wanted = np.asarray(num_micro_batches, dtype=np.int64)
    if wanted.size and wanted.min() < 1:
        raise TwofoldError(f"num_micro_batches must be at least 1, not {num_micro_batches}")
    batch_shape = costs.batch_shape(schedule.num_stages, num_ranks, [start_ps])
    batch_shape = np.broadcast_shapes(batch_shape, wanted.shape)
    counts = np.broadcast_to(wanted, batch_shape).reshape(-1)
    task = _Task(schedule, costs, batch_shape, start_ps)
    for count in np.unique(counts).tolist():
        task.sort(count, np.flatnonzero(counts == count))
    task.run(counts)
    shape = (*batch_shape, num_ranks)
    return PipelineTimes(
        start_ps=np.broadcast_to(np.asarray(start_ps, dtype=np.int64), shape),
        end_ps=task.end.T.reshape(shape),
        busy_ps=task.busy.T.reshape(shape),
        evaluated=task.evaluated.reshape(batch_shape),
    )


def action_times(schedule: Schedule, costs: PipelineCosts, *, start_ps: Times = 0) -> ActionTimes:
    """The end of every action of one configuration; nothing is left out.

    Raises:
        TwofoldError: as `pipeline_times`; costs with batch axes.
    """
    if shape := costs.batch_shape(schedule.num_stages, schedule.num_ranks, [start_ps]):
        raise TwofoldError(f"action_times is for one configuration, and the costs have the batch axes {shape}")
    structure = structure_of(_checked(schedule), *costs.structure_kind)
    run = _Run(structure, costs, Expand((), np.zeros(1, dtype=np.int64)), start_ps)
    values = run.values[:, 0]
    received = np.where(structure.transfer_of_row > 0, values[structure.transfer_of_row], -1)
    return ActionTimes(end_ps=values[structure.event_of_row], received_ps=received)


@lru_cache(maxsize=256)
def _checked(schedule: Schedule) -> Schedule:
    """The schedule, after checking that it can run."""
    if family_of(schedule) is None:
        validate(schedule)
    return schedule


class _Task:
    """A batch, sorted by the structure that evaluates each configuration, and filled in step by step."""

    def __init__(
        self,
        schedule: Schedule,
        costs: PipelineCosts,
        batch_shape: tuple[int, ...],
        start_ps: Times,
    ) -> None:
        self._schedule = schedule
        self._costs = costs
        self._batch_shape = batch_shape
        self._start_ps = start_ps
        self._structure_kind = costs.structure_kind
        size = int(np.prod(batch_shape, dtype=np.int64))
        self.end = np.zeros((schedule.num_ranks, size), dtype=np.int64)
        self.busy = np.zeros((schedule.num_ranks, size), dtype=np.int64)
        self.evaluated = np.zeros(size, dtype=np.int64)
        self._families: dict[Family, list[Ints]] = {}
        self._whole: list[tuple[Schedule, Ints]] = []

    def sort(self, count: int, chosen: Ints) -> None:
        """Enter the configurations with `count` micro-batches."""
        schedule = self._schedule
        family = family_of(schedule, count)
        if family is not None:
            self._families.setdefault(family, []).append(chosen)
        elif count != schedule.num_micro_batches:
            raise TwofoldError(
                f"schedule {schedule.name!r} is for {schedule.num_micro_batches} micro-batches and is not one that "
                f"make_schedule makes: it cannot be taken for {count}"
            )
        else:
            self._whole.append((_checked(schedule), chosen))

    def run(self, counts: Ints) -> None:
        """Evaluate all levels."""
        for family, parts in self._families.items():
            left = np.concatenate(parts)
            steady = steady_of(family, *self._structure_kind) if family.step else None
            if steady is not None:
                is_long = counts[left] > steady.num_micro_batches
                long = left[is_long]
                left = np.concatenate([left[~is_long], long[~self._evaluate(steady.structure, long, counts, steady)]])
            for count in np.unique(counts[left]).tolist():
                self._whole.append((family.schedule(count), left[counts[left] == count]))
        for schedule, chosen in self._whole:
            self._evaluate(structure_of(schedule, *self._structure_kind), chosen, counts, None)

    def _evaluate(
        self, structure: Structure, chosen: Ints, counts: Ints, steady: Steady | None
    ) -> npt.NDArray[np.bool_]:
        """Whether each of the chosen could be evaluated this way; its results are filled in then."""
        done = np.zeros(len(chosen), dtype=bool)
        at_once = max(1, _EVENTS_AT_ONCE // structure.num_events)
        size = structure.schedule.num_micro_batches
        for first in range(0, len(chosen), at_once):
            part = chosen[first : first + at_once]
            repeats = None if steady is None else (counts[part] - size) // steady.step
            expand = Expand(self._batch_shape, part)
            run = _Run(structure, self._costs, expand, self._start_ps, steady, repeats)
            fine = run.fine
            self.end[:, part[fine]] = run.end_ps()[:, fine]
            self.busy[:, part[fine]] = run.busy_ps()[:, fine]
            step = 0 if steady is None else steady.step
            self.evaluated[part[fine]] = size + step * run.num_periods[fine]
            done[first : first + at_once] = fine
        return done


class _Run:
    """One structure, some configurations: the values of its events, and what follows from them."""

    def __init__(
        self,
        structure: Structure,
        costs: PipelineCosts,
        expand: Expand,
        start_ps: Times,
        steady: Steady | None = None,
        repeats: Ints | None = None,
    ) -> None:
        self._structure = structure
        self._known = known = Known(structure, costs, expand, start_ps)
        self._closing = Closing(costs, expand, structure.schedule.num_ranks)
        self._steady = steady
        self._cuts = () if steady is None else steady.cuts
        self._repeats = np.zeros(expand.count, dtype=np.int64) if repeats is None else repeats
        self._later_host = np.zeros_like(known.start)
        self.fine = np.ones(expand.count, dtype=bool)
        self.num_periods = np.zeros(expand.count, dtype=np.int64)
        self._weights = self._weighted()
        self.values = self._evaluate()

    def _weighted(self) -> Ints:
        """(slots, events, batch) the coefficients; of what is known beforehand its value."""
        structure, known = self._structure, self._known
        weights = known.columns.table[structure.select]
        weights[FROM_CONSTANT] = np.maximum(np.maximum(known.fixed, known.own), known.posted)
        return weights

    def _evaluate(self) -> Ints:
        structure, known, weights = self._structure, self._known, self._weights
        values = np.zeros((structure.num_events, weights.shape[2]), dtype=np.int64)
        level = 1
        checked = 0
        for cut in self._cuts:
            stop = structure.bounds.index(cut.event)
            self._levels(values, level, stop)
            self._check_far(values, checked, cut.event)
            evaluated = insert_periods(
                cut, values, self._period(cut), self._repeats, max(structure.schedule.num_ranks + 1, len(cut.blocks))
            )
            self.num_periods = np.maximum(self.num_periods, evaluated)
            if known.issues:
                self._later_host += self._repeats * self._issued(cut)
                own, posted = self._ranks_of(np.arange(cut.event, structure.num_events))
                weights[FROM_CONSTANT, cut.event :] = np.maximum(
                    known.fixed[cut.event :], known.own[cut.event :] + self._later_host[own]
                )
                np.maximum(
                    weights[FROM_CONSTANT, cut.event :],
                    known.posted[cut.event :] + self._later_host[posted],
                    out=weights[FROM_CONSTANT, cut.event :],
                )
            level, checked = stop, cut.event
        self._levels(values, level, len(structure.bounds) - 1)
        self._check_far(values, checked, structure.num_events)
        return values

    def _levels(self, values: Ints, begin: int, end: int) -> None:
        inputs, bounds, weights = self._structure.inputs, self._structure.bounds, self._weights
        for first, stop in zip(bounds[begin:end], bounds[begin + 1 : end + 1], strict=True):
            terms = values.take(inputs[:, first:stop], axis=0)
            terms += weights[:, first:stop]
            np.maximum.reduce(terms, axis=0, out=values[first:stop])

    # ------------------------------------------------------------------- repetition

    def _ranks_of(self, events: Ints) -> tuple[Ints, Ints]:
        """The ranks whose hosts events wait for: their own (the sender), and the receiver of a transfer."""
        row, receiver = self._structure.row[events], self._structure.receiver[events]
        return self._structure.rank[row], self._structure.rank[np.where(receiver >= 0, receiver, row)]

    def _issued(self, cut: Cut) -> Ints:
        """(ranks, batch) host time of one period."""
        known, total = self._known, np.zeros_like(self._known.start)
        np.add.at(total, self._structure.rank[cut.rows], (known.dispatch + known.posts + known.waits)[cut.rows])
        return total

    def _period(self, cut: Cut) -> Period:
        known, events = self._known, cut.blocks[-1]
        weights = np.where((cut.inputs >= 0)[..., None], self._weights[:, events], NEVER)
        own, posted = self._ranks_of(events)
        issued = self._issued(cut)
        return Period(
            weights, known.fixed[events], known.own[events] + self._later_host[own], issued[own],
            known.posted[events] + self._later_host[posted], issued[posted],
        )  # fmt: skip

    def _check_far(self, values: Ints, first: int, stop: int) -> None:
        """Transfers between phases must wait for their receivers, not for their senders."""
        if self._steady is None:
            return
        structure = self._structure
        events = self._steady.far[(self._steady.far >= first) & (self._steady.far < stop)]
        if not len(events):
            return
        own, _ = self._ranks_of(events)
        reached = self._known.own[events] + self._later_host[own]
        for slot in (FROM_STREAM, FROM_TENSOR, *range(FROM_CHANNEL, len(structure.inputs))):
            source = structure.inputs[slot, events]
            np.maximum(reached, values[source] + self._weights[slot, events], out=reached)
        self.fine &= np.all(values[events] > reached, axis=0)

    # ---------------------------------------------------------------------- results

    def _kept(self, rows: Ints) -> Ints:
        """(ranks) how many more tensors each rank sends than it releases in some rows."""
        structure = self._structure
        count = (structure.sends - structure.releases)[rows]
        return np.bincount(structure.rank[rows], count, minlength=structure.schedule.num_ranks).astype(np.int64)

    def end_ps(self) -> Ints:
        """(ranks, batch) the end of the step."""
        structure, known, values = self._structure, self._known, self.values
        ranks = np.flatnonzero(known.has_rows)
        last = known.last_row[ranks]
        stream, host = known.first_stream.copy(), known.begun_host.copy()
        channels = [known.begun[CHANNELS[number]].copy() for number in range(len(structure.channel_of_row))]
        stream[ranks] = values[structure.event_of_row[last]]
        host[ranks] = known.body_host[last] + known.dispatch[last] + known.waits[last]
        for event_of_row, channel in zip(structure.channel_of_row, channels, strict=True):
            touching = np.flatnonzero(event_of_row > 0)
            last_touch = np.full(len(stream), -1)
            np.maximum.at(last_touch, structure.rank[touching], touching)
            touched = np.flatnonzero(last_touch >= 0)
            channel[touched] = values[event_of_row[last_touch[touched]]]
        kept = self._kept(np.arange(len(structure.rank)))[:, None] + np.zeros_like(stream)
        for cut in self._cuts:
            kept += self._kept(cut.rows)[:, None] * self._repeats
        end = self._closing.ends(stream, host + self._later_host, channels, known.start, kept * known.wait)
        over = np.flatnonzero((structure.kind == FINAL) | (structure.kind == TRANSFER))
        np.maximum.at(end, structure.rank[structure.row[over]], values[over])
        return end

    def busy_ps(self) -> Ints:
        """(ranks, batch) the time of all actions of a rank."""
        schedule, known = self._structure.schedule, self._known
        num_classes = len(known.columns.busy)
        counts = np.bincount(known.classes, minlength=num_classes)[:, None] + np.zeros_like(self._repeats)
        for cut in self._cuts:
            counts += np.bincount(known.classes[cut.rows], minlength=num_classes)[:, None] * self._repeats
        by_class = counts * np.where(counts > 0, known.columns.busy, 0)
        by_stage = by_class.reshape(len(VARIANTS), schedule.num_stages, -1).sum(0)
        busy = np.zeros((schedule.num_ranks, len(self._repeats)), dtype=np.int64)
        np.add.at(busy, np.array(schedule.placement), by_stage)
        return busy
