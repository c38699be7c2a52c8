"""What pieces of a model cost in a layout: the tables that bounds are made of.

Two kinds. An optimistic table belongs to what happens inside a stage (tp, cp, micro-batch, recompute and so on) and
leaves out everything else: no contention, and the communication of the optimizer wholly hidden. A settled table
also knows the data-parallel width and the optimizer's level: its numbers are those the forecast itself is made from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels.price import price_transfer
from plans.scale import Degrees
from plans.timeline import PS_PER_S
from search.scale.problem import Problem
from simulator.scale.action import Rates, Stretch
from simulator.scale.chunks import Chunk, Chunks
from simulator.scale.memory import Footprint

__all__ = ["PIECES", "Costs", "Inner", "Table"]

PIECES = ("embedding", "block", "head")

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class Inner:
    """What happens inside a stage: tp, cp, sequence parallel, samples of a micro-batch, recompute, split backward."""

    tp: int
    cp: int
    sequence_parallel: bool
    micro_batch: int
    recompute: str
    split: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Seconds on the stream by piece (`PIECES`), of each part of a micro-batch's way.

    Args:
        work: "F", "F.first", "closing" (the backward, or its weight-gradient part), "closing.last", "I" (zeros where
            the backward is one) -> seconds.
        first_gather: "F", "F.first", "I", "closing", "closing.last" -> seconds added once per action, by first piece.
        host: the same names as `work` -> seconds of the host.
        update: seconds of the optimizer.
        update_host: likewise, of the host.
    """

    work: dict[str, Floats]
    first_gather: dict[str, Floats]
    host: dict[str, Floats]
    update: Floats
    update_host: Floats


@dataclass(kw_only=True)
class Costs:
    """Tables of a problem, made once each."""

    problem: Problem
    rates: Rates | None
    num_tables: int = 0
    _known: dict[tuple[Inner, bool], dict[tuple[object, ...], Any]] = field(default_factory=dict)
    _optimistic: dict[Inner, Table] = field(default_factory=dict)
    _settled: dict[tuple[Inner, int, int], Table] = field(default_factory=dict)
    _chunks: dict[tuple[Inner, int, int, bool], Chunks] = field(default_factory=dict)
    _blocks: dict[Inner, dict[str, float]] = field(default_factory=dict)
    _trailing: dict[tuple[Inner, int, int, Chunk], float] = field(default_factory=dict)
    _transfer: dict[tuple[Inner, int, int], tuple[float, ...]] = field(default_factory=dict)

    def chunks(self, inner: Inner, dp: int, level: int, *, contention: bool) -> Chunks:
        """The costs of pieces as the forecast takes them."""
        key = (inner, dp, level, contention)
        if key not in self._chunks:
            problem = self.problem
            degrees = Degrees(
                dp=dp, tp=inner.tp, cp=inner.cp, pp=problem.num_devices // (dp * inner.tp * inner.cp),
                micro_batch=inner.micro_batch, global_batch=dp * inner.micro_batch, recompute=inner.recompute,
                sequence_parallel=inner.sequence_parallel, optimizer=problem.at_level(level),
            )  # fmt: skip
            self._chunks[key] = Chunks(
                config=problem.config, degrees=degrees, machine=problem.machine, stack=problem.stack,
                rates=self.rates if contention else None, split_backward=inner.split,
                known=self._known.setdefault((inner, contention), {}),
            )  # fmt: skip
        return self._chunks[key]

    def _plain(self, inner: Inner) -> Chunks:
        """Chunks of the widest data parallelism that is possible, where only what is inside a stage matters."""
        dp = self.problem.num_devices // (inner.tp * inner.cp)
        return self.chunks(inner, dp, 0, contention=False)

    def block(self, inner: Inner) -> dict[str, float]:
        """Seconds of one block by part, optimistic: the cheapest thing there is to know of a layout."""
        if inner not in self._blocks:
            chunks = self._plain(inner)
            parts = ("F", "I", "W") if inner.split else ("F", "B")
            self._blocks[inner] = {part: chunks.stretch("block", part).work_ps / PS_PER_S for part in parts}
            self.num_tables += 1
        return self._blocks[inner]

    def footprints(self, inner: Inner) -> tuple[Footprint, ...]:
        """Activations of the pieces."""
        chunks = self._plain(inner)
        return tuple(chunks.footprint(piece) for piece in PIECES)

    def optimistic(self, inner: Inner) -> Table:
        """Without contention and without the optimizer's communication."""
        if inner not in self._optimistic:
            # all ranks that hold the same weights share the update: no level does less
            chunks = self._plain(inner)
            self._optimistic[inner] = self._table(inner, chunks, 0, gathers=False)
            self.num_tables += 1
        return self._optimistic[inner]

    def settled(self, inner: Inner, dp: int, level: int) -> Table:
        """With everything that the forecast takes into account inside an action."""
        key = (inner, dp, level)
        if key not in self._settled:
            chunks = self.chunks(inner, dp, level, contention=True)
            self._settled[key] = self._table(inner, chunks, level, gathers=True)
            self.num_tables += 1
        return self._settled[key]

    def _table(self, inner: Inner, chunks: Chunks, level: int, *, gathers: bool) -> Table:
        closing, each = ("W" if inner.split else "B"), chunks.degrees.optimizer.reduces_each
        again = gathers and level >= 3
        ways = {
            "F": ("F", again, False),
            "F.first": ("F", gathers and level >= 1, False),
            "closing": (closing, again, gathers and each),
            "closing.last": (closing, again, gathers),
            "I": ("I", again, False),
        }
        work: dict[str, Floats] = {}
        host: dict[str, Floats] = {}
        first: dict[str, Floats] = {}
        zero = np.zeros(len(PIECES))
        for name, (part, gather, reduce) in ways.items():
            if part == "I" and not inner.split:
                work[name] = host[name] = first[name] = zero
                continue
            stretches = [chunks.stretch(piece, part, gathers=gather, reduces=reduce) for piece in PIECES]
            work[name] = _seconds([each.work_ps for each in stretches])
            host[name] = _seconds([each.dispatch_ps for each in stretches])
            actions = [chunks.action(_one(piece), part, gathers=gather, reduces=reduce) for piece in PIECES]
            first[name] = _seconds([each.work_ps for each in actions]) - work[name]
        updates = [chunks.update(_one(piece)) for piece in PIECES] if gathers else [Stretch()] * len(PIECES)
        known = self.problem.stack.block_host_s(chunks.degrees, "F", reduces=False) is None
        return Table(
            work=work, first_gather=first, host=host if known or gathers else dict.fromkeys(host, zero),
            update=_seconds([each.work_ps for each in updates]),
            update_host=_seconds([each.dispatch_ps for each in updates]),
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
            chunks = self._plain(inner)
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


def _one(piece: str) -> Chunk:
    return Chunk(num_blocks=int(piece == "block"), has_embedding=piece == "embedding", has_head=piece == "head")
