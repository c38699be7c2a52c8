"""The clock maps of the chunks of a pipeline: those of its pieces are computed once, counted and joined.

Gradients are reduced and sharded weights gathered on a separate channel, during the compute of a neighbouring block:
the gradients of a block during the backward of the block before it, its weights during the forward of the block before
it (`plans.lower.optimizer`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from costmodels.price.group import Group, axes_group
from costmodels.price.instruction import price_collective, price_compute, price_wait
from plans.degrees.groups import rank_groups
from plans.lower.symbolic import ParameterTemplate, plain
from plans.model.graph import itemsize
from simulator.channels import PairRates
from simulator.estimate.action import ClockMap, Sequenced, measure
from simulator.estimate.chunk import Chunk
from simulator.estimate.optimizer_lines import OptimizerLines, gradients_of
from simulator.estimate.pieces import PricedPieces
from simulator.estimate.pricing import busy_ps, hosted
from simulator.lines import COLLECTIVE, COMPUTE, WAIT, Line

__all__ = ["Chunks"]

_CHANNEL = "dp"
_GATHER, _REDUCE = 2**20, 2**20 + 1
"""Tokens that no template has."""

_NO_TOKEN = -2
"""The clock map of a wait for communication issued long ago."""


class _Depends(tuple[Any, ...]):
    """The key of a clock map: piece, part, host time or exposed gradients, lines of the optimizer.

    Its hash is taken once, as it goes over many lines.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


def _mean(lines: Sequence[Line], others: Sequence[Line]) -> tuple[Line, ...]:
    """One line that takes as long as the mean of two lists of lines of one kind."""
    first = lines[0]
    work, alone, dispatch = (
        sum(getattr(line, name) for line in (*lines, *others)) // 2 for name in ("work_ps", "alone_ps", "dispatch_ps")
    )
    return (first._replace(work_ps=work, alone_ps=alone, dispatch_ps=dispatch),)


@dataclass(kw_only=True)
class Chunks(PricedPieces):
    """The clock maps of a transformer's chunks in one layout on one machine, under one software stack.

    `rates` are those of compute and communication that overlap; None where nothing slows anything.
    """

    rates: PairRates | None
    _moved: dict[tuple[str, str], tuple[Line, ...]] = field(default_factory=dict)
    _depends: dict[tuple[str, str, bool, bool], _Depends] = field(default_factory=dict)
    _updates: dict[str, ClockMap] = field(default_factory=dict)

    @cached_property
    def optimizer_lines(self) -> OptimizerLines | None:
        """The optimizer's instructions in twofold's own programs; None for other stacks."""
        if not self.stack.runs_programs:
            return None
        return OptimizerLines(machine=self.machine, degrees=self.degrees, numbers=self.numbers)

    # -------------------------------------------------------------- communication of the optimizer

    def _collective(
        self, call: str, parameters: Sequence[ParameterTemplate], item_bytes: int, token: int, own: Group,
        sent_bytes: float = 0.0,
    ) -> tuple[Line, ...]:  # fmt: skip
        """One collective over the ranks with copies, in the stack's messages.

        Args:
            sent_bytes: of an element in a message; 0: `item_bytes`.
        """
        size_bytes = self.bytes_of(parameters, item_bytes)
        if sent_bytes:
            size_bytes = math.ceil(size_bytes / item_bytes * sent_bytes)
        if own.members == 1 or size_bytes == 0:
            return ()
        largest = item_bytes * max(self.numbers[parameter.elements] for parameter in parameters)
        bucket = self.stack.message_bytes(self.degrees.optimizer, own.members, item_bytes, largest)
        whole = not bucket
        count = 1.0 if whole else max(size_bytes / bucket, 1e-9)
        cost = price_collective(
            self.machine,
            call,
            own,
            size_bytes if whole else min(bucket, max(size_bytes, bucket)),
            item_bytes,
        )
        dispatch = self.stack.dispatch_ps(cost.dispatch_ps, "collective", "C")
        work, alone = round(cost.together_ps * count), round(cost.work_ps * count)
        return (Line(COLLECTIVE, round(dispatch * count), work, call, _CHANNEL, token, alone_ps=alone),)

    def _copied(self, read_bytes: int, written_bytes: int) -> tuple[Line, ...]:
        """A pass over all tensors of a piece, out of a flat buffer or into one, where the stack makes it."""
        if not self.stack.copies_shards:
            return ()
        moved = read_bytes + (written_bytes or read_bytes)
        cost = price_compute(self.machine, "add.forward", ((moved,),), self.config.dtype, moved)
        return (Line(COMPUTE, 0, cost.work_ps, "memory"),)

    def gather(self, piece: str) -> tuple[Line, ...]:
        """The gather of a piece's weights."""
        if (piece, "gather") not in self._moved:
            size, sent = itemsize(self.config.dtype), self.stack.gathered_item_bytes
            moved = tuple(
                line for group, some in self.by_group(piece)
                for line in self._collective("all_gather", some, size, _GATHER, self.groups[group], sent)
            )  # fmt: skip
            if self.stack.gathers_in_node and moved:  # the mean of a forward's gather and a backward's
                some = [parameter for _, some in self.by_group(piece) for parameter in some]
                within = self._collective("all_gather", some, size, _GATHER, self._node)
                moved = _mean(moved, within)
            self._moved[piece, "gather"] = moved
        return self._moved[piece, "gather"]

    @cached_property
    def _node(self) -> Group:
        """The data-parallel ranks of a node."""
        (ways, stride), *_ = rank_groups(self.degrees, self.config.kv_heads)["dp"]
        within = math.gcd(ways, max(1, self.machine.devices_per_node // stride))
        return axes_group(self.machine, [(within, stride)], self.degrees.num_ranks)

    def gather_busy_ps(self, piece: str) -> float:
        """The time for which the gather of a piece's weights occupies its channel."""
        if self.optimizer_lines is None:
            return busy_ps(self.gather(piece))
        return busy_ps(self.optimizer_lines.gathers(self.parameters(piece))[0])

    def reduce_busy_ps(self, piece: str, part: str) -> float:
        """The time for which the reduction of the gradients of a part of a piece occupies its channel."""
        reduce = self._key_of(piece, part, False, True)[4]
        return busy_ps(reduce if self.optimizer_lines is None else [line for _, lines in reduce for line in lines])

    def reduce(self, piece: str) -> tuple[Line, ...]:
        """The reduction of a piece's gradients."""
        if (piece, "reduce") not in self._moved:
            optimizer = self.degrees.optimizer
            call = "reduce_scatter" if optimizer.parallel_level >= 1 else "all_reduce"
            size, sent = itemsize(optimizer.reduces_in(self.config.dtype)), self.stack.reduced_item_bytes
            moved = tuple(
                line for group, some in self.by_group(piece)
                for line in self._collective(call, some, size, _REDUCE, self.groups[group], sent)
            )  # fmt: skip
            copied = self._copied(self.weight_bytes(piece), self.reduced_bytes(piece)) if moved else ()
            self._moved[piece, "reduce"] = (*copied, *moved)
        return self._moved[piece, "reduce"]

    # ------------------------------------------------------------------- actions

    def clock_map(self, piece: str, part: str, *, gathers: bool = False, reduces: bool = False) -> ClockMap:
        """The map of one of many equal pieces, during the gather of the next one and its own reduction."""
        return self._clock_map(self._key_of(piece, part, gathers, reduces))

    def stream_ps(self, piece: str, part: str, *, gathers: bool = False, reduces: bool = False) -> float:
        """`clock_map(...).work_ps` alone, which takes a third of the time."""
        depends = self._key_of(piece, part, gathers, reduces)
        if depends in self.known:
            own: ClockMap = self.known[depends]
            return own.work_ps
        key = ("stream", depends)
        if key not in self.known:
            self.known[key] = self._sequence(depends).stream_ps(self.rates)
        found: float = self.known[key]
        return found

    def _key_of(self, piece: str, part: str, gathers: bool, reduces: bool) -> _Depends:
        """The key of a clock map."""
        key = (piece, part, gathers, reduces)
        if key in self._depends:
            return self._depends[key]
        owner, name = self.owner_of(piece)
        if owner is not self:
            self._depends[key] = _Depends((piece, *owner._key_of(name, part, gathers, reduces)[1:]))
        else:
            around: tuple[Any, Any, Any] = (), (), ()
            if self.stack.runs_programs:
                body = self.template.pieces[piece].parts[part]
                # gradients of weights, and of a lookup, read no weights
                reads = gathers and (part == "F" or (part != "W" and piece != "embedding"))
                if reads or gradients_of(body):
                    assert self.optimizer_lines is not None
                    around = self.optimizer_lines.around(
                        part, body, self.parameters(piece), gathers=reads, reduces=reduces
                    )
            else:
                if piece == "block":
                    given = self.stack.block_host_s(self.degrees, part, reduces=reduces, config=self.config)
                else:
                    given = self.stack.end_host_s(piece, self.degrees, part)
                around = given, self.gather(piece) if gathers else (), self.reduce(piece) if reduces else ()
            found = _Depends((piece, part, *around))
            self._depends[key] = self.known.setdefault(("same", found), found)
        return self._depends[key]

    def _clock_map(self, depends: _Depends) -> ClockMap:
        if depends not in self.known:
            self.known[depends] = self._sequence(depends).clock_map(self.rates)
        found: ClockMap = self.known[depends]
        return found

    def _sequence(self, depends: _Depends) -> Sequenced:
        """The lines of a piece, and those of the optimizer around them."""
        piece, part, given, gather, reduce = depends
        owner, name = self.owner_of(piece)
        if owner is not self:
            return owner._sequence(_Depends((name, part, given, gather, reduce)))
        if self.optimizer_lines is not None:
            return self._in_program(piece, part, dict(given), gather, dict(reduce))
        after = list(reduce)
        if gather:
            wait = self.stack.dispatch_ps(price_wait(self.machine).dispatch_ps, "wait", "C")
            copied = self._copied(self.weight_bytes(piece), 0)
            after = [Line(WAIT, wait, 0, token=_GATHER), *copied, *reduce]
        return Sequenced(gather, tuple(hosted(self.lines(piece, part), given)), tuple(after), steady=bool(after))

    def _in_program(
        self,
        piece: str,
        part: str,
        sums: Mapping[str, Line | None],
        gather: tuple[tuple[Line, ...], ...],
        reduce: Mapping[str, tuple[Line, ...]],
    ) -> Sequenced:
        """`sums`: of gradients over micro-batches; None where products add them, or they are reduced as they are."""
        issue, arrive = gather or ((), ())
        lines = self.lines(piece, part)
        last: tuple[Line, ...] = ()
        if sums or reduce:
            priced, lines = lines, []
            for cell, line in zip(self.template.pieces[piece].parts[part].cells, priced, strict=True):
                own = sums.get(cell.gradient, line)
                if own is not None:
                    lines.append(own)
                if cell.gradient:
                    lines += reduce.get(cell.gradient, ())
            last = reduce.get("", ())
        if piece != "embedding":  # waited for when the piece before has issued its own
            last = tuple(line._replace(token=_NO_TOKEN) if line.kind == WAIT else line for line in last)
        is_first = part != "F" and piece == "head"  # in a backward, so that no other piece's reductions slow it
        steady = bool(gather or reduce or None in sums.values()) and not is_first
        return Sequenced(issue, (*lines, *last), arrive, steady=steady)

    def action(self, chunk: Chunk, part: str, *, gathers: bool = False, reduces: bool = False) -> ClockMap:
        """The map of a chunk's complete action: its pieces in the order of the part."""
        pieces = chunk.pieces if part == "F" else chunk.pieces[::-1]
        own = tuple((self._key_of(piece, part, gathers, reduces), count) for piece, count in pieces)
        if own not in self.known:
            parts = [self._clock_map(depends).times(count) for depends, count in own]
            if gathers and pieces and self.optimizer_lines is not None:
                depends, count = own[0]
                if depends[3] and depends[3][0]:  # the last piece has nothing to gather next to it
                    parts[0] = self._first(depends).then(self._clock_map(depends).times(count - 1))
            elif gathers and pieces and (gather := self.gather(pieces[0][0])):
                parts.insert(0, self._gathered(gather))
            self.known[own] = functools.reduce(ClockMap.then, parts) if parts else ClockMap()
        found: ClockMap = self.known[own]
        return found

    def _first(self, depends: _Depends) -> ClockMap:
        """The map of the first piece of an action, which starts when the first of its own weights have been gathered.

        Programs issue their gathers before they wait for the tensor that arrives. It is taken to be no faster than
        another piece, so that a chunk that waits takes as long as its pieces in a row.
        """
        key = ("first", depends)
        if key not in self.known:
            piece, part, given, (issue, arrive), reduce = depends
            owner, name = self.owner_of(piece)
            if owner is not self:
                self.known[key] = owner._first(_Depends((name, *depends[1:])))
                return self.known[key]
            waits = [number for number, line in enumerate(arrive) if line.kind == WAIT]
            cut = waits[1] if len(waits) > 1 else len(arrive)
            gather = (*issue, *arrive[:cut]), arrive[cut:]
            own = self._in_program(piece, part, dict(given), gather, dict(reduce)).clock_map(self.rates)
            other = self._clock_map(depends)
            there = measure([*issue, arrive[0]], self.rates)
            work = max(own.work_ps, other.work_ps)
            self.known[key] = own._replace(work_ps=work, prefetch_ps=min(there.work_ps, work - other.work_ps))
        found: ClockMap = self.known[key]
        return found

    def _gathered(self, gather: tuple[Line, ...]) -> ClockMap:
        """The map of a gather during which nothing is computed."""
        key = ("gathered", gather)
        if key not in self.known:
            self.known[key] = measure([*gather, Line(WAIT, 0, 0, token=_GATHER)], self.rates)
        found: ClockMap = self.known[key]
        return found

    # ------------------------------------------------------------------- the end of a step

    def update(self, chunk: Chunk) -> ClockMap:
        """The optimizer's kernels for a rank's part of a chunk."""
        for piece, _ in chunk.pieces:
            if piece not in self._updates:
                self._updates[piece] = self._update(plain(piece))
        parts = [self._updates[piece].times(count) for piece, count in chunk.pieces]
        return functools.reduce(ClockMap.then, parts) if parts else ClockMap()

    def _update(self, piece: str) -> ClockMap:
        optimizer = self.degrees.optimizer
        shards = self.shards if optimizer.parallel_level else 1
        dtype = self.config.dtype
        ending = () if self.optimizer_lines is None else self.optimizer_lines.endings(self.parameters(piece))
        key = (
            "update", piece, shards, self.shares_table, optimizer.kind, optimizer.updates_in(dtype),
            optimizer.accumulates_in(dtype), optimizer.keeps_states_in(dtype), optimizer.has_master(dtype), ending,
        )  # fmt: skip
        if key not in self.known:
            lines: list[Line] = []
            for group, some in self.by_group(piece):
                copies = self.groups[group].members if optimizer.parallel_level else 1
                for together in [some] if self._updates_together(piece) else [[parameter] for parameter in some]:
                    sizes = [self.numbers[parameter.elements] for parameter in together]
                    lines += self.stack.update_lines(sizes, dtype, optimizer, copies, self.machine)
            self.known[key] = measure([*ending, *lines], self.rates)
        found: ClockMap = self.known[key]
        return found

    def _updates_together(self, piece: str) -> bool:
        """Whether one kernel updates all parameters of a piece; for twofold's programs see `plans.lower.optimizer`."""
        optimizer, dtype = self.degrees.optimizer, self.config.dtype
        is_cast = optimizer.accumulates_in(dtype) != optimizer.updates_in(dtype)
        is_block = piece not in ("embedding", "head")
        return self.optimizer_lines is None or (is_block and optimizer.kind == "adamw" and not is_cast)
