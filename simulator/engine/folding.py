"""Ranks that do the same thing at the same time are simulated once: a program of one rank for each kind of rank.

Ranks, meetings (an instance of a collective, a pair of ranks of a transfer) and links are divided into classes such
that equal ranks take part in equal meetings, equal meetings join equal ranks over equal links, and equal links carry as
many meetings of each class, with the same shares: the coarsest equitable partition. It is found by refinement: it
begins with the groups and with what is known to differ (a slow rank), and a class is split as long as its members
differ in what they meet (Paige and Tarjan, "Three partition refinement algorithms", SIAM Journal on Computing 16,
1987, is the fast form). Equal ranks then have equal times by induction over events, including max-min fair shares of
links, so one rank of each class represents all. One slow rank leaves few classes: along each axis of the mesh the
groups that have it and those that have it not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from costmodels.price.sharing import Claims
from plans.layout import Layout
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program
from plans.redistribution import Piece
from plans.timeline import Timeline
from simulator.engine.exchange import Wires
from simulator.engine.prices import CostOf, Priced

__all__ = ["Folded", "fold"]

_Members = tuple[int, ...]


class _Pattern:
    """Communication of the same ranks, of any size: collectives of one call along the same axes, or one SEND or RECV.

    Attributes:
        meetings: members of each.
        claims: of each, for one instruction of the pattern: the shares of others are as much smaller or larger on all
            links.
        work_ps: of each, likewise.
        class_of: meeting -> number of its class; found by refinement.
    """

    def __init__(self, is_transfer: bool, instruction: Instruction) -> None:
        self.is_transfer = is_transfer
        self.instruction = instruction
        self.meetings: list[_Members] = []
        self.claims: list[Claims] = []
        self.work_ps: list[int] = []
        self.class_of: dict[_Members, int] = {}

    def add(self, meetings: Iterable[_Members]) -> None:
        """Add meetings that are not known yet."""
        for members in meetings:
            if members not in self.class_of:
                self.class_of[members] = 0
                self.meetings.append(members)


def fold(
    program: Program, cost_of: CostOf, *, kinds: Mapping[int, Hashable] | None = None, wires: Wires | None = None
) -> Folded | None:
    """The program of representatives.

    Args:
        program: to fold.
        cost_of: its prices.
        kinds: properties of a rank that distinguish it (its own prices or slow-down); ranks of other kinds differ.
        wires: the links, where they are shared or changed.

    Returns:
        None where ranks meet in ways that do not fold: equal ranks that send each other something, a channel whose
        transfers join different pairs, joined transfers that need processors.
    """
    transfers = [_Transfers(group) for group in program.groups]
    if not all(each.is_regular for each in transfers):
        return None
    patterns = _patterns(program)
    if wires is not None:
        _claim(program, patterns, cost_of, wires)
    group_of = {rank: number for number, group in enumerate(program.groups) for rank in group.ranks}
    special = kinds or {}
    first_kinds = {rank: (number, special.get(rank)) for rank, number in group_of.items()}
    class_of, link_class = _refined(first_kinds, patterns)
    first: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for rank in sorted(class_of):
        first.setdefault(class_of[rank], rank)
        counts[class_of[rank]] += 1
    if _send_to_equals(transfers, class_of, first.values()):
        return None
    number_of = {kind: number for number, kind in enumerate(first)}  # ascending by representative
    writer = _Writer({rank: number_of[kind] for rank, kind in class_of.items()})
    groups = []
    for number, rank in enumerate(first.values()):
        whole = group_of[rank]
        groups.append(writer.group(program.groups[whole], transfers[whole], rank, number))
    if writer.joins and _transfers_need_processors(program, cost_of):
        return None
    ranks = tuple(first.values())
    return Folded(
        program=replace(program, groups=tuple(groups)),
        ranks=ranks,
        representatives=tuple(first[class_of[rank]] for rank in sorted(class_of)),
        _originals=writer.originals,
        _groups={id(group): program.groups[group_of[rank]] for group, rank in zip(groups, ranks, strict=True)},
        _number_of=writer.number_of,
        _patterns=patterns,
        _link_class=link_class,
    )


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A program of representatives.

    Args:
        program: rank r of it is the rank `ranks[r]` of the complete program.
        ranks: ascending.
        representatives: the representative in `ranks` of each rank of the full program.
    """

    program: Program
    ranks: tuple[int, ...]
    representatives: tuple[int, ...]
    _originals: Mapping[int, tuple[Instruction, GroupProgram, int]]
    _groups: Mapping[int, GroupProgram]
    _number_of: Mapping[int, int]
    _patterns: Mapping[Hashable, _Pattern]
    _link_class: Mapping[Hashable, int]

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
        """The timeline of `program` under the ranks' own numbers; `Timeline.represents` has the number of ranks that
        each represents."""
        ranks = np.array(self.ranks, dtype=timeline.rank.dtype)
        return replace(
            timeline,
            num_ranks=len(self.representatives),
            rank=ranks[timeline.rank],
            memory=tuple(replace(each, rank=self.ranks[each.rank]) for each in timeline.memory),
            memory_curve={self.ranks[rank]: curve for rank, curve in timeline.memory_curve.items()},
            meta={**timeline.meta, "representatives": self.representatives},
        )


class _FoldedWires:
    """The load of all meetings of a class on one link of each class, as claims of their representative."""

    def __init__(self, whole: Wires, folded: Folded) -> None:
        self._whole = whole
        self._folded = folded
        self._on_link: dict[Hashable, dict[tuple[int, Hashable], list[_Members]]] = {}
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
        key = _key(original, group)
        like, on_link = self._folded._patterns[key].class_of[whole], self._meetings_on(key)
        shares: dict[Hashable, Fraction] = {}
        for link, _ in self._whole.claims(original, whole, work_ps):
            kind = self._folded._link_class[link]
            if kind not in shares:  # the other links of a class carry the same
                of_all = (dict(self._whole.claims(original, each, work_ps))[link] for each in on_link[like, link])
                shares[kind] = sum(of_all, Fraction(0))
        return tuple(shares.items())

    def _meetings_on(self, key: Hashable) -> Mapping[tuple[int, Hashable], Sequence[_Members]]:
        """(class of meetings, link) -> the meetings of a pattern."""
        if key not in self._on_link:
            found = self._on_link[key] = {}
            pattern = self._folded._patterns[key]
            for members, claims in zip(pattern.meetings, pattern.claims, strict=True):
                for link, _ in claims:
                    found.setdefault((pattern.class_of[members], link), []).append(members)
        return self._on_link[key]

    def _original(
        self, instruction: Instruction, members: tuple[int, ...]
    ) -> tuple[Instruction, GroupProgram, _Members]:
        original, group, rank = self._folded._originals[id(instruction)]
        if original.kind is Kind.COLLECTIVE:
            return original, group, group.members(original, rank)
        is_send = original.kind is Kind.SEND
        other = members[1] if is_send else members[0]
        for piece in original.pieces:
            own, partner = (piece.src_rank, piece.dst_rank) if is_send else (piece.dst_rank, piece.src_rank)
            if own == rank and self._folded._number_of[partner] == other:
                return original, group, (piece.src_rank, piece.dst_rank)
        raise AssertionError("a folded transfer has a pair of the full program")


# ----------------------------------------------------------------------------------------------------------- refinement


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


def _patterns(program: Program) -> dict[Hashable, _Pattern]:
    found: dict[Hashable, _Pattern] = {}
    added: set[tuple[object, ...]] = set()
    for group in program.groups:
        for instruction in _communication(group):
            mesh = instruction.mesh or group.mesh
            if instruction.kind is not Kind.COLLECTIVE:
                pattern = found[_key(instruction, group)] = _Pattern(True, instruction)
                pattern.add(dict.fromkeys((piece.src_rank, piece.dst_rank) for piece in instruction.pieces))
            elif (quick := (id(mesh), instruction.axes, instruction.call, instruction.message_bytes)) not in added:
                added.add(quick)
                found.setdefault(_key(instruction, group), _Pattern(False, instruction)).add(
                    mesh.groups(instruction.axes)
                )
    return found


def _claim(program: Program, patterns: Mapping[Hashable, _Pattern], cost_of: CostOf, wires: Wires) -> None:
    """The load of the meetings of each pattern on links, for its first instruction."""
    work_of: dict[Hashable, int] = {}
    for group in program.groups:
        for instruction in _communication(group):
            key = _key(instruction, group)
            if patterns[key].instruction is instruction:
                work_of[key] = cost_of(instruction, group).work_ps
    known: dict[Hashable, _Pattern] = {}
    for key, pattern in patterns.items():
        line = pattern.instruction
        moved = tuple((each.src_rank, each.dst_rank, each.num_elements) for each in line.pieces)
        like = known.setdefault((line.kind, line.dtype, work_of[key], moved) if pattern.is_transfer else key, pattern)
        if like is not pattern:
            pattern.work_ps, pattern.claims = like.work_ps, like.claims
            continue
        for members in pattern.meetings:
            is_local = pattern.is_transfer and members[0] == members[1]
            work_ps = 0 if is_local else wires.work_ps(line, members, work_of[key])
            pattern.work_ps.append(work_ps)
            pattern.claims.append(wires.claims(line, members, work_ps) if work_ps else ())


class _Kind(NamedTuple):
    """The common properties of patterns with equal meetings and claims, with links and shares as numbers.

    Attributes:
        is_transfer, meetings, work_ps: as of `_Pattern`.
        over: of each meeting (link, share) of its claims.
        first: number of the first sign of its meetings; every one has two.
    """

    is_transfer: bool
    meetings: tuple[_Members, ...]
    work_ps: tuple[int, ...]
    over: tuple[tuple[tuple[int, int], ...], ...]
    first: int


def _refined(
    first: Mapping[int, Hashable], patterns: Mapping[Hashable, _Pattern]
) -> tuple[dict[int, int], dict[Hashable, int]]:
    """Rank -> its class, and link -> its class; those of meetings are kept in their patterns."""
    kinds, kind_of, links = _kinds(patterns)
    numbers: dict[Hashable, int] = {}
    class_of = {rank: numbers.setdefault(kind, len(numbers)) for rank, kind in first.items()}
    classes = [[0] * len(kind.meetings) for kind in kinds]
    link_class = [0] * len(links)
    size = -1
    while True:
        met: dict[int, list[int]] = {rank: [] for rank in class_of}
        on_link: list[list[tuple[int, int]]] = [[] for _ in links]
        num_meetings = 0
        for number, kind in enumerate(kinds):
            classes[number] = _refine_meetings(kind, classes[number], class_of, link_class)
            num_meetings += len(set(classes[number]))
            for members, own in zip(kind.meetings, classes[number], strict=True):
                sign = kind.first + 2 * own
                for place, rank in enumerate(members):
                    if rank in met:
                        met[rank].append(sign + place if kind.is_transfer else sign)
            for over, own in zip(kind.over, classes[number], strict=False):
                for link, share in over:
                    on_link[link].append((kind.first + 2 * own, share))
        signs: dict[object, int] = {}
        class_of = {
            rank: signs.setdefault((kind, tuple(sorted(met[rank]))), len(signs)) for rank, kind in class_of.items()
        }
        link_signs: dict[object, int] = {}
        link_class = [
            link_signs.setdefault((kind, tuple(sorted(own))), len(link_signs))
            for kind, own in zip(link_class, on_link, strict=True)
        ]
        now = len(signs) + len(link_signs) + num_meetings
        if now == size:
            break
        size = now
    for pattern, number in zip(patterns.values(), kind_of, strict=True):
        pattern.class_of = dict(zip(kinds[number].meetings, classes[number], strict=True))
    return class_of, dict(zip(links, link_class, strict=True))


def _kinds(patterns: Mapping[Hashable, _Pattern]) -> tuple[list[_Kind], list[int], list[Hashable]]:
    """The kinds, that of each pattern, and the links in the order of their numbers."""
    links: dict[Hashable, int] = {}
    shares: dict[tuple[int, int], int] = {}
    known: dict[int, tuple[tuple[tuple[int, int], ...], ...]] = {}
    found: dict[Hashable, int] = {}
    kinds: list[_Kind] = []
    kind_of = []
    first = 0
    for pattern in patterns.values():
        if id(pattern.claims) not in known:
            known[id(pattern.claims)] = tuple(
                tuple(
                    (links.setdefault(link, len(links)), shares.setdefault(share.as_integer_ratio(), len(shares)))
                    for link, share in claims
                )
                for claims in pattern.claims
            )
        over = known[id(pattern.claims)]
        kind = _Kind(pattern.is_transfer, tuple(pattern.meetings), tuple(pattern.work_ps), over, first)
        number = found.setdefault(kind[:-1], len(kinds))
        kind_of.append(number)
        if number == len(kinds):
            kinds.append(kind)
            first += 2 * len(kind.meetings)
    return kinds, kind_of, list(links)


def _refine_meetings(
    kind: _Kind, before: Sequence[int], class_of: Mapping[int, int], links: Sequence[int]
) -> list[int]:
    """Number the meetings of a kind again, by the classes of ranks and links."""
    signs: dict[object, int] = {}
    found = []
    for number, (members, own) in enumerate(zip(kind.meetings, before, strict=True)):
        ranks = [class_of.get(rank, -1) for rank in members]
        who = tuple(ranks if kind.is_transfer else sorted(ranks))
        over: object = None
        if kind.over:
            over = kind.work_ps[number], tuple(sorted([(links[link], share) for link, share in kind.over[number]]))
        found.append(signs.setdefault((own, who, over), len(signs)))
    return found


# -------------------------------------------------------------------------------------------------------------- writing


def _send_to_equals(transfers: Sequence[_Transfers], class_of: Mapping[int, int], ranks: Collection[int]) -> bool:
    """Whether some of `ranks` send something to other ranks of their class, or get it from them."""
    return any(
        other != rank and class_of[other] == class_of[rank]
        for each in transfers
        for partners in each.partners.values()
        for rank in ranks
        for other in partners.get(rank, ())
    )


def _transfers_need_processors(program: Program, cost_of: CostOf) -> bool:
    return any(
        line.kind is not Kind.COLLECTIVE and cost_of(line, group).cpu_ps
        for group in program.groups
        for line in _communication(group)
    )


class _Transfers:
    """Who is at the other end of a group's transfers.

    Attributes:
        partners: by `id` of the instruction; rank -> the ranks at the other end, each once.
        is_regular: whether the transfers of a channel and direction all join the same pairs: then the k-th of one kind
            of rank is the k-th of each of these ranks.
    """

    def __init__(self, group: GroupProgram) -> None:
        self.partners: dict[int, Mapping[int, tuple[int, ...]]] = {}
        self.is_regular = True
        of_channel: dict[tuple[str, Kind], Mapping[int, tuple[int, ...]]] = {}
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


class _Writer:
    """Writes the groups of the representatives.

    Attributes:
        number_of: rank of the complete program -> its number in the folded one.
        originals: by `id` of a communication the instruction that it was, with its group and the representative.
        joins: whether a rank has two equal partners in one transfer, which are one then.
    """

    def __init__(self, number_of: Mapping[int, int]) -> None:
        self.number_of = number_of
        self.originals: dict[int, tuple[Instruction, GroupProgram, int]] = {}
        self.joins = False
        self._meshes: dict[tuple[int, ...], Layout] = {}

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
            members = tuple(sorted({self.number_of[other] for other in whole.members(line, rank)}))
            if members not in self._meshes:
                self._meshes[members] = Layout((len(members),), ("members",), members)
            new = replace(line, mesh=self._meshes[members], axes=("members",))
        elif line.kind in (Kind.SEND, Kind.RECV):
            partners = transfers.partners[id(line)].get(rank, ())
            others = dict.fromkeys(self.number_of[other] for other in partners)
            self.joins |= len(others) < len(partners)
            region = line.pieces[0].region if line.pieces else ()
            ends = [(number, other) if line.kind is Kind.SEND else (other, number) for other in others]
            new = replace(
                line, pieces=tuple(Piece(src_rank=source, dst_rank=target, region=region) for source, target in ends)
            )
        else:
            return line
        self.originals[id(new)] = (line, whole, rank)
        return new
