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
        forecast: that of the program it lowers to; the estimate, for other software than twofold's executor.
        simulated_s: seconds from step to step in the event engine; None where it was not simulated.
    """

    degrees: Degrees
    forecast: Forecast
    simulated_s: float | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Orders equally fast configurations: less memory first, then smaller degrees."""
        return self.forecast.step_s, self.forecast.peak_bytes, *self.degrees.rank


def identity(degrees: Degrees) -> tuple[Any, ...]:
    """A key that identifies a configuration within a problem."""
    return tuple(degrees.values.values())
