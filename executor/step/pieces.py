"""A step in pieces that follow each other: recordings, and between them instructions that cannot be recorded.

Recordings of one step use one memory and are replayed in the order in which they were made. What a recording reads
stays at its address, so an instruction between two of them finds its operands where the one before left them, and
leaves copies of its results where the one after looks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_

import torch
from torch import Tensor

from executor.device import Mark, Recording
from executor.kernels.context import torch_dtype
from executor.step.code import Code
from executor.step.comm import Work
from executor.step.interpreter import Interpreter
from plans.errors import TwofoldError
from plans.program import Kind

__all__ = ["Replay", "finish_before", "issued_by_host", "stretches"]


class Replay:
    """The recorded pieces of a step, with the addresses for which they were recorded.

    Args:
        pieces: in their order, what launches each.
        recordings: those among them.
        kept: what lives on between steps.
        loss: where the step leaves it, if this rank knows it.
        marks: the start of the step and the end of each instruction, of a recording that is timed.
    """

    def __init__(
        self,
        pieces: Sequence[Callable[[], object]],
        recordings: Sequence[Recording],
        kept: list[Tensor],
        loss: Tensor | None,
        marks: list[Mark],
    ) -> None:
        self.recordings, self.marks = recordings, marks
        self._pieces, self._kept, self._loss = pieces, kept, loss
        self._addresses = [tensor.data_ptr() for tensor in kept]

    def fits(self, interpreter: Interpreter) -> bool:
        """Whether all tensors still have the addresses that they had when the recordings were made."""
        same = all(map(is_, self._kept, interpreter.kept_tensors))
        return same and all(tensor.data_ptr() == at for tensor, at in zip(self._kept, self._addresses, strict=True))

    def run(self) -> Tensor | None:
        """Launch the pieces; a copy of the loss, for the next replay writes over it."""
        for launch in self._pieces:
            launch()
        return None if self._loss is None else self._loss.clone()

    def release(self) -> None:
        """Free the recordings."""
        for recording in self.recordings:
            recording.release()


def stretches(count: int, by_host: Iterable[int]) -> list[slice]:
    """The ranges of positions between those that the host issues; the last may be empty.

    >>> stretches(6, [2, 3])
    [slice(0, 2, None), slice(3, 3, None), slice(4, 6, None)]
    """
    ends = sorted(by_host)
    return [slice(first, last) for first, last in zip([0, *(end + 1 for end in ends)], [*ends, count], strict=True)]


def finish_before(interpreter: Interpreter, position: int) -> None:
    """Make the current stream wait for all communication issued before a position of the step.

    Raises:
        TwofoldError: a transfer is under way, which may wait for what its other end does later.
    """
    for code in interpreter.codes[:position]:
        work = None if code.token is None or code.instruction.kind is Kind.WAIT else interpreter.env[code.token]
        if not isinstance(work, Work) or work.is_finished:
            continue
        if code.instruction.kind is not Kind.COLLECTIVE:
            raise TwofoldError(f"the transfer {code.id} is under way between two recordings")
        work.finish()


def issued_by_host(interpreter: Interpreter, code: Code) -> Callable[[], None]:
    """Put the results of an instruction between two recordings into its slots; returns what runs it in every replay.

    Raises:
        TwofoldError: it is no COMPUTE or COLLECTIVE, or its result shares memory with an operand.
    """
    env, where = interpreter.env, interpreter.device.torch_device
    if code.instruction.kind not in (Kind.COMPUTE, Kind.COLLECTIVE):
        raise TwofoldError(f"{code.id} cannot run between two recordings, it is a {code.instruction.kind}")
    given = {slot: env[slot] for slot in (*code.reads, *code.writes) if env[slot] is not None}
    homes: dict[int, Tensor] = {}
    for slot in code.writes:
        value = interpreter.declared(slot)
        if value.shares is not None:
            raise TwofoldError(f"{code.id} cannot run between two recordings, {value.name} shares {value.shares}")
        if slot in given:
            homes[slot] = given[slot]
        else:
            homes[slot] = torch.empty(value.shape, dtype=torch_dtype(value.dtype), device=where)
    passing = [slot for slot in given | homes if slot >= len(interpreter.kept_tensors)]

    def run() -> None:
        for slot, tensor in given.items():
            env[slot] = tensor
        code.run()
        if code.token is not None:
            for slot, made in zip(code.writes, env[code.token].finish(), strict=True):
                env[slot] = made
            env[code.token] = None
        for slot, home in homes.items():
            if env[slot] is not home:
                home.copy_(env[slot])
                env[slot] = home
        for slot in passing:
            env[slot] = None

    made = tuple(homes[slot] for slot in code.writes)
    if code.token is None:
        for slot, home in zip(code.writes, made, strict=True):
            env[slot] = home
    else:
        env[code.token] = Work((), lambda: made)
    for slot in code.frees:
        env[slot] = None
    return run
