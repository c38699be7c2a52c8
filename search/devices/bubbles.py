"""The least time that a pipeline takes with any schedule and any layer split, without making a schedule.

A rank is idle until the first micro-batch has passed the chunks before it, and while the last one goes back through
them. Which chunks these are depends on two properties of a schedule: the number of chunks of a rank, and whether they
are placed in loops or in a V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plans.schedules.registry import Form, form_of
from search.devices.costs import num_dense, piece_counts
from search.devices.problem import Problem
from search.devices.space import ScheduleChoice, shapes, spreads

__all__ = ["Bubbles"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """The ranks of every spread, those of one spread side by side.

    Args:
        own: (term, piece) pieces of the rank.
        before: (term, piece) pieces before its first chunk.
        begun: the same, or 0 where ranks do not begin a step together.
        first: (term, piece) pieces of the model's first chunk.
        hops: (term, 2) links that the first micro-batch passes before the rank begins, and the same, or 0 where ranks
            do not begin a step together.
        starts: the first term of each spread.
    """

    own: Floats
    before: Floats
    begun: Floats
    first: Floats
    hops: Ints
    starts: Ints


@dataclass(kw_only=True)
class Bubbles:
    """Bounds of pipelines of a problem.

    Args:
        problem: what is asked.
        together: whether all ranks begin a step together with a schedule.
    """

    problem: Problem
    together: Callable[[ScheduleChoice], bool]
    _known: dict[tuple[int, bool], _Terms | None] = field(default_factory=dict)

    def bound_s(
        self, pp: int, count: int, forward: Floats, inputs: Floats, backward: Floats, *, split: bool,
        transfers_s: Sequence[float] = (),
    ) -> float:  # fmt: skip
        """Seconds of a step that no schedule and no spread of the layers can beat.

        With f and b seconds per rank, rank r of a schedule that does not split the backward ends no earlier than
        m (f_r + b_r) + sum (f_c + b_c) over the chunks c before its first one: its own work, and before and after it
        the way of a micro-batch through those chunks. Where the backward is split into i and w, all of its own work
        comes after the forwards before it, and the gradients of the first chunk's weights come after all gradients of
        inputs: max(m (f_r + i_r + w_r) + sum f_c, m (f_r + i_r) + sum (f_c + i_c) + w_0). These are terms of
        `ScheduleSpace.bounds_s` without gathers, reductions and updates, none of which is negative.

        Args:
            pp, count: pipeline ranks and micro-batches.
            forward, backward: (piece) seconds of one micro-batch.
            inputs: (piece) the part of the backward that the way back waits for: all of it unless `split`.
            split: whether the schedules split the backward.
            transfers_s: from pipeline rank i to the next; none by default.
        """
        terms = self._terms(pp, split)
        if terms is None:
            return float("inf")
        way = forward + inputs
        least = terms.own @ (count * way) + terms.before @ way
        if transfers_s:
            travelled = np.cumsum([0.0, *transfers_s])[terms.hops]
            least += 2 * travelled[:, 0]
        if split:
            least += terms.first @ (backward - inputs)
            busy = terms.own @ (count * (forward + backward)) + terms.begun @ forward
            if transfers_s:
                busy += travelled[:, 1]
            np.maximum(least, busy, out=least)
        return float(np.maximum.reduceat(least, terms.starts).min())

    def _terms(self, pp: int, split: bool) -> _Terms | None:
        key = (pp, split)
        if key not in self._known:
            rows: dict[tuple[bytes, ...], tuple[Any, ...]] = {}
            for shape in shapes(self.problem, pp):
                form = form_of(shape.schedule)
                if form is None:
                    rows |= self._any_form(pp)
                elif form.is_split is split:
                    rows |= self._of_form(pp, shape, form)
            self._known[key] = _joined(list(rows.values())) if rows else None
        return self._known[key]

    def _of_form(self, pp: int, shape: ScheduleChoice, form: Form) -> dict[tuple[bytes, ...], tuple[Any, ...]]:
        """Of the spreads of a shape, by their values; of ranks with the same pieces only the one that begins last."""
        placement = np.asarray(form.placement(pp, shape.virtual))
        layers = spreads(self.problem, len(placement))
        if not layers:
            return {}
        pieces = piece_counts(layers, num_dense(self.problem.config)).astype(np.float64)
        owners = (placement[:, None] == np.arange(pp)).astype(np.float64)
        begins = owners.argmax(axis=0)
        in_turn, together = bool((begins == np.arange(pp)).all()), self.together(shape)
        found: dict[tuple[bytes, ...], tuple[Any, ...]] = {}
        for piece in pieces:
            own, before = owners.T @ piece, (np.cumsum(piece, axis=0) - piece)[begins]
            last = {own[rank].tobytes(): rank for rank in np.argsort(begins, kind="stable").tolist()}
            ranks = list(last.values())
            begun = before[ranks] if together else np.zeros_like(before[ranks])
            hops = np.array(ranks)[:, None] * np.array([in_turn, in_turn and together])
            row = own[ranks], before[ranks], begun, np.tile(piece[0], (len(ranks), 1)), hops
            found[tuple(part.tobytes() for part in row)] = row
        return found

    def _any_form(self, pp: int) -> dict[tuple[bytes, ...], tuple[Any, ...]]:
        """For unknown schedules: the fullest rank has at least the mean."""
        config = self.problem.config
        mean = piece_counts([(config.num_layers,)], num_dense(config))[0].astype(np.float64) / pp
        none = np.zeros((1, len(mean)))
        return {(b"any",): (mean[None], none, none, none, np.zeros((1, 2), dtype=np.int64))}


def _joined(rows: list[tuple[Any, ...]]) -> _Terms:
    own, before, begun, first, hops = (np.concatenate([row[part] for row in rows]) for part in range(5))
    starts = np.cumsum([0, *(len(row[0]) for row in rows[:-1])])
    return _Terms(own=own, before=before, begun=begun, first=first, hops=hops, starts=starts)
