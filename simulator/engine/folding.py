"""Folding: ranks that do the same thing at the same time are simulated once.

Equal ranks are those of one class of the coarsest equitable partition (`simulator.engine.classes`), which starts from
the groups and from known differences (a slow rank). By induction over events they have equal times, including max-min
fair shares of links, so one rank represents its class. One slow rank leaves few classes: along each axis of the mesh,
the groups that contain it and those that do not.

A pair of ranks of a transfer becomes a pair of their representatives. Pairs of two classes may differ (within a node,
between nodes), and both ranks may be of one class: such pairs get a label, a negative number, next to the two ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from costmodels.price.sharing import Claims
from plans.layout import Layout
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program
from plans.redistribution import Piece, TransferPieces
from plans.timeline import Timeline
from simulator.engine.classes import Pattern, classes_of
from simulator.engine.exchange import Loads, Wires
from simulator.engine.prices import LONGEST_PS, CostOf, Priced, too_long

__all__ = ["Folded", "fold"]

_Members = tuple[int, ...]
_Ints = npt.NDArray[np.int64]


def fold(
    program: Program, cost_of: CostOf, *, kinds: Mapping[int, Hashable] | None = None, wires: Wires | None = None
) -> Folded | None:
    """Fold a program: the program of one representative per class of ranks.

    Args:
        program: to fold.
        cost_of: its prices.
        kinds: properties of a rank that distinguish it (its own prices or slow-down); ranks of other kinds differ.
        wires: the links, where they are shared or changed.

    Returns:
        None where ranks meet in ways that do not fold: a channel whose transfers join different pairs, joined transfers
        that need processors.
    """
    if not all(map(_is_regular, program.groups)):
        return None
    patterns = _patterns(program)
    if wires is not None:
        _load(program, patterns, cost_of, wires)
    group_of = {rank: number for number, group in enumerate(program.groups) for rank in group.ranks}
    special, ranks, numbers = kinds or {}, sorted(group_of), dict[Hashable, int]()
    first_kinds = [numbers.setdefault((group_of[rank], special.get(rank)), len(numbers)) for rank in ranks]
    classes = classes_of(ranks, first_kinds, patterns.values())
    class_of = classes.class_of.tolist()
    writer = _Writer(dict(zip(ranks, class_of, strict=True)), _Pairs(program, patterns))
    firsts = classes.first
    groups = [writer.group(program.groups[group_of[rank]], rank, number) for number, rank in enumerate(firsts)]
    if writer.joins and _transfers_need_processors(program, cost_of):
        return None
    return Folded(
        program=replace(program, groups=tuple(groups)),
        ranks=tuple(firsts),
        representatives=tuple([firsts[number] for number in class_of]),
        _originals=writer.originals,
        _pairs=writer.whole_pairs,
        _groups={id(group): program.groups[group_of[rank]] for group, rank in zip(groups, firsts, strict=True)},
        _patterns=patterns,
        _link_color=classes.link_color,
    )


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A program of representatives, and the classes that they represent.

    Args:
        program: rank r of it is the rank `ranks[r]` of the complete program.
        ranks: ascending.
        representatives: the representative in `ranks` of each rank of the full program.
    """

    program: Program
    ranks: tuple[int, ...]
    representatives: tuple[int, ...]
    _originals: Mapping[int, tuple[Instruction, GroupProgram, int]]
    _pairs: Mapping[tuple[int, _Members], _Members]
    _groups: Mapping[int, GroupProgram]
    _patterns: Mapping[Hashable, Pattern]
    _link_color: Mapping[int, int]

    def cost_of(self, whole: CostOf) -> CostOf:
        """The prices of the complete program for this one."""

        def cost_of(instruction: Instruction, group: GroupProgram) -> Priced:
            original = self._originals.get(id(instruction))
            return whole(instruction if original is None else original[0], self._groups[id(group)])

        return cost_of

    def wires(self, whole: Wires) -> Wires:
        """The links of the complete program for this one."""
        return _FoldedWires(whole, self)

    def named(self, timeline: Timeline) -> Timeline:
        """The timeline of `program` with the original numbers of the ranks; `Timeline.represents` has the number of
        ranks that each represents.
        """
        ranks = np.array(self.ranks, dtype=timeline.rank.dtype)
        return replace(
            timeline,
            num_ranks=len(self.representatives),
            rank=ranks[timeline.rank],
            memory=tuple(replace(memory_peak, rank=self.ranks[memory_peak.rank]) for memory_peak in timeline.memory),
            memory_curve={self.ranks[rank]: curve for rank, curve in timeline.memory_curve.items()},
            meta={**timeline.meta, "representatives": self.representatives},
        )


class _FoldedWires:
    """The load of all meetings of a class on one link of each class, as claims of their representative."""

    def __init__(self, whole: Wires, folded: Folded) -> None:
        self._whole = whole
        self._folded = folded
        self._claims: dict[tuple[int, _Members], Claims] = {}

    def work_ps(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> int:
        """As in `Wires`."""
        original, _, whole = self._original(instruction, members)
        return self._whole.work_ps(original, whole, work_ps)

    def claims(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> Claims:
        """As in `Wires`."""
        if work_ps == 0:
            return ()
        key = (id(instruction), members)
        if key not in self._claims:
            self._claims[key] = self._of_class(instruction, members, work_ps)
        return self._claims[key]

    def _of_class(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> Claims:
        original, group, whole = self._original(instruction, members)
        pattern = self._folded._patterns[_key(original, group)]
        like, shares = pattern.number(whole), dict[Hashable, Fraction]()
        for link, _ in self._whole.claims(original, whole, work_ps):
            number = self._whole.link_number(link)
            color = self._folded._link_color[number]
            if color not in shares:  # the other links of a class carry the same
                meetings = pattern.meetings_on(number, like)
                of_all = (dict(self._whole.claims(original, meeting, work_ps))[link] for meeting in meetings)
                shares[color] = sum(of_all, Fraction(0))
        return tuple(shares.items())

    def works_ps(self, instruction: Instruction, members: _Ints, work_ps: int) -> _Ints:
        """Not supported: a folded program is not folded again."""
        raise AssertionError("the program is folded already")

    def loads(self, instruction: Instruction, members: _Ints, work_ps: _Ints) -> Loads:
        """As `works_ps`."""
        raise AssertionError("the program is folded already")

    def link_number(self, link: Hashable) -> int:
        """As `works_ps`."""
        raise AssertionError("the program is folded already")

    def _original(
        self, instruction: Instruction, members: tuple[int, ...]
    ) -> tuple[Instruction, GroupProgram, _Members]:
        original, group, rank = self._folded._originals[id(instruction)]
        if original.kind is Kind.COLLECTIVE:
            return original, group, group.members(original, rank)
        return original, group, self._folded._pairs[id(instruction), members]


# -------------------------------------------------------------------------------------------------------- communication


def _communication(group: GroupProgram) -> Iterable[Instruction]:
    """Every communication of a group's bodies, once."""
    bodies = {id(block.body): block.body for block in group.blocks}
    for body in bodies.values():
        for instruction in body.instructions:
            if instruction.kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV):
                yield instruction


def _key(instruction: Instruction, group: GroupProgram) -> Hashable:
    """The common properties of communications of one pattern."""
    if instruction.kind is Kind.COLLECTIVE:
        mesh = instruction.mesh or group.mesh
        return mesh, instruction.axes, instruction.call, instruction.message_bytes  # the links depend on the length
    return id(instruction)


def _patterns(program: Program) -> dict[Hashable, Pattern]:
    found: dict[Hashable, Pattern] = {}
    added: set[tuple[object, ...]] = set()
    for group in program.groups:
        for instruction in _communication(group):
            mesh = instruction.mesh or group.mesh
            if instruction.kind is not Kind.COLLECTIVE:
                found[_key(instruction, group)] = Pattern.of_transfer(instruction)
            elif (quick := (id(mesh), instruction.axes, instruction.call, instruction.message_bytes)) not in added:
                added.add(quick)
                key = _key(instruction, group)
                if key not in found:
                    found[key] = Pattern(instruction, np.array(mesh.groups(instruction.axes), dtype=np.int64))
    return found


def _load(program: Program, patterns: Mapping[Hashable, Pattern], cost_of: CostOf, wires: Wires) -> None:
    """Set the work of the meetings of each pattern, and their loads on links, for its first instruction."""
    for group in program.groups:
        for instruction in _communication(group):
            pattern = patterns[_key(instruction, group)]
            if pattern.instruction is not instruction:
                continue
            if (work_ps := cost_of(instruction, group).work_ps) > LONGEST_PS:
                raise too_long()
            pattern.work_ps = wires.works_ps(instruction, pattern.members, work_ps)
            if pattern.is_transfer:
                pattern.work_ps[pattern.members[:, 0] == pattern.members[:, 1]] = 0
            pattern.loads = wires.loads(instruction, pattern.members, pattern.work_ps)


# -------------------------------------------------------------------------------------------------------------- writing


def _is_regular(group: GroupProgram) -> bool:
    """Whether all transfers of a channel and direction join the same pairs of ranks. If so, the k-th transfer of a
    class is the k-th of each of its ranks.
    """
    of_channel: dict[tuple[str, Kind], TransferPieces] = {}
    for line in _communication(group):
        if line.kind is not Kind.COLLECTIVE:
            known = of_channel.setdefault((line.channel, line.kind), line.pieces)
            if known is not line.pieces and not _same_pairs(known, line.pieces, line.kind):
                return False
    return True


def _same_pairs(one: TransferPieces, other: TransferPieces, kind: Kind) -> bool:
    """Whether every rank has the same partners in the same order."""

    def by_rank(pieces: TransferPieces) -> _Ints:
        pairs, _ = pieces.by_pair
        return pairs[np.argsort(pairs[:, 0 if kind is Kind.SEND else 1], kind="stable")]

    return np.array_equal(by_rank(one), by_rank(other))


def _transfers_need_processors(program: Program, cost_of: CostOf) -> bool:
    return any(
        line.kind is not Kind.COLLECTIVE and cost_of(line, group).cpu_ps
        for group in program.groups
        for line in _communication(group)
    )


class _Pairs:
    """The classes of the pairs of ranks between which a channel transfers something: those of its SENDs.

    The RECVs of a channel have the same pairs, so both sides call a class by the same number.
    """

    def __init__(self, program: Program, patterns: Mapping[Hashable, Pattern]) -> None:
        self._sends: dict[str, dict[int, Pattern]] = {}
        for group in program.groups:
            for line in _communication(group):
                if line.kind is Kind.SEND:  # the others of the channel in this group have the same pairs
                    self._sends.setdefault(line.channel, {}).setdefault(id(group), patterns[_key(line, group)])

    def of_rank(self, line: Instruction, rank: int) -> dict[int, int]:
        """The ranks to which a rank sends something by this line, or from which it receives, and the class of each
        pair; -1 where there is no SEND.
        """
        is_send = line.kind is Kind.SEND
        found = dict.fromkeys(line.pieces.partners(rank, sends=is_send), -1)
        for pattern in self._sends.get(line.channel, {}).values():
            own = pattern.members[:, 1 - is_send] == rank
            found |= zip(pattern.members[own, int(is_send)].tolist(), pattern.class_of[own].tolist(), strict=True)
        return found


class _PiecesOfOne(TransferPieces):
    """The pieces of one representative: a pair of representatives each, with a label or without."""

    def __init__(self, pairs: Iterable[_Members]) -> None:
        self._pairs = tuple(pairs)
        super().__init__(Piece(src_rank=src, dst_rank=dst, region=()) for src, dst, *_ in self._pairs)

    def pairs_of(self, rank: int, *, sends: bool) -> tuple[_Members, ...]:
        """All pairs: they are of one rank and direction."""
        return self._pairs


class _Writer:
    """Writes the groups of the representatives.

    Attributes:
        number_of: rank of the complete program -> its number in the folded one.
        originals: by `id` of a communication the instruction that it was, with its group and the representative.
        whole_pairs: (`id` of a transfer, pair of representatives) -> a pair of ranks that it stands for.
        joins: whether a pair stands for several pairs of one rank, or for a pair of equal ranks.
    """

    def __init__(self, number_of: Mapping[int, int], pairs: _Pairs) -> None:
        self.number_of = number_of
        self.whole_pairs: dict[tuple[int, _Members], _Members] = {}
        self.originals: dict[int, tuple[Instruction, GroupProgram, int]] = {}
        self.joins = False
        self._pairs = pairs
        self._labels: dict[int, int] = {}
        self._meshes: dict[tuple[int, ...], Layout] = {}

    def group(self, whole: GroupProgram, rank: int, number: int) -> GroupProgram:
        """The group of one representative."""
        bodies: dict[int, Body] = {}
        blocks: list[Block] = []
        for block in whole.blocks:
            body = bodies.get(id(block.body))
            if body is None:
                lines = tuple(self._line(line, whole, rank, number) for line in block.body.instructions)
                same = all(one is other for one, other in zip(lines, block.body.instructions, strict=True))
                body = block.body if same else replace(block.body, instructions=lines)
                bodies[id(block.body)] = body
            blocks.append(Block(label=block.label, micro_batch=block.micro_batch, body=body))
        return replace(whole, mesh=Layout((1,), ("rank",), (number,)), blocks=tuple(blocks))

    def _line(self, line: Instruction, whole: GroupProgram, rank: int, number: int) -> Instruction:
        if line.kind is Kind.COLLECTIVE:
            members = tuple(sorted({self.number_of[other] for other in whole.members(line, rank)}))
            if members not in self._meshes:
                self._meshes[members] = Layout((len(members),), ("members",), members)
            new = replace(line, mesh=self._meshes[members], axes=("members",))
        elif line.kind in (Kind.SEND, Kind.RECV):
            whole_pairs = self._transfer(line, rank, number)
            new = replace(line, pieces=_PiecesOfOne(whole_pairs))
            self.whole_pairs |= {(id(new), pair): of for pair, of in whole_pairs.items()}
        else:
            return line
        self.originals[id(new)] = (line, whole, rank)
        return new

    def _transfer(self, line: Instruction, rank: int, number: int) -> dict[_Members, _Members]:
        """The pairs of representatives of a SEND or RECV, and a pair of ranks for which each stands."""
        classes = self._pairs.of_rank(line, rank)
        kinds: dict[int, set[int]] = {}
        for other, color in classes.items():
            if other != rank:
                kinds.setdefault(self.number_of[other], set()).add(color)
        found: dict[_Members, _Members] = {}
        for other, color in classes.items():
            near, far = (number, rank), (self.number_of[other], other)
            ends = (near, far) if line.kind is Kind.SEND else (far, near)
            pair: _Members = tuple(each for each, _ in ends)
            if other != rank and (far[0] == number or len(kinds[far[0]]) > 1):
                pair = (*pair, self._labels.setdefault(color, -1 - len(self._labels)))
            self.joins |= pair in found or (other != rank and far[0] == number)
            found.setdefault(pair, tuple(each for _, each in ends))
        return found
