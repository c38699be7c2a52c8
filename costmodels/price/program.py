"""A program on a machine: the price of each of its instructions, computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from costmodels.machine.machine import Machine
from costmodels.price.instruction import Cost, price
from plans.program import GroupProgram, Instruction, Program

__all__ = ["ProgramPrices"]


class ProgramPrices:
    """The prices of a program's instructions on a machine; call it as `price(instruction, group)`.

    Args:
        program: whose instructions these are.
        machine: it runs on.

    >>> from plans.layout import Layout
    >>> from plans.program import Block, Body, Kind
    >>> line = Instruction(name="sum", kind=Kind.COLLECTIVE, call="all_reduce", part="C", axes=("dp",))
    >>> body = Body(name="0B", instructions=(line,))
    >>> blocks = tuple(Block(label=f"0B{number}", micro_batch=number, body=body) for number in (0, 1))
    >>> group = GroupProgram(mesh=Layout((4,), ("dp",)), values={}, blocks=blocks)
    >>> prices = ProgramPrices(Program(groups=(group,), num_micro_batches=2), Machine.load("h200-x4"))
    >>> [(cost == prices(line, group), count) for _, cost, count in prices.of(group)]
    [(True, 2)]
    """

    def __init__(self, program: Program, machine: Machine) -> None:
        self.program = program
        self.machine = machine
        self._known: dict[tuple[int, int], tuple[Cost, Instruction, GroupProgram]] = {}

    def __call__(self, instruction: Instruction, group: GroupProgram) -> Cost:
        """The price of an instruction of a group."""
        key = id(instruction), id(group)
        known = self._known.get(key)
        if known is None:  # what is kept has its id to itself
            cost = price(instruction, group, self.machine, self.program.num_ranks)
            known = self._known[key] = cost, instruction, group
        return known[0]

    def bodies(self, group: GroupProgram) -> Iterator[tuple[list[tuple[Instruction, Cost]], int]]:
        """The instructions of each body of a group with their prices, and how often the body runs in a step."""
        bodies = {id(block.body): block.body for block in group.blocks}
        for number, count in Counter(id(block.body) for block in group.blocks).items():
            yield [(line, self(line, group)) for line in bodies[number].instructions], count

    def of(self, group: GroupProgram) -> Iterator[tuple[Instruction, Cost, int]]:
        """The instructions of a group's bodies, their prices, and how often each runs in a step."""
        for lines, count in self.bodies(group):
            for instruction, cost in lines:
                yield instruction, cost, count
