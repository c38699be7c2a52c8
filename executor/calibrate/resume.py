"""Resuming from a file of points of an earlier run, if both ran on machines of the same kind."""

from __future__ import annotations

from collections.abc import Mapping

from costmodels.fit.points import PointLog
from plans.errors import TwofoldError

__all__ = ["check_same", "resume"]

SAME = ("device", "device_name", "machine", "processor", "cores")
"""Parts of the environment that must not change within a file; versions and dates may, and are stored."""


def check_same(log: PointLog, environment: Mapping[str, str]) -> None:
    """Refuse a file with any part from another device.

    Args:
        log: the file, with the points of an earlier run or without.
        environment: of this run.

    Raises:
        TwofoldError: existing points were measured on another device.
    """
    for earlier in log.environments:
        for name in SAME:
            there, here = earlier.get(name), environment.get(name)
            if there is not None and here is not None and there != here:
                raise TwofoldError(
                    f"the points in {str(log.path)!r} were measured where {name} is {there!r}, but here it is "
                    f"{here!r}. Name "
                    "another file with --points"
                )


def resume(log: PointLog, environment: Mapping[str, str]) -> None:
    """Write the environment of the following points to the file, after `check_same`."""
    check_same(log, environment)
    log.begin(environment)
