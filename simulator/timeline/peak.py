"""The composition of a rank's memory peak: every value, and the instruction that wrote it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.program import Program, Scope
from plans.timeline import Timeline
from simulator.timeline.memory import Changes, times_of_instructions

__all__ = ["LiveValue", "Peak", "memory_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValue:
    """A value that is alive.

    Args:
        name: name of the value.
        role: weight, gradient, optimizer, activation, input or buffer.
        size_bytes: of its own memory.
        made_by: id of the instruction that allocated the memory, "" for values kept between steps.
    """

    name: str
    role: str
    size_bytes: int
    made_by: str = ""

    @property
    def action(self) -> str:
        """The action that wrote it, such as "0F3", "begin" or "end"; "" for values kept between steps."""
        return self.made_by.partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The values of a rank at its peak, the largest first.

    Args:
        rank: the rank.
        time_ps: when, the first of equal ones, from the step's start on.
        values: the live values at that time, without the buffers of communication.
    """

    rank: int
    time_ps: int
    values: tuple[LiveValue, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all values."""
        return sum(value.size_bytes for value in self.values)

    @property
    def by_role(self) -> dict[str, int]:
        """Role -> bytes, sorted by role."""
        return self._sums(lambda each: each.role)

    @property
    def by_action(self) -> dict[str, int]:
        """Action -> bytes of its live values, the largest first; "" for values kept between steps."""
        return dict(sorted(self._sums(lambda each: each.action).items(), key=lambda item: (-item[1], item[0])))

    def _sums(self, key: Callable[[LiveValue], str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for value in self.values:
            found[key(value)] = found.get(key(value), 0) + value.size_bytes
        return dict(sorted(found.items()))


def memory_peak(program: Program, timeline: Timeline, rank: int) -> Peak:
    """The live values on a rank of a timeline of `program` at their peak, in the last step.

    Raises:
        TwofoldError: a rank outside the program.

    >>> from costmodels.price.instruction import Cost
    >>> from plans.layout import Layout
    >>> from plans.program import Block, Body, GroupProgram, Instruction, Kind, Value
    >>> from simulator import run_program
    >>> line = Instruction(name="fc", kind=Kind.COMPUTE, call="linear.forward", part="F", outputs=("y",))
    >>> blocks = tuple(Block(label=f"0F{n}", micro_batch=n, body=Body(name="0F", instructions=(line,))) for n in (0, 1))
    >>> group = GroupProgram(mesh=Layout((1,), ("dp",)), values={"y": Value(name="y", shape=(2,))}, blocks=blocks)
    >>> program = Program(groups=(group,), num_micro_batches=2)
    >>> peak = memory_peak(program, run_program(program, lambda *_: Cost(dispatch_ps=0, work_ps=5)), 0)
    >>> peak.time_ps, peak.by_action
    (5, {'0F0': 8, '0F1': 8})
    """
    for group, of_ranks in times_of_instructions(program, timeline):
        if rank not in group.ranks:
            continue
        changes = Changes(group)
        start, end = next(times for other, times in of_ranks if other == rank)
        times, sequence = changes.in_time(start, end)
        live = np.cumsum(changes.size[sequence])
        kept = [value for value in group.values.values() if value.scope is Scope.KEPT and value.size_bytes]
        found = [LiveValue(name=value.name, role=value.role, size_bytes=value.size_bytes) for value in kept]
        time_ps = 0
        if len(live) and live.max() > 0:
            until = sequence[: int(np.argmax(live)) + 1]
            time_ps = int(times[until[-1]]) - timeline.step_start_ps[-1]
            ids = [f"{block.label}/{instruction.name}" for block, instruction in group.walk()]
            found += _alive(changes, until, ids)
        found.sort(key=lambda each: (-each.size_bytes, each.made_by, each.name))
        return Peak(rank=rank, time_ps=time_ps, values=tuple(found))
    raise TwofoldError(f"the memory of rank {rank}: the program's ranks are 0 to {program.num_ranks - 1}")


def _alive(changes: Changes, until: npt.NDArray[np.int64], ids: list[str]) -> list[LiveValue]:
    """Memory that was allocated and not released."""
    alive: dict[tuple[int, int], LiveValue] = {}
    for at in until:
        key = (int(changes.value[at]), int(changes.micro_batch[at]))
        if changes.is_release[at]:
            del alive[key]
        else:
            alive[key] = LiveValue(
                name=changes.names[key[0]], role=changes.roles[changes.role[at]], size_bytes=int(changes.size[at]),
                made_by=ids[changes.position[at]],
            )  # fmt: skip
    return list(alive.values())
