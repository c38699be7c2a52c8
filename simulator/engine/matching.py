"""Which communication of one rank belongs to which of another, settled and checked before anything is simulated.

Collectives belong together by instruction id and group of ranks. The k-th SEND on a channel from one rank to another
belongs to the k-th RECV there, so both ranks must have equally many. Pieces that a rank hands to itself are matched the
same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from plans.errors import TwofoldError
from plans.program import Instruction, Kind
from simulator.engine.order import ISSUE, Order

__all__ = ["Links", "match"]


class Links:
    """What one rank's communication instruction is joined to; equal in every step.

    Attributes:
        stream: number of the (rank, channel, direction) whose order it keeps.
        keys: of the meetings: the number of the collective, or of each pair of ranks; none where it has no piece.
        members: ranks of each meeting; (source, destination) of a pair.
        is_transfer: SEND or RECV.
        is_send: SEND.
        is_plain: of a transfer that is one pair of two ranks on both sides.
    """

    __slots__ = ("is_plain", "is_send", "is_transfer", "keys", "members", "stream")

    def __init__(self, stream: int, keys: tuple[int, ...], members: tuple[tuple[int, ...], ...], kind: Kind) -> None:
        self.stream = stream
        self.keys = keys
        self.members = members
        self.is_transfer = kind is not Kind.COLLECTIVE
        self.is_send = kind is Kind.SEND
        self.is_plain = False


class _Numbers:
    """Numbers things in order of their first appearance."""

    def __init__(self) -> None:
        self.table: dict[object, int] = {}

    def __call__(self, thing: object) -> int:
        return self.table.setdefault(thing, len(self.table))


def match(orders: Sequence[Order]) -> Mapping[int, Mapping[int, Links]]:
    """rank -> position in its order -> links, for every communication.

    Raises:
        TwofoldError: a rank in two groups or missing between 0 and the largest, a member of a collective that is not in
            the program or does not issue it, a SEND without RECV or the other way round.
    """
    ranks = [rank for order in orders for rank in order.group.ranks]
    if sorted(ranks) != list(range(len(ranks))):
        raise TwofoldError(f"the program's groups hold the ranks {sorted(ranks)}; they must be 0 to n-1, each once")
    streams, meetings = _Numbers(), _Numbers()
    links: dict[int, dict[int, Links]] = {}
    for order in orders:
        for rank in order.group.ranks:
            links[rank] = _links_of(order, rank, streams, meetings, len(ranks))
    _check_collectives(orders, links)
    _check_transfers(orders, links)
    _mark_plain(links)
    return links


def _mark_plain(links: Mapping[int, Mapping[int, Links]]) -> None:
    transfers = {id(link): link for of_rank in links.values() for link in of_rank.values() if link.is_transfer}
    several = {key for link in transfers.values() if len(link.keys) != 1 for key in link.keys}
    for link in transfers.values():
        link.is_plain = len(link.keys) == 1 and link.keys[0] not in several and len(set(link.members[0])) == 2


def _links_of(order: Order, rank: int, streams: _Numbers, meetings: _Numbers, num_ranks: int) -> dict[int, Links]:
    result: dict[int, Links] = {}
    transfers: dict[int, Links] = {}  # a body's SEND or RECV has the same links in all its blocks
    for kind, position, _ in order.segments:
        if kind != ISSUE:
            continue
        instruction, id_ = order.instructions[position], order.ids[position]
        if instruction.kind is Kind.COLLECTIVE:
            members = order.group.members(instruction, rank)
            if max(members) >= num_ranks:
                raise TwofoldError(f"{id_!r} has the member {max(members)}, but the program has {num_ranks} ranks")
            stream = streams((rank, instruction.channel, "both"))
            result[position] = Links(stream, (meetings((id_, members)),), (members,), Kind.COLLECTIVE)
        else:
            known = transfers.get(id(instruction))
            if known is None:
                known = transfers[id(instruction)] = _transfer_links(
                    instruction, id_, rank, streams, meetings, num_ranks
                )
            result[position] = known
    return result


def _transfer_links(
    instruction: Instruction, id_: str, rank: int, streams: _Numbers, meetings: _Numbers, num_ranks: int
) -> Links:
    is_send = instruction.kind is Kind.SEND
    pairs = dict.fromkeys(
        (piece.src_rank, piece.dst_rank)
        for piece in instruction.pieces
        if (piece.src_rank if is_send else piece.dst_rank) == rank
    )
    for pair in pairs:
        if max(pair) >= num_ranks:
            raise TwofoldError(f"{id_!r} goes from rank {pair[0]} to {pair[1]}, but the program has {num_ranks} ranks")
    keys = tuple(meetings((instruction.channel, pair)) for pair in pairs)
    return Links(streams((rank, instruction.channel, str(instruction.kind))), keys, tuple(pairs), instruction.kind)


def _check_collectives(orders: Sequence[Order], links: Mapping[int, Mapping[int, Links]]) -> None:
    """Every member issues a collective, once. Inside a group that is so; a mesh may reach beyond its group."""
    here: dict[int, dict[int, str]] = {}
    for order in orders:
        for rank in order.group.ranks:
            for position, link in links[rank].items():
                if link.is_transfer:
                    continue
                issued = here.setdefault(link.keys[0], {})
                if rank in issued:
                    raise TwofoldError(
                        f"the collective {order.ids[position]!r} stands twice in a step of rank {rank}; ids are unique"
                    )
                issued[rank] = order.ids[position]
    for order in orders:
        for rank in order.group.ranks:
            for position, link in links[rank].items():
                if link.is_transfer:
                    continue
                for member in link.members[0]:
                    if member not in here[link.keys[0]]:
                        raise TwofoldError(
                            f"rank {rank} would wait for ever in {order.ids[position]!r} for rank {member}, which is a "
                            f"member {link.members[0]} but never issues it"
                        )


def _check_transfers(orders: Sequence[Order], links: Mapping[int, Mapping[int, Links]]) -> None:
    balance: Counter[int] = Counter()
    for of_rank in links.values():
        for link, count in Counter(link for link in of_rank.values() if link.is_transfer).items():
            for key in link.keys:
                balance[key] += count if link.is_send else -count
    if not any(balance.values()):
        return
    sides: dict[tuple[int, bool], list[tuple[str, str, tuple[int, ...]]]] = {}
    for order in orders:
        for rank in order.group.ranks:
            for position, link in links[rank].items():
                if link.is_transfer:
                    entry = (order.ids[position], order.instructions[position].channel)
                    for key, pair in zip(link.keys, link.members, strict=True):
                        sides.setdefault((key, link.is_send), []).append((*entry, pair))
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
