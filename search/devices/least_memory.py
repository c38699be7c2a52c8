"""The least memory that layer splits need, for many schedules at once, as one matrix product.

The peak of a rank is at least its memory at any moment: its weights, gradients and states, the micro-batches that its
chunks keep, and what the backward of a block needs beyond that. These counts depend only on the schedule and the layer
split. The moments that are the peak in some layout are found once; layouts differ in the bytes of each piece.

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

_HEAD = 2
"""Number of a piece."""

_LIKELY = np.array(
    [
        [1.0, 0.0, 0.0, 0.0, 1e-3], [0.0, 1.0, 1.0, 0.0, 0.3], [1.0, 0.1, 0.1, 0.0, 3.0], [1.0, 0.3, 0.3, 0.0, 0.3],
        [0.0, 0.05, 0.05, 1.0, 0.5], [0.0, 0.0, 1.0, 0.0, 0.3],
    ]
)  # fmt: skip
"""Weights of memory: of a block's states, of what it keeps of a micro-batch, wholly and for the gradients of weights,
of what the head keeps of one, and of what the backward of a block needs. The moments that are the peak for each of
these weights are kept; the last one only where backwards are in two parts."""


class LeastMemory:
    """The least memory of the spreads of some schedules with equal ranks and micro-batches.

    Args:
        spaces: the schedules.
    """

    def __init__(self, spaces: Sequence[ScheduleSpace]) -> None:
        terms, alive = zip(*map(_terms, spaces), strict=True)
        self._num_spreads = sum(len(space.layers) for space in spaces)
        kinds, parts = np.concatenate(terms, axis=2), np.concatenate(alive, axis=2)
        self._terms = kinds.reshape(len(kinds), -1, kinds.shape[3])  # (kind, moment and spread, piece)
        self._alive = parts.reshape(len(parts), -1)  # (kept wholly or for weights, moment and spread)

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
        weights, gradients, kept, kept_for_weights, backward = self._terms
        total, during = weights @ held.sum(axis=1) - gradients @ held[:, 1], peak_memory.backward_of_pieces(stage)
        if peak_memory.gathers(stage, dp, level):
            total = total + peak_memory.gathered_bytes(stage, (weights > 0)[..., None])[:, 0]
        if not partial:
            total += kept @ whole + kept_for_weights @ part + _beside_head(backward, during, whole)
            least = self._of_spreads(total)
            return least, np.zeros_like(least)
        plain = without_recompute(stage)
        once, during_once = peak_memory.kept_of_pieces(plain), peak_memory.backward_of_pieces(plain)
        fewest = np.minimum(whole, once[0])
        least = self._of_spreads(
            total + kept @ fewest + kept_for_weights @ np.minimum(part, once[1])
            + _beside_head(backward, _least_during(during, during_once, whole, once[0]), whole)
        )  # fmt: skip
        excess = total + kept @ once[0] + kept_for_weights @ once[1] - limit - 1.0
        excess += _beside_head(backward, np.minimum(during, during_once), whole)
        blocks = list(peak_memory.costs.blocks)
        saved = [
            max(0.0, float((before - after)[blocks].max())) for before, after in zip(once, (whole, part), strict=True)
        ]
        each = np.maximum(saved @ self._alive, 1.0)
        return least, self._of_spreads(np.maximum(np.ceil(excess / each), 0.0))

    def _of_spreads(self, values: Floats) -> Floats:
        """(spread) the largest of all moments."""
        return np.asarray(values.reshape(-1, self._num_spreads).max(axis=0))


def _beside_head(backward: Floats, during: Floats, kept: Floats) -> Floats:
    """(moment and spread) what the backward of a chunk's last block needs, whose head may have freed what it kept.

    Args:
        backward: (moment and spread, piece) the block whose backward runs, and the head where the chunk has it.
        during, kept: (piece) bytes during its backward, and kept for it.
    """
    blocks = during.copy()
    blocks[_HEAD] = -kept[_HEAD]
    return np.asarray(np.maximum(backward @ blocks, 0.0))


def _least_during(again: Floats, once: Floats, kept_again: Floats, kept_once: Floats) -> Floats:
    """(piece) what the backward of a chunk needs at least beyond what it would keep if all of its blocks recomputed.

    If j of its blocks keep everything, each of them keeps kept_once - kept_again more, and `again` counts only as far
    as it exceeds what these j free before, j kept_once: together no less than where both kinds need the same, for
    j = (again - once) / kept_once.
    """
    share = np.minimum(kept_again, kept_once) / np.maximum(kept_once, 1.0)
    saved = np.maximum(again - once, 0.0) * np.where(kept_again <= kept_once, share, 1.0)
    return np.asarray(np.minimum(again, np.maximum(again - saved, 0.0)))


def _terms(space: ScheduleSpace) -> tuple[Floats, Floats]:
    """Counts by moment and spread, with one kind of counts in each row.

    Returns:
        (kind, moment, spread, piece): pieces of the rank, those whose gradients may come where activations were, and
        micro-batches of pieces that are kept, wholly or for the gradients of weights, and the last block of a chunk
        whose backward runs, with the head if it has one; (kind, moment, spread)
        micro-batches that the chunks with blocks keep, wholly or for the gradients of weights.
    """
    chunks, states, to_come, backward = moments(space.schedule)
    num_ranks, num_moments, most = states.shape[0], states.shape[1], chunks.shape[1]
    counts = np.bincount(space.placement, minlength=num_ranks)
    own = space.pieces[:, chunks] * (np.arange(most) < counts[:, None])[None, :, :, None]  # spread, rank, place, piece
    held = own.sum(axis=2)
    blocks = own.sum(axis=3) - own[..., _HEAD]
    blocks[:, space.placement[0], 0] -= 1.0  # the embedding weighs otherwise, as does the head
    whole, part = states[..., :most], states[..., most:]
    runs = (space.pieces[:, backward, 1] > 0) & (backward >= 0)
    kept = np.stack(
        [_sums(whole, blocks), _sums(part, blocks[:, :, : part.shape[2]]), _sums(whole, own[..., _HEAD]), runs]
    )
    weights = _LIKELY if part.shape[2] else _LIKELY[:-1]
    likely = (weights[:, 1:] @ kept.reshape(len(kept), -1)).reshape(-1, *kept.shape[1:])  # kind, spread, rank, moment
    likely += weights[:, 0, None, None, None] * blocks.sum(axis=2)[..., None]
    rank, moment = np.divmod(likely.reshape(*likely.shape[:2], -1).argmax(axis=2).T, num_moments)  # spread, kind
    spread = np.arange(len(own))[:, None]
    then, own, held = states[rank, moment], own[spread, rank], held[spread, rank]  # spread, kind, place
    for_weights = then[..., most:]
    there = own[..., 1] + own[..., 3:].sum(axis=3) > 0
    alive = [(then[..., :most] * there).sum(axis=2), (for_weights * there[..., : for_weights.shape[2]]).sum(axis=2)]
    running = _running(space, backward[rank, moment])
    kinds = [
        held, np.einsum("skc,skcp->skp", to_come[rank, moment], own), np.einsum("skc,skcp->skp", then[..., :most], own),
        np.einsum("skc,skcp->skp", for_weights, own[:, :, : for_weights.shape[2]]), running,
    ]  # fmt: skip
    return np.stack(kinds).swapaxes(1, 2), np.stack(alive).swapaxes(1, 2)


def _sums(states: Floats, pieces: Floats) -> Floats:
    """(spread, rank, moment) pieces in the micro-batches that are kept, given (spread, rank, chunk of the rank)."""
    return np.asarray((states @ pieces.transpose(1, 2, 0)).transpose(2, 0, 1))


def _running(space: ScheduleSpace, chunk: Ints) -> Floats:
    """(spread, kind, piece) 1 for the last block of the chunk whose backward runs, and for its head if it has one."""
    own = space.pieces[np.arange(len(chunk))[:, None], chunk] * (chunk >= 0)[..., None]
    found = np.zeros_like(own)
    found[..., 1] = own[..., 1] > 0  # plain blocks come before those with experts
    found[..., 3:] = (own[..., 3:] > 0) & (own[..., 1:2] == 0)
    found[..., _HEAD] = own[..., _HEAD] * found.any(axis=2)
    return found
