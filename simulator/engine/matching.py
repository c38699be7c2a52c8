"""Matches the communication of ranks, and checks it before anything is simulated.

Collectives match by instruction id and group of ranks. The k-th SEND on a channel from one rank to another matches the
k-th RECV there, so both ranks must have the same number. Messages that a rank sends to itself are matched in the same
way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.program import Instruction, Kind
from simulator.engine.order import Order

__all__ = ["Matching", "Pair", "Peers", "match"]


class Peers:
    """The partners of one communication instruction of a rank; the same in every step.

    Attributes:
        stream: number of the (rank, channel, direction) whose order it keeps.
        keys: of the meetings: the number of the collective, or of each pair of ranks; none where it has no piece.
        members: ranks of each meeting; (source, destination) of a pair, and its label where ranks are folded.
        is_transfer: SEND or RECV.
        is_send: SEND.
    """

    __slots__ = ("is_send", "is_transfer", "keys", "members", "stream")

    def __init__(self, stream: int, keys: tuple[int, ...], members: tuple[tuple[int, ...], ...], kind: Kind) -> None:
        self.stream = stream
        self.keys = keys
        self.members = members
        self.is_transfer = kind is not Kind.COLLECTIVE
        self.is_send = kind is Kind.SEND


@dataclass(frozen=True, slots=True)
class Matching:
    """The partners of every communication of a step.

    Args:
        peers: rank -> position in its order -> its peers, for every communication.
        positions: stream of transfers -> their positions.
        pairs: streams of transfers from one rank to another that meet nobody else.
    """

    peers: Mapping[int, Mapping[int, Peers]]
    positions: Mapping[int, npt.NDArray[np.int64]]
    pairs: Sequence[Pair]


class Pair(NamedTuple):
    """The stream of SENDs of one rank and of the matching RECVs of another."""

    source: int
    target: int
    sends: int
    receives: int


class _Numbers:
    """Numbers keys in order of their first appearance."""

    def __init__(self) -> None:
        self.table: dict[object, int] = {}

    def __call__(self, thing: object) -> int:
        return self.table.setdefault(thing, len(self.table))


def match(orders: Sequence[Order]) -> Matching:
    """Match the communication of all ranks.

    Raises:
        TwofoldError: a rank in two groups or missing between 0 and the largest, a member of a collective that is not in
            the program or does not issue it, a SEND without RECV or vice versa.
    """
    ranks = [rank for order in orders for rank in order.group.ranks]
    if sorted(ranks) != list(range(len(ranks))):
        raise TwofoldError(f"the program's groups hold the ranks {sorted(ranks)}; they must be 0 to n-1, each once")
    matcher = _Matcher(len(ranks))
    peers = {rank: matcher.peers_of(order, rank) for order in orders for rank in order.group.ranks}
    _check_collectives(orders, peers)
    _check_transfers(orders, peers, matcher.transfers)
    return Matching(peers, matcher.positions, _pairs([peers for peers, _ in matcher.transfers]))


def _pairs(transfers: Sequence[Peers]) -> list[Pair]:
    streams_of: dict[int, set[int]] = {}
    keys_of: dict[int, set[int]] = {}
    for peers in transfers:
        keys_of.setdefault(peers.stream, set()).update(peers.keys)
        for key in peers.keys:
            streams_of.setdefault(key, set()).add(peers.stream)
    found: dict[Pair, None] = {}
    for peers in transfers:
        source, target, *_ = peers.members[0] if peers.members else (0, 0)
        if peers.is_send and len(keys_of[peers.stream]) == 1 and source != target:
            (other,) = streams_of[peers.keys[0]] - {peers.stream}
            if len(keys_of[other]) == 1:
                found[Pair(source, target, peers.stream, other)] = None
    return list(found)


class _Matcher:
    """Numbers streams and meetings, and stores the matches."""

    def __init__(self, num_ranks: int) -> None:
        self.positions: dict[int, npt.NDArray[np.int64]] = {}
        self.transfers: list[tuple[Peers, int]] = []  # with how often they are in a step
        self._num_ranks = num_ranks
        self._streams = _Numbers()
        self._meetings = _Numbers()

    def peers_of(self, order: Order, rank: int) -> dict[int, Peers]:
        """Position -> peers of one rank."""
        positions, lines = order.issues.tolist(), order.line[order.issues]
        of_line: dict[int, Peers] = {}  # a body's SEND or RECV has the same peers in all its blocks
        members_of: dict[int, tuple[tuple[int, ...], int]] = {}  # and a collective the same members and stream
        positions_of: dict[int, list[npt.NDArray[np.int64]]] = {}
        for line in np.unique(lines).tolist():
            instruction = order.line_instructions[line]
            if instruction.kind is Kind.COLLECTIVE:
                members_of[line] = self._members(order, instruction, order.line_id(line), rank)
                continue
            of_line[line] = peers = self._transfer(instruction, order.line_id(line), rank)
            here = order.issues[lines == line]
            self.transfers.append((peers, len(here)))
            if peers.keys:
                positions_of.setdefault(peers.stream, []).append(here)
        for stream, found in positions_of.items():
            self.positions[stream] = np.sort(np.concatenate(found))
        if not members_of:
            return dict(zip(positions, map(of_line.__getitem__, lines.tolist()), strict=True))
        result: dict[int, Peers] = {}
        for position, line in zip(positions, lines.tolist(), strict=True):
            if line in of_line:
                result[position] = of_line[line]
                continue
            members, stream = members_of[line]
            key = self._meetings((order.ids[position], members))
            result[position] = Peers(stream, (key,), (members,), Kind.COLLECTIVE)
        return result

    def _members(self, order: Order, instruction: Instruction, id_: str, rank: int) -> tuple[tuple[int, ...], int]:
        members = order.group.members(instruction, rank)
        if max(members) >= self._num_ranks:
            raise TwofoldError(f"{id_!r} has the member {max(members)}, but the program has {self._num_ranks} ranks")
        return members, self._streams((rank, instruction.channel, "both"))

    def _transfer(self, instruction: Instruction, id_: str, rank: int) -> Peers:
        pairs = instruction.pieces.pairs_of(rank, sends=instruction.kind is Kind.SEND)
        for pair in pairs:
            if max(pair) >= self._num_ranks:
                raise TwofoldError(
                    f"{id_!r} goes from rank {pair[0]} to {pair[1]}, but the program has {self._num_ranks} ranks"
                )
        keys = tuple(self._meetings((instruction.channel, pair)) for pair in pairs)
        stream = self._streams((rank, instruction.channel, str(instruction.kind)))
        return Peers(stream, keys, pairs, instruction.kind)


def _check_collectives(orders: Sequence[Order], peers: Mapping[int, Mapping[int, Peers]]) -> None:
    """Check that every member issues a collective exactly once. Inside a group this always holds, but a mesh may extend
    beyond its group.
    """
    issued: dict[int, dict[int, str]] = {}
    collectives: list[tuple[int, int, Peers, Order]] = []
    for order in orders:
        for rank in order.group.ranks:
            for position, peer in peers[rank].items() if order.has_collectives else ():
                if peer.is_transfer:
                    continue
                collectives.append((rank, position, peer, order))
                of_key = issued.setdefault(peer.keys[0], {})
                if rank in of_key:
                    raise TwofoldError(
                        f"the collective {order.ids[position]!r} occurs twice in a step of rank {rank}; ids are unique"
                    )
                of_key[rank] = order.ids[position]
    for rank, position, peer, order in collectives:
        for member in peer.members[0]:
            if member not in issued[peer.keys[0]]:
                raise TwofoldError(
                    f"rank {rank} would wait forever in {order.ids[position]!r} for rank {member}, which is a "
                    f"member {peer.members[0]} but never issues it"
                )


def _check_transfers(
    orders: Sequence[Order], peers: Mapping[int, Mapping[int, Peers]], transfers: Sequence[tuple[Peers, int]]
) -> None:
    balance: Counter[int] = Counter()
    for peer, count in transfers:
        for key in peer.keys:
            balance[key] += count if peer.is_send else -count
    if not any(balance.values()):
        return
    sides: dict[tuple[int, bool], list[tuple[str, str, tuple[int, ...]]]] = {}
    for order in orders:
        for rank in order.group.ranks:
            for position, peer in peers[rank].items():
                if peer.is_transfer:
                    entry = (order.ids[position], order.instructions[position].channel)
                    for key, pair in zip(peer.keys, peer.members, strict=True):
                        sides.setdefault((key, peer.is_send), []).append((*entry, pair))
    for (key, is_send), mine in sides.items():
        others = sides.get((key, not is_send), [])
        if len(mine) > len(others):
            id_, channel, (source, target) = mine[len(others)]
            rank, verb = (source, "sends") if is_send else (target, "receives")
            other, answer = (target, "receives") if is_send else (source, "sends")
            raise TwofoldError(
                f"{id_!r} has no partner: on channel {channel!r} rank {rank} {verb} {len(mine)} times a step, "
                f"but rank {other} {answer} {len(others)} times"
            )
