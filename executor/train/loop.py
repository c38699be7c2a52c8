"""The training loop of one rank. It launches a step, and evaluates it after the next one has been launched.

An eager step is evaluated when the device has finished it. A replayed step is launched while the device still works on
the previous one, so that the device never waits for the host: its loss is copied afterwards, and its times are those of
events on the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.device import Device, Mark, now_ns
from executor.step.code import RecordedStep
from executor.step.compiled import CompiledStep, Stepper
from executor.step.interpreter import Batch
from executor.train.heartbeat import Heartbeat
from executor.train.options import RunOptions
from executor.train.profile import Profile
from executor.train.verdict import Verdict
from plans.errors import TrainingStopped, TwofoldError
from plans.step_check import StepCheck

__all__ = ["Training", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The outcome of the steps of a run.

    Args:
        losses: of every step; NaN if this rank does not have it.
        recorded: of the last steps.
        times_ns: [2, steps] when each step began and ended.
        cpu_s: processor time of this process per step, the first quarter of the steps left out.
        last_batch: the last one that was fed; None after no step.
    """

    losses: npt.NDArray[np.float64]
    recorded: list[RecordedStep]
    times_ns: npt.NDArray[np.int64]
    cpu_s: float
    last_batch: Batch | None


def train(
    stepper: Stepper,
    device: Device,
    batches: Iterator[Batch],
    steps: int,
    options: RunOptions,
    heartbeat: Heartbeat,
    *,
    first: int = 0,
    after_step: Callable[[int, Batch, Tensor | None], None] | None = None,
) -> Training:
    """Train for a number of steps.

    Args:
        stepper: does one.
        device: where.
        batches: of these steps.
        steps: to be done; 0 where a checkpoint has all of them.
        options: options of the run.
        heartbeat: notified of the loop's position.
        first: number of the first step, the steps that were done before.
        after_step: called with the number of steps done in all, the batch and the loss when a step was launched.

    Raises:
        TwofoldError: the data ends early.
        TrainingStopped: a loss is not finite, or the check of steps ends training.
    """
    recorded: list[RecordedStep] = []
    watch = _Watch(device, options, steps, first, behind=isinstance(stepper, CompiledStep))
    warm, cpu_ns, batch = steps // 4, 0, None
    profiled_from = max(0, steps - options.record_steps - options.profile_steps)
    profile = Profile(options.profile_path, device)
    for step in range(steps):
        if step == warm:
            cpu_ns = time.process_time_ns()
        heartbeat.reads(first + step)
        batch = next(batches, None)
        heartbeat.trains()
        if batch is None:
            raise TwofoldError(
                f"the data ended after {first + step} of {first + steps} steps; give more batches or fewer steps"
            )
        if options.profile_steps and step == profiled_from:
            profile.start()
        learning_rate = None if options.learning_rate is None else options.learning_rate(first + step)
        watch.begins()
        if step >= steps - options.record_steps:
            loss, spans = stepper.record(batch, learning_rate)
            recorded.append(spans)
        else:
            loss = stepper.step(batch, learning_rate)
        watch.launched(step, loss, stepper.held_of_check)
        if options.checkpoints is not None and options.checkpoints.is_due(first + step + 1, first + steps):
            watch.look()  # no checkpoint of a step that diverged
        if after_step is not None:
            heartbeat.ends()  # a disk may be slow
            after_step(first + step + 1, batch, loss)
        if step == profiled_from + options.profile_steps - 1:
            profile.stop()
    watch.look()
    cpu_ns = time.process_time_ns() - cpu_ns
    return Training(
        losses=watch.losses, recorded=recorded, times_ns=watch.times_ns, cpu_s=cpu_ns / 1e9 / max(1, steps - warm),
        last_batch=batch,
    )  # fmt: skip


class _Launched(NamedTuple):
    """A step: its number in this run, its loss and what is held of its check, and marks of its ends."""

    step: int
    loss: Any
    checked: tuple[StepCheck, Tensor] | None
    begun: Mark
    ended: Mark


class _Watch:
    """Times and losses of steps, taken at once or, with `behind`, one step late."""

    def __init__(self, device: Device, options: RunOptions, steps: int, first: int, *, behind: bool) -> None:
        self.times_ns = np.zeros((2, steps), dtype=np.int64)
        self.losses = np.full(steps, math.nan)  # numbers: 10,000 tensors would fill memory
        self._device, self._options = device, options
        self._marks = behind and device.is_async
        self._behind, self._first = behind, first
        self._loss = math.nan
        self._begun: Mark = None
        self._pending: _Launched | None = None
        if self._marks:
            device.synchronize()
        self._last: tuple[Mark, int] = self._mark(), now_ns()

    def begins(self) -> None:
        """A step is about to be launched."""
        self._begun = self._mark()

    def launched(self, step: int, loss: Tensor | None, held: tuple[StepCheck, Tensor] | None) -> None:
        """A step was launched; look at the one before it, or at this one if it has ended.

        Args:
            step: its number in this run.
            loss: of it, if this rank has it.
            held: of the check of steps, if there is one.
        """
        host_loss = None if loss is None else self._on_host(loss)
        checked = None if held is None else (held[0], self._on_host(held[1].clone()))
        before, self._pending = self._pending, _Launched(step, host_loss, checked, self._begun, self._mark())
        if self._behind:
            self._look_at(before)
        else:
            self.look()

    def look(self) -> None:
        """Look at the last step, waiting for its end."""
        pending, self._pending = self._pending, None
        self._look_at(pending)

    def _look_at(self, launched: _Launched | None) -> None:
        if launched is None:
            return
        step, loss, checked, begun, ended = launched
        if self._marks:
            self._device.reached(ended)
            last, last_ns = self._last
            start_ns = last_ns + self._device.between_ns(last, begun)
            end_ns = start_ns + self._device.between_ns(begun, ended)
            self._last = ended, end_ns
        else:
            start_ns, end_ns = begun, ended
        self.times_ns[:, step] = start_ns, end_ns
        value = None if loss is None else float(loss)
        verdict = None if checked is None else Verdict.of(*checked)
        if value is not None:
            self.losses[step] = value
            if verdict is None or not verdict.goes_on_without_a_loss:
                self._check_finite(step, value)
        if verdict is not None:
            verdict.stop_where_asked(self._first + step + 1)
            if self._options.on_check is not None:
                self._options.on_check(self._first + step, verdict)
        if self._options.on_step is not None:
            self._options.on_step(self._first + step, value)

    def _check_finite(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            before = "" if step == 0 else f", after {self._loss:.6g} in the step before"
            raise TrainingStopped(
                f"training diverged: the loss of step {self._first + step + 1} is {loss}{before}; lower the learning "
                "rate, clip "
                f"gradients, or check the data of this step"
            )
        self._loss = loss

    def _mark(self) -> Mark:
        return self._device.mark() if self._marks else now_ns()

    def _on_host(self, loss: Tensor) -> Tensor:
        if not self._marks:
            return loss
        host = self._device.host_buffer(tuple(loss.shape), loss.dtype)
        with torch.inference_mode():
            return host.copy_(loss, non_blocking=True)
