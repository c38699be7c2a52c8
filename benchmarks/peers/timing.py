"""How steps are timed, the same way for both sides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, supported_activities

from benchmarks.devices.profiled import kernels_of
from executor.calibrate.rank_sync import RankSync
from executor.device import Device, now_ns

__all__ = ["MIN_STEPS", "WARM_STEPS", "Measured", "measured_steps"]

WARM_STEPS = 4
MIN_STEPS = 8
_SINGLE = 6
"""Steps that are timed alone, in addition to those in a row."""
_LONG_S, _MAX_STEPS = 3.0, 400
"""Seconds for which steps of an accelerator follow each other, and the most steps. A GPU at its power limit changes its
clock all the time, and for about a second after a pause it is faster than in a long run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps of one side.

    Args:
        step_s: median seconds of steps that follow each other without waiting, as in training, between marks on the
            stream of the slowest rank; of the second half of them, when clocks have settled.
        spread: of these, the distance between the quartiles over the median.
        steps: how many.
        single_s: median seconds of a step alone: from a barrier until the slowest rank's device has done everything.
        peak_bytes: the most bytes of tensors on a device during all steps, of the fullest rank; 0 on a CPU.
        steady_peak_bytes: the same without the first steps, in which compilers try kernels. What a captured step takes
            is counted in the step that captures it only.
        reserved_bytes: what torch's allocator held behind the last step, of the fullest rank.
        left_bytes: what the fullest rank held before this side was built.
        losses: of the first steps, which do not count for the time; the first is that of the initial weights.
        computing_s: seconds of a step in which kernels other than communication run, of the busiest device; None where
            torch's profiler does not see the device. The rest of a step waits for communication or for the host.
    """

    step_s: float
    spread: float
    steps: int
    single_s: float
    peak_bytes: int
    steady_peak_bytes: int
    reserved_bytes: int
    left_bytes: int
    losses: tuple[float, ...]
    computing_s: float | None = None

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
    alone = [_alone_s(device, sync, step) for _ in range(_SINGLE)]
    single_s = float(np.median(sync.maximum(alone)))
    count = int(min(_MAX_STEPS, max(2 * MIN_STEPS, _LONG_S / single_s))) if device.is_async else MIN_STEPS
    in_a_row = _in_a_row_s(device, sync, step, count)
    settled = in_a_row[len(in_a_row) // 2 :] if device.is_async else in_a_row
    low, middle, high = np.percentile(settled, [25, 50, 75])
    steady = device.max_memory_allocated()
    computing_s = _computing_s(device, sync, step)
    peak, steady, reserved, left = map(
        int, sync.maximum([max(first_peak, steady), steady, device.memory_reserved(), left_bytes])
    )
    return Measured(
        step_s=float(middle), spread=float((high - low) / middle), steps=len(settled), single_s=single_s,
        peak_bytes=peak, steady_peak_bytes=steady, reserved_bytes=reserved, left_bytes=left, losses=tuple(losses),
        computing_s=computing_s,
    )  # fmt: skip


def _alone_s(device: Device, sync: RankSync, step: Callable[[], Tensor | None]) -> float:
    """Wall seconds of one step on this rank, from a barrier on."""
    _meet(device, sync)
    start = now_ns()
    step()
    device.synchronize()
    return (now_ns() - start) / 1e9


def _in_a_row_s(device: Device, sync: RankSync, step: Callable[[], Tensor | None], count: int) -> list[float]:
    """Seconds of each of `count` steps that follow each other without waiting, of the rank that takes longest."""
    _meet(device, sync)
    marks = [device.mark()]
    for _ in range(count):
        step()
        marks.append(device.mark())
    device.synchronize()
    own = [device.between_ns(start, end) / 1e9 for start, end in itertools.pairwise(marks)]
    every = sync.gather(own)  # on rank 0
    return list(sync.from_rank_0(max(every, key=sum) if every else None))


def _computing_s(device: Device, sync: RankSync, step: Callable[[], Tensor | None]) -> float | None:
    """See `Measured`; every rank profiles one more step."""
    if not device.is_async or ProfilerActivity.CUDA not in supported_activities():
        return None
    _meet(device, sync)
    busy_s, until_s = 0.0, 0.0
    for kernel in kernels_of(device, step):
        if not kernel.communicates:
            end_s = kernel.start_s + kernel.seconds
            busy_s += max(0.0, end_s - max(kernel.start_s, until_s))
            until_s = max(until_s, end_s)
    return sync.maximum([busy_s])[0]


def _meet(device: Device, sync: RankSync) -> None:
    """Wait until all ranks are here and their devices idle."""
    device.synchronize()
    if sync.size > 1:
        dist.barrier()
        device.synchronize()


def _mean(sync: RankSync, loss: Tensor | None) -> float:
    """The mean over the ranks that know a loss."""
    known = [value for value in sync.gather(None if loss is None else float(loss)) if value is not None]
    return float(sync.from_rank_0(float(np.mean(known)) if known else float("nan")))
