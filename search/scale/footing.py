"""Memory of many spreads of the layers at once: what the forecast will find, or a little less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plans.schedules import Schedule
from search.scale.costs import Costs, Inner, num_dense, only, piece_counts
from simulator.scale.batch import peak_bytes
from simulator.scale.memory import Footprint

__all__ = ["Footing"]

Ints = NDArray[np.int64]

_ROWS_AT_ONCE = 500_000
"""Actions times spreads that are followed together."""

_GRADIENT = 1
"""Among weights, gradients and states."""


@dataclass(kw_only=True)
class Footing:
    """Peaks of memory by layout, made once each.

    Left out is only what a software stack may add to a rank.
    """

    costs: Costs
    _activations: dict[tuple[Inner, str, int, int, int, int], Ints] = field(default_factory=dict)
    _static: dict[tuple[int, int, int, int], Ints] = field(default_factory=dict)
    _whole: dict[tuple[int, int], Ints] = field(default_factory=dict)
    _prints: dict[Inner, tuple[Footprint, ...]] = field(default_factory=dict)

    def peaks_bytes(
        self,
        inner: Inner,
        schedule: Schedule,
        layers: Sequence[Sequence[int]],
        *,
        dp: int,
        level: int,
    ) -> Ints:
        """The peak of the fullest rank, per spread."""
        counts = self._pieces(layers)
        placement = np.asarray(schedule.placement)
        owners = placement[:, None] == np.arange(schedule.num_ranks)
        held = self.static_bytes(inner, dp, level)
        total = self.activations(inner, schedule, layers) + (counts @ held.sum(axis=1)) @ owners
        if level >= 3 and dp * inner.cp > 1:
            total = total + self._gathered(inner, (counts.transpose(0, 2, 1) @ owners) > 0)
        if _forwards_first(schedule):  # gradients may come where activations were
            gradient = (counts @ held[:, _GRADIENT]) @ owners
            kept = (counts @ np.array([own.kept for own in self._footprints(inner)], dtype=np.int64)) @ owners
            total = total - np.minimum(gradient, kept)
        return np.asarray(total.max(axis=1))

    def least_bytes(self, inner: Inner, *, pp: int, dp: int, level: int) -> float:
        """What the fullest rank of any schedule and spread holds at least.

        Every rank once holds the activations of one micro-batch on all of its blocks, and the fullest holds no less
        than the mean.
        """
        numbers = self._blocks
        counts = self.costs.all_counts[numbers]
        held = counts @ self.static_bytes(inner, dp, level)[numbers]
        kept, gradient = float(counts @ np.array(self.kept_bytes(inner))), float(held[_GRADIENT])
        return (float(held.sum()) - gradient + max(kept, gradient)) / pp

    def kept_bytes(self, inner: Inner) -> tuple[int, ...]:
        """What one micro-batch leaves behind in one block, for each kind of block."""
        return tuple(self._footprints(inner)[number].kept for number in self._blocks)

    @property
    def _blocks(self) -> list[int]:
        return [number for number, piece in enumerate(self.costs.pieces) if piece.endswith("block")]

    def _pieces(self, layers: Sequence[Sequence[int]]) -> Ints:
        return piece_counts(layers, num_dense(self.costs.problem.config))

    def _footprints(self, inner: Inner) -> tuple[Footprint, ...]:
        if inner not in self._prints:
            chunks = self.costs.plain(inner)
            self._prints[inner] = tuple(chunks.footprint(piece) for piece in self.costs.pieces)
        return self._prints[inner]

    def static_bytes(self, inner: Inner, dp: int, level: int) -> Ints:
        """(piece, role) weights, gradients and states on one rank."""
        key = (inner.tp, inner.ep, dp * inner.cp, level)
        if key not in self._static:
            chunks = self.costs.chunks(inner, dp, level, contention=True)
            self._static[key] = np.array(
                [list(chunks.static_bytes(only(piece)).values()) for piece in self.costs.pieces], dtype=np.int64
            )
        return self._static[key]

    def _whole_weights(self, inner: Inner) -> Ints:
        key = (inner.tp, inner.ep)
        if key not in self._whole:
            chunks = self.costs.plain(inner)
            self._whole[key] = np.array([chunks.weight_bytes(piece) for piece in self.costs.pieces], dtype=np.int64)
        return self._whole[key]

    def _gathered(self, inner: Inner, has: NDArray[np.bool_]) -> Ints:
        """Per spread and rank the whole weights that are there at a time, given (spread, piece, rank) what it has."""
        names = self.costs.pieces
        weights = dict(zip(names, self._whole_weights(inner).tolist(), strict=True))
        result = np.zeros((has.shape[0], has.shape[2]), dtype=np.int64)
        for pattern in np.unique(has.transpose(0, 2, 1).reshape(-1, len(names)), axis=0):
            own = {piece: weights[piece] for piece, there in zip(names, pattern.tolist(), strict=True) if there}
            result[(has == pattern[None, :, None]).all(axis=1)] = self.costs.problem.stack.whole_bytes(own)
        return result

    def activations(self, inner: Inner, schedule: Schedule, layers: Sequence[Sequence[int]]) -> Ints:
        """Per spread and pipeline rank the most bytes of activations alive at once."""
        key = (
            inner, schedule.name, schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches,
            hash(tuple(map(tuple, layers))),
        )  # fmt: skip
        if key not in self._activations:
            self._activations[key] = self._count(inner, schedule, layers)
        return self._activations[key]

    def _count(self, inner: Inner, schedule: Schedule, layers: Sequence[Sequence[int]]) -> Ints:
        prints = self._footprints(inner)
        counts = self._pieces(layers)
        has = counts > 0
        kept = counts @ np.array([own.kept for own in prints], dtype=np.int64)
        later = counts @ np.array([own.kept_for_weights for own in prints], dtype=np.int64)
        during = np.stack(
            [
                (has * np.array(own, dtype=np.int64)).max(axis=2)
                for own in (
                    [each.forward - each.kept for each in prints],
                    [each.backward for each in prints],
                    [each.backward for each in prints],
                    [each.weights for each in prints],
                )
            ]
        )  # kind, spread, chunk
        at_once = max(1, _ROWS_AT_ONCE // len(schedule.table.stage))
        parts = [slice(first, first + at_once) for first in range(0, len(counts), at_once)]
        return np.concatenate(
            [peak_bytes(schedule, kept[part].T, later[part].T, during[:, part].transpose(0, 2, 1)).T for part in parts]
        )


def _forwards_first(schedule: Schedule) -> bool:
    """Whether some rank begins no backward before its last forward."""
    table = schedule.table
    for first, last in zip(table.rank_start[:-1].tolist(), table.rank_start[1:].tolist(), strict=True):
        kinds = table.kind[first:last]
        if not (kinds[int((kinds == 0).sum()) :] == 0).any():
            return True
    return False
