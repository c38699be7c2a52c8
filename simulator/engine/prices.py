"""The prices of an order's instructions, and the times of its runs of compute that follow from them.

A run needs no event of its own. With dispatch times d and work w, on a rank whose host is free at h and whose compute
stream is free at c, instruction i of the run ends at W_i + max(c, h + max_{j <= i}(D_j - W_{j-1})), where D and W are
the sums of d and w up to and including i (the longest path through issue order and stream order). The inner maximum
does not depend on h and c, so a run is advanced in one step, and the times of its instructions are computed afterwards
in one array operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from numbers import Integral
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.program import GroupProgram, Instruction, Kind
from simulator.engine.order import Order

__all__ = ["LONGEST_PS", "CostOf", "PriceTable", "Priced", "too_long"]

LONGEST_PS = 2**61
"""A step may not last longer (26 days): int64 has room for the steps after it."""

_Ints = npt.NDArray[np.int64]


class Priced(Protocol):
    """A price as an integer number of picoseconds, as `costmodels.price.instruction.Cost`."""

    @property
    def dispatch_ps(self) -> int:
        """Host time to issue it."""

    @property
    def work_ps(self) -> int:
        """Time of its work when alone."""

    @property
    def cpu_ps(self) -> int:
        """Processor time of every member of a communication."""


CostOf = Callable[[Instruction, GroupProgram], Priced]
"""The price of an instruction of a group."""


class PriceTable:
    """The prices of an order's instructions, one entry per position.

    Args:
        order: of the instructions.
        columns: dispatch, work and processor time, a row each.

    Attributes:
        dispatch_ps, work_ps, cpu_ps: as `Priced`.
        runs: of every run of the order the sum of its dispatch times, of its work, and the inner maximum of its last
            instruction (see the module).
    """

    def __init__(self, order: Order, columns: _Ints) -> None:
        if columns.sum(dtype=np.float64) > LONGEST_PS:
            raise too_long()
        self.order = order
        self.dispatch_ps, self.work_ps, self.cpu_ps = columns.tolist()
        self._dispatch, self._work, _ = columns
        # sums over everything before a position, in runs or not: differences give the sums of a run
        self._dispatch_before = np.concatenate([[0], np.cumsum(self._dispatch)])
        self._work_before = np.concatenate([[0], np.cumsum(self._work)])
        self._first, self._stop = order.bounds.T
        self.runs: list[tuple[int, int, int]] = []
        if len(order.bounds):
            lead = np.append(self._lead, 0)
            highest = np.maximum.reduceat(lead, order.bounds.ravel())[::2] - self._base(self._first)
            dispatch = self._dispatch_before[self._stop] - self._dispatch_before[self._first]
            work = self._work_before[self._stop] - self._work_before[self._first]
            self.runs = list(zip(dispatch.tolist(), work.tolist(), highest.tolist(), strict=True))

    @classmethod
    def priced(cls, order: Order, cost_of: CostOf, launch_ps: int = 0) -> PriceTable:
        """Price every distinct instruction once; the launch of a step is issued with its first.

        Raises:
            TwofoldError: a price that is negative, not a number or not whole.
        """
        known: dict[int, tuple[int, int, int]] = {}
        rows = []
        for line, instruction in enumerate(order.line_instructions):
            if id(instruction) not in known:
                cost, id_ = cost_of(instruction, order.group), order.line_id(line)
                known[id(instruction)] = _price(cost, instruction, id_)
            rows.append(known[id(instruction)])
        if max(map(sum, rows), default=0) > LONGEST_PS:
            raise too_long()
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T[:, order.line]
        columns[0, :1] += launch_ps
        return cls(order, columns)

    def slowed(self, factor: npt.NDArray[np.float64]) -> PriceTable:
        """The same prices with the rank's own work multiplied by a factor per position and rounded; links are
        unchanged.
        """
        computes = np.array([line.kind is Kind.COMPUTE for line in self.order.line_instructions], dtype=bool)
        factors = (factor, np.where(computes[self.order.line], factor, 1.0), factor)
        columns = np.rint(np.array([self.dispatch_ps, self.work_ps, self.cpu_ps], dtype=np.float64) * factors)
        if columns.sum() > LONGEST_PS:
            raise too_long()
        return PriceTable(self.order, columns.astype(np.int64))

    def marks(self, run: int) -> list[int]:
        """Dispatch and work of a run up to and including each of its instructions."""
        first, stop = self.order.runs[run]
        both = self._dispatch_before + self._work_before
        return (both[first + 1 : stop + 1] - both[first]).tolist()

    def spans(self, number: _Ints, host: _Ints, stream: _Ints, host_async: bool) -> Mapping[str, _Ints]:
        """Start and end of the instructions of runs of some numbers, given when host and stream are free before.

        Returns:
            arrays over all instructions of all these runs: `position`, `record` (index into `number`), `host_start`,
            `host_end` (equal where the host computes itself), `start`, `end`.
        """
        firsts, lengths = self._first[number], self._stop[number] - self._first[number]
        record = np.repeat(np.arange(len(number)), lengths)
        position = np.arange(len(record)) - (np.cumsum(lengths) - lengths)[record] + firsts[record]
        begin = firsts[record]
        dispatch = self._dispatch_before[position + 1] - self._dispatch_before[begin]
        work = self._work_before[position + 1] - self._work_before[begin]
        free_host = host[record]
        if not host_async:
            end = free_host + dispatch + work
            start = end - self._dispatch[position] - self._work[position]
            return {
                "position": position, "record": record, "host_start": start, "host_end": start,
                "start": start, "end": end,
            }  # fmt: skip
        lead = self._highest_lead[position] - self._base(begin)
        end = work + np.maximum(stream[record], free_host + lead)
        host_end = free_host + dispatch
        return {
            "position": position, "record": record, "host_start": host_end - self._dispatch[position],
            "host_end": host_end, "start": end - self._work[position], "end": end,
        }  # fmt: skip

    @property
    def _lead(self) -> _Ints:
        """D_j - W_{j-1} of every position, with sums from the start of the step rather than of its run."""
        return self._dispatch_before[1:] - self._work_before[:-1]

    def _base(self, first: _Ints) -> _Ints:
        """The excess of `_lead` in runs that begin at `first`."""
        return self._dispatch_before[first] - self._work_before[first]

    @cached_property
    def _highest_lead(self) -> _Ints:
        """The largest `_lead` within the run up to each position, computed by doubling the distance."""
        highest = self._lead.copy()
        lengths = self._stop - self._first
        into_run = np.zeros(len(highest), dtype=np.int64)
        steps = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        into_run[np.repeat(self._first, lengths) + steps] = steps
        distance = 1
        while np.any(far := into_run >= distance):
            at = np.flatnonzero(far)
            highest[at] = np.maximum(highest[at], highest[at - distance])
            distance *= 2
        return highest


def too_long() -> TwofoldError:
    """The refusal of prices above `LONGEST_PS`."""
    return TwofoldError(f"the prices of a step add up to over {LONGEST_PS / 1e12:.3g} s; check the machine")


def _price(cost: Priced, instruction: Instruction, id_: str) -> tuple[int, int, int]:
    row = (
        _whole(cost.dispatch_ps, "dispatch_ps", id_),
        _whole(cost.work_ps, "work_ps", id_),
        _whole(cost.cpu_ps, "cpu_ps", id_),
    )
    if instruction.kind is Kind.COMPUTE and row[2]:
        raise TwofoldError(f"{id_!r} computes, but has cpu_ps = {row[2]}; only communication has")
    if instruction.kind is Kind.WAIT and (row[1] or row[2]):
        raise TwofoldError(f"{id_!r} only waits, but has work_ps = {row[1]} and cpu_ps = {row[2]}")
    return row


def _whole(price: object, what: str, id_: str) -> int:
    if type(price) is int and price >= 0:
        return price
    if isinstance(price, bool) or not isinstance(price, Integral) or int(price) < 0:
        raise TwofoldError(f"{id_!r} has {what} = {price!r}; a price is a whole number of picoseconds, at least 0")
    return int(price)
