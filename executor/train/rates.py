"""Learning rates over the steps of a run."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from plans.errors import TwofoldError

__all__ = ["Rate"]


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A learning-rate schedule: a linear warm-up to the peak, then the kind of decay to `final`.

    Args:
        kind: "constant"; "linear"; "cosine" (Loshchilov and Hutter, arXiv 1608.03983, one period); "wsd" (Hu et al.,
            arXiv 2404.06395: the peak is held, and falls linearly in the last `decay` steps).
        peak: the highest rate.
        warmup: steps in which it rises from peak / warmup.
        final: the rate of the last step.
        decay: of wsd: steps in which it falls.

    >>> [round(Rate(kind="linear", peak=1.0, warmup=2).at(step, 6), 3) for step in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    peak: float
    warmup: int = 0
    final: float = 0.0
    decay: int = 0

    def check(self, steps: int) -> None:
        """Refuse a schedule that does not fit the steps.

        Raises:
            TwofoldError: a rate that is negative or not finite, more steps of warm-up and decay than the run has.
        """
        if not (0 < self.peak < math.inf and 0 <= self.final <= self.peak):
            raise TwofoldError(
                f"learning_rate: peak must be above 0 and final from 0 to peak, not {self.peak:g} and {self.final:g}"
            )
        if self.warmup < 0 or self.decay < 0 or self.warmup + self.decay > steps:
            raise TwofoldError(
                f"learning_rate: warmup {self.warmup} and decay {self.decay} must be at least 0 and together at most "
                f"the {steps} steps of the run"
            )
        if (self.kind == "wsd") != (self.decay > 0):
            raise TwofoldError(
                "learning_rate: decay is for kind 'wsd', which needs it: state decay of at least 1 there"
            )

    def at(self, step: int, steps: int) -> float:
        """The rate of a step, counted from 0, in a run of `steps` steps."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.kind == "constant":
            return self.peak
        falls_from = steps - 1 - self.decay if self.kind == "wsd" else max(0, self.warmup - 1)
        done = min(1.0, max(0.0, (step - falls_from) / max(1, steps - 1 - falls_from)))
        left = (1 + math.cos(math.pi * done)) / 2 if self.kind == "cosine" else 1 - done
        return self.final + (self.peak - self.final) * left
