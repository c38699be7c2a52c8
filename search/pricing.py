"""What one instruction costs the search: seconds when every rank is busy."""

from __future__ import annotations

from costmodels import Machine, price
from plans.layout import Layout
from plans.program import GroupProgram, Instruction
from plans.timeline import PS_PER_S
from search.additive import InstructionCost

__all__ = ["instruction_cost", "ranks_per_core"]


def instruction_cost(machine: Machine, mesh: Layout, num_ranks: int) -> InstructionCost:
    """The price of an instruction of a group on `mesh`, one of `num_ranks` ranks.

    Host time is added where the host itself computes, and cores that ranks share are taken as shared by all of them.
    """
    group = GroupProgram(mesh=mesh, values={}, blocks=())
    shared = ranks_per_core(machine, num_ranks)

    def seconds(instruction: Instruction) -> float:
        cost = price(instruction, group, machine, num_ranks)
        if machine.host_async:
            return max(cost.dispatch_ps, cost.work_ps) / PS_PER_S
        busy, rest = cost.dispatch_ps + cost.cpu_ps, 0
        if instruction.axes:
            rest = cost.work_ps
        else:
            busy += cost.work_ps
        return (busy * shared + rest) / PS_PER_S

    return seconds


def ranks_per_core(machine: Machine, num_ranks: int) -> float:
    """How many ranks share a core of a node when all are busy; 1 where every rank has its own device."""
    if machine.cores_per_node is None:
        return 1.0
    return max(1.0, min(num_ranks, machine.devices_per_node) / machine.cores_per_node)
