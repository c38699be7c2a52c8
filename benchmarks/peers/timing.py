"""How steps are timed, the same way for both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from executor.calibrate.rank_sync import RankSync
from executor.device import Device, now_ns

__all__ = ["MIN_STEPS", "WARM_STEPS", "Measured", "measured_steps"]

WARM_STEPS = 4
MIN_STEPS = 8
_LONG_S = 2.0
"""Short steps of an accelerator are repeated for so long, ..."""
_MAX_STEPS = 40
"""... but not more often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps of one side.

    Args:
        step_s: median seconds from a barrier until the slowest rank's device has done everything.
        spread: of these, the distance between the quartiles over the median.
        steps: how many.
        device_s: median seconds between events before and behind the step on the slowest rank's current stream.
        peak_bytes: the most bytes of tensors on a device during all steps, of the fullest rank; 0 on a CPU.
        steady_peak_bytes: the same without the first steps, in which compilers try kernels. What a captured step takes
            is counted in the step that captures it only.
        reserved_bytes: what torch's allocator held behind the last step, of the fullest rank.
        left_bytes: what the fullest rank held before this side was built.
        losses: of the first steps, which do not count for the time; the first is that of the initial weights.
    """

    step_s: float
    spread: float
    steps: int
    device_s: float
    peak_bytes: int
    steady_peak_bytes: int
    reserved_bytes: int
    left_bytes: int
    losses: tuple[float, ...]

    @property
    def json(self) -> dict[str, Any]:
        """As stored."""
        return asdict(self)


def measured_steps(device: Device, sync: RankSync, step: Callable[[], Tensor | None], left_bytes: int) -> Measured:
    """Run warm-up steps, then timed ones; every rank calls it.

    Args:
        device: device of this rank.
        sync: of all ranks.
        step: one training step; it returns its mean loss where this rank knows one.
        left_bytes: see `Measured`.
    """
    device.reset_peak_memory()
    losses = [_mean(sync, step()) for _ in range(WARM_STEPS)]
    first_peak = device.max_memory_allocated()
    device.reset_peak_memory()
    taken = [_timed(device, sync, step)]
    count = MIN_STEPS
    if device.is_async:
        count = int(min(_MAX_STEPS, max(MIN_STEPS, _LONG_S / _slowest(sync, taken)[0][0])))
    taken = [_timed(device, sync, step) for _ in range(count)]
    wall, on_device = (np.array(each) for each in _slowest(sync, taken))
    low, middle, high = np.percentile(wall, [25, 50, 75])
    steady = device.max_memory_allocated()
    peak, steady, reserved, left = map(
        int, sync.maximum([max(first_peak, steady), steady, device.memory_reserved(), left_bytes])
    )
    return Measured(
        step_s=float(middle), spread=float((high - low) / middle), steps=count, device_s=float(np.median(on_device)),
        peak_bytes=peak, steady_peak_bytes=steady, reserved_bytes=reserved, left_bytes=left, losses=tuple(losses),
    )  # fmt: skip


def _timed(device: Device, sync: RankSync, step: Callable[[], Tensor | None]) -> tuple[float, float]:
    """Wall seconds and seconds between events of one step on this rank."""
    device.synchronize()
    if sync.size > 1:
        dist.barrier()
        device.synchronize()
    start, first = now_ns(), device.mark()
    step()
    last = device.mark()
    device.synchronize()
    end = now_ns()
    return (end - start) / 1e9, device.between_ns(first, last) / 1e9


def _slowest(sync: RankSync, taken: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Of every step the slowest rank's times; one exchange for all of them, behind the last."""
    largest = sync.maximum([value for pair in taken for value in pair])
    return largest[::2], largest[1::2]


def _mean(sync: RankSync, loss: Tensor | None) -> float:
    """The mean over the ranks that know a loss."""
    known = [value for value in sync.gather(None if loss is None else float(loss)) if value is not None]
    return float(sync.from_rank_0(float(np.mean(known)) if known else float("nan")))
