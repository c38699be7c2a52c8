"""An instruction that is ready to run on a rank, and the times at which the instructions of a step ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from executor.step.comm import Launch
from plans.program import Instruction

__all__ = ["Code", "RecordedStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """One instruction, resolved for one rank.

    Args:
        id: as in `Program`.
        instruction: where it comes from.
        run: does it: reads and writes slots, launches and waits.
        reads, writes, frees: slots. A WAIT writes the communication's result.
        token: the slot of the token that it makes or waits for, or None.
        launch: for communication: starts it, given the tensors of `reads`.
    """

    id: str
    instruction: Instruction
    run: Callable[[], None]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]
    token: int | None = None
    launch: Launch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """Start and end of each instruction of one step, in program order.

    `host_ns` holds pairs on the host's clock. `device_ns` holds pairs on the compute stream, moved to the host's clock;
    None on a CPU, where the host does the work. `comm_ns` holds (id, start, end) of communication where it is known
    better than "from its issue to its wait" (emulation).
    """

    start_ns: int
    end_ns: int
    host_ns: Sequence[tuple[int, int]]
    device_ns: Sequence[tuple[int, int]] | None = None
    comm_ns: Sequence[tuple[str, int, int]] | None = None
