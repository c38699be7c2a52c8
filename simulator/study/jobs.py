"""Several jobs on one machine at the same time: each runs its own program on its own ranks, and links are shared.

The programs are combined into one, with every job's ranks moved to its devices, and simulated. Jobs share only links
and processors, so a job whose links no other job uses takes exactly as long as alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodels.machine.machine import Machine
from costmodels.price.program import ProgramPrices
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.program import Block, Body, GroupProgram, Instruction, Program
from plans.redistribution import TransferPieces
from plans.timeline import STREAMS, Timeline
from simulator.predict import finished, simulate
from simulator.study.whatif import WhatIf
from simulator.timeline.memory import memory_timeline

__all__ = ["Job", "simulate_jobs"]

_NOTHING = WhatIf()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program and the devices on which it runs.

    Args:
        program: of ranks 0 to n - 1.
        ranks: for each of them the device of the machine.

    Raises:
        TwofoldError: not one device for every rank, or one device for two.
    """

    program: Program
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ranks) != self.program.num_ranks or len(set(self.ranks)) != len(self.ranks):
            raise TwofoldError(
                f"a job of {self.program.num_ranks} ranks needs as many distinct devices, not {self.ranks}"
            )


def simulate_jobs(
    jobs: Sequence[Job], machine: Machine, *, num_steps: int = 3, what_if: WhatIf = _NOTHING
) -> tuple[Timeline, ...]:
    """Simulate all jobs at the same time from one start on, `num_steps` steps each.

    A job that is done leaves the others alone, so the first steps are the most informative for jobs of unequal length.

    Args:
        jobs: with no device in common; devices without a job stand idle.
        machine: they run on.
        num_steps: number of steps of every job.
        what_if: changes; its ranks are devices of the machine.

    Returns:
        a timeline for every job, under the ranks of its own program.

    Raises:
        TwofoldError: no jobs, a device of two jobs or outside the machine, and what `simulate` refuses.

    >>> from plans.program import Kind
    >>> line = Instruction(name="a", kind=Kind.COMPUTE, call="relu.forward", part="F")
    >>> block = Block(label="0F0", micro_batch=0, body=Body(name="0F", instructions=(line,)))
    >>> group = GroupProgram(mesh=Layout((1,), ("dp",)), values={}, blocks=(block,))
    >>> alone, machine = Program(groups=(group,), num_micro_batches=1), Machine.load("h200-x4")
    >>> both = simulate_jobs([Job(program=alone, ranks=(0,)), Job(program=alone, ranks=(3,))], machine)
    >>> [each.num_ranks for each in both], both[0].step_s == simulate(alone, machine).step_s
    ([1, 1], True)
    """
    if not jobs:
        raise TwofoldError("no jobs to simulate")
    owner: dict[int, int] = {}
    for number, job in enumerate(jobs):
        for rank in job.ranks:
            if not 0 <= rank < machine.num_devices:
                raise TwofoldError(
                    f"job {number} has device {rank}; machine {machine.name!r} has the devices 0 to "
                    f"{machine.num_devices - 1}"
                )
            if owner.setdefault(rank, number) != number:
                raise TwofoldError(
                    f"device {rank} belongs to job {owner[rank]} and to job {number}; give each job devices of its own"
                )
    groups = [group for job in jobs for group in _moved(job)]
    idle = sorted(set(range(max(owner) + 1)) - set(owner))
    groups += [GroupProgram(mesh=Layout((1,), ("idle",), (rank,)), values={}, blocks=()) for rank in idle]
    micro_batches = max(job.program.num_micro_batches for job in jobs)
    together = simulate(
        Program(groups=tuple(groups), num_micro_batches=micro_batches), machine, num_steps=num_steps, what_if=what_if,
        with_memory=False,
    )  # fmt: skip
    changed = what_if.machine(machine)
    result = []
    for job in jobs:
        own = _own(together, job)
        peaks, curve = memory_timeline(job.program, own)
        prices = ProgramPrices(job.program, changed)
        result.append(finished(replace(own, memory=peaks, memory_curve=curve), prices, what_if))
    return tuple(result)


def _moved(job: Job) -> list[GroupProgram]:
    """The job's groups on its devices."""
    layouts: dict[Layout, Layout] = {}
    bodies: dict[int, Body] = {}

    def layout(before: Layout) -> Layout:
        if before not in layouts:
            ranks = [job.ranks[rank] for rank in before.rank_list]
            layouts[before] = Layout(before.device_matrix, before.alias_name, ranks)
        return layouts[before]

    def instruction(line: Instruction) -> Instruction:
        pieces = TransferPieces(
            replace(piece, src_rank=job.ranks[piece.src_rank], dst_rank=job.ranks[piece.dst_rank])
            for piece in line.pieces
        )
        return replace(line, mesh=None if line.mesh is None else layout(line.mesh), pieces=pieces)

    def body(before: Body) -> Body:
        if id(before) not in bodies:
            bodies[id(before)] = replace(before, instructions=tuple(map(instruction, before.instructions)))
        return bodies[id(before)]

    def block(before: Block) -> Block:
        return replace(before, body=body(before.body))

    return [
        replace(group, mesh=layout(group.mesh), blocks=tuple(map(block, group.blocks))) for group in job.program.groups
    ]


def _own(together: Timeline, job: Job) -> Timeline:
    """One job's spans, under the ranks of its program; its steps begin and end with them."""
    number = np.full(together.num_ranks, -1, dtype=np.int32)
    number[list(job.ranks)] = np.arange(len(job.ranks), dtype=np.int32)
    rows = np.flatnonzero(number[together.rank] >= 0)
    rank = number[together.rank[rows]]
    order = np.lexsort((np.arange(len(rows)), rank))  # by rank, as the engine has it
    rows, rank = rows[order], rank[order]
    step, stream = together.step[rows], together.stream[rows]
    start, end = together.start_ps[rows], together.end_ps[rows]
    works = stream != STREAMS.index("host")
    works = works if np.any(works) else ~works
    starts, ends = [], []
    for number_of_step in range(together.num_steps):
        of_step = step == number_of_step
        starts.append(int(start[of_step & works].min(initial=2**62)))
        ends.append(int(end[of_step].max(initial=0)))
    return Timeline(
        kind=together.kind, num_ranks=len(job.ranks), names=together.names, rank=rank, stream=stream, step=step,
        name_index=together.name_index[rows], start_ps=start, end_ps=end,
        step_start_ps=tuple(map(min, starts, ends)), step_end_ps=tuple(ends), meta=together.meta,
        program=job.program,
    )  # fmt: skip
