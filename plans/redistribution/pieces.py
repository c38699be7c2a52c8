"""Which rank sends which part of a tensor to which rank, from any layout to any other.

Both layouts cut the tensor into boxes, so a destination's box meets every source box in at most one box: a piece. No
work is done per element. The cost is proportional to the number of pieces.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from plans.errors import TwofoldError
from plans.layout import Region, TensorLayout

__all__ = ["Piece", "pieces"]


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


@lru_cache(maxsize=1024)
def _pieces(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    if not len(source.dims) == len(target.dims) == len(shape):
        raise TwofoldError(f"a tensor of shape {shape} cannot go from {source} to {target}: the numbers of dims differ")
    if source.mesh.size(source.partial) != target.mesh.size(target.partial):
        raise TwofoldError(
            f"{source} cannot be transferred to {target}: reduce the partial sums first, a transfer only moves values"
        )
    # a source box is known by its interval in every dim and its partial term; replicas own the same box
    owners: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    intervals: list[set[tuple[int, int]]] = [set() for _ in shape]
    for rank in source.mesh.rank_list:
        region = source.region(rank, shape)
        owners[((source.mesh.index(rank, source.partial), 0), *region)].append(rank)
        for seen, interval in zip(intervals, region, strict=True):
            seen.add(interval)
    ordered = [sorted(interval for interval in seen if interval[0] < interval[1]) for seen in intervals]
    position = {rank: at for at, rank in enumerate(source.mesh.rank_list)}
    owned = {key: set(ranks) for key, ranks in owners.items()}
    sent: dict[int, int] = defaultdict(int)
    found: list[Piece] = []
    for at, rank in enumerate(target.mesh.rank_list):
        region = target.region(rank, shape)
        term = (target.mesh.index(rank, target.partial), 0)
        meets = [
            [(cut, (max(cut[0], start), min(cut[1], stop))) for cut in cuts if cut[0] < stop and start < cut[1]]
            for cuts, (start, stop) in zip(ordered, region, strict=True)
        ]
        for cell in product(*meets):
            key = (term, *(cut for cut, _ in cell))
            part = tuple(common for _, common in cell)
            # dims are cut independently of each other, so every combination of intervals is somebody's box
            if rank in owned[key]:
                found.append(Piece(src_rank=rank, dst_rank=rank, region=part))
                continue
            near = min(owners[key], key=lambda owner: (sent[owner], abs(position[owner] - at), position[owner]))
            sent[near] += math.prod(stop - start for start, stop in part)
            found.append(Piece(src_rank=near, dst_rank=rank, region=part))
    return tuple(found)
