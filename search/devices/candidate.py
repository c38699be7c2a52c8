"""A configuration with its forecast, and parts of the space that were refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plans.degrees import Degrees, describe
from simulator.forecast import Forecast

__all__ = ["Found", "Refused", "describe", "identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A configuration and its forecast."""

    degrees: Degrees
    forecast: Forecast

    @property
    def key(self) -> tuple[Any, ...]:
        """Orders what is equally fast: less memory first, then smaller degrees."""
        return self.forecast.step_s, self.forecast.peak_bytes, *self.degrees.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Configurations that were not taken, and the reason.

    Args:
        what: the part of the space.
        reason: why.
        count: how many configurations, or 0 where they were not counted.
        excess_bytes: by how much the least of them exceeds the memory.
    """

    what: str
    reason: str
    count: int = 0
    excess_bytes: int | None = None


def identity(degrees: Degrees) -> tuple[Any, ...]:
    """What tells configurations of one problem apart."""
    return tuple(degrees.values.values())
