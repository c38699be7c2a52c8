"""Which rank sends which part of a tensor to which rank, from any layout to any other.

Both layouts cut the tensor into boxes, so a destination's box meets every source box in at most one box: a piece. No
work is done per element. The cost is proportional to the number of pieces.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import overload

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.layout import Layout, Region, TensorLayout
from plans.redistribution.cuts import cut

__all__ = ["NO_PIECES", "Piece", "TransferPieces", "check", "pieces"]

_Ints = npt.NDArray[np.int64]


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


class TransferPieces(Sequence[Piece]):
    """The pieces of a transfer in columns, so that transfers between 100,000 ranks are handled as arrays.

    Attributes:
        src_ranks, dst_ranks: of each piece.
        num_elements: of each piece.

    >>> parts = [Piece(src_rank=0, dst_rank=2, region=((0, 4),)), Piece(src_rank=1, dst_rank=2, region=())]
    >>> TransferPieces(parts).pairs
    {(0, 2): 4, (1, 2): 1}
    """

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        given = tuple(pieces)
        self._regions: Sequence[Region] = [piece.region for piece in given]
        self.src_ranks: _Ints = np.array([piece.src_rank for piece in given], dtype=np.int64)
        self.dst_ranks: _Ints = np.array([piece.dst_rank for piece in given], dtype=np.int64)
        self.num_elements: _Ints = np.array([piece.num_elements for piece in given], dtype=np.int64)

    @classmethod
    def _of_columns(cls, src: _Ints, dst: _Ints, regions: Sequence[Region], num_elements: _Ints) -> TransferPieces:
        found = cls.__new__(cls)
        found.src_ranks, found.dst_ranks, found._regions, found.num_elements = src, dst, regions, num_elements
        return found

    @cached_property
    def by_pair(self) -> tuple[_Ints, _Ints]:
        """The distinct pairs of ranks in the order in which they come, shape (pairs, 2), and the elements of each.

        A pair sends its pieces together; what a rank keeps is a pair of itself.
        """
        both = np.stack([self.src_ranks, self.dst_ranks], axis=1)
        keys = both[:, 0] * (1 + both.max(initial=0)) + both[:, 1]
        _, first, number = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(first)
        return both[first[order]], _sums(number, self.num_elements)[order]

    @cached_property
    def pairs(self) -> dict[tuple[int, int], int]:
        """(sending rank, receiving rank) -> elements, without what a rank keeps."""
        pairs, elements = self.by_pair
        moved = pairs[:, 0] != pairs[:, 1]
        return dict(zip(map(tuple, pairs[moved].tolist()), elements[moved].tolist(), strict=True))

    @cached_property
    def most_sent(self) -> int:
        """The most elements that a rank sends to others."""
        return self._most(self.src_ranks)

    @cached_property
    def most_received(self) -> int:
        """The most elements that a rank receives from others."""
        return self._most(self.dst_ranks)

    def _most(self, ranks: _Ints) -> int:
        moved = self.src_ranks != self.dst_ranks
        return int(_sums(ranks[moved], self.num_elements[moved]).max(initial=0))

    def of_rank(self, rank: int, *, sends: bool) -> tuple[Piece, ...]:
        """The pieces that a rank sends to others, or receives from them."""
        own = (self.src_ranks if sends else self.dst_ranks) == rank
        (moved,) = np.nonzero(own & (self.src_ranks != self.dst_ranks))
        return tuple(
            Piece(src_rank=int(self.src_ranks[at]), dst_rank=int(self.dst_ranks[at]), region=self._regions[at])
            for at in moved.tolist()
        )

    def partners(self, rank: int, *, sends: bool) -> tuple[int, ...]:
        """The ranks that a rank sends to, or receives from, each once; itself for what it keeps."""
        own, other = (self.src_ranks, self.dst_ranks) if sends else (self.dst_ranks, self.src_ranks)
        return tuple(dict.fromkeys(other[own == rank].tolist()))

    def pairs_of(self, rank: int, *, sends: bool) -> tuple[tuple[int, ...], ...]:
        """(sending rank, receiving rank) of what a rank sends, or receives, each once; with what it keeps."""
        others = self.partners(rank, sends=sends)
        return tuple((rank, other) if sends else (other, rank) for other in others)

    @cached_property
    def _all(self) -> tuple[Piece, ...]:
        ranks = zip(self.src_ranks.tolist(), self.dst_ranks.tolist(), self._regions, strict=True)
        return tuple(Piece(src_rank=src, dst_rank=dst, region=region) for src, dst, region in ranks)

    def __len__(self) -> int:
        return len(self._regions)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._all)

    @overload
    def __getitem__(self, at: int) -> Piece: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Piece, ...]: ...

    def __getitem__(self, at: int | slice) -> Piece | tuple[Piece, ...]:
        return self._all[at]

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, TransferPieces):
            return self is other
        columns = ((self.src_ranks, other.src_ranks), (self.dst_ranks, other.dst_ranks))
        return all(np.array_equal(*both) for both in columns) and list(self._regions) == list(other._regions)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.src_ranks.tobytes(), self.dst_ranks.tobytes(), self.num_elements.tobytes()))

    def __repr__(self) -> str:
        return f"TransferPieces({list(self._all)!r})"


def _sums(number: _Ints, amount: _Ints) -> _Ints:
    """The sum of the amounts of every number from 0 to the largest."""
    found = np.zeros(1 + int(number.max(initial=-1)), dtype=np.int64)
    np.add.at(found, number, amount)
    return found


NO_PIECES = TransferPieces()
"""Nothing is sent."""


def pieces(source: TensorLayout, target: TensorLayout, shape: Sequence[int]) -> TransferPieces:
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
def _pieces(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]) -> TransferPieces:
    senders, receivers = source.mesh.rank_list, target.mesh.rank_list
    if set(senders).isdisjoint(receivers):  # then only positions matter, as they do between every two stages alike
        here, there, regions, elements = _between(_numbered(source, 0), _numbered(target, len(senders)), shape)
    else:
        here, there, regions, elements = _columns(source, target, shape)
    src, dst = np.array(senders, dtype=np.int64)[here], np.array(receivers, dtype=np.int64)[there]
    return TransferPieces._of_columns(src, dst, regions, elements)


def _numbered(layout: TensorLayout, first: int) -> TensorLayout:
    """The same on ranks that count from `first`."""
    mesh = layout.mesh
    ranked = _counted(mesh.device_matrix, mesh.alias_name, first, mesh.num_ranks)
    return TensorLayout(mesh=ranked, dims=layout.dims, partial=layout.partial)


@lru_cache(maxsize=64)
def _counted(device_matrix: tuple[int, ...], names: tuple[str, ...], first: int, count: int) -> Layout:
    return Layout(device_matrix, names, range(first, first + count))


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The pieces that make up one box of the target: the numbers of the source boxes, the elements, the regions."""

    numbers: _Ints
    elements: _Ints
    regions: list[Region]


def _columns(
    source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]
) -> tuple[_Ints, _Ints, list[Region], _Ints]:
    """Per piece: positions of the sending and of the receiving rank in their meshes, its region, its elements."""
    check(source, target, shape)
    # the number of a source box counts its partial term and its cuts; replicas own the same box
    own, sizes, cuts = _terms(source), [], []
    for size, axes in zip(shape, source.dims, strict=True):
        ranges = list(zip(*(each.tolist() for each in cut(source.mesh, axes, size)), strict=True))
        cuts.append(sorted(set(ranges)))
        number_of = {each: number for number, each in enumerate(cuts[-1])}
        sizes.append(len(cuts[-1]))
        own = own * sizes[-1] + np.array([number_of[each] for each in ranges], dtype=np.int64)
    wanted = [zip(*(each.tolist() for each in cut(target.mesh, axes, size)), strict=True)
              for size, axes in zip(shape, target.dims, strict=True)]  # fmt: skip
    of_rank = list(zip(*wanted, strict=True)) if wanted else [()] * target.mesh.num_ranks
    known = {box: _boxes_of(box, cuts) for box in dict.fromkeys(of_rank)}
    found = [known[box] for box in of_rank]
    counts = np.array([len(each.regions) for each in found], dtype=np.int64)
    boxes = np.concatenate([each.numbers for each in found]) + np.repeat(_terms(target) * math.prod(sizes), counts)
    elements = np.concatenate([each.elements for each in found])
    place = {rank: at for at, rank in enumerate(source.mesh.rank_list)}
    here = np.repeat(np.array([place.get(rank, -1) for rank in target.mesh.rank_list], dtype=np.int64), counts)
    (asked,) = np.nonzero((here < 0) | (own[here] != boxes))
    if len(asked):
        here[asked] = _dealt(boxes[asked], elements[asked], own)
    regions = [region for each in found for region in each.regions]
    return here, np.repeat(np.arange(len(found)), counts), regions, elements


def _terms(layout: TensorLayout) -> _Ints:
    """The number of every rank's partial term."""
    mesh = layout.mesh
    return np.array([mesh.index(rank, layout.partial) for rank in mesh.rank_list], dtype=np.int64)


def _boxes_of(box: Region, cuts: Sequence[Sequence[tuple[int, int]]]) -> _Boxes:
    """The pieces of a box. Dims are cut independently of each other, so every combination of cuts is somebody's box."""
    numbers, elements, by_dim = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), []
    for (start, stop), distinct in zip(box, cuts, strict=True):
        first = bisect_right([last for _, last in distinct], start)  # ascending, both
        last = bisect_left([begin for begin, _ in distinct], stop)
        common = [
            (max(low, start), min(high, stop), number)
            for number, (low, high) in enumerate(distinct[first:last], first)
            if min(high, stop) > max(low, start)
        ]
        by_dim.append([(low, high) for low, high, _ in common])
        held = np.array(common, dtype=np.int64).reshape(-1, 3)
        numbers = (numbers[:, None] * len(distinct) + held[:, 2]).ravel()
        elements = (elements[:, None] * (held[:, 1] - held[:, 0])).ravel()
    return _Boxes(numbers, elements, list(product(*by_dim)))


def _dealt(boxes: _Ints, elements: _Ints, own: _Ints) -> _Ints:
    """The positions of the ranks that send the pieces of these boxes, the elements of a box in equal shares."""
    order = np.argsort(boxes, kind="stable")
    box, size = boxes[order], elements[order] // np.gcd.reduce(elements)
    starts = np.flatnonzero(np.append(True, box[1:] != box[:-1]))
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(box))))
    before = np.cumsum(size) - size
    before -= before[starts][group]
    owners = np.argsort(own, kind="stable")
    first, stop = (np.searchsorted(own[owners], box[starts], side) for side in ("left", "right"))
    replica = (2 * before + size) * (stop - first)[group] // (2 * np.add.reduceat(size, starts)[group])
    found = np.empty_like(boxes)
    found[order] = owners[first[group] + replica]
    return found


_between = lru_cache(maxsize=16)(_columns)


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
