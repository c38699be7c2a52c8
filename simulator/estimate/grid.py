"""Estimates of thousands of configurations: shared results are computed once, schedules are evaluated in batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from costmodels import Machine
from plans.degrees import Degrees, check
from plans.model.transformer import TransformerConfig, sizes_of
from plans.optimizer import Optimizer
from simulator.engine.garbage import without_collection
from simulator.estimate.action import ClockMap
from simulator.estimate.batch import ActionColumns, Floats, Ints, action_columns, peak_bytes, pipeline_ends_ps
from simulator.estimate.case import PipelineForecast, RankKinds, transfer_overlap_penalty_ps
from simulator.estimate.chunk import Chunk
from simulator.estimate.estimate import check_machine, chunk_costs, chunks_of
from simulator.estimate.layout import LayoutCosts, is_split
from simulator.result import Forecast
from simulator.stacks import Stack

__all__ = ["Grid", "estimate_grid"]

_ROWS_AT_ONCE = 200_000
"""Actions times configurations that are run together: their arrays stay in a processor's cache."""


@without_collection()
def estimate_grid(
    config: TransformerConfig,
    degrees: Iterable[Degrees],
    machine: Machine,
    *,
    stack: Stack | None = None,
) -> list[Forecast]:
    """Predict many configurations of one model, with the results of `estimate` up to rounding.

    Args:
        config: of a dense transformer.
        degrees: how each is spread.
        machine: with at least as many devices, whose compute runs behind the host.
        stack: the software that runs it; twofold's executor by default.

    Raises:
        TwofoldError: what `estimate` refuses in any of them.

    >>> from plans.model.transformer import transformer_config
    >>> widths = [Degrees(dp=128 // tp, tp=tp, pp=8, global_batch=512) for tp in (1, 2, 4, 8)]
    >>> found = estimate_grid(transformer_config("llama-3-70b"), widths, Machine.load("h100-sxm-x1024"))
    >>> [each.step_s > 0 for each in found]
    [True, True, True, True]
    """
    return Grid(config, machine, stack).forecasts(degrees)


class _Columns(NamedTuple):
    """The arrays of some configurations, side by side in the last axis, as `pipeline_ends_ps` and `peak_bytes` take
    them."""

    actions: Floats
    updates: Floats
    transfer_ps: Floats
    send_ps: Floats
    overlap_penalty_ps: Floats
    memory: Ints


class Grid:
    """Estimates of configurations of one model on one machine: what they share is kept from one call to the next.

    Args:
        config, machine, stack: as of `estimate_grid`.

    Raises:
        TwofoldError: a machine whose hosts compute.
    """

    def __init__(self, config: TransformerConfig, machine: Machine, stack: Stack | None = None) -> None:
        check_machine(machine)
        self._config = config
        self._sizes = sizes_of(config)
        self._machine = machine
        self._stack = (stack or Stack()).on(machine)
        self._optimizers: list[Optimizer] = []
        self._known: dict[tuple[object, ...], dict[tuple[object, ...], Any]] = {}
        self._pieces: dict[tuple[object, ...], LayoutCosts] = {}
        self._spreads: dict[tuple[object, ...], tuple[tuple[Chunk, ...], RankKinds]] = {}
        self._transfers: dict[tuple[object, ...], tuple[Floats, float]] = {}
        self._columns: dict[tuple[LayoutCosts, Chunk], ActionColumns] = {}

    def forecasts(self, degrees: Iterable[Degrees]) -> list[Forecast]:
        """The estimates of some configurations, those with one schedule together.

        Raises:
            TwofoldError: what `estimate` refuses in any of them.
        """
        cases = [self._case(each) for each in degrees]
        result: list[Forecast | None] = [None] * len(cases)
        groups: dict[tuple[int, bool], list[int]] = {}  # schedules are shared objects
        for number, case in enumerate(cases):
            groups.setdefault((id(case.schedule), case.opens_with_gathers), []).append(number)
        for numbers in groups.values():
            at_once = max(1, _ROWS_AT_ONCE // len(cases[numbers[0]].schedule.table.stage))
            for first in range(0, len(numbers), at_once):
                part = numbers[first : first + at_once]
                for number, found in zip(part, self._of_schedule([cases[each] for each in part]), strict=True):
                    result[number] = found
        return [forecast for forecast in result if forecast is not None]

    def _case(self, degrees: Degrees) -> PipelineForecast:
        """One configuration."""
        check(degrees, self._sizes, num_devices=self._machine.num_devices, machine=self._machine.name)
        degrees = self._stack.as_run(degrees)
        schedule = degrees.pipeline
        split = is_split(schedule)
        shape = (
            degrees.tp, degrees.cp, degrees.ep, degrees.micro_batch, degrees.sequence_parallel, degrees.num_ranks,
            degrees.strides[:3],
        )  # fmt: skip
        mixed = degrees.recompute_layers is not None
        own = (*shape, split, degrees.dp, self._number(degrees.optimizer), degrees.recompute, mixed)
        if own not in self._pieces:
            self._pieces[own] = LayoutCosts(
                chunk_costs(
                    self._config, degrees, self._machine, self._stack, split,
                    lambda each: self._known.setdefault((*shape, each.recompute), {}),
                )
            )  # fmt: skip
        spread = (degrees.layers_of(self._sizes.num_layers), schedule.placement, degrees.recompute_layers)
        if spread not in self._spreads:
            chunks = chunks_of(self._config, degrees)
            self._spreads[spread] = chunks, RankKinds.of(chunks, schedule)
        chunks, ranks = self._spreads[spread]
        return PipelineForecast(layout=self._pieces[own], degrees=degrees, chunks=chunks, ranks=ranks)

    def _of_schedule(self, cases: Sequence[PipelineForecast]) -> list[Forecast]:
        """The estimates of cases with one schedule, and gathers at the same times."""
        schedule, runtime = cases[0].schedule, cases[0].runtime
        if runtime.holds_host:  # which the batch ignores
            return [case.forecast(case.end_ps(), case.activations()) for case in cases]
        alike: dict[int, list[int]] = {}  # chunks are shared objects
        for number, case in enumerate(cases):
            alike.setdefault(id(case.chunks), []).append(number)
        parts = [self._side_by_side([cases[number] for number in numbers]) for numbers in alike.values()]
        every = _Columns(*(np.concatenate(each, axis=-1) for each in zip(*parts, strict=True)))
        ends = pipeline_ends_ps(
            schedule, every.actions, every.updates, every.transfer_ps, every.send_ps, runtime,
            every.overlap_penalty_ps if schedule.num_ranks > 1 else None,
        )  # fmt: skip
        memory = every.memory
        peaks = peak_bytes(schedule, memory[0], memory[1], memory[2:6], memory[6])
        result: list[Forecast | None] = [None] * len(cases)
        order = [number for numbers in alike.values() for number in numbers]
        for number, end_ps, own in zip(order, ends.tolist(), peaks.T.tolist(), strict=True):
            result[number] = cases[number].forecast(end_ps, own)
        return [forecast for forecast in result if forecast is not None]

    def _side_by_side(self, cases: Sequence[PipelineForecast]) -> _Columns:
        """The arrays of cases with the same chunks."""
        chunks = cases[0].chunks
        kinds = list(dict.fromkeys(chunks))
        stage_kind = [kinds.index(chunk) for chunk in chunks]
        rank_kinds, rank_kind = cases[0].ranks
        actions = np.stack(
            [np.stack([self._column(case.layout, chunk) for chunk in kinds], axis=-1) for case in cases], axis=-1
        )
        updates = np.array(
            [[_ends(case.layout.update(own)) for own in rank_kinds] for case in cases], dtype=np.float64
        ).T  # (2, kinds of rank, cases)
        transfers = [self._transfer(case) for case in cases]
        penalties = [
            transfer_overlap_penalty_ps(times, case.overlap_penalty_share)
            for (times, _), case in zip(transfers, cases, strict=True)
        ]
        memory = np.array([[_flat(case.layout, chunk) for chunk in kinds] for case in cases], dtype=np.int64).T
        return _Columns(
            actions=actions[:, :, stage_kind], updates=updates[:, list(rank_kind)],
            transfer_ps=np.stack([times for times, _ in transfers], -1),
            send_ps=np.array([send for _, send in transfers], dtype=np.float64),
            overlap_penalty_ps=np.stack(penalties, -1), memory=memory[:, stage_kind],
        )  # fmt: skip

    def _number(self, optimizer: Optimizer) -> int:
        """Equal optimizers, which are few and cannot be hashed, have one number."""
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return self._optimizers.index(optimizer)

    def _column(self, layout: LayoutCosts, chunk: Chunk) -> ActionColumns:
        key = (layout, chunk)
        if key not in self._columns:
            self._columns[key] = action_columns(layout.actions(chunk))
        return self._columns[key]

    def _transfer(self, case: PipelineForecast) -> tuple[Floats, float]:
        costs, placement = case.layout.costs, case.schedule.placement
        key = (costs.numbers[costs.template.pieces["block"].leaves], case.degrees.strides[-1], placement)
        if key not in self._transfers:
            times, send_ps = case.transfers()
            column = np.array([times.get((stage, stage + 1), 0.0) for stage in range(len(placement))])
            self._transfers[key] = column, float(send_ps)
        return self._transfers[key]


def _ends(update: ClockMap) -> tuple[float, float]:
    return update.work_ps, update.cold_start_ps


def _flat(layout: LayoutCosts, chunk: Chunk) -> tuple[int, ...]:
    own = layout.activations(chunk)
    return own.kept, own.kept_for_weights, *own.during, layout.late_gradient_bytes(chunk)
