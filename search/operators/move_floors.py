"""Lower bounds on the time to redistribute a tensor, for all pairs of given layouts at once.

The bound of a pair is the least time of any single step that brings a rank the elements that it lacks: those of its
target part that it does not hold in the source, or all of them if they are partial sums. Several steps that bring the
same elements take no less, because no link has less work per byte when there are fewer bytes.

If links have tiers, the same holds for a domain (a node): elements that none of its ranks holds must enter over the
slow links, by collectives across its boundary or by transfers. A collective brings each of its groups in the domain as
much as one rank receives, so the ranks of a domain share what it lacks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plans.layout import Layout, TensorLayout
from plans.redistribution import StepKind
from plans.redistribution.atomic import primes

__all__ = ["Floors", "least_seconds"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOVING = (StepKind.ALL_GATHER, StepKind.ALL_TO_ALL, StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE)
_MAX_GROUPED = 6
"""Largest number of axes of the collectives that are considered; collectives over more ranks never take less time."""

_MAX_CELLS = 1 << 22
"""Largest product of pairs and ranks for which missing elements are counted rank by rank."""


class Floors(Protocol):
    """Lower bounds of a price on steps (see `pricing.StepSeconds`) and the results derived from them."""

    def __hash__(self) -> int:
        """Lower bounds on the seconds of steps."""

    def local_s(self, kind: StepKind, mesh: Layout, axes: frozenset[str], size_bytes: int, itemsize: int) -> float:
        """Seconds of a slice or a collective over `axes`."""

    def transfer_floors_s(self, sizes_bytes: Ints, least_peers: Ints, most_peers: int, leaves_domain: bool) -> Floats:
        """The least seconds of a transfer whose busiest rank has at least these bytes and these peers, for each
        entry."""

    def domains(self, ranks: Sequence[int]) -> tuple[int, ...] | None:
        """For each rank the domain that the fastest links join; None if that includes all ranks."""


def least_seconds(
    floors: Floors, mesh: Layout, layouts: Sequence[TensorLayout], shape: tuple[int, ...], item_bytes: int
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """[layouts, layouts]: lower bounds in seconds, and whether there is any sequence of steps."""
    lacking, adds, possible = _lacking(mesh, layouts, shape)
    needed, place = np.unique(lacking, return_inverse=True)
    least, adding = _least_steps(floors, mesh, tuple((needed * item_bytes).tolist()), item_bytes)
    seconds = np.array(least)[place.reshape(lacking.shape)]
    seconds = np.where(adds, np.maximum(seconds, adding), seconds)
    inner = _inner_axes(mesh, floors.domains(mesh.rank_list))
    if inner is not None and len(layouts) ** 2 * mesh.num_ranks <= _MAX_CELLS:
        crossing = _crossing(mesh, inner, layouts, shape)
        needed, place = np.unique(crossing, return_inverse=True)
        far = _least_far_steps(floors, mesh, inner, tuple((needed * item_bytes).tolist()), item_bytes)
        seconds = np.maximum(seconds, np.array(far)[place.reshape(crossing.shape)])
    seconds[np.eye(len(layouts), dtype=bool)] = 0.0
    return seconds, possible


def _inner_axes(mesh: Layout, domains: tuple[int, ...] | None) -> tuple[str, ...] | None:
    """The atoms of the mesh along which ranks are of one domain, where those are all of its ranks; else None."""
    if domains is None:
        return None
    atoms, inner, size = primes(mesh)[0], [], 1
    whole = len(domains) // len(set(domains))
    for axis in reversed(atoms.alias_name):
        if size < whole:
            inner.append(axis)
            size *= atoms.size((axis,))
    blocks = np.array(domains).reshape(-1, size)
    even = size == whole and bool((blocks == blocks[:, :1]).all()) and len(set(blocks[:, 0].tolist())) == len(blocks)
    return tuple(inner) if even else None


def _crossing(mesh: Layout, inner: tuple[str, ...], layouts: Sequence[TensorLayout], shape: tuple[int, ...]) -> Ints:
    """The largest number of elements that enter a domain from others, for every pair.

    Every axis splits one dim at most, so what the ranks of a domain hold together is a product over the dims.
    """
    atoms_mesh, atoms = primes(mesh)
    sizes = dict(zip(mesh.alias_name, mesh.device_matrix, strict=True))
    inside = math.prod(atoms_mesh.size((axis,)) for axis in inner)
    outer = {axis for axis, atom in atoms.items() if sizes[axis] > 1 and not set(atom) <= set(inner)}
    index = dict(zip(mesh.alias_name, np.indices(mesh.device_matrix).reshape(len(sizes), -1), strict=True))
    count, domains = len(layouts), mesh.num_ranks // inside
    wanted, common = np.ones((count, domains), dtype=np.int64), np.ones((count, count, domains), dtype=np.int64)
    for dim, whole in enumerate(shape):
        cuts: dict[tuple[str, ...], int] = {}
        place = np.array([cuts.setdefault(layout.dims[dim], len(cuts)) for layout in layouts])
        bounds = [_part(axes, whole, sizes, index, mesh.num_ranks) for axes in cuts]
        edges = np.unique(np.concatenate([[0, whole], *(each for pair in bounds for each in pair)]))
        long = np.diff(edges)
        held = np.zeros((len(cuts), domains, len(long)), dtype=bool)
        for at, (start, stop) in enumerate(bounds):
            mine = (edges[None, :-1] >= start[:, None]) & (edges[None, 1:] <= stop[:, None])
            held[at] = mine.reshape(domains, inside, -1).any(axis=1)
        wanted *= (held * long).sum(axis=-1)[place]
        both = np.einsum("sdp,tdp,p->std", held.astype(np.int64), held.astype(np.int64), long)
        common *= both[place[:, None], place[None, :]]
    adds = np.array([[bool(outer & (set(one.partial) - set(two.partial))) for two in layouts] for one in layouts])
    lacking = np.where(adds[..., None], wanted[None, :, :], wanted[None, :, :] - common)
    return np.asarray(lacking.max(axis=-1))


def _lacking(
    mesh: Layout, layouts: Sequence[TensorLayout], shape: tuple[int, ...]
) -> tuple[Ints, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """For every pair: the most elements that a rank lacks, whether sums have to be reduced, and whether a way
    exists."""
    sizes = dict(zip(mesh.alias_name, mesh.device_matrix, strict=True))
    local = np.array([math.prod(layout.local_shape(shape)) for layout in layouts], dtype=np.int64)
    bits = {axis: 1 << at for at, axis in enumerate(mesh.alias_name) if sizes[axis] > 1}
    partial = np.array([sum(bits.get(axis, 0) for axis in layout.partial) for layout in layouts], dtype=np.int64)
    possible = (partial[None, :] & ~partial[:, None]) == 0
    adds = (partial[:, None] & ~partial[None, :]) != 0
    count, num_ranks = len(layouts), mesh.num_ranks
    if count * count * num_ranks > _MAX_CELLS:
        held = np.minimum(local[:, None], local[None, :])
    else:
        index = dict(zip(mesh.alias_name, np.indices(mesh.device_matrix).reshape(len(sizes), -1), strict=True))
        common = np.ones((count, count, num_ranks), dtype=np.int64)
        for dim, whole in enumerate(shape):
            cuts: dict[tuple[str, ...], int] = {}
            place = np.array([cuts.setdefault(layout.dims[dim], len(cuts)) for layout in layouts])
            start, stop = np.array([_part(axes, whole, sizes, index, num_ranks) for axes in cuts]).transpose(1, 0, 2)
            both = np.minimum(stop[:, None], stop[None]) - np.maximum(start[:, None], start[None])
            common *= np.maximum(both, 0)[place[:, None], place[None, :]]
        held = common.min(axis=-1)  # parts are even: who holds least lacks most
    return np.where(adds, local[None, :], np.maximum(local[None, :] - held, 0)), adds, possible


def _part(
    axes: Sequence[str], whole: int, sizes: dict[str, int], index: dict[str, Ints], num_ranks: int
) -> tuple[Ints, Ints]:
    """Begin and end of the part of every rank."""
    start, long = np.zeros(num_ranks, dtype=np.int64), np.full(num_ranks, whole, dtype=np.int64)
    for axis in axes:
        part = -(-long // sizes[axis])
        offset = np.minimum(part * index[axis], long)
        start, long = start + offset, np.minimum(part, long - offset)
    return start, start + long


@lru_cache(maxsize=256)
def _least_steps(
    floors: Floors, mesh: Layout, needed_bytes: tuple[int, ...], item_bytes: int
) -> tuple[tuple[float, ...], float]:
    """The least seconds of one step that brings this number of bytes to a rank, without and with a reduction."""
    if floors.domains(mesh.rank_list) is not None:
        mesh = primes(mesh)[0]  # a step may be taken over a part of an axis that is within a node
    groups = _groups(floors, mesh)
    if not groups:
        return tuple(0.0 for _ in needed_bytes), 0.0
    sizes = np.array(needed_bytes, dtype=np.int64)
    least = floors.transfer_floors_s(sizes, np.ones_like(sizes), mesh.num_ranks - 1, False).tolist()
    slice_s = floors.local_s(StepKind.SLICE, mesh, frozenset(), 0, item_bytes)
    for at, size in enumerate(needed_bytes):
        moved_s = _least_collective_s(floors, mesh, groups, size, item_bytes)
        least[at] = min(least[at], moved_s) if size else min(least[at], slice_s, moved_s)
    adding = min(
        floors.local_s(kind, mesh, group, 0, item_bytes)
        for kind in (StepKind.REDUCE_SCATTER, StepKind.ALL_REDUCE)
        for group in groups
    )
    return tuple(least), adding


@lru_cache(maxsize=256)
def _groups(floors: Floors, mesh: Layout) -> tuple[frozenset[str], ...]:
    """The sets of axes that a collective may pass over; of those that cost the same, one."""
    axes = [axis for axis in mesh.alias_name if mesh.size((axis,)) > 1]
    most = len(axes) if len(axes) <= _MAX_GROUPED else 1
    groups = [frozenset(some) for count in range(1, most + 1) for some in itertools.combinations(axes, count)]
    if floors.domains(mesh.rank_list) is None:
        groups = list({mesh.size(group): group for group in groups}.values())
    return tuple(groups)


@lru_cache(maxsize=65_536)
def _least_collective_s(
    floors: Floors, mesh: Layout, groups: tuple[frozenset[str], ...], size_bytes: int, item_bytes: int
) -> float:
    """The least seconds of a collective over one of some sets of axes."""
    return min(floors.local_s(kind, mesh, group, size_bytes, item_bytes) for kind in _MOVING for group in groups)


@lru_cache(maxsize=256)
def _least_far_steps(
    floors: Floors, mesh: Layout, inner: tuple[str, ...], needed_bytes: tuple[int, ...], item_bytes: int
) -> tuple[float, ...]:
    """The least seconds of one step that brings a number of bytes to a domain from others."""
    mesh = primes(mesh)[0]
    axes = [axis for axis in mesh.alias_name if mesh.size((axis,)) > 1]
    if len(axes) > _MAX_GROUPED:
        return tuple(0.0 for _ in needed_bytes)
    far: dict[int, tuple[frozenset[str], ...]] = {}
    for group in _groups(floors, mesh):
        if not group <= set(inner):
            shares = mesh.size(set(inner) - group)
            far[shares] = (*far.get(shares, ()), group)
    sizes = np.array(needed_bytes, dtype=np.int64)
    least = floors.transfer_floors_s(sizes // mesh.size(inner), np.ones_like(sizes), mesh.num_ranks - 1, True).tolist()
    for at, size in enumerate(needed_bytes):
        moved = [
            _least_collective_s(floors, mesh, groups, size // shares, item_bytes) for shares, groups in far.items()
        ]
        least[at] = min(least[at], *moved) if size else 0.0
    return tuple(least)
