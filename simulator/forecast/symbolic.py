"""The priced bodies of a transformer in stated degrees, from templates: the same as those of its lowered program.

A chunk of many blocks is lowered with few of them. What the optimizer does with a block depends on what the blocks
before it have left in open buckets, so it repeats itself after some blocks (`_period`); one period is then written out
as often as it is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from costmodels.price.instruction import Cost, price, price_transfer, price_wait
from plans.lower.buckets import LocalParameter
from plans.lower.symbolic import plain
from plans.lower.symbolic.outline import ModelOutline, model_outline
from plans.lower.symbolic.rank import ARRIVE, Cells, PieceUse, SymbolicRank, lower_rank
from plans.model.graph import itemsize
from plans.program import GroupProgram, Instruction
from simulator.forecast import body
from simulator.forecast.action import COLLECTIVE, COMPUTE, Line
from simulator.forecast.body import Op
from simulator.forecast.chunk import Chunk
from simulator.forecast.chunks import Chunks
from simulator.forecast.program import ops_of
from simulator.forecast.rank import RankBodies

__all__ = ["LoweredRank", "bodies_of_rank", "lowered_rank"]

Wanted = frozenset[tuple[str, bool]]


class Repeat(NamedTuple):
    """Blocks `first` to `stop` of a rank stand for themselves and `more` further copies."""

    first: int
    stop: int
    more: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredRank:
    """A rank, lowered with few blocks, and what of them is repeated."""

    symbolic: SymbolicRank
    uses: tuple[tuple[PieceUse, ...], ...]
    repeats: tuple[Repeat, ...]
    group: GroupProgram


def lowered_rank(costs: Chunks, chunks: Sequence[Chunk], wanted: Sequence[Wanted]) -> LoweredRank:
    """The symbolic step of a rank.

    Args:
        costs: of the layout.
        chunks: of the rank, in the order of the model.
        wanted: for each the kinds of backward that its schedule has.
    """
    outline = model_outline(costs.config, costs.degrees)
    pieces = {name: template for name, (template, _) in costs.pieces.items()}
    uses, repeats = _uses(costs, outline, chunks)
    table = "tok_embeddings.weight" if costs.config.tied else "output.weight"
    symbolic = lower_rank(costs.degrees, outline, pieces, uses, wanted, table)
    group = GroupProgram(mesh=outline.mesh, values=dict(symbolic.values), blocks=())
    return LoweredRank(symbolic=symbolic, uses=tuple(map(tuple, uses)), repeats=repeats, group=group)


def _uses(
    costs: Chunks, outline: ModelOutline, chunks: Sequence[Chunk]
) -> tuple[list[list[PieceUse]], tuple[Repeat, ...]]:
    """The pieces of each chunk, blocks numbered through, with as few blocks as show what all do."""
    number, found, repeats = 0, [], list[Repeat]()
    for chunk in chunks:
        uses: list[PieceUse] = []
        for piece, count in chunk.pieces:
            if not piece.endswith("block"):
                uses.append(PieceUse(piece))
                continue
            lead, period = _period(costs, outline, [name for name, _ in chunk.pieces], piece)
            margin = 1 + costs.degrees.optimizer.prefetch
            kept = lead + margin + period + margin + lead
            more = max(0, (count - kept) // period)
            uses += [PieceUse(piece, number + place) for place in range(count - more * period)]
            if more:
                repeats.append(Repeat(number + lead + margin, number + lead + margin + period, more))
            number += count - more * period
        found.append(uses)
    return found, tuple(repeats)


_LONGEST = 4
"""Blocks of a period; where what they leave in buckets repeats itself more slowly, all blocks are lowered."""


def _period(costs: Chunks, outline: ModelOutline, names: Sequence[str], piece: str) -> tuple[int, int]:
    """After how many blocks of a kind buckets begin to be filled alike, and after how many more they are again.

    Seen from the first block on (gathers) as from the last one (reductions).
    """
    optimizer = costs.degrees.optimizer
    if not optimizer.bucket_bytes:
        return 1, 1
    at = names.index(piece)
    lead, period = 1, 1
    for around, gradients in ((names[:at], False), (names[at + 1 :][::-1], True)):
        sizes = [_sizes(costs, outline, plain(name), gradients) for name in (*around, piece)]
        state: dict[object, int] = {}
        for before in sizes[:-1]:
            _fill(state, before, optimizer.bucket_bytes)
        seen = [dict(state)]
        while len(seen) < 3 * _LONGEST:
            _fill(state, sizes[-1], optimizer.bucket_bytes)
            if state in seen:
                break
            seen.append(dict(state))
        else:
            return 10**6, 1
        lead, period = max(lead, seen.index(state)), math.lcm(period, len(seen) - seen.index(state))
    return (lead, period) if period <= _LONGEST else (10**6, 1)


def _sizes(costs: Chunks, outline: ModelOutline, piece: str, gradients: bool) -> list[tuple[object, int]]:
    """(key, bytes) of a piece's parameters in the order in which they are bucketed."""
    optimizer = costs.degrees.optimizer
    own = outline.pieces[piece]
    tensors = {tensor.name: tensor for tensor in own.tensors}
    names = [name for name, _ in own.completed] if gradients else list(tensors)
    found: list[tuple[object, int]] = []
    for name in names:
        parameter = LocalParameter(
            tensor=tensors[name], home=outline.homes[name], summed=outline.reduced[name].partial, optimizer=optimizer
        )
        dtype = parameter.tensor.dtype
        item = itemsize(optimizer.reduces_in(dtype) if gradients else dtype)
        key = parameter.mesh, parameter.axes, parameter.summed, dtype
        found.append((key, math.prod(parameter.shape) * item))
    return found


def _fill(state: dict[object, int], sizes: Iterable[tuple[object, int]], limit_bytes: int) -> None:
    """As `plans.lower.buckets.filled`: a bucket that has reached the limit is closed."""
    for key, size in sizes:
        total = state.get(key, 0) + size
        state[key] = 0 if total >= limit_bytes else total


def bodies_of_rank(costs: Chunks, rank: LoweredRank) -> RankBodies:
    """The priced bodies of a rank."""
    pricing = _Pricing(costs, rank)
    return RankBodies(
        begin=pricing.lines(rank.symbolic.begin),
        actions={key: pricing.body(items) for key, items in rank.symbolic.bodies.items()},
        end=pricing.lines(rank.symbolic.end),
    )


_BLOCK_NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)")


class _Pricing:
    """Prices the items of a rank's bodies, and writes repeated blocks out."""

    def __init__(self, costs: Chunks, rank: LoweredRank) -> None:
        self._costs = costs
        self._rank = rank
        self._cells: dict[tuple[str, str], list[tuple[Op, ...]]] = {}
        self._spans: dict[Cells, tuple[Op, ...]] = {}
        self._send = Op(body.SEND, price_transfer(costs.machine, 0, 0, 0).dispatch_ps)
        self._arrive = Op(body.ARRIVE, price_wait(costs.machine).dispatch_ps)

    def cost(self, line: Instruction) -> Cost:
        """Of an instruction that the optimizer's lowering wrote."""
        return price(line, self._rank.group, self._costs.machine, self._costs.degrees.num_ranks)

    def body(self, items: Sequence[tuple[int, object]]) -> tuple[Op, ...]:
        """The operations of a body."""
        blocks: list[tuple[int, list[Op]]] = []
        for block, item in items:
            if not blocks or blocks[-1][0] != block:
                blocks.append((block, []))
            ops = blocks[-1][1]
            if isinstance(item, Cells):
                ops += self._span(item)
            elif isinstance(item, Instruction):
                if item.call != "cell":
                    ops += ops_of([item], self.cost)
            else:
                ops.append(self._arrive if item == ARRIVE else self._send)
        return self._written_out(blocks)

    def lines(self, lines: Sequence[Instruction]) -> tuple[Op, ...]:
        """The operations of what opens or closes a step."""
        blocks: list[tuple[int, list[Op]]] = []
        for line in lines:
            named = _BLOCK_NUMBER.search(line.name)
            block = int(named.group()) if named else -1
            if not blocks or blocks[-1][0] != block:
                blocks.append((block, []))
            blocks[-1][1].extend(ops_of([line], self.cost))
        return self._written_out(blocks)

    def _span(self, cells: Cells) -> tuple[Op, ...]:
        found = self._spans.get(cells)
        if found is None:
            found = ()
            if not cells.is_dropped:
                parts = self._part(cells.piece, cells.part)[cells.first : cells.stop]
                found = tuple(op for ops in parts for op in ops)
            self._spans[cells] = found
        return found

    def _part(self, piece: str, part: str) -> list[tuple[Op, ...]]:
        if (piece, part) not in self._cells:
            owner, name = self._costs.owner_of(piece)
            self._cells[piece, part] = [_ops(line) for line in owner.lines(name, part)]
        return self._cells[piece, part]

    def _written_out(self, blocks: Sequence[tuple[int, list[Op]]]) -> tuple[Op, ...]:
        """All blocks in order; a run of repeated ones as often as it says."""
        if not self._rank.repeats:
            return tuple(op for _, ops in blocks for op in ops)
        ascending = [block for block, _ in blocks if block >= 0]
        is_backward = len(ascending) > 1 and ascending[0] > ascending[-1]
        found: list[Op] = []
        held: list[tuple[int, list[Op]]] = []
        repeat: Repeat | None = None

        def flush() -> None:
            nonlocal repeat
            if repeat is not None:
                period = repeat.stop - repeat.first
                copies: Iterable[int] = range(repeat.more + 1)
                for copy in reversed(list(copies)) if is_backward else copies:
                    for block, ops in held:
                        found.extend(_shifted(ops, self._shift(block) + copy * period))
            held.clear()
            repeat = None

        for block, ops in blocks:
            own = next((each for each in self._rank.repeats if each.first <= block < each.stop), None)
            if own is not repeat:
                flush()
                repeat = own
            if own is None:
                found.extend(_shifted(ops, self._shift(block) if block >= 0 else self._shift))
            else:
                held.append((block, ops))
        flush()
        return tuple(found)

    def _shift(self, block: int) -> int:
        """By how much a block's number is larger than among the few."""
        return sum(each.more * (each.stop - each.first) for each in self._rank.repeats if each.stop <= block)


def _shifted(ops: Sequence[Op], by: int | Callable[[int], int]) -> Iterable[Op]:
    """The operations with the blocks' numbers in their tokens shifted; by what depends on the block outside of one."""
    if not by:
        return ops

    def shifted(match: re.Match[str]) -> str:
        number = int(match.group())
        return str(number + (by if isinstance(by, int) else by(number)))

    return [op._replace(token=_BLOCK_NUMBER.sub(shifted, op.token)) if "layers." in op.token else op for op in ops]


def _ops(line: Line) -> tuple[Op, ...]:
    token = str(line.token)
    if line.kind == COMPUTE:
        return (Op(body.COMPUTE, line.dispatch_ps, line.work_ps, line.name),)
    if line.kind == COLLECTIVE:
        issue = Op(body.ISSUE, line.dispatch_ps, line.work_ps, line.name, line.channel, token)
        return (issue,) if line.token >= 0 else (issue, Op(body.WAIT, 0, token=token))
    return (Op(body.WAIT, line.dispatch_ps, token=token),)
