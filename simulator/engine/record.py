"""What is kept of a simulation, and the timeline that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.timeline import Timeline
from simulator.engine.exchange import Communication
from simulator.engine.order import Names, Order
from simulator.engine.prices import LONGEST_PS, PriceTable

__all__ = ["COMM", "COMPUTE", "HOST", "Recorder"]

HOST, COMPUTE, COMM = range(3)
"""Numbers of the streams, as in `plans.timeline.STREAMS`."""

_Ints = npt.NDArray[np.int64]


class Recorder:
    """What is kept of a simulation: single spans, runs with the times at which they began, whole channels.

    Args:
        order_of: rank -> its order.
    """

    def __init__(self, order_of: Mapping[int, Order]) -> None:
        self._order_of = order_of
        self._rows: list[int] = []  # rank, stream, step, name, start, end, and so on
        self._runs: dict[PriceTable, list[tuple[int, int, int, int, int]]] = {}
        self._waits: list[tuple[int, int, int, int, int]] = []
        self._channels: list[tuple[int, Sequence[int], Sequence[int], Sequence[int]]] = []

    def span(self, rank: int, stream: int, step: int, name: int, start_ps: int, end_ps: int) -> None:
        """Keep one span."""
        self._rows += (rank, stream, step, name, start_ps, end_ps)

    def wait(self, rank: int, step: int, position: int, start_ps: int, end_ps: int) -> None:
        """Keep a span in which the host of a rank is blocked by an instruction."""
        self._waits.append((rank, step, position, start_ps, end_ps))

    def communication(self, over: Communication) -> None:
        """Keep the span of a communication that is over."""
        name = self._order_of[over.rank].name[over.position]
        self._rows += (over.rank, COMM, over.step, name, over.start, over.end)

    def runs_of(self, prices: PriceTable) -> list[tuple[int, int, int, int, int]]:
        """Where runs at these prices are kept: (rank, step, number of the run, host free at, stream free at)."""
        return self._runs.setdefault(prices, [])

    def channel(
        self, rank: int, positions: Sequence[int], starts_ps: Sequence[int], ends_ps: Sequence[int]
    ) -> None:
        """Keep one side of all transfers of a channel: `positions` of a step again and again, with their times."""
        self._channels.append((rank, positions, starts_ps, ends_ps))

    def timeline(self, names: Names, *, num_ranks: int, num_steps: int, host_async: bool) -> Timeline:
        """The recorded spans in columns, in an order that does not depend on how they came about.

        A step begins with its first compute or communication.
        """
        self._add_waits(names)
        self._refuse_too_long()
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 6).T
        parts = [rows, *self._channel_columns(), *self._run_columns(host_async)]
        rank, stream, step, name, start, end = np.concatenate(parts, axis=1)
        order = np.lexsort((name, stream, end, start, rank))
        starts = np.full(num_steps, LONGEST_PS)
        ends = np.zeros(num_steps, dtype=np.int64)
        # a rank that is done early waits for its next step, or issues it, while others are still in this one
        works = stream != HOST if np.any(stream != HOST) else stream == HOST
        np.minimum.at(starts, step[works], start[works])
        np.maximum.at(ends, step, end)
        starts = np.minimum(starts, ends)  # of a program without instructions
        return Timeline(
            kind="predicted",
            num_ranks=num_ranks,
            names=tuple(names.table),
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
        """Waits are named in program order, so that the numbers of names do not depend on who waited first."""
        for rank, step, position, start, end in sorted(self._waits, key=lambda each: (each[2], each[0], each[1])):
            order = self._order_of[rank]
            name = names.number(order.ids[position], "wait", order.instructions[position].part)
            self.span(rank, HOST, step, name, start, end)

    def _refuse_too_long(self) -> None:
        last = max(self._rows[5::6], default=0)
        for _, _, _, ends in self._channels:
            last = max(last, max(ends, default=0))
        for prices, records in self._runs.items():
            free = max((max(record[3:]) for record in records), default=0)
            if free + sum(prices.dispatch_ps) + sum(prices.work_ps) > LONGEST_PS:
                ends = (max(host, stream) + sum(prices.runs[run][:2]) for _, _, run, host, stream in records)
                last = max(last, max(ends, default=0))
        if last > LONGEST_PS:
            raise TwofoldError(
                f"the timeline ends after {last / 1e12:.3g} s, more than {LONGEST_PS / 1e12:.3g} s; check the prices"
            )

    def _channel_columns(self) -> list[_Ints]:
        parts = []
        for rank, positions, starts, ends in self._channels:
            per_step = len(positions)
            name = np.array(self._order_of[rank].name, dtype=np.int64)[np.array(positions, dtype=np.int64)]
            columns = np.empty((6, len(starts)), dtype=np.int64)
            columns[0], columns[1] = rank, COMM
            columns[2] = np.arange(len(starts)) // per_step
            columns[3] = np.tile(name, len(starts) // per_step)
            columns[4], columns[5] = starts, ends
            parts.append(columns)
        return parts

    def _run_columns(self, host_async: bool) -> list[_Ints]:
        parts = []
        for prices, records in self._runs.items():
            if not records:
                continue
            ranks, steps, runs, hosts, streams = zip(*records, strict=True)
            found = prices.spans(runs, hosts, streams, host_async)
            name = np.array(prices.order.name, dtype=np.int64)[found["position"]]
            rank = np.array(ranks, dtype=np.int64)[found["record"]]
            step = np.array(steps, dtype=np.int64)[found["record"]]
            parts.append(np.stack([rank, np.full_like(rank, COMPUTE), step, name, found["start"], found["end"]]))
            issued = found["host_end"] > found["host_start"]
            host_rows = [rank, np.full_like(rank, HOST), step, name, found["host_start"], found["host_end"]]
            parts.append(np.stack(host_rows)[:, issued])
        return parts
