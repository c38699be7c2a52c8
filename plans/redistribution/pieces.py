"""Which rank sends which part of a tensor to which rank, from any layout to any other.

Both layouts cut the tensor into boxes, so a destination's box meets every source box in at most one box: a piece. No
work is done per element. The cost is proportional to the number of pieces.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from plans.errors import TwofoldError
from plans.layout import Region, TensorLayout
from plans.redistribution.cuts import cut

__all__ = ["Load", "Piece", "load", "pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of the global tensor that `dst_rank` takes from `src_rank`; equal ranks mark what it holds already."""

    src_rank: int
    dst_rank: int
    region: Region

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent."""
        return self.src_rank == self.dst_rank

    @property
    def num_elements(self) -> int:
        """How many elements the box has."""
        return math.prod(stop - start for start, stop in self.region)


def pieces(source: TensorLayout, target: TensorLayout, shape: Sequence[int]) -> tuple[Piece, ...]:
    """Every piece of `target`, taken from ranks of `source`, ordered by destination and then by index.

    Among the replicas of a part a destination takes its own; otherwise the rank that sends least so far, the nearest
    position in the mesh first. So senders share the load, and equal layouts on two equally wide meshes give one pair
    per rank, matching positions.

    Args:
        source: where the tensor lies; partial only if `target` is partial over as many ranks (terms move as terms).
        target: where it goes, on any mesh.
        shape: the global shape.

    Raises:
        TwofoldError: the ranks of the two layouts hold different numbers of partial terms, or the dims do not fit.

    >>> from plans.layout import Layout
    >>> mesh = Layout((2,), ("dp",))
    >>> [(p.src_rank, p.dst_rank, p.region) for p in pieces(mesh("dp"), mesh("None"), (4,))]
    [(0, 0, ((0, 2),)), (1, 0, ((2, 4),)), (0, 1, ((0, 2),)), (1, 1, ((2, 4),))]
    """
    return _pieces(source, target, tuple(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the busiest rank of a transfer has to do.

    Args:
        num_peers: the most ranks that one rank sends to, or receives from.
        num_elements: the most elements that one rank sends, or receives.
        pairs: (sender, receiver) of all that is sent between ranks.
    """

    num_peers: int
    num_elements: int
    pairs: frozenset[tuple[int, int]]


def load(source: TensorLayout, target: TensorLayout, shape: Sequence[int]) -> Load:
    """The load of the busiest rank when `pieces` move, found without making them.

    >>> from plans.layout import Layout
    >>> mesh = Layout((2,), ("dp",))
    >>> busiest = load(mesh("dp"), mesh("None"), (4,))
    >>> busiest.num_peers, busiest.num_elements, sorted(busiest.pairs)
    (1, 2, [(0, 1), (1, 0)])
    """
    return _load(source, target, tuple(shape))


@lru_cache(maxsize=16384)
def _load(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]) -> Load:
    pairs: set[tuple[int, int]] = set()
    sent: dict[int, int] = defaultdict(int)
    got: dict[int, int] = defaultdict(int)
    senders, receivers = source.mesh.rank_list, target.mesh.rank_list
    for here, there, size, _ in _hand_overs(source, target, shape):
        sender, receiver = senders[here], receivers[there]
        if sender != receiver:
            sent[sender] += size
            got[receiver] += size
            pairs.add((sender, receiver))
    peers = Counter(("from", sender) for sender, _ in pairs) + Counter(("to", receiver) for _, receiver in pairs)
    return Load(
        num_peers=max(peers.values(), default=0),
        num_elements=max([*sent.values(), *got.values()], default=0),
        pairs=frozenset(pairs),
    )


@lru_cache(maxsize=1024)
def _pieces(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    senders, receivers = source.mesh.rank_list, target.mesh.rank_list
    return tuple(
        Piece(src_rank=senders[here], dst_rank=receivers[there], region=tuple(part[0] for part in parts))
        for here, there, _, parts in _hand_overs(source, target, shape)
    )


_Part = tuple[tuple[int, int], int, int]
"""Of one dim: the range that is handed over, its length, and the number of the source's cut that holds it."""


def _hand_overs(
    source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]
) -> Iterator[tuple[int, int, int, tuple[_Part, ...]]]:
    """Per piece: positions of the sending and of the receiving rank in their meshes, its elements, its parts by dim."""
    if not len(source.dims) == len(target.dims) == len(shape):
        raise TwofoldError(f"a tensor of shape {shape} cannot go from {source} to {target}: the numbers of dims differ")
    if source.mesh.size(source.partial) != target.mesh.size(target.partial):
        raise TwofoldError(
            f"{source} cannot be transferred to {target}: reduce the partial sums first, a transfer only moves values"
        )
    # a source box is known by the numbers of its cuts and its partial term; replicas own the same box
    owners: dict[tuple[int, ...], list[int]] = defaultdict(list)
    terms = [source.mesh.index(rank, source.partial) for rank in source.mesh.rank_list]
    numbers, meets = [terms], []
    for size, old, new in zip(shape, source.dims, target.dims, strict=True):
        low, high = cut(source.mesh, old, size)
        held = list(zip(low.tolist(), high.tolist(), strict=True))
        distinct = sorted(set(held))
        number_of = {each: number for number, each in enumerate(distinct)}
        numbers.append([number_of[each] for each in held])
        low, high = cut(target.mesh, new, size)
        known: dict[tuple[int, int], list[_Part]] = {}
        for start, stop in set(zip(low.tolist(), high.tolist(), strict=True)):
            common = [
                ((max(first, start), min(last, stop)), min(last, stop) - max(first, start), number)
                for number, (first, last) in enumerate(distinct)
            ]
            known[start, stop] = [part for part in common if part[1] > 0]
        meets.append([known[each] for each in zip(low.tolist(), high.tolist(), strict=True)])
    for at, key in enumerate(zip(*numbers, strict=True)):
        owners[key].append(at)
    own = list(zip(*numbers, strict=True))
    place = {rank: at for at, rank in enumerate(source.mesh.rank_list)}
    sent = [0] * source.mesh.num_ranks
    for at, rank in enumerate(target.mesh.rank_list):
        term, mine = target.mesh.index(rank, target.partial), place.get(rank, -1)
        # dims are cut independently of each other, so every combination of cuts is somebody's box
        for parts in product(*(meet[at] for meet in meets)):
            box = (term, *(number for _, _, number in parts))
            elements = math.prod(length for _, length, _ in parts)
            if mine >= 0 and own[mine] == box:
                yield mine, at, elements, parts
                continue
            candidates = owners[box]
            near = candidates[0]
            if len(candidates) > 1:
                near = min(candidates, key=lambda owner: (sent[owner], abs(owner - at), owner))
            sent[near] += elements
            yield near, at, elements, parts
