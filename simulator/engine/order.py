"""A group's program spelled out and priced: what the engine walks.

`Order` is the sequence of one step, the same on every rank of a group and in every step: consecutive COMPUTE
instructions are one run, tokens are numbered, communication and waits stand between. `Table` holds its prices.

A run needs no event of its own. With dispatch times d and work w, on a rank whose host is free at h and whose compute
stream is free at c, instruction i of the run ends at W_i + max(c, h + max_{j <= i}(D_j - W_{j-1})), D and W being the
sums of d and w up to and including i (the longest path through issue order and stream order). The inner maximum does
not depend on h and c, so a run is advanced in one step, and its instructions' times follow afterwards in one array
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.program import GroupProgram, Instruction, Kind, Scope

__all__ = ["ISSUE", "RUN", "WAIT", "CostOf", "Names", "Order", "Priced", "Run", "Table"]

RUN, ISSUE, WAIT = 0, 1, 2
"""Segments: (RUN, number of the run, 0), (ISSUE, position, slot), (WAIT, position, slot); slot -1 blocks."""

LONGEST_PS = 2**61
"""A step may not last longer (26 days): int64 has room for the steps after it."""


class Priced(Protocol):
    """A price in whole picoseconds, as `costmodels.price.instruction.Cost`."""

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


class Names:
    """The (id, call, part) triples of spans, numbered in order of their first appearance."""

    def __init__(self) -> None:
        self.table: dict[tuple[str, str, str], int] = {}

    def number(self, id_: str, call: str, part: str) -> int:
        """The number of a triple."""
        table = self.table
        return table.setdefault((id_, call, part), len(table))


_Line = tuple[str, str, str, Kind, Instruction]
"""What an instruction's id ends with, its call, part and kind, and itself."""


def _line(instruction: Instruction) -> _Line:
    return f"/{instruction.name}", instruction.call, instruction.part, instruction.kind, instruction


class Order:
    """One step of `group`.

    Attributes:
        instructions, ids: one entry per instruction of the step.
        name, wait_name: number of the span that it makes, and of the one it makes by blocking.
        segments: see `ISSUE`.
        runs: (first, stop) positions of each run.
        num_slots: how many tokens there are.
        unwaited: positions of communications that no later WAIT of the step takes.

    Raises:
        TwofoldError: a WAIT for a token that was never issued.
    """

    def __init__(self, group: GroupProgram, names: Names) -> None:
        self.group = group
        self.instructions: list[Instruction] = []
        self.ids: list[str] = []
        self.name: list[int] = []
        self.wait_name: list[int] = []
        self.segments: list[tuple[int, int, int]] = []
        self.runs: list[tuple[int, int]] = []
        slots: dict[tuple[str, int | None], int] = {}
        issued: dict[int, int] = {}
        self.unwaited: set[int] = set()
        first = -1
        lines: dict[int, list[_Line]] = {}
        position = -1
        table, ids, own_names, wait_names = names.table, self.ids, self.name, self.wait_name
        for block in group.blocks:
            label, micro_batch, body = block.label, block.micro_batch, block.body
            of_body = lines.get(id(body))
            if of_body is None:
                of_body = lines[id(body)] = [_line(instruction) for instruction in body.instructions]
            self.instructions += body.instructions
            for end, call, part, kind, instruction in of_body:
                position += 1
                id_ = label + end
                ids.append(id_)
                own_names.append(table.setdefault((id_, call, part), len(table)))
                if kind is Kind.COMPUTE:
                    wait_names.append(-1)
                    if first < 0:
                        first = position
                    continue
                wait_names.append(table.setdefault((id_, "wait", part), len(table)))
                if first >= 0:
                    self.segments.append((RUN, len(self.runs), 0))
                    self.runs.append((first, position))
                    first = -1
                if kind is Kind.WAIT:
                    key = self._token(instruction.waits, micro_batch, instruction, id_)
                    if key not in slots:
                        if group.values[key[0]].scope is not Scope.KEPT:
                            raise TwofoldError(
                                f"{id_!r} waits for token {key[0]!r}, which nothing before it in the step issues"
                            )
                        slots[key] = len(slots)
                    self.segments.append((WAIT, position, slots[key]))
                    self.unwaited.discard(issued.get(slots[key], -1))
                elif instruction.token is None:
                    self.segments.append((ISSUE, position, -1))
                else:
                    slot = slots.setdefault(self._token(instruction.token, micro_batch, instruction, id_), len(slots))
                    self.segments.append((ISSUE, position, slot))
                    issued[slot] = position
                    self.unwaited.add(position)
        if first >= 0:
            self.segments.append((RUN, len(self.runs), 0))
            self.runs.append((first, len(self.instructions)))
        self.num_slots = len(slots)

    def _token(self, token: str | None, micro_batch: int, instruction: Instruction, id_: str) -> tuple[str, int | None]:
        if token is None or token not in self.group.values:
            raise TwofoldError(f"{id_!r} names the token {token!r}, which is not among the values of its group")
        if self.group.values[token].scope is not Scope.MICRO:
            return token, None
        return token, instruction.attrs.get("micro_batch", micro_batch) if instruction.waits else micro_batch


class Run:
    """What the engine needs of a run: sums of dispatch and work, and the inner maximum of its last instruction."""

    __slots__ = ("dispatch_ps", "first", "lead_ps", "marks", "stop", "total_ps", "work_ps")

    def __init__(self, first: int, stop: int, dispatch: Sequence[int], work: Sequence[int]) -> None:
        self.first = first
        self.stop = stop
        self.dispatch_ps = self.work_ps = self.total_ps = 0
        self.lead_ps = -LONGEST_PS
        self.marks: list[int] = []
        for position in range(first, stop):
            self.dispatch_ps += dispatch[position]
            if (lead := self.dispatch_ps - self.work_ps) > self.lead_ps:
                self.lead_ps = lead
            self.work_ps += work[position]
            self.total_ps += dispatch[position] + work[position]
            self.marks.append(self.total_ps)


class Table:
    """The prices of an order's instructions, one entry per position.

    Attributes:
        dispatch_ps, work_ps, cpu_ps: as `Cost`.
        runs: the order's runs with their sums.
    """

    def __init__(self, order: Order, dispatch_ps: Sequence[int], work_ps: Sequence[int], cpu_ps: Sequence[int]) -> None:
        self.order = order
        self.dispatch_ps = dispatch_ps
        self.work_ps = work_ps
        self.cpu_ps = cpu_ps
        self.runs = [Run(first, stop, dispatch_ps, work_ps) for first, stop in order.runs]
        if sum(dispatch_ps) + sum(work_ps) + sum(cpu_ps) > LONGEST_PS:
            raise TwofoldError(f"the prices of a step add up to over {LONGEST_PS / 1e12:.3g} s; check the machine")

    @classmethod
    def priced(cls, order: Order, cost_of: CostOf) -> Table:
        """Price every distinct instruction once.

        Raises:
            TwofoldError: a price that is negative, not a number or not whole.
        """
        known: dict[int, tuple[int, int, int]] = {}
        rows: list[tuple[int, int, int]] = []
        for instruction, id_ in zip(order.instructions, order.ids, strict=True):
            row = known.get(id(instruction))
            if row is None:
                cost = cost_of(instruction, order.group)
                row = known[id(instruction)] = (
                    _whole(cost.dispatch_ps, "dispatch_ps", id_),
                    _whole(cost.work_ps, "work_ps", id_),
                    _whole(cost.cpu_ps, "cpu_ps", id_),
                )
                if instruction.kind is Kind.COMPUTE and row[2]:
                    raise TwofoldError(f"{id_!r} computes, but has cpu_ps = {row[2]}; only communication has")
                if instruction.kind is Kind.WAIT and (row[1] or row[2]):
                    raise TwofoldError(f"{id_!r} only waits, but has work_ps = {row[1]} and cpu_ps = {row[2]}")
            rows.append(row)
        return cls(order, *([row[column] for row in rows] for column in range(3)))

    def stretched(self, factor: npt.NDArray[np.float64]) -> Table:
        """The same prices, what the rank itself does times a factor per position and rounded; links stay."""
        computes = np.array([entry.kind is Kind.COMPUTE for entry in self.order.instructions], dtype=bool)
        factors = (factor, np.where(computes, factor, 1.0), factor)
        columns = [
            [int(entry) for entry in np.rint(np.asarray(column, dtype=np.float64) * by)]
            for column, by in zip((self.dispatch_ps, self.work_ps, self.cpu_ps), factors, strict=True)
        ]
        return Table(self.order, *columns)

    def spans(
        self, runs: Sequence[Run], host: Sequence[int], stream: Sequence[int], host_async: bool
    ) -> Mapping[str, npt.NDArray[np.int64]]:
        """When the instructions of some runs start and end, given when host and stream were free before each.

        Returns:
            arrays over all instructions of all these runs: `position`, `record` (index into `runs`), `host_start`,
            `host_end` (equal where the host computes itself), `start`, `end`.
        """
        lengths = np.array([run.stop - run.first for run in runs], dtype=np.int64)
        record = np.repeat(np.arange(len(runs)), lengths)
        firsts = np.array([run.first for run in runs], dtype=np.int64)
        offset = np.cumsum(lengths) - lengths
        position = np.arange(len(record)) - offset[record] + firsts[record]
        summed = self._sums()
        free_host = np.array(host, dtype=np.int64)[record]
        dispatch, work = summed["dispatch"][position], summed["work"][position]
        own_dispatch = np.array(self.dispatch_ps, dtype=np.int64)[position]
        own_work = np.array(self.work_ps, dtype=np.int64)[position]
        if not host_async:
            end = free_host + dispatch + work
            start = end - own_dispatch - own_work
            return {
                "position": position, "record": record, "host_start": start, "host_end": start,
                "start": start, "end": end,
            }  # fmt: skip
        end = work + np.maximum(np.array(stream, dtype=np.int64)[record], free_host + summed["lead"][position])
        host_end = free_host + dispatch
        return {
            "position": position, "record": record, "host_start": host_end - own_dispatch, "host_end": host_end,
            "start": end - own_work, "end": end,
        }  # fmt: skip

    def _sums(self) -> dict[str, npt.NDArray[np.int64]]:
        """Per position of a run: dispatch and work up to it, and the inner maximum."""
        size = len(self.work_ps)
        result = {name: np.zeros(size, dtype=np.int64) for name in ("dispatch", "work", "lead")}
        for run in self.runs:
            dispatch = work = 0
            lead = -LONGEST_PS
            for position in range(run.first, run.stop):
                dispatch += self.dispatch_ps[position]
                lead = max(lead, dispatch - work)
                work += self.work_ps[position]
                result["dispatch"][position] = dispatch
                result["work"][position] = work
                result["lead"][position] = lead
        return result


def _whole(price: object, what: str, id_: str) -> int:
    if type(price) is int and price >= 0:
        return price
    if isinstance(price, bool) or not isinstance(price, Integral) or int(price) < 0:
        raise TwofoldError(f"{id_!r} has {what} = {price!r}; a price is a whole number of picoseconds, at least 0")
    return int(price)
