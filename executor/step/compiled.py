"""A rank's steps as one launch each: recorded once, with all communication, and replayed.

The first step runs eagerly and is checked value by value, the second warms up (kernels, communicators, workspaces), the
third is recorded and replayed, and all later ones are replayed. Everything that a replay reads stays at its address:
weights and states, the buffers of the inputs (`Feeds`), the numbers that change from step to step (`StepCounter`).

The recording has a separate memory, for which the eager steps' memory is returned first. An instruction that cannot
be recorded is issued by the host between two recordings (`executor.step.pieces`). A step that one rank cannot record so
either runs eagerly on all of them. `fallback` gives the mode and the reason.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from executor.device import Mark, Recording, now_ns
from executor.step.code import Code, RecordedStep
from executor.step.feeds import Feeds
from executor.step.interpreter import Batch, Interpreter
from executor.step.pieces import Replay, finish_before, issued_by_host, stretches
from plans.errors import TwofoldError
from plans.step_check import StepCheck
from plans.streams import StreamOrder

__all__ = ["CompiledStep", "Stepper"]

_WARM_STEPS = 2

_MOST_BY_HOST = 8
"""Instructions of a step that the host issues between recordings; with more of them the complete step runs eagerly."""


class Stepper(Protocol):
    """An object that runs training steps: an `Interpreter`, or a `CompiledStep` of one."""

    def step(self, batch: Batch, learning_rate: float | None = None) -> Tensor | None:
        """One training step."""

    def record(self, batch: Batch, learning_rate: float | None = None) -> tuple[Tensor | None, RecordedStep]:
        """One training step that notes when each instruction begins and ends."""

    @property
    def held_of_check(self) -> tuple[StepCheck, Tensor] | None:
        """The current state of the check of steps; the next step changes it."""


class CompiledStep:
    """The steps of an interpreter, replayed from the third on. The current stream must not be the default one.

    A replayed step returns before the device has done it. The returned loss belongs to the caller.

    Args:
        interpreter: of this rank.
        agree: whether all ranks agree; every rank calls it as often. None for a single rank.

    Attributes:
        fallback: why steps, or some of their instructions, run eagerly; "" if they do not.
    """

    def __init__(self, interpreter: Interpreter, agree: Callable[[bool], bool] | None = None) -> None:
        self.fallback = ""
        self._is_eager = False
        self._interpreter = interpreter
        self._agree: Callable[[bool], bool] = agree or bool
        self._feeds = Feeds(interpreter.device)
        self._whole: Replay | None = None
        self._marked: Replay | None = None
        self._cannot_mark = False
        self._states_rate = False  # whether the run, not the plan, states the learning rate

    @torch.inference_mode()
    def step(self, batch: Batch, learning_rate: float | None = None) -> Tensor | None:
        """One training step, as `Interpreter.step`."""
        interpreter = self._interpreter
        if self._is_eager:
            return interpreter.step(batch, learning_rate)
        fed = self._feeds.fill(interpreter.checked(batch))
        if interpreter.num_begun < _WARM_STEPS:
            self.close()  # parameters were set again
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
    def held_of_check(self) -> tuple[StepCheck, Tensor] | None:
        """As `Interpreter.held_of_check`; a replay changes it in place."""
        return self._interpreter.held_of_check

    @property
    def execution(self) -> str:
        """The current execution: "graph" or "eager"."""
        return "eager" if self._whole is None else "graph"

    @property
    def times_replays(self) -> bool:
        """Whether the steps that were recorded last were replays."""
        return self._marked is not None

    def close(self, *, wait: bool = True) -> None:
        """Free the recordings and their memory; to be called before the process groups are closed.

        Args:
            wait: for the replays that are under way. Without it nothing waits, not even for ranks that are gone, and
                the memory is not returned.
        """
        if self._whole is None:
            return
        if wait:
            self._interpreter.device.synchronize()
        for replay in (self._marked, self._whole):
            if replay is not None:
                replay.release()
        self._whole = self._marked = None
        if wait:
            self._interpreter.device.release_memory()

    def _recorded(self, *, marked: bool = False) -> Replay | None:
        """A recording of the complete step; nothing is executed.

        An instruction that cannot be recorded is left to the host, between two recordings. None where that is no way
        out on one of the ranks; `fallback` then has the reason.
        """
        interpreter, by_host = self._interpreter, dict[int, str]()
        gc.collect()  # nothing of the device may be freed while it records
        if not marked:
            interpreter.device.synchronize()
            interpreter.device.release_memory()
        while True:
            made, failed_at, why = self._attempt(by_host, marked)
            if self._agree(made is not None):
                if not marked:  # all ranks time replays, or none does
                    self.fallback, self._cannot_mark = "; ".join(by_host.values()), not self._agree(not by_host)
                if by_host:
                    share = f"{len(by_host)} of {len(interpreter.codes)} instructions"
                    print(f"rank {interpreter.rank} issues {share} itself: {self.fallback}", flush=True)
                return made
            can_go_on = not marked and interpreter.stream_order is None
            if made is not None:
                made.release()
                why = "another rank cannot record it; see its log"
            elif failed_at is None or len(by_host) == _MOST_BY_HOST:
                can_go_on = False
            else:
                by_host[failed_at] = why
            interpreter.device.release_memory()
            if not self._agree(can_go_on):
                break
        if not marked:
            self.fallback, self._is_eager, self._feeds = why, True, Feeds(interpreter.device)
            print(f"steps run eagerly on rank {interpreter.rank}: {why}", flush=True)
        return None

    def _attempt(self, by_host: Iterable[int], marked: bool) -> tuple[Replay | None, int | None, str]:
        """A recording that leaves these positions to the host, or the position that cannot be recorded and why."""
        interpreter, device = self._interpreter, self._interpreter.device
        kept, marks, loss = list(interpreter.kept_tensors), list[Mark](), list[Tensor | None]()
        pieces, recordings = list[Callable[[], object]](), list[Recording]()
        pool = self._whole.recordings[0].pool if marked and self._whole is not None else None
        position, stretch = 0, slice(0, 0)

        def run(code: Code) -> None:
            nonlocal position
            code.run()
            position += 1
            if marked:
                marks.append(device.recorded_mark())

        def piece() -> None:
            nonlocal position
            position = stretch.start
            if marked:
                marks.append(device.recorded_mark())
            interpreter.issue(run, positions=stretch)
            if stretch.stop < len(interpreter.codes):
                finish_before(interpreter, stretch.stop)
                return
            interpreter.settle(kept)
            loss.append(interpreter.end())

        interpreter.counter.is_recording = True
        try:
            for stretch in stretches(len(interpreter.codes), by_host):
                recording = device.capture(piece, pool)
                if recording is None:
                    return None, None, f"a device of kind {device.kind} cannot record launches"
                pool = recording.pool
                recordings.append(recording)
                pieces.append(recording.replay)
                if stretch.stop < len(interpreter.codes):
                    pieces.append(issued_by_host(interpreter, interpreter.codes[stretch.stop]))
        except (RuntimeError, TwofoldError) as error:
            interpreter.abandon(kept)
            for recording in recordings:
                recording.release()
            in_instruction = position < stretch.stop and not isinstance(error, torch.OutOfMemoryError)
            return None, position if in_instruction else None, _in_one_line(error)
        finally:
            interpreter.counter.is_recording = False
        return Replay(pieces, recordings, kept, loss[0], marks), None, ""


def _between(times_ns: Sequence[int], order: StreamOrder | None) -> list[tuple[int, int]]:
    """The start and end of instructions, from `times_ns`: the start of the step and the end of each instruction."""
    if order is None:
        return list(itertools.pairwise(times_ns))
    free, found = [times_ns[0]] * order.count, list[tuple[int, int]]()
    for position, (stream, end) in enumerate(zip(order.streams, times_ns[1:], strict=True)):
        begin = max([free[stream], *(found[awaited][1] for awaited in order.waits.get(position, ()))])
        free[stream] = max(begin, end)
        found.append((begin, free[stream]))
    return found


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return ", ".join([lines[0] if lines else type(error).__name__, *getattr(error, "__notes__", ())[:1]])
