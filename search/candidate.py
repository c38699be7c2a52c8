"""A configuration with its forecast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plans.degrees import Degrees, describe
from simulator.forecast import Forecast

__all__ = ["Candidate", "describe", "identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration and its forecast.

    Args:
        degrees: the configuration.
        forecast: the estimate that the search ranks and bounds by, or (`search.devices.confirm.predicted`) the forecast
            of the lowered program.
        estimate_s: seconds of a step by the estimate, where `forecast` is that of the program.
    """

    degrees: Degrees
    forecast: Forecast
    estimate_s: float | None = None

    @property
    def ranked_s(self) -> float:
        """Seconds of a step that the search ranked it by."""
        return self.forecast.step_s if self.estimate_s is None else self.estimate_s

    @property
    def key(self) -> tuple[Any, ...]:
        """Orders what is equally fast: less memory first, then smaller degrees."""
        return self.forecast.step_s, self.forecast.peak_bytes, *self.degrees.rank


def identity(degrees: Degrees) -> tuple[Any, ...]:
    """What tells configurations of one problem apart."""
    return tuple(degrees.values.values())
