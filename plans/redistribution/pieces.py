"""Which rank sends which part of a tensor to which rank, from any layout to any other.

Both layouts cut the tensor into boxes, so a destination's box meets every source box in at most one box: a piece. No
work is done per element. The cost is proportional to the number of pieces.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from plans.errors import TwofoldError
from plans.layout import Layout, Region, TensorLayout
from plans.redistribution.cuts import cut

__all__ = ["Piece", "check", "pieces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of the global tensor that `dst_rank` takes from `src_rank`; equal ranks mark what it holds already."""

    src_rank: int
    dst_rank: int
    region: Region

    @property
    def is_local(self) -> bool:
        """Whether sender and receiver are the same rank."""
        return self.src_rank == self.dst_rank

    @property
    def num_elements(self) -> int:
        """Number of elements of the box."""
        return math.prod(stop - start for start, stop in self.region)


def pieces(source: TensorLayout, target: TensorLayout, shape: Sequence[int]) -> tuple[Piece, ...]:
    """Every piece of `target`, taken from ranks of `source`, ordered by destination and then by index.

    A destination that holds a part takes its own. The others, in the order of their mesh, are dealt to the replicas of
    the part in the order of theirs, each replica an equal share of the elements; so senders share the load, neighbours
    take from neighbours, and equal layouts on two equally wide meshes give one pair per rank, matching positions.

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


@lru_cache(maxsize=1024)
def _pieces(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    senders, receivers = source.mesh.rank_list, target.mesh.rank_list
    if set(senders).isdisjoint(receivers):  # then only positions matter, as they do between every two stages alike
        found = _between(_numbered(source, 0), _numbered(target, len(senders)), shape)
    else:
        found = _hand_overs(source, target, shape)
    return tuple(
        Piece(src_rank=senders[here], dst_rank=receivers[there], region=tuple([part[0] for part in parts]))
        for here, there, parts in found
    )


def _numbered(layout: TensorLayout, first: int) -> TensorLayout:
    """The same on ranks that count from `first`."""
    mesh = layout.mesh
    ranked = _counted(mesh.device_matrix, mesh.alias_name, first, mesh.num_ranks)
    return TensorLayout(mesh=ranked, dims=layout.dims, partial=layout.partial)


@lru_cache(maxsize=64)
def _counted(device_matrix: tuple[int, ...], names: tuple[str, ...], first: int, count: int) -> Layout:
    return Layout(device_matrix, names, range(first, first + count))


_Part = tuple[tuple[int, int], int, int]
"""For one dim: the range that is sent, its length, and the number of the source's cut that holds it."""


def _hand_overs(
    source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]
) -> list[tuple[int, int, tuple[_Part, ...]]]:
    """Per piece: positions of the sending and of the receiving rank in their meshes, its parts by dim."""
    check(source, target, shape)
    # a source box is known by the numbers of its cuts and its partial term; replicas own the same box
    numbers, meets = [[source.mesh.index(rank, source.partial) for rank in source.mesh.rank_list]], []
    for size, old, new in zip(shape, source.dims, target.dims, strict=True):
        low, high = cut(source.mesh, old, size)
        held = list(zip(low.tolist(), high.tolist(), strict=True))
        distinct = sorted(set(held))
        number_of = {each: number for number, each in enumerate(distinct)}
        numbers.append([number_of[each] for each in held])
        low, high = cut(target.mesh, new, size)
        firsts, lasts = [first for first, _ in distinct], [last for _, last in distinct]  # ascending, both
        known: dict[tuple[int, int], list[_Part]] = {}
        for start, stop in set(zip(low.tolist(), high.tolist(), strict=True)):
            common = [
                ((max(firsts[number], start), min(lasts[number], stop)), number)
                for number in range(bisect_right(lasts, start), bisect_left(firsts, stop))
            ]
            known[start, stop] = [((low, high), high - low, number) for (low, high), number in common if high > low]
        meets.append([known[each] for each in zip(low.tolist(), high.tolist(), strict=True)])
    own = list(zip(*numbers, strict=True))
    owners: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, box in enumerate(own):
        owners[box].append(at)
    place = {rank: at for at, rank in enumerate(source.mesh.rank_list)}
    found: list[tuple[int, int, tuple[_Part, ...]]] = []
    asked: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)  # box -> which of `found`, its elements
    for at, rank in enumerate(target.mesh.rank_list):
        term, mine = target.mesh.index(rank, target.partial), place.get(rank, -1)
        # dims are cut independently of each other, so every combination of cuts is somebody's box
        for parts in product(*(meet[at] for meet in meets)):
            box = (term, *(number for _, _, number in parts))
            if mine < 0 or own[mine] != box:
                asked[box].append((len(found), math.prod(length for _, length, _ in parts)))
            found.append((mine, at, parts))
    for box, requests in asked.items():
        before, total = 0, sum(elements for _, elements in requests)
        for which, elements in requests:
            replica = (2 * before + elements) * len(owners[box]) // (2 * total)
            found[which] = (owners[box][replica], *found[which][1:])
            before += elements
    return found


@lru_cache(maxsize=16)
def _between(
    source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]
) -> list[tuple[int, int, tuple[_Part, ...]]]:
    return _hand_overs(source, target, shape)


def check(source: TensorLayout, target: TensorLayout, shape: Sequence[int]) -> None:
    """Refuse an impossible transfer.

    Raises:
        TwofoldError: the ranks of the two layouts hold different numbers of partial terms, or the dims do not fit.
    """
    if not len(source.dims) == len(target.dims) == len(shape):
        raise TwofoldError(
            f"a tensor of shape {tuple(shape)} cannot go from {source} to {target}: the numbers of dims differ"
        )
    if source.mesh.size(source.partial) != target.mesh.size(target.partial):
        raise TwofoldError(
            f"{source} cannot be transferred to {target}: reduce the partial sums first, a transfer only moves values"
        )
