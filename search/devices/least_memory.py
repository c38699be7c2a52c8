"""The least memory that layer splits need, for many schedules at once, as one matrix product.

The peak of a rank is at least its memory at any moment: its weights, gradients and states, and the micro-batches that
its chunks keep. These counts depend only on the schedule and the layer split. The moments that are the peak in some
layout are found once; layouts differ in the bytes of each piece.

If a moment needs more than there is, blocks have to recompute. The first k blocks of every chunk recompute, and a chunk
that keeps n micro-batches saves at most n times the bytes of k blocks. This bounds k from below.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from search.devices.bounds import ScheduleSpace
from search.devices.peak_memory import PeakMemory, moments
from search.devices.stage_config import StageConfig, without_recompute

__all__ = ["LeastMemory"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_LIKELY = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.03], [1.0, 0.1], [1.0, 0.3]])
"""Weights of a block's memory: moments that are the peak for some weights of states and activations of one micro-batch
are kept."""


class LeastMemory:
    """The least memory of the spreads of some schedules with equal ranks and micro-batches.

    Args:
        spaces: the schedules.
    """

    def __init__(self, spaces: Sequence[ScheduleSpace]) -> None:
        terms, alive = zip(*map(_terms, spaces), strict=True)
        self._terms = np.concatenate(terms, axis=1)  # (kind, spread and moment, piece)
        self._alive = np.concatenate(alive, axis=1)  # (kept wholly or for weights, spread and moment)

    def needs(
        self, peak_memory: PeakMemory, stage: StageConfig, *, dp: int, level: int, partial: bool, limit: int
    ) -> tuple[Floats, Floats]:
        """(spread) the least bytes with any number of blocks that recompute, and the least number of them.

        The bytes are no more than `PeakMemory.peaks_bytes`. With fewer blocks of every chunk that recompute, a spread
        needs more than the limit.

        Args:
            peak_memory: knows the memory of pieces.
            stage, dp, level: the layout.
            partial: whether some blocks may keep everything; otherwise the least number is 0.
            limit: bytes that there are.
        """
        held = peak_memory.static_bytes(stage, dp, level).astype(np.float64)
        whole, part = peak_memory.kept_of_pieces(stage)
        weights, gradients, kept, kept_for_weights = self._terms
        total = weights @ held.sum(axis=1) - gradients @ held[:, 1]
        if not partial:
            total += kept @ whole + kept_for_weights @ part
            least = _of_spreads(total)
            return least, np.zeros_like(least)
        once = peak_memory.kept_of_pieces(without_recompute(stage))
        least = _of_spreads(total + kept @ np.minimum(whole, once[0]) + kept_for_weights @ np.minimum(part, once[1]))
        excess = total + kept @ once[0] + kept_for_weights @ once[1] - limit - 1.0
        blocks = list(peak_memory.costs.blocks)
        saved = [
            max(0.0, float((before - after)[blocks].max())) for before, after in zip(once, (whole, part), strict=True)
        ]
        each = np.maximum(saved @ self._alive, 1.0)
        return least, _of_spreads(np.maximum(np.ceil(excess / each), 0.0))


def _of_spreads(values: Floats) -> Floats:
    """(spread) the largest of all moments."""
    return np.asarray(values.reshape(-1, len(_LIKELY)).max(axis=1))


def _terms(space: ScheduleSpace) -> tuple[Floats, Floats]:
    """Counts by spread and moment, with one kind of counts in each row.

    Returns:
        (kind, spread and moment, piece): pieces of the rank, those whose gradients may come where activations were, and
        micro-batches of pieces that are kept, wholly or for the gradients of weights; (kind, spread and moment)
        micro-batches that the chunks with blocks keep, wholly or for the gradients of weights.
    """
    chunks, states, to_come = moments(space.schedule)
    num_ranks, num_moments, most = states.shape[0], states.shape[1], chunks.shape[1]
    counts = np.bincount(space.placement, minlength=num_ranks)
    own = space.pieces[:, chunks] * (np.arange(most) < counts[:, None])[None, :, :, None]  # spread, rank, place, piece
    held = own.sum(axis=2)
    blocks = own.sum(axis=3) - own[..., 2]  # the head weighs otherwise
    blocks[:, space.placement[0], 0] -= 1.0  # as does the embedding
    kept = (states[None, :, :, :most] @ blocks[..., None])[..., 0]  # spread, rank, moment
    weighed = blocks.sum(axis=2)[:, None, :, None] * _LIKELY[:, 0, None, None]
    likely = weighed + kept[:, None] * _LIKELY[:, 1, None, None]
    rank, moment = np.divmod(likely.reshape(*likely.shape[:2], -1).argmax(axis=2), num_moments)  # spread, kind
    spread = np.arange(len(own))[:, None]
    then, own, held = states[rank, moment], own[spread, rank], held[spread, rank]  # spread, kind, place
    for_weights = then[..., most:]
    there = own[..., 1] + own[..., 3:].sum(axis=3) > 0
    alive = [(then[..., :most] * there).sum(axis=2), (for_weights * there[..., : for_weights.shape[2]]).sum(axis=2)]
    kinds = [
        held, np.einsum("skc,skcp->skp", to_come[rank, moment], own), np.einsum("skc,skcp->skp", then[..., :most], own),
        np.einsum("skc,skcp->skp", for_weights, own[:, :, : for_weights.shape[2]]),
    ]  # fmt: skip
    return np.stack(kinds).reshape(4, -1, held.shape[2]), np.stack(alive).reshape(2, -1)
