"""The load of the busiest rank of a transfer, computed with arrays. `pieces` lists the messages themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from plans.layout import DimAxes, Layout, TensorLayout
from plans.redistribution.cuts import Indices, cut
from plans.redistribution.pieces import check

__all__ = ["Load", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of the busiest rank of a transfer.

    Args:
        num_peers: the most ranks that one rank sends to, or receives from.
        num_elements: the most elements that one rank sends, or receives.
        pairs: (sender, receiver) of all that is sent between ranks.
    """

    num_peers: int
    num_elements: int
    pairs: frozenset[tuple[int, int]]


def load(source: TensorLayout, target: TensorLayout, shape: Sequence[int]) -> Load:
    """The load of the busiest rank when `pieces` move.

    >>> mesh = Layout((2,), ("dp",))
    >>> busiest = load(mesh("dp"), mesh("None"), (4,))
    >>> busiest.num_peers, busiest.num_elements, sorted(busiest.pairs)
    (1, 2, [(0, 1), (1, 0)])
    """
    return _load(source, target, tuple(shape))


@lru_cache(maxsize=16384)
def _load(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]) -> Load:
    check(source, target, shape)
    senders, receivers = _ranks(source.mesh), _ranks(target.mesh)
    asked, owner, first, num_owners = _asked(source, target, shape)
    boxes, there = np.nonzero(asked)
    if not len(boxes):
        return Load(num_peers=0, num_elements=0, pairs=frozenset())
    before = np.cumsum(asked, axis=1) - asked
    sizes, before, total = asked[boxes, there], before[boxes, there], asked.sum(axis=1)[boxes]
    common = np.gcd.reduce(sizes)  # the same share of smaller numbers, so that products fit 64 bits
    middle = 2 * (before // common) + sizes // common
    replica = middle * num_owners[boxes] // (2 * (total // common))
    here = owner[first[boxes] + replica]
    sent, got = np.zeros(len(senders), dtype=np.int64), asked.sum(axis=0)
    np.add.at(sent, here, sizes)
    peers = max(np.bincount(here).max(), np.bincount(there).max())  # a rank holds one box, so no pair comes twice
    return Load(
        num_peers=int(peers),
        num_elements=int(max(sent.max(), got.max())),
        pairs=frozenset(zip(senders[here].tolist(), receivers[there].tolist(), strict=True)),
    )


def _asked(
    source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]
) -> tuple[Indices, Indices, Indices, Indices]:
    """[boxes of the source, ranks of the target] elements that a rank lacks; owners by box, where each box begins, how
    many it has."""
    boxes = _terms(source.mesh, source.partial)
    numbers, meets = [boxes], [_terms(target.mesh, target.partial)]
    common = []
    for size, old, new in zip(shape, source.dims, target.dims, strict=True):
        (mine, low, high), (theirs, start, stop) = _numbered(source.mesh, old, size), _numbered(target.mesh, new, size)
        numbers.append(mine)
        meets.append(theirs)
        common.append(np.maximum(np.minimum(high[:, None], stop) - np.maximum(low[:, None], start), 0))
        boxes = boxes * len(low) + mine
    _, one, box_of, num_owners = np.unique(boxes, return_index=True, return_inverse=True, return_counts=True)
    asked = (numbers[0][one][:, None] == meets[0]).astype(np.int64)
    for both, mine, theirs in zip(common, numbers[1:], meets[1:], strict=True):
        asked = asked * both[mine[one][:, None], theirs]
    box_of = box_of.reshape(-1)
    if source.mesh.rank_list == target.mesh.rank_list:
        asked[box_of, np.arange(len(box_of))] = 0
    else:
        place = {rank: at for at, rank in enumerate(source.mesh.rank_list)}
        for at, rank in enumerate(target.mesh.rank_list):
            if rank in place:
                asked[box_of[place[rank]], at] = 0
    return asked, np.argsort(box_of, kind="stable"), np.cumsum(num_owners) - num_owners, num_owners


@lru_cache(maxsize=4096)
def _numbered(mesh: Layout, axes: DimAxes, size: int) -> tuple[Indices, Indices, Indices]:
    """Which part of a dim each rank has, where the parts begin and end."""
    low, high = cut(mesh, axes, size)
    _, one, number = np.unique(low * (size + 1) + high, return_index=True, return_inverse=True)
    return number.reshape(-1), low[one], high[one]


@lru_cache(maxsize=1024)
def _terms(mesh: Layout, partial: DimAxes) -> Indices:
    return np.array([mesh.index(rank, partial) for rank in mesh.rank_list], dtype=np.int64)


@lru_cache(maxsize=256)
def _ranks(mesh: Layout) -> Indices:
    return np.array(mesh.rank_list, dtype=np.int64)
