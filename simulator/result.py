"""The prediction of one configuration, as forecasts and estimates give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plans.shown import Shown

__all__ = ["Forecast"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Forecast(Shown):
    """The prediction of one configuration.

    Args:
        step_s: seconds from the end of one step to the end of the next.
        low_s, high_s: its 90 % interval.
        peak_bytes: the largest peak of any rank.
        memory: role -> bytes on the pipeline rank of the peak; they add up to it.
        bubble_fraction: share of the step in which a rank waits for other ranks, averaged over ranks: what compute,
            exposed communication and the wait for its own host leave (`plans.step_parts`).
        exposed_comm_s: seconds in which a rank waits for collectives, averaged over ranks.
        host_wait_s: seconds in which a rank waits for its own host, averaged over ranks; an estimate does not tell it
            from the bubble.
        rank_s: per pipeline rank seconds of compute and of exposed communication by call.
    """

    step_s: float
    low_s: float
    high_s: float
    peak_bytes: int
    memory: Mapping[str, int]
    bubble_fraction: float
    exposed_comm_s: float
    rank_s: tuple[Mapping[str, float], ...]
    host_wait_s: float = 0.0

    def __repr__(self) -> str:
        low, high = self.low_s * 1e3, self.high_s * 1e3
        step = f"{self.step_s * 1e3:.4g} ms ({low:.4g} to {high:.4g})"
        return f"<Forecast: a step of {step}, peak {self.peak_bytes / 1e9:.4g} GB, {len(self.rank_s)} pipeline ranks>"
