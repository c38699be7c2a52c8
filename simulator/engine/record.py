"""The record of a simulation, and the timeline made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.timeline import Timeline
from simulator.engine.exchange import Communication
from simulator.engine.order import Names, Order
from simulator.engine.prices import LONGEST_PS, PriceTable

__all__ = ["COMM", "COMPUTE", "HOST", "Recorder", "StepPrices"]

HOST, COMPUTE, COMM = range(3)
"""Numbers of the streams, as in `plans.timeline.STREAMS`."""

_Ints = npt.NDArray[np.int64]


class StepPrices(Protocol):
    """The prices of a step: `simulator.engine.prices.PriceTable`, or nothing at all."""

    @property
    def order(self) -> Order:
        """The order of the step's instructions."""

    @property
    def dispatch_ps(self) -> Sequence[int]:
        """By position, as of `Priced`."""

    @property
    def work_ps(self) -> Sequence[int]:
        """By position."""

    @property
    def cpu_ps(self) -> Sequence[int]:
        """By position."""

    @property
    def runs(self) -> Sequence[tuple[int, int, int]]:
        """As in `PriceTable`."""


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of one step of a rank: their indices (None: all), and the times at which host and stream were free before
    each.
    """

    prices: StepPrices
    rank: int
    step: int
    numbers: list[int] | None
    free: list[int]

    @property
    def run_numbers(self) -> Sequence[int]:
        return range(len(self.prices.runs)) if self.numbers is None else self.numbers


class Recorder:
    """The record of a simulation: single spans, runs with their start times, complete channels.

    Args:
        order_of: rank -> its order.
    """

    def __init__(self, order_of: Mapping[int, Order]) -> None:
        self._order_of = order_of
        self._rows: list[int] = []  # rank, stream, step, name, start, end, and so on
        self._runs: list[_Runs] = []
        self._waits: list[tuple[int, int, int, int, int]] = []
        self._channels: list[tuple[Mapping[int, _Ints], Sequence[int], Sequence[int]]] = []

    def span(self, rank: int, stream: int, step: int, name: int, start_ps: int, end_ps: int) -> None:
        """Record one span."""
        self._rows += (rank, stream, step, name, start_ps, end_ps)

    def wait(self, rank: int, step: int, position: int, start_ps: int, end_ps: int) -> None:
        """Record a span in which the host of a rank is blocked by an instruction."""
        self._waits.append((rank, step, position, start_ps, end_ps))

    def communication(self, over: Communication) -> None:
        """Record the span of a communication that has ended."""
        name = self._order_of[over.rank].name[over.position]
        self._rows += (over.rank, COMM, over.step, name, over.start, over.end)

    def all_runs(self, prices: StepPrices, rank: int, step: int) -> list[int]:
        """A list to append to: for every run of a step, in order, the times at which host and stream were free before
        it.
        """
        runs = _Runs(prices, rank, step, None, [])
        self._runs.append(runs)
        return runs.free

    def some_runs(self, prices: StepPrices, rank: int, step: int) -> tuple[list[int], list[int]]:
        """Two lists to append to: run indices, and the times at which host and stream were free before each run."""
        runs = _Runs(prices, rank, step, [], [])
        self._runs.append(runs)
        assert runs.numbers is not None
        return runs.numbers, runs.free

    def channel(self, positions_of: Mapping[int, _Ints], starts_ps: Sequence[int], ends_ps: Sequence[int]) -> None:
        """Record all transfers of a channel: the positions of a step on both ranks, repeated, at equal times."""
        self._channels.append((positions_of, starts_ps, ends_ps))

    def timeline(self, names: Names, *, num_ranks: int, num_steps: int, host_async: bool) -> Timeline:
        """The recorded spans in columns, in an order that does not depend on the order of recording.

        A step begins with its first compute or communication.
        """
        self._add_waits(names)
        self._refuse_too_long()
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 6).T
        parts = [rows, *self._channel_columns(), *self._run_columns(host_async)]
        rank, stream, step, name, start, end = np.concatenate(parts, axis=1)
        order = np.lexsort((stream * len(names) + name, end, start, rank))
        starts = np.full(num_steps, LONGEST_PS)
        ends = np.zeros(num_steps, dtype=np.int64)
        # a step begins when its first work is issued; the next ones are issued while others are still in this one
        works = (stream != HOST) | (step == 0) if np.any(stream != HOST) else stream == HOST
        np.minimum.at(starts, step[works], start[works])
        np.maximum.at(ends, step, end)
        starts = np.minimum(starts, ends)  # of a program without instructions
        return Timeline(
            kind="predicted",
            num_ranks=num_ranks,
            names=names,
            rank=rank[order].astype(np.int32),
            stream=stream[order].astype(np.int8),
            step=step[order].astype(np.int32),
            name_index=name[order].astype(np.int32),
            start_ps=start[order],
            end_ps=end[order],
            step_start_ps=tuple(starts.tolist()),
            step_end_ps=tuple(ends.tolist()),
            meta={"engine": "simpy"},
        )

    def _add_waits(self, names: Names) -> None:
        """Waits are named in program order, so that the indices of names do not depend on which rank waited first."""
        for rank, step, position, start, end in sorted(self._waits, key=lambda each: (each[2], each[0], each[1])):
            order = self._order_of[rank]
            name = names.number(order.ids[position], "wait", order.instructions[position].part)
            self.span(rank, HOST, step, name, start, end)

    def _refuse_too_long(self) -> None:
        last = max(self._rows[5::6], default=0)
        # transfers of a channel and runs of a rank end one after the other
        for _, _, ends in self._channels:
            last = max(last, *ends[-1:])
        for runs in self._runs:
            if runs.free:
                last = max(last, max(runs.free[-2:]) + sum(runs.prices.runs[runs.run_numbers[-1]][:2]))
        if last > LONGEST_PS:
            raise TwofoldError(
                f"the timeline ends after {last / 1e12:.3g} s, more than {LONGEST_PS / 1e12:.3g} s; check the prices"
            )

    def _channel_columns(self) -> list[_Ints]:
        parts = []
        for positions_of, starts, ends in self._channels:
            times = np.array([starts, ends], dtype=np.int64)
            for rank, positions in positions_of.items():
                num_steps = len(starts) // len(positions)
                columns = np.empty((6, len(starts)), dtype=np.int64)
                columns[0], columns[1] = rank, COMM
                columns[2] = np.repeat(np.arange(num_steps), len(positions))
                columns[3] = np.tile(self._order_of[rank].name_array[positions], num_steps)
                columns[4:] = times
                parts.append(columns)
        return parts

    def _run_columns(self, host_async: bool) -> list[_Ints]:
        parts = []
        for runs in self._runs:
            if not runs.free:
                continue
            free = np.array(runs.free, dtype=np.int64).reshape(-1, 2)
            numbers = np.array(runs.run_numbers, dtype=np.int64)
            assert isinstance(runs.prices, PriceTable)
            found = runs.prices.spans(numbers, free[:, 0], free[:, 1], host_async)
            name = runs.prices.order.name_array[found["position"]]
            issued = np.flatnonzero(found["host_end"] > found["host_start"])
            columns = np.empty((6, len(name) + len(issued)), dtype=np.int64)
            columns[0], columns[2] = runs.rank, runs.step
            columns[1, : len(name)], columns[1, len(name) :] = COMPUTE, HOST
            columns[3] = np.concatenate([name, name[issued]])
            columns[4] = np.concatenate([found["start"], found["host_start"][issued]])
            columns[5] = np.concatenate([found["end"], found["host_end"][issued]])
            parts.append(columns)
        return parts
