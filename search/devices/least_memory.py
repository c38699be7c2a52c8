"""The least memory that layer splits need, for many schedules at once, as one matrix product.

The peak of a rank is at least its memory at any moment: its weights, gradients and states, and the micro-batches that
its chunks keep. These counts depend only on the schedule and the layer split. The moments that are the peak in some
layout are found once; layouts differ in the bytes of each piece.
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
    """The least memory of the spreads of some schedules with equal ranks and micro-batches, if every block recomputes.

    Args:
        spaces: the schedules.
    """

    def __init__(self, spaces: Sequence[ScheduleSpace]) -> None:
        self._terms = np.concatenate([_terms(space) for space in spaces], axis=1)  # (kind, spread and moment, piece)

    def bytes_of(self, peak_memory: PeakMemory, stage: StageConfig, *, dp: int, level: int, partial: bool) -> Floats:
        """(spread) no more than `PeakMemory.peaks_bytes` of any number of blocks that recompute.

        Args:
            peak_memory: knows the memory of pieces.
            stage, dp, level: the layout.
            partial: whether some blocks may keep everything.
        """
        held = peak_memory.static_bytes(stage, dp, level).astype(np.float64)
        whole, part = peak_memory.kept_of_pieces(stage)
        if partial:
            whole, part = map(np.minimum, (whole, part), peak_memory.kept_of_pieces(without_recompute(stage)))
        weights, gradients, kept, kept_for_weights = self._terms
        total = weights @ held.sum(axis=1) + kept @ whole + kept_for_weights @ part
        total -= gradients @ held[:, 1]
        return np.asarray(total.reshape(-1, len(_LIKELY)).max(axis=1))


def _terms(space: ScheduleSpace) -> Floats:
    """(kind, spread and moment, piece): pieces of the rank, those whose gradients may come where activations were, and
    micro-batches of pieces that are kept, wholly or for the gradients of weights."""
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
    kinds = [
        held, np.einsum("skc,skcp->skp", to_come[rank, moment], own), np.einsum("skc,skcp->skp", then[..., :most], own),
        np.einsum("skc,skcp->skp", for_weights, own[:, :, : for_weights.shape[2]]),
    ]  # fmt: skip
    return np.stack(kinds).reshape(4, -1, held.shape[2])
