"""All-reduces that write into the memory of their input.

If nothing reads a partial result after its all-reduce, no second tensor is needed: the output then shares the memory of
the input (`Value.shares`), which simulator, executor and memory timeline all follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from plans.lower.emit import ValueTable
from plans.program import Instruction, Kind, Scope

__all__ = ["sum_in_place"]


def sum_in_place(variants: Sequence[Sequence[Sequence[Instruction]]], table: ValueTable) -> None:
    """Let all-reduces write into the memory of their input where no later instruction needs the input.

    The input, or another value in the same memory, must have been made here by a computation, and all that reads it
    must be computations before: data that a communication sends must not change until it is over.

    Args:
        variants: the bodies that follow each other for one micro-batch, for every kind of backward; an all-reduce that
            is in several is made in place if that is free in all.
        table: of the values, in which those outputs are entered again.
    """
    free: dict[str, str] = {}
    kept: set[str] = set()
    for bodies in variants:
        flat = [instruction for body in bodies for instruction in body]
        reads: dict[str, list[int]] = defaultdict(list)
        computed: set[str] = set()
        for position, instruction in enumerate(flat):
            for name in instruction.inputs if instruction.kind is not Kind.WAIT else ():
                reads[_base(name, table)].append(position)
            if instruction.kind is Kind.COMPUTE:
                computed.update(name for name in instruction.outputs if table[name].scope is Scope.MICRO)
        for position, instruction in enumerate(flat):
            if instruction.call != "all_reduce" or instruction.inputs == instruction.outputs:
                continue
            (given,), (made,) = instruction.inputs, instruction.outputs
            *before, last = reads[base := _base(given, table)]
            by_compute = base in computed and all(flat[at].kind is Kind.COMPUTE for at in before)
            if last == position and by_compute and table[made].scope is Scope.MICRO:
                free[made] = given
            else:
                kept.add(made)
    for made, given in free.items():
        if made not in kept:
            table.values[made] = replace(table[made], shares=given)


def _base(name: str, table: ValueTable) -> str:
    """The value that owns the memory of a value."""
    while (shared := table[name].shares) is not None:
        name = shared
    return name
