"""What pieces of a model cost in a layout: the tables that bounds are made of.

Two kinds. An optimistic table belongs to what happens inside a stage (tp, cp, micro-batch, recompute and so on) and
leaves out everything else: no contention, and the communication of the optimizer wholly hidden. A settled table
also knows the data-parallel width and the optimizer's level: its numbers are those the forecast itself is made from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.price import price_transfer
from plans.scale import Degrees
from plans.timeline import PS_PER_S
from plans.transformer import TransformerConfig
from search.scale.problem import Problem
from simulator.scale.action import Rates
from simulator.scale.chunks import Chunk, Chunks

__all__ = ["WAYS", "Costs", "Inner", "Table", "num_dense", "only", "piece_counts", "pieces_of"]

_PIECES = ("embedding", "block", "head")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, order=True)
class Inner:
    """What happens inside a stage."""

    tp: int
    cp: int
    sequence_parallel: bool
    micro_batch: int
    recompute: str
    split: bool
    ep: int = 1


WAYS = ("F.first", "F", "closing", "closing.last", "I")
"""What a chunk does: its first forward and the others, the backward (or its weight-gradient part) but for the last, the
last, and the input-gradient part where the backward is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Seconds on the stream and on the host, by piece (`pieces_of`) and way (`WAYS`).

    Args:
        work: (piece, way) on the stream.
        first_gather: (piece, way) added once per action, by the piece that it meets first.
        dispatch: (piece, way) of the host.
        update, update_dispatch: (piece) of the optimizer.
    """

    work: Floats
    first_gather: Floats
    dispatch: Floats
    update: Floats
    update_dispatch: Floats

    @property
    def gathers(self) -> bool:
        """Whether anything is added to first pieces."""
        return bool(self.first_gather.any())

    def host(self, count: int) -> Floats:
        """Of each piece in a step of `count` micro-batches."""
        return np.asarray(self.dispatch @ np.array([1, count - 1, count - 1, 1, count]) + self.update_dispatch)


@dataclass(kw_only=True)
class Costs:
    """Tables of a problem, made once each."""

    problem: Problem
    rates: Rates | None
    num_tables: int = 0
    _known: dict[tuple[Inner, bool], dict[tuple[object, ...], Any]] = field(default_factory=dict)
    _early: dict[tuple[Inner, int, int], Table] = field(default_factory=dict)
    _settled: dict[tuple[Inner, int, int], Table] = field(default_factory=dict)
    _chunks: dict[tuple[Inner, int, int, bool], Chunks] = field(default_factory=dict)
    _first: dict[Inner, Chunks] = field(default_factory=dict)
    _whole: dict[Inner, tuple[float, ...]] = field(default_factory=dict)
    _trailing: dict[tuple[Inner, int, int, Chunk], float] = field(default_factory=dict)
    _transfer: dict[tuple[Inner, int, int], tuple[float, ...]] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The pieces of the model."""
        return pieces_of(self.problem.config)

    @cached_property
    def all_counts(self) -> Ints:
        """(piece) how often the whole model has each."""
        config = self.problem.config
        return np.asarray(piece_counts([(config.num_layers,)], num_dense(config))[0, 0])

    def chunks(self, inner: Inner, dp: int, level: int, *, contention: bool) -> Chunks:
        """The costs of pieces as the forecast takes them."""
        key = (inner, dp, level, contention)
        if key not in self._chunks:
            problem = self.problem
            degrees = Degrees(
                dp=dp, tp=inner.tp, cp=inner.cp, ep=inner.ep, pp=problem.num_devices // (dp * inner.tp * inner.cp),
                micro_batch=inner.micro_batch, global_batch=dp * inner.micro_batch, recompute=inner.recompute,
                sequence_parallel=inner.sequence_parallel, optimizer=problem.at_level(level),
            )  # fmt: skip
            self._chunks[key] = made = Chunks(
                config=problem.config, degrees=degrees, machine=problem.machine, stack=problem.stack,
                rates=self.rates if contention else None, split_backward=inner.split,
                known=self._known.setdefault((inner, contention), {}),
            )  # fmt: skip
            first = self._first.setdefault(inner, made)
            if first is not made:  # cached properties that no width and no level changes
                vars(made).update(template=first.template, numbers=first.numbers)
        return self._chunks[key]

    def plain(self, inner: Inner) -> Chunks:
        """Chunks of the widest data parallelism that is possible, where only what is inside a stage matters.

        Sharded gradients (level 2) are not summed over micro-batches while they are whole: the least of all levels.
        """
        dp = self.problem.num_devices // (inner.tp * inner.cp)
        return self.chunks(inner, dp, 2 if self.problem.pins.zero in (None, 2, 3) else 0, contention=False)

    def whole(self, inner: Inner) -> tuple[float, ...]:
        """Seconds of the whole model and one micro-batch, forward and backward (in one part or two).

        Without contention and without the optimizer: the cheapest thing there is to know of a layout.
        """
        if inner not in self._whole:
            chunks, counts = self.plain(inner), dict(zip(self.pieces, self.all_counts.tolist(), strict=True))
            self._whole[inner] = tuple(
                sum(count * chunks.stretch(piece, part).work_ps for piece, count in counts.items()) / PS_PER_S
                for part in (("F", "I", "W") if inner.split else ("F", "B"))
            )
            self.num_tables += 1
        return self._whole[inner]

    def early(self, inner: Inner, dp: int, level: int) -> Table:
        """A table that is quickly made: first and last actions are as all others, the update takes nothing."""
        key = (inner, dp if level >= 2 else 0, level if level >= 2 else 0)
        if key not in self._early:
            chunks = self.chunks(inner, dp, level, contention=True)
            gathers, reduces = level >= 3, chunks.degrees.optimizer.reduces_each
            zero, nothing = np.zeros((len(self.pieces), len(WAYS))), np.zeros(len(self.pieces))
            work = zero.copy()
            for number, piece in enumerate(self.pieces):
                beside = piece.endswith("block")  # what runs beside the others is left out
                first = chunks.stretch(piece, "F", gathers=gathers and beside).work_ps
                part = "W" if inner.split else "B"
                closing = chunks.stretch(piece, part, gathers=gathers and beside, reduces=reduces and beside).work_ps
                between = chunks.stretch(piece, "I", gathers=gathers and beside).work_ps if inner.split else 0.0
                work[number] = first, first, closing, closing, between
            self._early[key] = Table(
                work=work / PS_PER_S, first_gather=zero, dispatch=zero, update=nothing, update_dispatch=nothing
            )
        return self._early[key]

    def settled(self, inner: Inner, dp: int, level: int) -> Table:
        """With everything that the forecast takes into account inside an action."""
        key = (inner, dp, level)
        if key not in self._settled:
            self._settled[key] = self._table(inner, self.chunks(inner, dp, level, contention=True), level)
            self.num_tables += 1
        return self._settled[key]

    def _table(self, inner: Inner, chunks: Chunks, level: int) -> Table:
        closing, each = ("W" if inner.split else "B"), chunks.degrees.optimizer.reduces_each
        again = level >= 3
        ways = (
            ("F", level >= 1, False),
            ("F", again, False),
            (closing, again, each),
            (closing, again, True),
            ("I", again, False),
        )
        work, dispatch, first = np.zeros((3, len(self.pieces), len(WAYS)))
        for way, (part, gathers, reduces) in enumerate(ways):
            if part == "I" and not inner.split:
                continue
            for number, piece in enumerate(self.pieces):
                stretch = chunks.stretch(piece, part, gathers=gathers, reduces=reduces)
                work[number, way], dispatch[number, way] = stretch.work_ps, stretch.dispatch_ps
                if gathers:
                    action = chunks.action(only(piece), part, gathers=True, reduces=reduces)
                    first[number, way] = action.work_ps - stretch.work_ps
        updates = [chunks.update(only(piece)) for piece in self.pieces]
        return Table(
            work=work / PS_PER_S, first_gather=first / PS_PER_S, dispatch=dispatch / PS_PER_S,
            update=_seconds([each.work_ps for each in updates]),
            update_dispatch=_seconds([each.dispatch_ps for each in updates]),
        )  # fmt: skip

    def trailing_s(self, inner: Inner, dp: int, level: int, chunk: Chunk) -> float:
        """How long after a chunk's last action its reductions still run."""
        key = (inner, dp, level, chunk)
        if key not in self._trailing:
            chunks = self.chunks(inner, dp, level, contention=True)
            part = "W" if inner.split else "B"
            found = chunks.action(chunk, part, gathers=level >= 3, reduces=True)
            self._trailing[key] = found.trailing_ps / PS_PER_S
        return self._trailing[key]

    def transfer_s(self, inner: Inner, dp: int, pp: int) -> tuple[float, ...]:
        """Seconds of what passes from pipeline rank i to i + 1, for every i; the last entry is from the last to 0."""
        key = (inner, dp, pp)
        if key not in self._transfer:
            chunks = self.plain(inner)
            size = chunks.numbers[chunks.template.pieces["block"].leaves]
            width = dp * inner.tp * inner.cp
            machine = self.problem.machine
            self._transfer[key] = tuple(
                price_transfer(machine, rank * width, (rank + 1) % pp * width, size).work_ps / PS_PER_S
                for rank in range(pp)
            ) if pp > 1 else (0.0,)  # fmt: skip
        return self._transfer[key]


def _seconds(picoseconds: list[float]) -> Floats:
    return np.array(picoseconds, dtype=np.float64) / PS_PER_S


def only(piece: str) -> Chunk:
    """A chunk of one piece."""
    dense = int(piece == "dense_block")
    return Chunk(
        num_blocks=int(piece == "block") + dense, has_embedding=piece == "embedding", has_head=piece == "head",
        num_dense=dense,
    )  # fmt: skip


def num_dense(config: TransformerConfig) -> int:
    """How many of the first blocks have a plain MLP where the others have experts."""
    return 0 if config.experts is None else min(config.experts.num_dense_layers, config.num_layers)


def pieces_of(config: TransformerConfig) -> tuple[str, ...]:
    """What a model consists of; "dense_block" comes last, and only where there are any."""
    return (*_PIECES, "dense_block") if num_dense(config) else _PIECES


def piece_counts(layers: Sequence[Sequence[int]], num_dense: int = 0) -> Ints:
    """(spread, chunk, piece) how many, the pieces as `pieces_of` has them; the first blocks are the dense ones.

    >>> piece_counts([(1, 3)], 2).tolist()
    [[[1, 0, 0, 1], [0, 2, 1, 1]]]
    """
    blocks = np.asarray(layers, dtype=np.int64)
    before = np.cumsum(blocks, axis=1) - blocks
    dense = np.minimum(np.maximum(num_dense - before, 0), blocks)
    pieces = np.zeros((*blocks.shape, len(_PIECES) + bool(num_dense)), dtype=np.int64)
    pieces[:, 0, 0] = 1
    pieces[:, :, 1] = blocks - dense
    pieces[:, -1, 2] = 1
    if num_dense:
        pieces[:, :, 3] = dense
    return pieces
