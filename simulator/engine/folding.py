"""Ranks that do the same thing at the same time are simulated once: a program of one rank for each kind of rank.

Two ranks of a group are equal if, in every collective, they meet equal ranks and, in every transfer, they have partners
that are equal. The coarsest such division is found by refinement: it begins with the groups, and a set of ranks is
split as long as its members differ in what they meet (Paige and Tarjan, "Three partition refinement algorithms", SIAM
Journal on Computing 16, 1987, is the fast form). Equal ranks then have equal times by induction over events, so one of
each stands for all. Nothing of the cost depends on how many there are but finding out who meets whom.

It holds while nothing makes equal ranks unequal: shared cores, shared links and ranks with times of their own do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from plans.layout import Layout
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program
from plans.redistribution import Piece
from plans.timeline import Timeline
from simulator.engine.prices import CostOf, Priced

__all__ = ["Folded", "fold"]

_Partners = Mapping[int, tuple[int, ...]]
"""rank -> the ranks at the other end of a transfer, each once."""


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A program of representatives.

    Args:
        program: rank r of it is the rank `ranks[r]` of the whole program.
        ranks: ascending.
        counts: how many ranks each stands for.
        is_simple: whether no rank has two equal partners in one transfer; if some have, transfers are joined, which
            changes what shares a device or a processor with others.
    """

    program: Program
    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    is_simple: bool
    _originals: Mapping[int, Instruction]
    _groups: Mapping[int, GroupProgram]

    def is_exact(self, whole: CostOf, *, shares_devices: bool) -> bool:
        """Whether this program takes the same times: joined transfers must share neither devices nor processors."""
        return self.is_simple or not (
            shares_devices
            or any(
                self.cost_of(whole)(line, group).cpu_ps
                for group in self.program.groups
                for line in _communication(group)
                if line.kind is not Kind.COLLECTIVE
            )
        )

    def cost_of(self, whole: CostOf) -> CostOf:
        """The prices of the whole program for this one."""

        def cost_of(instruction: Instruction, group: GroupProgram) -> Priced:
            return whole(self._originals.get(id(instruction), instruction), self._groups[id(group)])

        return cost_of

    def named(self, timeline: Timeline, num_ranks: int) -> Timeline:
        """The timeline of `program` under the ranks' own numbers; `Timeline.represents` says what each stands for."""
        ranks = np.array(self.ranks, dtype=timeline.rank.dtype)
        return replace(
            timeline,
            num_ranks=num_ranks,
            rank=ranks[timeline.rank],
            memory=tuple(replace(each, rank=self.ranks[each.rank]) for each in timeline.memory),
            memory_curve={self.ranks[rank]: curve for rank, curve in timeline.memory_curve.items()},
            meta={**timeline.meta, "represents": dict(zip(self.ranks, self.counts, strict=True))},
        )


def fold(program: Program) -> Folded | None:
    """The program of representatives; None where ranks meet in ways that do not fold (equal ranks that send each other
    something, a channel whose transfers join different pairs)."""
    transfers = [_Transfers(group) for group in program.groups]
    if not all(each.is_regular for each in transfers):
        return None
    class_of, kinds = _classes(program, transfers)
    first: dict[int, int] = {}
    counts: dict[int, int] = {}
    for rank in sorted(class_of):
        first.setdefault(class_of[rank], rank)
        counts[class_of[rank]] = counts.get(class_of[rank], 0) + 1
    number_of = {kind: number for number, kind in enumerate(first)}  # ascending by representative
    ranks = tuple(first.values())
    if any(
        other != rank and class_of[other] == class_of[rank]
        for each in transfers
        for partners in each.partners.values()
        for rank in ranks
        for other in partners.get(rank, ())
    ):
        return None
    writer = _Writer(class_of, number_of)
    groups = [
        writer.group(program.groups[kinds[kind]], transfers[kinds[kind]], rank, number)
        for number, (kind, rank) in enumerate(first.items())
    ]
    return Folded(
        program=replace(program, groups=tuple(groups)),
        ranks=ranks,
        counts=tuple(counts[kind] for kind in first),
        is_simple=writer.is_simple,
        _originals=writer.originals,
        _groups={
            id(group): program.groups[kinds[kind]] for group, kind in zip(groups, first, strict=True)
        },
    )  # fmt: skip


def _communication(group: GroupProgram) -> Iterable[Instruction]:
    """Every communication of a group's bodies, once."""
    bodies = {id(block.body): block.body for block in group.blocks}
    for body in bodies.values():
        for instruction in body.instructions:
            if instruction.kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV):
                yield instruction


class _Transfers:
    """Who is at the other end of a group's transfers.

    Attributes:
        partners: by `id` of the instruction.
        is_regular: whether the transfers of a channel and direction all join the same pairs: then the k-th of one kind
            of rank is the k-th of each of these ranks.
    """

    def __init__(self, group: GroupProgram) -> None:
        self.partners: dict[int, _Partners] = {}
        self.is_regular = True
        of_channel: dict[tuple[str, Kind], _Partners] = {}
        for instruction in _communication(group):
            if instruction.kind is Kind.COLLECTIVE:
                continue
            ends: dict[int, dict[int, None]] = {}
            for piece in instruction.pieces:
                own, other = piece.src_rank, piece.dst_rank
                if instruction.kind is Kind.RECV:
                    own, other = other, own
                ends.setdefault(own, {})[other] = None
            found = {rank: tuple(others) for rank, others in ends.items()}
            known = of_channel.setdefault((instruction.channel, instruction.kind), found)
            self.is_regular &= known == found
            self.partners[id(instruction)] = known


def _classes(program: Program, transfers: list[_Transfers]) -> tuple[dict[int, int], list[int]]:
    """rank -> number of its kind, and the group of each kind."""
    class_of = {rank: number for number, group in enumerate(program.groups) for rank in group.ranks}
    kinds = list(range(len(program.groups)))
    while True:
        numbers: dict[tuple[object, ...], int] = {}
        refined: dict[int, int] = {}
        split_of: list[int] = []
        for position, group in enumerate(program.groups):
            signs = list(_signs(group, transfers[position], class_of))
            for rank in group.ranks:
                key = (class_of[rank], *(sign(rank) for sign in signs))
                if key not in numbers:
                    numbers[key] = len(numbers)
                    split_of.append(position)
                refined[rank] = numbers[key]
        if len(numbers) == len(kinds):
            return refined, split_of
        class_of, kinds = refined, split_of


def _signs(
    group: GroupProgram, transfers: _Transfers, class_of: Mapping[int, int]
) -> Iterable[Callable[[int], tuple[object, ...]]]:
    """What tells ranks of a group apart: for each communication whom they meet there."""
    kinds_in: dict[int, int] = {}
    seen: set[tuple[object, ...]] = set()
    for instruction in _communication(group):
        if instruction.kind is not Kind.COLLECTIVE:
            partners = transfers.partners[id(instruction)]
            if (id(partners),) not in seen:
                seen.add((id(partners),))
                yield lambda rank, partners=partners: tuple(  # type: ignore[misc]
                    sorted((class_of.get(other, -1), other == rank) for other in partners.get(rank, ()))
                )
            continue
        mesh = instruction.mesh or group.mesh
        if id(mesh) not in kinds_in:
            kinds_in[id(mesh)] = len({class_of.get(rank, -1) for rank in mesh.rank_list})
        if kinds_in[id(mesh)] > 1 and (id(mesh), instruction.axes) not in seen:
            seen.add((id(mesh), instruction.axes))
            yield lambda rank, mesh=mesh, axes=instruction.axes: tuple(  # type: ignore[misc]
                sorted(class_of.get(other, -1) for other in mesh.group_of(rank, axes))
            )


class _Writer:
    """Writes the groups of the representatives."""

    def __init__(self, class_of: Mapping[int, int], number_of: Mapping[int, int]) -> None:
        self._class_of = class_of
        self._number_of = number_of
        self._meshes: dict[tuple[int, ...], Layout] = {}
        self.originals: dict[int, Instruction] = {}
        self.is_simple = True

    def group(self, whole: GroupProgram, transfers: _Transfers, rank: int, number: int) -> GroupProgram:
        """The group of one representative."""
        bodies: dict[int, Body] = {}
        blocks: list[Block] = []
        for block in whole.blocks:
            body = bodies.get(id(block.body))
            if body is None:
                lines = tuple(self._line(line, whole, transfers, rank, number) for line in block.body.instructions)
                same = all(one is other for one, other in zip(lines, block.body.instructions, strict=True))
                body = block.body if same else replace(block.body, instructions=lines)
                bodies[id(block.body)] = body
            blocks.append(Block(label=block.label, micro_batch=block.micro_batch, body=body))
        return replace(whole, mesh=Layout((1,), ("rank",), (number,)), blocks=tuple(blocks))

    def _line(
        self, line: Instruction, whole: GroupProgram, transfers: _Transfers, rank: int, number: int
    ) -> Instruction:
        if line.kind is Kind.COLLECTIVE:
            members = tuple(sorted({self._number(other) for other in whole.members(line, rank)}))
            if members not in self._meshes:
                self._meshes[members] = Layout((len(members),), ("members",), members)
            new = replace(line, mesh=self._meshes[members], axes=("members",))
        elif line.kind in (Kind.SEND, Kind.RECV):
            partners = transfers.partners[id(line)].get(rank, ())
            others = dict.fromkeys(self._number(other) for other in partners)
            self.is_simple &= len(others) == len(partners)
            region = line.pieces[0].region if line.pieces else ()
            ends = [(number, other) if line.kind is Kind.SEND else (other, number) for other in others]
            new = replace(
                line, pieces=tuple(Piece(src_rank=source, dst_rank=target, region=region) for source, target in ends)
            )
        else:
            return line
        self.originals[id(new)] = line
        return new

    def _number(self, rank: int) -> int:
        return self._number_of[self._class_of[rank]]
