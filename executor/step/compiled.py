"""A rank's steps as one launch each: recorded once, with all communication, and replayed.

The first step runs eagerly and is checked value by value, the second warms up (kernels, communicators, workspaces), the
third is recorded and replayed, and all later ones are replayed. What a replay reads stays at its address: weights and
states, the buffers of the inputs (`Feeds`), the numbers that change from step to step (`StepCounter`).

The recording has a memory of its own, for which the eager steps' memory is given back first. A step that one rank
cannot record runs eagerly on all of them, and `fallback` says why.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Protocol

import torch
from torch import Tensor

from executor.device import Mark, Recording, now_ns
from executor.step.feeds import Feeds
from executor.step.interpreter import Batch, Code, Interpreter, RecordedStep
from plans.errors import TwofoldError
from plans.streams import StreamOrder

__all__ = ["CompiledStep", "Stepper"]

_WARM_STEPS = 2


class Stepper(Protocol):
    """What trains: an `Interpreter`, or a `CompiledStep` of one."""

    def step(self, batch: Batch, learning_rate: float | None = None) -> Tensor | None:
        """One training step."""

    def record(self, batch: Batch, learning_rate: float | None = None) -> tuple[Tensor | None, RecordedStep]:
        """One training step that notes when each instruction begins and ends."""


class CompiledStep:
    """The steps of an interpreter, replayed from the third on. The current stream must not be the default one.

    A replayed step returns before the device has done it. What it returns as the loss is the caller's own.

    Args:
        interpreter: of this rank.
        agree: whether all ranks say yes; every rank calls it as often. None for a single rank.

    Attributes:
        fallback: why steps run eagerly, "" if they do not.
    """

    def __init__(self, interpreter: Interpreter, agree: Callable[[bool], bool] | None = None) -> None:
        self.fallback = ""
        self._interpreter = interpreter
        self._agree = agree
        self._feeds = Feeds(interpreter.device)
        self._whole: _Replay | None = None
        self._marked: _Replay | None = None
        self._cannot_mark = False
        self._states_rate = False  # whether the run, not the plan, states the learning rate

    @torch.inference_mode()
    def step(self, batch: Batch, learning_rate: float | None = None) -> Tensor | None:
        """One training step, as `Interpreter.step`."""
        interpreter = self._interpreter
        if self.fallback:
            return interpreter.step(batch, learning_rate)
        fed = self._feeds.fill(interpreter.checked(batch))
        if interpreter.counter.step < _WARM_STEPS:
            self.close()  # parameters were set anew
            self._states_rate = learning_rate is not None
            return interpreter.step(fed, learning_rate)
        if self._states_rate != (learning_rate is not None):
            self.close()  # kernels may be others; they run once before they are recorded
            self._states_rate = learning_rate is not None
            return interpreter.step(fed, learning_rate)
        if self._whole is not None and not self._whole.fits(interpreter):
            self.close()
        if self._whole is None:
            interpreter.bind(fed)
            self._whole = self._recorded()
            if self._whole is None:
                return interpreter.step(fed, learning_rate)
        interpreter.begin(fed, learning_rate)
        return self._whole.run()

    @torch.inference_mode()
    def record(self, batch: Batch, learning_rate: float | None = None) -> tuple[Tensor | None, RecordedStep]:
        """One training step that notes when each instruction begins and ends, as `Interpreter.record`.

        A replayed step is timed by events inside a second recording: an instruction begins where the one before it ends
        on its compute stream, or where what it waits for on another ends. Where that cannot be recorded, or there is no
        recording yet, the step runs eagerly.
        """
        interpreter = self._interpreter
        if self._states_rate != (learning_rate is not None):
            self.close()
        if self._whole is not None and not self._whole.fits(interpreter):
            self.close()
        if self._whole is not None and self._marked is None and not self._cannot_mark:
            self._marked = self._recorded(marked=True)
            self._cannot_mark = self._marked is None
        if self._marked is None:
            return interpreter.record(batch, learning_rate)
        device, marks = interpreter.device, self._marked.marks
        interpreter.begin(self._feeds.fill(interpreter.checked(batch)), learning_rate)
        device.synchronize()
        start_ns = now_ns()
        loss = self._marked.run()
        device.synchronize()
        times_ns = [start_ns + device.between_ns(marks[0], mark) for mark in marks]
        return loss, RecordedStep(
            start_ns=start_ns, end_ns=now_ns(), host_ns=[(start_ns, start_ns)] * len(interpreter.codes),
            device_ns=_between(times_ns, interpreter.stream_order),
        )  # fmt: skip

    @property
    def execution(self) -> str:
        """How steps run now: "graph" or "eager"."""
        return "eager" if self._whole is None else "graph"

    @property
    def times_replays(self) -> bool:
        """Whether the steps that were recorded last were replays."""
        return self._marked is not None

    def close(self, *, wait: bool = True) -> None:
        """Free the recordings and their memory; to be called before the process groups are closed.

        Args:
            wait: for the replays that are under way. Without it nothing waits, not even for ranks that are gone, and
                the memory is not given back.
        """
        if self._whole is None:
            return
        if wait:
            self._interpreter.device.synchronize()
        for recording in [each.recording for each in (self._marked, self._whole) if each is not None]:
            recording.release()
        self._whole = self._marked = None
        if wait:
            self._interpreter.device.release_memory()

    def _recorded(self, *, marked: bool = False) -> _Replay | None:
        """A recording of the whole step, or None and `fallback` says why; nothing is carried out."""
        interpreter, device = self._interpreter, self._interpreter.device
        kept, marks = list(interpreter.kept_tensors), list[Mark]()
        loss: list[Tensor | None] = []

        def mark() -> None:
            marks.append(device.recorded_mark())

        def run(code: Code) -> None:
            code.run()
            mark()

        def whole() -> None:
            if marked:
                mark()
            interpreter.issue(run if marked else None)
            interpreter.settle(kept)
            loss.append(interpreter.end())

        gc.collect()  # nothing of the device may be freed while it records
        if not marked:
            device.synchronize()
            device.release_memory()
        recording, why = None, f"a device of kind {device.kind} cannot record launches"
        interpreter.counter.is_recording = True
        try:
            recording = device.capture(whole, self._whole.recording.pool if marked and self._whole else None)
        except (RuntimeError, TwofoldError) as error:
            why = _in_one_line(error)
            interpreter.abandon(kept)
        finally:
            interpreter.counter.is_recording = False
        if self._agree is not None and not self._agree(recording is not None):
            if recording is not None:
                recording.release()
                recording, why = None, "another rank cannot record it, which its log explains"
        if recording is None:
            device.release_memory()
            if not marked:
                self.fallback, self._feeds = why, Feeds(device)
                print(f"steps run eagerly on rank {interpreter.rank}: {why}", flush=True)
            return None
        return _Replay(recording, kept, loss[0], marks)


class _Replay:
    """A recording with the addresses that it was made for."""

    def __init__(self, recording: Recording, kept: list[Tensor], loss: Tensor | None, marks: list[Mark]) -> None:
        self.recording, self.marks = recording, marks
        self._kept, self._loss = kept, loss
        self._addresses = [each.data_ptr() for each in kept]

    def fits(self, interpreter: Interpreter) -> bool:
        """Whether everything is where it was when the recording was made."""
        same = all(map(is_, self._kept, interpreter.kept_tensors))
        return same and all(each.data_ptr() == at for each, at in zip(self._kept, self._addresses, strict=True))

    def run(self) -> Tensor | None:
        """Launch it; a copy of the loss, for the next replay writes over it."""
        self.recording.replay()
        return None if self._loss is None else self._loss.clone()


def _between(times_ns: Sequence[int], order: StreamOrder | None) -> list[tuple[int, int]]:
    """When instructions begin and end; `times_ns` are the start of the step and the end of each."""
    if order is None:
        return list(itertools.pairwise(times_ns))
    free, found = [times_ns[0]] * order.count, list[tuple[int, int]]()
    for position, (stream, end) in enumerate(zip(order.streams, times_ns[1:], strict=True)):
        begin = max([free[stream], *(found[awaited][1] for awaited in order.waits.get(position, ()))])
        free[stream] = max(begin, end)
        found.append((begin, free[stream]))
    return found


def _in_one_line(error: BaseException) -> str:
    said = str(error).strip().splitlines()
    return ", ".join([said[0] if said else type(error).__name__, *getattr(error, "__notes__", ())[:1]])
