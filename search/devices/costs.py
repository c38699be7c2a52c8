"""Costs of the pieces of a model in a layout: the tables from which bounds are computed.

There are two kinds. An optimistic table depends on what happens inside a stage (tp, cp, micro-batch, recompute and so
on). It has no contention, and the communication of the optimizer is hidden. A settled table also depends on the
data-parallel width and the optimizer level; its numbers are those of the forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.price.instruction import price_transfer
from plans.degrees import ORDER, Degrees
from plans.degrees.groups import strides
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from plans.timeline import PS_PER_S
from search.devices.problem import Problem
from search.devices.stage_config import (
    StageConfig,
    in_any_order,
    with_one_backward,
    without_experts,
    without_recompute,
)
from simulator.channels import PairRates
from simulator.estimate.action import SETTLED, ClockMap
from simulator.estimate.chunk import Chunk
from simulator.estimate.chunks import Chunks

__all__ = ["SHORTER", "WAYS", "Costs", "Table", "num_dense", "one_piece", "piece_counts", "pieces_of"]

_PIECES = ("embedding", "block", "head")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


WAYS = ("F.first", "F", "closing", "closing.last", "I", "joined")
"""The actions of a chunk: first and other forwards, backwards (or weight-gradient parts) but the last, the last, and
input gradients; "joined" is what a whole backward takes beyond its two parts, which is negative."""


SHORTER = 1e-5
"""Share by which something may be shorter and still count as no shorter. Where norms are recomputed, forwards keep no
statistics of them, which makes them shorter by some 1e-6."""

_F_FIRST, _F, _CLOSING, _LAST, _I, _JOINED = range(len(WAYS))


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def gathers(self) -> bool:
        """Whether the first piece of an action adds any time."""
        return bool(self.first_gather.any())

    def beside(self, other: Table, pieces: Sequence[int]) -> Table:
        """This table, extended by the given pieces of another table."""
        chosen = list(pieces)
        return Table(**{
            each.name: np.concatenate([getattr(self, each.name), getattr(other, each.name)[chosen]])
            for each in fields(self)
        })  # fmt: skip

    def least(self, other: Table) -> Table:
        """The smaller of two values, element by element."""
        return Table(
            **{each.name: np.minimum(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        )

    def host(self, count: int) -> Floats:
        """The least costs of each piece in a step of `count` micro-batches, with every backward whole or split."""
        return np.asarray(self.dispatch @ np.array([1, count - 1, count - 1, 1, count, count]) + self.update_dispatch)


@dataclass(kw_only=True)
class Costs:
    """Tables of a problem, made once each."""

    problem: Problem
    rates: PairRates | None
    num_tables: int = 0
    _known: dict[tuple[StageConfig, bool], dict[tuple[object, ...], Any]] = field(default_factory=dict)
    _relaxed: dict[tuple[StageConfig, int, int], Table] = field(default_factory=dict)
    _exact: dict[tuple[StageConfig, int, int], Table] = field(default_factory=dict)
    _chunks: dict[tuple[StageConfig, int, int, bool], Chunks] = field(default_factory=dict)
    _optimizer: dict[tuple[object, ...], tuple[Floats, Floats, Floats]] = field(default_factory=dict)
    _piece_seconds: dict[tuple[StageConfig, int, bool], Floats] = field(default_factory=dict)
    _part_s: dict[tuple[str, str, StageConfig, bool], float] = field(default_factory=dict)
    _longer: dict[tuple[StageConfig, int, int, bool], bool] = field(default_factory=dict)
    _trailing: dict[tuple[StageConfig, int, int, Chunk, bool], float] = field(default_factory=dict)
    _transfer: dict[tuple[int, int, int], tuple[float, ...]] = field(default_factory=dict)
    _optimizers: dict[int, Optimizer] = field(default_factory=dict)

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The pieces of the model."""
        return pieces_of(self.problem.config)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Which of the pieces are blocks."""
        return tuple(number for number, piece in enumerate(self.pieces) if piece.endswith("block"))

    @cached_property
    def all_counts(self) -> Ints:
        """(piece) how often the complete model has each."""
        config = self.problem.config
        return np.asarray(piece_counts([(config.num_layers,)], num_dense(config))[0, 0])

    def chunks(self, stage: StageConfig, dp: int, level: int, *, contention: bool) -> Chunks:
        """The costs of pieces as the forecast takes them."""
        key = (stage, dp, level, contention)
        if key not in self._chunks:
            problem, bare = self.problem, with_one_backward(in_any_order(stage))
            degrees = Degrees(
                dp=dp, tp=stage.tp, cp=stage.cp, ep=stage.ep, pp=problem.num_devices // (dp * stage.tp * stage.cp),
                micro_batch=stage.micro_batch, global_batch=dp * stage.micro_batch, recompute=stage.recompute,
                sequence_parallel=stage.sequence_parallel, optimizer=self._at_level(level),
                order=stage.order or ORDER, fused=problem.fuses,
            )  # fmt: skip
            self._chunks[key] = Chunks(
                config=problem.config, degrees=problem.stack.as_run(degrees), machine=problem.machine,
                stack=problem.stack, rates=self.rates if contention else None, split_backward=stage.split,
                known=self._known.setdefault((bare, contention), {}),
                tier_override=() if stage.order else stage.tier_override,
            )  # fmt: skip
        return self._chunks[key]

    def gathers_per_use(self, stage: StageConfig, dp: int, level: int) -> bool:
        """Whether weights are gathered for each use, as the stack runs the optimizer's level."""
        return level >= 3 and self._as_run(stage, dp, level).parallel_level >= 3

    def _as_run(self, stage: StageConfig, dp: int, level: int) -> Optimizer:
        """The optimizer at a level as the stack runs it: twofold's programs run what the degrees state."""
        if self.problem.stack.runs_programs:
            return self._at_level(level)
        return self.chunks(stage, dp, level, contention=True).degrees.optimizer

    def _at_level(self, level: int) -> Optimizer:
        """`Problem.at_level`, one object for each level."""
        if level not in self._optimizers:
            self._optimizers[level] = self.problem.at_level(level)
        return self._optimizers[level]

    def widest_chunks(self, stage: StageConfig, *, sums: bool = False) -> Chunks:
        """Chunks of the widest data parallelism that is possible, where only what is inside a stage matters.

        Sharded gradients (level 2) are not summed over micro-batches while they are whole: the least of all levels.
        `sums`: of the levels that sum them.
        """
        dp = self.problem.num_devices // (stage.tp * stage.cp)
        level = 2 if self.problem.pins.zero in (None, 2, 3) and not sums else 0
        return self.chunks(in_any_order(stage), dp, level, contention=False)

    def reduces_per_micro_batch(self, stage: StageConfig, dp: int, level: int) -> bool:
        """Whether gradients are reduced after every micro-batch instead of summed, as the stack runs the level."""
        if level < 2:
            return False
        return self._as_run(stage, dp, level).reduced_per_micro_batch

    def model_seconds(self, stage: StageConfig) -> tuple[float, ...]:
        """Seconds of the complete model and one micro-batch, forward and backward (in one part or two).

        Without contention and without the optimizer: the cheapest property of a layout to compute.
        """
        return tuple((self.all_counts @ self.piece_seconds(stage)).tolist())

    def piece_seconds(self, stage: StageConfig, num_parts: int = 3, *, sums: bool = False) -> Floats:
        """(piece, part) seconds of one micro-batch, at least: weight gradients count as what a whole backward adds to
        the input gradients where that is less. Parts beyond `num_parts` are not priced and count as 0. `sums`: with
        the sums of gradients over micro-batches."""
        stage = in_any_order(stage)
        key = (stage, min(num_parts, 3 if stage.split else 2), sums)
        if key not in self._piece_seconds:
            parts = ("F", "I", "W", "B") if stage.split else ("F", "B")
            priced = parts if num_parts >= 3 else parts[:num_parts]
            found = np.array(
                [[self._part_seconds(piece, part, stage, sums) for part in priced] for piece in self.pieces]
            )
            if len(priced) == 4:
                found[:, 2] = np.minimum(found[:, 2], found[:, 3] - found[:, 1])
                found = found[:, :3]
            self._piece_seconds[key] = np.zeros((len(self.pieces), 3 if stage.split else 2))
            self._piece_seconds[key][:, : found.shape[1]] = found
            self.num_tables += 1
        return self._piece_seconds[key]

    def _part_seconds(self, piece: str, part: str, stage: StageConfig, sums: bool) -> float:
        """Seconds of one part of a piece, made once for all stages in which it is the same."""
        if part in "FB":
            stage = with_one_backward(stage)
        if not piece.endswith("block"):  # the embedding and the head recompute in no mode
            stage = without_recompute(stage)
        if piece != "block":
            stage = without_experts(stage)
        key = (piece, part, stage, sums and part in "WB")
        if key not in self._part_s:
            self._part_s[key] = self.widest_chunks(stage, sums=key[3]).stream_ps(piece, part) / PS_PER_S
        return self._part_s[key]

    def relaxed_table(self, stage: StageConfig, dp: int, level: int) -> Table:
        """A table that is quickly made: first and last actions are as all others, the update takes nothing."""
        if level < 2:
            stage = in_any_order(stage)
        key = (stage, dp if level >= 2 else 0, level if level >= 2 else 0)
        if key not in self._relaxed:
            chunks = self.chunks(stage, dp, level, contention=True)
            gathers = self.gathers_per_use(stage, dp, level)
            reduces = chunks.degrees.optimizer.reduced_per_micro_batch
            zero, nothing = np.zeros((len(self.pieces), len(WAYS))), np.zeros(len(self.pieces))
            work = zero.copy()
            if stage.recompute != "none":
                # the embedding and the head recompute in no mode
                work[:] = PS_PER_S * self.relaxed_table(without_recompute(stage), dp, level).work
            for number, piece in enumerate(self.pieces):
                if stage.recompute != "none" and number not in self.blocks:
                    continue
                beside = piece.endswith("block")  # what runs next to the others is left out
                first = chunks.stream_ps(piece, "F", gathers=gathers and beside)
                whole = chunks.stream_ps(piece, "B", gathers=gathers and beside, reduces=reduces and beside)
                closing, between, joined = whole, 0.0, 0.0
                if stage.split:
                    closing = chunks.stream_ps(piece, "W", gathers=gathers and beside, reduces=reduces and beside)
                    between = chunks.stream_ps(piece, "I", gathers=gathers and beside)
                    joined = min(0.0, whole - between - closing)
                work[number] = first, first, closing, closing, between, joined
            self._relaxed[key] = Table(
                work=work / PS_PER_S, first_gather=zero, dispatch=zero, update=nothing, update_dispatch=nothing
            )
        return self._relaxed[key]

    def exact_table(self, stage: StageConfig, dp: int, level: int) -> Table:
        """With everything that the forecast takes into account inside an action."""
        key = (stage, dp, level)
        if key not in self._exact:
            self._exact[key] = self._table(stage, self.chunks(stage, dp, level, contention=True), level)
            self.num_tables += 1
        return self._exact[key]

    def _table(self, stage: StageConfig, chunks: Chunks, level: int) -> Table:
        closing, each = ("W" if stage.split else "B"), chunks.degrees.optimizer.reduced_per_micro_batch
        again = chunks.degrees.optimizer.parallel_level >= 3
        ways = (
            ("F", level >= 1, False),
            ("F", again, False),
            (closing, again, each),
            (closing, again, True),
            ("I", again, False),
            ("B", again, each),
        )
        work, dispatch, first = np.zeros((3, len(self.pieces), len(WAYS)))
        for way, (part, gathers, reduces) in enumerate(ways):
            if way >= _I and not stage.split:
                continue
            for number, piece in enumerate(self.pieces):
                clock_map = chunks.clock_map(piece, part, gathers=gathers, reduces=reduces)
                work[number, way], dispatch[number, way] = clock_map.work_ps, clock_map.dispatch_ps
                if gathers:
                    action = chunks.action(one_piece(piece), part, gathers=True, reduces=reduces)
                    first[number, way] = action.work_ps - clock_map.work_ps
        for times in (work, dispatch, first):
            times[:, _JOINED] = np.minimum(times[:, _JOINED] - times[:, _I] - times[:, _CLOSING], 0.0) * stage.split
        updates = [chunks.update(one_piece(piece)) for piece in self.pieces]
        return Table(
            work=work / PS_PER_S, first_gather=first / PS_PER_S, dispatch=dispatch / PS_PER_S,
            update=_seconds([update.work_ps for update in updates]),
            update_dispatch=_seconds([update.dispatch_ps for update in updates]),
        )  # fmt: skip

    def mixed_table(self, stage: StageConfig, dp: int, level: int, *, exact: bool) -> Table:
        """A table with blocks that keep everything as further pieces."""
        of = self.exact_table if exact else self.relaxed_table
        return of(stage, dp, level).beside(of(without_recompute(stage), dp, level), self.blocks)

    def optimizer_s(self, stage: StageConfig, dp: int, level: int) -> tuple[Floats, Floats, Floats]:
        """(piece) seconds that gathers and reductions keep their channels busy at least, and of the update.

        They do not depend on the micro-batch or the recomputation.
        """
        key = (stage.tp, stage.cp, stage.ep, stage.sequence_parallel, stage.split, stage.order, dp, level)
        if key not in self._optimizer:
            chunks, part = self.chunks(stage, dp, level, contention=True), "W" if stage.split else "B"
            gathered, reduced = np.zeros((2, len(self.pieces)))
            for number in self.blocks:
                gathered[number] = chunks.gather_busy_ps(self.pieces[number]) if level >= 1 else 0.0
                reduced[number] = chunks.reduce_busy_ps(self.pieces[number], part)
            updated = [chunks.update(one_piece(piece)).work_ps for piece in self.pieces]
            self._optimizer[key] = gathered / PS_PER_S, reduced / PS_PER_S, _seconds(updated)
        return self._optimizer[key]

    def quick_floor(self, stage: StageConfig, dp: int, level: int) -> Table:
        """No entry above that of `floor_table` with any blocks kept whole: of level 0, no block before its gathers."""
        table = self.relaxed_table(without_recompute(stage), dp, 0)
        if not self.gathers_per_use(stage, dp, level):
            return table
        busy, work = self.optimizer_s(stage, dp, level)[0], table.work.copy()
        for way in (_F_FIRST, _F, _I if stage.split else _CLOSING):
            np.maximum(work[:, way], busy, out=work[:, way])
        work[:, _JOINED] += table.work[:, _I] - work[:, _I]  # whole backwards gather once, too
        return replace(table, work=work)

    def with_optimizer(self, table: Table, stage: StageConfig, dp: int, level: int) -> Table:
        """An early table with what the optimizer takes at least.

        The first forwards wait for gathers, the step ends after the last chunk's reductions and the update.
        """
        gathered, reduced, updated = self.optimizer_s(stage, dp, level)
        work = table.work.copy()
        np.maximum(work[:, _F_FIRST], gathered, out=work[:, _F_FIRST])
        np.maximum(work[:, _LAST], reduced, out=work[:, _LAST])
        return replace(table, work=work, update=updated)

    def floor_table(self, stage: StageConfig, dp: int, level: int, *, partial: bool) -> Table:
        """An early table no entry of which is above that of any blocks that may be there, with any of them kept whole.

        `partial`: whether blocks may keep everything, too. Recomputing adds work to a body; during communication it
        may spare other work its share of the slowing down, but no more than it takes itself (`recompute_only_adds`).
        """
        if not partial:
            return self.relaxed_table(stage, dp, level)
        once = self.relaxed_table(without_recompute(stage), dp, level)
        return once if self.recompute_only_adds else once.least(self.relaxed_table(stage, dp, level))

    @cached_property
    def recompute_only_adds(self) -> bool:
        """Whether one second of any work during a collective spares no other work more than that second.

        It moves the collective on by its rate r, which would take other work w seconds r / r_w, of which it loses
        (1 - s_w): at most 1 where r (1 - s_w) <= r_w. (1 - s_w) / r_w does not depend on how long kernels and messages
        are (`costmodels.machine.sections.Overlap`); r is largest beside short kernels.
        """
        pairs = self.problem.machine.overlap if self.rates else ()
        most = max((pair.rates(0.0, 1.0)[1] for pair in pairs), default=1.0)
        return all(max(1.0, most) * (1.0 - pair.compute_rate) <= pair.comm_rate for pair in pairs)

    def some_are_longer(self, stage: StageConfig, dp: int, level: int) -> bool:
        """Whether blocks that recompute take no less in the early table than those that keep everything (`SHORTER`)."""
        again, once = self.relaxed_table(stage, dp, level), self.relaxed_table(without_recompute(stage), dp, level)
        least = 1.0 - SHORTER
        return bool((again.work >= least * once.work).all() and (again.first_gather >= least * once.first_gather).all())

    def longer_with_recompute(self, stage: StageConfig, dp: int, level: int, *, together: bool) -> bool:
        """Whether a step surely takes no less time with every further block that recomputes.

        So it is where no action of such a block is shorter (`SHORTER`) than that of a block that keeps everything: maps
        of clocks compose monotonically, more work beside the same reductions ends them no sooner
        (`recompute_only_adds`), and shares carry over to the step. Where ranks do not begin a step together, the time
        of each counts from its first forward on; so forwards must be no longer either.
        """
        key = (stage, dp, level, together)
        if key not in self._longer:
            again, once = (
                self.chunks(variant, dp, level, contention=True) for variant in (stage, without_recompute(stage))
            )
            self._longer[key] = self.recompute_only_adds and all(
                self._is_longer(self.pieces[number], variant, again, once, together=together)
                for number in self.blocks for variant in self._variants(stage, again, level)
            )  # fmt: skip
        return self._longer[key]

    @staticmethod
    def _is_longer(piece: str, variant: tuple[str, bool, bool], again: Chunks, once: Chunks, *, together: bool) -> bool:
        """Whether a body is no shorter in one layout than in another; unless `together`, forwards must be no longer."""
        part, gathers, reduces = variant
        one, other = (chunks.clock_map(piece, part, gathers=gathers, reduces=reduces) for chunks in (again, once))
        return _no_shorter(one, other) and (together or part != "F" or _no_shorter(other, one))

    @staticmethod
    def _variants(stage: StageConfig, chunks: Chunks, level: int) -> list[tuple[str, bool, bool]]:
        """(part, gathers, reduces) of all bodies that a step has, those of first pieces included."""
        each, closing = chunks.degrees.optimizer.reduced_per_micro_batch, "W" if stage.split else "B"
        found = [("F", chunks.stack.gathers_each_forward(chunks.degrees), False), ("F", level >= 1, False)]
        found += [(closing, level >= 3, each), (closing, level >= 3, True)]
        found += [("I", level >= 3, False), ("B", level >= 3, each), ("B", level >= 3, True)] if stage.split else []
        return list(dict.fromkeys([*found, *((part, False, reduces) for part, _, reduces in found)]))

    def trailing_s(self, stage: StageConfig, dp: int, level: int, chunk: Chunk, *, joined: bool) -> float:
        """The time by which a chunk's reductions outlast its last action; `joined`: which may be a whole backward."""
        key = (stage, dp, level, chunk, joined)
        if key not in self._trailing:
            chunks = self.chunks(stage, dp, level, contention=True)
            if chunk.num_kept and chunks.kept is None:
                chunks.kept = self.chunks(without_recompute(stage), dp, level, contention=True)
            parts = ("W", "B") if stage.split and joined else ("W",) if stage.split else ("B",)
            found = [chunks.action(chunk, part, gathers=level >= 3, reduces=True).tail_ps for part in parts]
            self._trailing[key] = min(found) / PS_PER_S
        return self._trailing[key]

    def transfer_s(self, stage: StageConfig, dp: int, pp: int) -> tuple[float, ...]:
        """Seconds of what passes from pipeline rank i to i + 1, for every i; the last entry is from the last to 0."""
        chunks = self.widest_chunks(stage)
        size = chunks.numbers[chunks.template.pieces["block"].leaves]
        sizes = {"dp": dp, "tp": stage.tp, "cp": stage.cp, "pp": pp}
        stride = strides(sizes, stage.order or ORDER)["pp"]
        key = (size, stride, pp)
        if key not in self._transfer:
            machine = self.problem.machine
            self._transfer[key] = tuple(
                price_transfer(machine, rank * stride, (rank + 1) % pp * stride, size, stride).together_ps / PS_PER_S
                for rank in range(pp)
            ) if pp > 1 else (0.0,)  # fmt: skip
        return self._transfer[key]


def _no_shorter(one: ClockMap, other: ClockMap) -> bool:
    """Whether an action, repeated any number of times, takes at least as long as another in any context (`SHORTER`)."""
    return all(mine >= (1.0 - SHORTER) * theirs for mine, theirs in zip(_ends(one), _ends(other), strict=True))


def _ends(each: ClockMap) -> tuple[float, ...]:
    """Times on which those of all rows of equal actions depend monotonically (`ClockMap.times`)."""
    rows = [each.times(count) for count in range(1, SETTLED + 1)]
    return (
        each.work_ps, each.cold_start_ps, each.dispatch_ps, each.work_ps + each.drift_per_repeat_ps,
        each.cold_start_ps + min(each.tail_ps, each.tail_if_host_bound_ps),
        *(row.work_ps + row.tail_ps for row in rows),
    )  # fmt: skip


def _seconds(picoseconds: list[float]) -> Floats:
    return np.array(picoseconds, dtype=np.float64) / PS_PER_S


def one_piece(piece: str) -> Chunk:
    """A chunk of one piece."""
    dense = int(piece == "dense_block")
    return Chunk(
        num_blocks=int(piece == "block") + dense, has_embedding=piece == "embedding", has_head=piece == "head",
        num_dense=dense,
    )  # fmt: skip


def num_dense(config: TransformerConfig) -> int:
    """Number of first blocks with a plain MLP, if the others have experts."""
    return 0 if config.experts is None else min(config.experts.num_dense_layers, config.num_layers)


def pieces_of(config: TransformerConfig) -> tuple[str, ...]:
    """The pieces of a model; "dense_block" comes last, if there are any."""
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
