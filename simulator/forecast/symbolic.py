"""The priced bodies of a transformer for given degrees, from templates: equal to those of its lowered program.

A chunk of many blocks is lowered with few of them. The optimizer's work on a block depends on the buckets that earlier
blocks left open, so it repeats after some blocks (`_period`); one period is repeated as often as needed. Chunks of a
rank are lowered apart where no instruction is about several (`chunks_together`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from costmodels.price.instruction import Cost, price, price_transfer, price_wait
from plans.lower.buckets import LocalParameter
from plans.lower.symbolic import plain
from plans.lower.symbolic.items import ARRIVE, Cells, PieceUse
from plans.lower.symbolic.outline import ModelOutline, model_outline
from plans.lower.symbolic.rank import SymbolicRank, are_apart, lower_rank
from plans.lower.symbolic.wide import block_number, is_wide, with_all_blocks
from plans.model.graph import itemsize
from plans.optimizer import Optimizer
from plans.program import GroupProgram, Instruction
from simulator.estimate.chunk import Chunk
from simulator.estimate.pieces import PricedPieces
from simulator.forecast import body
from simulator.forecast.body import Op
from simulator.forecast.program import ops_of
from simulator.forecast.rank import RankBodies
from simulator.lines import COLLECTIVE, COMPUTE, Line

__all__ = ["LoweredChunks", "PricedChunks", "bodies_of_rank", "chunks_together", "lowered_chunks", "priced_chunks"]

Wanted = frozenset[tuple[str, bool]]


class Repeat(NamedTuple):
    """Blocks `first` to `stop` of a rank represent themselves and `more` further copies."""

    first: int
    stop: int
    more: int


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredChunks:
    """Chunks of a rank, lowered with few blocks, and what of them is repeated; `copies` has the number for each
    block."""

    symbolic: SymbolicRank
    uses: tuple[tuple[PieceUse, ...], ...]
    repeats: tuple[Repeat, ...]
    copies: Mapping[int, int]
    group: GroupProgram


def chunks_together(costs: PricedPieces, chunks: Sequence[Chunk]) -> Sequence[slice]:
    """The chunks of a rank that are lowered together: each alone, or all where they have an instruction in common."""
    outline = model_outline(costs.config, costs.degrees)
    others = [[piece for piece, _ in chunk.pieces if not piece.endswith("block")] for chunk in chunks]
    if are_apart(costs.degrees, outline, others):
        return [slice(number, number + 1) for number in range(len(chunks))]
    return [slice(0, len(chunks))]


def lowered_chunks(costs: PricedPieces, chunks: Sequence[Chunk], wanted: Sequence[Wanted]) -> LoweredChunks:
    """The symbolic step of some chunks of a rank.

    Args:
        costs: of the layout.
        chunks: lowered together, in the order of the model.
        wanted: for each the kinds of backward that its schedule has.
    """
    outline = model_outline(costs.config, costs.degrees)
    pieces = {name: template for name, (template, _) in costs.pieces.items()}
    uses, repeats = _uses(costs, outline, chunks)
    table = "tok_embeddings.weight" if costs.config.tied else "output.weight"
    copies = {block: 1 + repeat.more for repeat in repeats for block in range(repeat.first, repeat.stop)}
    symbolic = lower_rank(costs.degrees, outline, pieces, uses, wanted, table, copies)
    group = GroupProgram(mesh=outline.mesh, values=dict(symbolic.values), blocks=())
    return LoweredChunks(
        symbolic=symbolic, uses=tuple(map(tuple, uses)), repeats=repeats, copies=copies, group=group
    )  # fmt: skip


def _uses(
    costs: PricedPieces, outline: ModelOutline, chunks: Sequence[Chunk]
) -> tuple[list[list[PieceUse]], tuple[Repeat, ...]]:
    """The pieces of each chunk, blocks numbered through, with as few blocks as show what all do."""
    number, found, repeats, optimizer = 0, [], list[Repeat](), costs.degrees.optimizer
    for chunk in chunks:
        uses: list[PieceUse] = []
        for piece, count in chunk.pieces:
            if not piece.endswith("block"):
                uses.append(PieceUse(piece))
                continue
            lead, period = _period(costs, outline, chunk.pieces, piece)
            margin = _margin(optimizer, period)
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


def _margin(optimizer: Optimizer, period: int) -> int:
    """Number of further blocks that differ from the repeated ones, on either side, besides those in which buckets
    begin.

    Where a reduction waits for the one before it (level 2), one must have been begun; where weights are gathered for
    each use (level 3), some gathers are under way.
    """
    if optimizer.parallel_level < 2:
        return 0
    return period + (optimizer.prefetch if optimizer.parallel_level == 3 else 0)


def _period(
    costs: PricedPieces, outline: ModelOutline, pieces: Sequence[tuple[str, int]], piece: str
) -> tuple[int, int]:
    """After how many blocks of a kind buckets begin to be filled alike, and after how many more they are again.

    Seen from the first block on (gathers) as from the last one (reductions). A bucket that all its parameters in the
    chunk do not fill is closed when the chunk ends, so it does not tell blocks apart (`plans.lower.symbolic.wide`).
    """
    optimizer = costs.degrees.optimizer
    if optimizer.clip_norm is not None:  # one instruction reads the gradients of all blocks
        return 10**6, 1
    if not optimizer.bucket_bytes:
        return 1, 1
    lead, period = 1, 1
    for around, gradients in ((pieces, False), (pieces[::-1], True)):
        sizes = {name: _sizes(costs, outline, plain(name), gradients) for name, _ in around}
        totals: dict[object, int] = {}
        for name, count in around:
            for key, size in sizes[name]:
                totals[key] = totals.get(key, 0) + count * size
        sizes = {
            name: [(key, size) for key, size in own if totals[key] >= optimizer.bucket_bytes]
            for name, own in sizes.items()
        }
        state: dict[object, int] = {}
        for name, count in around:
            if name == piece:
                break
            for _ in range(count):
                _fill(state, sizes[name], optimizer.bucket_bytes)
        seen = [dict(state)]
        while len(seen) < 3 * _LONGEST:
            _fill(state, sizes[piece], optimizer.bucket_bytes)
            if state in seen:
                break
            seen.append(dict(state))
        else:
            return 10**6, 1
        lead, period = max(lead, seen.index(state)), math.lcm(period, len(seen) - seen.index(state))
    return (lead, period) if period <= _LONGEST else (10**6, 1)


def _sizes(costs: PricedPieces, outline: ModelOutline, piece: str, gradients: bool) -> list[tuple[object, int]]:
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
    """As in `plans.lower.buckets.filled`: a bucket that has reached the limit is closed."""
    for key, size in sizes:
        total = state.get(key, 0) + size
        state[key] = 0 if total >= limit_bytes else total


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedChunks:
    """The operations of chunks that are lowered together, as `SymbolicRank` has their instructions.

    `num_blocks` is the number of blocks of all, which their tokens number from 0.
    """

    begin: tuple[Op, ...]
    actions: Mapping[tuple[int, str], tuple[Op, ...]]
    ends: tuple[tuple[Op, ...], ...]
    num_chunks: int
    num_blocks: int

    def behind(self, num_chunks: int, num_blocks: int) -> PricedChunks:
        """The same behind other chunks of a rank."""
        if not num_chunks:
            return self
        return replace(
            self,
            begin=tuple(_shifted(self.begin, num_blocks)),
            actions={
                (num_chunks + number, name): tuple(_shifted(ops, num_blocks))
                for (number, name), ops in self.actions.items()
            },
            ends=tuple(tuple(_shifted(ops, num_blocks)) for ops in self.ends),
        )


def priced_chunks(costs: PricedPieces, chunks: Sequence[Chunk], lowered: LoweredChunks) -> PricedChunks:
    """The priced operations of chunks."""
    pricing, symbolic = _Pricing(costs, lowered), lowered.symbolic
    return PricedChunks(
        begin=pricing.lines(symbolic.begin),
        actions={key: pricing.body(items) for key, items in symbolic.bodies.items()},
        ends=tuple(pricing.lines(lines) for lines in symbolic.ends),
        num_chunks=len(chunks),
        num_blocks=sum(chunk.num_blocks for chunk in chunks),
    )


def bodies_of_rank(parts: Sequence[PricedChunks]) -> RankBodies:
    """The priced bodies of a rank from those of its chunks, in the order of the model."""
    placed, num_chunks, num_blocks = list[PricedChunks](), 0, 0
    for part in parts:
        placed.append(part.behind(num_chunks, num_blocks))
        num_chunks, num_blocks = num_chunks + part.num_chunks, num_blocks + part.num_blocks
    return RankBodies(
        begin=tuple([op for part in placed for op in part.begin]),
        actions={key: ops for part in placed for key, ops in part.actions.items()},
        end=tuple([op for ends in zip(*(part.ends for part in placed), strict=True) for ops in ends for op in ops]),
    )


_BLOCK_NUMBER = re.compile(r"(?<=layers\.)\d+(?=\.)")


class _Pricing:
    """Prices the items of bodies, and writes repeated blocks out."""

    def __init__(self, costs: PricedPieces, lowered: LoweredChunks) -> None:
        self._costs = costs
        self._lowered = lowered
        self._cells: dict[tuple[str, str], list[tuple[Op, ...]]] = {}
        self._spans: dict[Cells, tuple[Op, ...]] = {}
        self._send = Op(body.SEND, price_transfer(costs.machine, 0, 0, 0).dispatch_ps)
        self._arrive = Op(body.ARRIVE, price_wait(costs.machine).dispatch_ps)

    def cost(self, line: Instruction) -> Cost:
        """The symbolic form of an instruction written by the optimizer's lowering."""
        if self._lowered.copies and is_wide(line):
            line = with_all_blocks(line, self._lowered.copies)
        return price(line, self._lowered.group, self._costs.machine, self._costs.degrees.num_ranks)

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
            named = block_number(line.name)
            block = -1 if named is None else named
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
        """All blocks in order, with repeated runs written out."""
        if not self._lowered.repeats:
            return tuple([op for _, ops in blocks for op in ops])
        found: list[Op] = []
        at = 0
        while at < len(blocks):
            block, ops = blocks[at]
            repeat = self._repeat(block)
            if repeat is None:
                found.extend(self._outside(block, ops))
                at += 1
                continue
            stop = at
            while stop < len(blocks) and self._repeat(blocks[stop][0]) is repeat:
                stop += 1
            period, copies = repeat.stop - repeat.first, range(repeat.more + 1)
            for copy in reversed(copies) if _is_backward(blocks, at, stop) else copies:
                for own, ops in blocks[at:stop]:
                    found.extend(_shifted(ops, self._shift(own) + copy * period))
            at = stop
        return tuple(found)

    def _repeat(self, block: int) -> Repeat | None:
        return next((repeat for repeat in self._lowered.repeats if repeat.first <= block < repeat.stop), None)

    def _shift(self, block: int) -> int:
        """By how much a block's number is larger than among the few."""
        return sum(
            repeat.more * (repeat.stop - repeat.first) for repeat in self._lowered.repeats if repeat.stop <= block
        )

    def _outside(self, block: int, ops: Sequence[Op]) -> Iterable[Op]:
        """Operations outside of repeated blocks. A token of a repeated block is that of the copy that is next."""

        def shift(number: int) -> int:
            return self._shift(number if block < 0 or self._repeat(number) is None else block)

        return _shifted(ops, shift)


def _is_backward(blocks: Sequence[tuple[int, object]], first: int, stop: int) -> bool:
    """Whether the numbers of blocks fall from `first` to before `stop`, with those right before and behind."""
    around = [block for block, _ in blocks[max(0, first - 1) : stop + 1] if block >= 0]
    return len(around) > 1 and around[0] > around[-1]


def _shifted(ops: Sequence[Op], by: int | Callable[[int], int]) -> Iterable[Op]:
    """The operations with the blocks' numbers in their tokens shifted, by as much or by what depends on the number."""
    if by == 0:
        return ops
    found = []
    for op in ops:
        if "layers." in op.token:
            number = block_number(op.token)
            if number is not None:
                op = op._replace(token=_renumbered(op.token, number + (by if isinstance(by, int) else by(number))))
        found.append(op)
    return found


@lru_cache(maxsize=65_536)
def _renumbered(token: str, number: int) -> str:
    return _BLOCK_NUMBER.sub(str(number), token)


def _ops(line: Line) -> tuple[Op, ...]:
    token = str(line.token)
    if line.kind == COMPUTE:
        return (Op(body.COMPUTE, line.dispatch_ps, line.work_ps, line.name, energy_pJ=line.energy_pJ),)
    if line.kind == COLLECTIVE:
        issue = Op(
            body.ISSUE, line.dispatch_ps, line.work_ps, line.name, line.channel, token, line.payload,
            alone_ps=line.alone_ps,
        )  # fmt: skip
        return (issue,) if line.token >= 0 else (issue, Op(body.WAIT, 0, token=token))
    return (Op(body.WAIT, line.dispatch_ps, token=token),)
