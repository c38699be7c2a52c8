"""Seconds of calls that follow each other on a device, by its own clock."""

from __future__ import annotations

from collections.abc import Callable

from executor.calibrate.rank_sync import RankSync
from executor.device import Device

__all__ = ["in_a_row_s", "settle"]


def in_a_row_s(device: Device, call: Callable[[], object], count: int) -> float:
    """Seconds of `count` calls in a row on this rank's device, from the first to the last."""
    first = device.mark()
    for _ in range(count):
        call()
    last = device.mark()
    device.synchronize()
    return device.between_ns(first, last) / 1e9


def settle(device: Device, sync: RankSync, call: Callable[[], object], seconds: float) -> None:
    """Repeat a call for about `seconds`, equally often on every rank, until the clocks of the devices have settled."""
    once_s = sync.maximum([in_a_row_s(device, call, 1)])[0]
    for _ in range(max(2, round(seconds / once_s))):
        call()
