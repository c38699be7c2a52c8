"""Slices of a micro-batch: one body is replaced by n copies whose instructions are interleaved.

A chunk is lowered once, for one slice. Its bodies are then copied for every slice (values and instructions of slice i
are called "name[i]") and merged. In the **interleaved** order, a slice runs until it would wait for communication, then
the next slice continues. The communication of one slice thus overlaps with the compute of the others, in the forward
and in the backward. In the **sequential** order one slice follows the other. Interleaved slices alternate between two
compute streams, so that no slice waits for the communication of another on a device.

Work that does not depend on a slice is done once: slice 0, which always runs first, redistributes weights, and the last
slice reduces gradients after all have been accumulated. On a channel the slices communicate in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plans.lower.emit import ValueTable
from plans.program import Instruction, Kind, Scope, Value

__all__ = ["Slices"]

_STREAMS = 2


@dataclass(slots=True)
class Slices:
    """Writes bodies out for `count` slices; the values of the slices are entered into `table`."""

    count: int
    table: ValueTable
    interleaved: bool = True
    shared: set[str] = field(default_factory=set)
    replaced: set[str] = field(default_factory=set)

    def values(self) -> Mapping[str, Value]:
        """The values of the table that instructions may name: those of slices, not the original ones."""
        return {name: value for name, value in self.table.values.items() if name not in self.replaced}

    def spread(self, bodies: Sequence[Sequence[Instruction]]) -> list[list[Instruction]]:
        """Bodies that follow each other for one micro-batch, each for all slices."""
        if self.count == 1:
            return [list(body) for body in bodies]
        return [self._spread(body) for body in bodies]

    def _spread(self, body: Sequence[Instruction]) -> list[Instruction]:
        single = {instruction.name: self._is_single(instruction, body) for instruction in body}
        turns = _turns(body) if self.interleaved else [body]
        merged = []
        for turn in turns:
            for number in range(self.count):
                for instruction in turn:
                    once = single[instruction.name]
                    if once is None:
                        merged.append(self._of_slice(instruction, number))
                    elif once == number:
                        merged.append(instruction)
        return merged

    def _is_single(self, instruction: Instruction, body: Sequence[Instruction]) -> int | None:
        """The slice that executes an instruction for all slices: the first computes values that depend on weights only,
        the last issues reductions."""
        if instruction.kind is Kind.WAIT:
            if self._outlives(str(instruction.waits)):
                return self.count - 1
            return 0 if instruction.waits in self.shared else None
        if instruction.kind is Kind.SEND and ":within" not in instruction.channel:
            return None  # the stage that receives does not know that all slices would get the same
        reads = instruction.inputs
        if instruction.kind is Kind.RECV:  # of a transfer inside the stage: its SEND reads
            own = [each for each in body if each.kind is Kind.SEND and each.name == instruction.name]
            reads = own[0].inputs if own else ()
        if not reads or not all(name in self.shared or self._outlives(name) for name in reads):
            return None
        if all(self._outlives(name) for name in instruction.outputs) and instruction.kind is not Kind.SEND:
            return self.count - 1
        made = (*instruction.outputs, *([instruction.token] if instruction.token else []))
        self.shared.update(name for name in made if not self._outlives(name))
        return 0

    def _outlives(self, name: str) -> bool:
        return self.table[name].scope is not Scope.MICRO

    def _of_slice(self, instruction: Instruction, number: int) -> Instruction:
        attrs = dict(instruction.attrs)
        if instruction.call == "load" or "seed" in attrs:  # the slice decides their rows and random numbers
            attrs["slice"] = (number, self.count)
        if "transfer" in attrs:
            attrs["transfer"] = f"{attrs['transfer']}[{number}]"
        return replace(
            instruction,
            name=f"{instruction.name}[{number}]",
            inputs=tuple(self._named(name, number) for name in instruction.inputs),
            outputs=tuple(self._named(name, number) for name in instruction.outputs),
            token=None if instruction.token is None else self._named(instruction.token, number),
            waits=None if instruction.waits is None else self._named(instruction.waits, number),
            attrs=attrs,
            stream=number % _STREAMS if self.interleaved else 0,
        )

    def _named(self, name: str, number: int) -> str:
        """The value that stands for `name` in a slice."""
        if name in self.shared or self._outlives(name):
            return name
        value = self.table[name]
        self.replaced.add(name)
        shares = None if value.shares is None else self._named(value.shares, number)
        return self.table.add(replace(value, name=f"{name}[{number}]", shares=shares))


def _turns(body: Sequence[Instruction]) -> list[list[Instruction]]:
    """Cut before every wait that does not follow another one."""
    turns: list[list[Instruction]] = [[]]
    for before, instruction in zip((None, *body), body, strict=False):
        if instruction.kind is Kind.WAIT and before is not None and before.kind is not Kind.WAIT:
            turns.append([])
        turns[-1].append(instruction)
    return turns
