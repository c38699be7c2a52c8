"""The position of a rank in its program, in a file that other processes read while the rank hangs.

`heartbeat` in the rank's folder is memory shared with the rank: three integers of 8 bytes for position, step and
activity. `heartbeat.json` describes each position and the rank's partners there. The launcher reads both
(`executor.launch.stalls`). Nothing is written to disk while the rank trains.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from executor.step.interpreter import Interpreter
from plans.files import write_atomically
from plans.plan import Prediction
from plans.program import Instruction, Kind

__all__ = ["Heartbeat", "beating", "meetings"]

_FOLDER = "TWOFOLD_RANK_FOLDER"
_OUTSIDE, _READS, _TRAINS = 0, 1, 2


class Heartbeat:
    """The state of the training loop.

    Args:
        numbers: position, step and activity.
    """

    def __init__(self, numbers: memoryview) -> None:
        self._numbers = numbers

    def reads(self, step: int) -> None:
        """The rank gets the data of a step, counted from 0."""
        self._numbers[1], self._numbers[2] = step + 1, _READS

    def trains(self) -> None:
        """The rank runs the step that it got data for."""
        self._numbers[2] = _TRAINS

    def ends(self) -> None:
        """The rank does something else than steps, for as long as it likes."""
        self._numbers[2] = _OUTSIDE


@contextmanager
def beating(interpreter: Interpreter, prediction: Prediction | None, *, watched: bool = True) -> Iterator[Heartbeat]:
    """The heartbeat of a rank's steps; kept to itself where no launcher made a folder for the rank.

    Args:
        interpreter: of the rank, which then notes its position.
        prediction: of the step, for how long a rank may stand still.
        watched: whether others may see it; emulated instructions last as long as their machine says.
    """
    folder = os.environ.get(_FOLDER)
    if folder is None or not watched:
        yield Heartbeat(memoryview(bytearray(24)).cast("q"))
        return
    says = {"step_s": None if prediction is None else prediction.step_s, "instructions": meetings(interpreter)}
    path = Path(folder) / "heartbeat"
    path.write_bytes(bytes(24))
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 24)  # lives as long as the views of it
    numbers = memoryview(shared).cast("q")
    write_atomically(path.with_suffix(".json"), json.dumps(says).encode())
    interpreter.place = numbers[:1]
    heartbeat = Heartbeat(numbers)
    try:
        yield heartbeat
    finally:
        heartbeat.ends()


def meetings(interpreter: Interpreter) -> list[tuple[str, str, tuple[int, ...]]]:
    """Id, call and the other ranks that must take part, of every instruction of the rank."""
    issued: dict[Any, tuple[int, ...]] = {}
    found = []
    for code in interpreter.codes:
        instruction = code.instruction
        peers = issued.get(code.token, ()) if instruction.kind is Kind.WAIT else _peers(interpreter, instruction)
        if code.token is not None:
            issued[code.token] = peers
        found.append((code.id, instruction.call, peers))
    return found


def _peers(interpreter: Interpreter, instruction: Instruction) -> tuple[int, ...]:
    rank, kind = interpreter.rank, instruction.kind
    if kind is Kind.COLLECTIVE:
        return tuple(member for member in interpreter.group.members(instruction, rank) if member != rank)
    if kind not in (Kind.SEND, Kind.RECV):
        return ()
    return tuple(sorted({*instruction.pieces.partners(rank, sends=kind is Kind.SEND)} - {rank}))
