"""The parts of weights and optimizer states that ranks keep between steps, and which ranks keep equal parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from executor.step.interpreter import Interpreter
from plans.layout import Region, TensorLayout
from plans.program import GroupProgram, ParameterPlacement, Program

__all__ = ["STEP_CHECK", "WEIGHT", "Part", "Place", "common_region", "holders", "kept", "part_of", "within"]

Place = tuple[str, Region, int]
"""Parameter, region and number of a part."""

WEIGHT = "weight"

STEP_CHECK = "step_check"
"""The role of the state of a step check, of which every rank has a full copy."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a full tensor: elements [number size, (number + 1) size) of a region, flattened and padded.

    Args:
        name: name of the parameter.
        role: "weight" (the master, where there is one), "state0", "state1", "step_check".
        region: of the full tensor.
        number: number of the part.
        size: elements of it.
    """

    name: str
    role: str
    region: Region
    number: int
    size: int

    @property
    def place(self) -> Place:
        """The common part of all roles."""
        return self.name, self.region, self.number

    @property
    def key(self) -> str:
        """The part as a text, which `of_key` reads."""
        box = ",".join(f"{first}-{last}" for first, last in self.region)
        return f"{self.name}|{self.role}|{box}|{self.number}|{self.size}"

    @classmethod
    def of_key(cls, key: str) -> Part:
        """The part that has this key."""
        name, role, box, number, size = key.rsplit("|", 4)
        region = tuple((int(first), int(last)) for first, last in (ends.split("-") for ends in box.split(",") if ends))
        return cls(name, role, region, int(number), int(size))


def kept(interpreter: Interpreter) -> Iterator[tuple[ParameterPlacement, Part, str]]:
    """Placement, part and value of every tensor that a rank keeps and steps change."""
    for placement in interpreter.group.changed:
        roles = {WEIGHT: placement.kept} | {f"state{at}": name for at, name in enumerate(placement.states)}
        for role, value in roles.items():
            yield placement, part_of(interpreter.group, placement, interpreter.rank, role, value), value
    for placement in _of_step_check(interpreter.group):
        value = placement.weight
        yield placement, part_of(interpreter.group, placement, interpreter.rank, STEP_CHECK, value), value


def _of_step_check(group: GroupProgram) -> Iterator[ParameterPlacement]:
    """The state of a step check, in the form of a parameter that no model has."""
    check = group.step_check
    for value in () if check is None else (check.held, check.norms):
        if value is not None:
            of = group.values[value]
            layout = TensorLayout(mesh=group.mesh, dims=((),))
            yield ParameterPlacement(name=f"#{value}", shape=of.shape, dtype=of.dtype, layout=layout, weight=value)


def part_of(group: GroupProgram, placement: ParameterPlacement, rank: int, role: str, value: str) -> Part:
    """The part of a tensor that a rank keeps in a value of its program."""
    return Part(placement.name, role, *_place(placement, rank)[1:], math.prod(group.values[value].shape))


def holders(program: Program) -> Mapping[Place, tuple[int, ...]]:
    """The ranks that keep each part, in order."""
    found: dict[Place, set[int]] = defaultdict(set)
    for group in program.groups:
        for placement in (*group.changed, *_of_step_check(group)):
            for rank in placement.layout.mesh.rank_list:
                found[_place(placement, rank)].add(rank)
    return {place: tuple(sorted(ranks)) for place, ranks in found.items()}


def common_region(left: Region, right: Region) -> Region | None:
    """The intersection of two regions; None if it is empty.

    >>> common_region(((0, 4), (0, 2)), ((2, 6), (0, 2)))
    ((2, 4), (0, 2))
    """
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(left, right, strict=True))
    return found if all(first < last for first, last in found) else None


def within(region: Region, outer: Region) -> tuple[slice, ...]:
    """The index of a region in a tensor that holds `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(region, outer, strict=True))


def _place(placement: ParameterPlacement, rank: int) -> Place:
    layout = placement.layout
    return placement.name, layout.region(rank, placement.shape), layout.mesh.index(rank, placement.shard_axes)
