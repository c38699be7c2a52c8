"""The location of a communication's ranks on the network: everything that its price depends on.

A group falls into domains of every tier of links. Regular groups (equal strides, as the axes of a mesh have) are
counted in closed form, others by listing their ranks. The groups along the same axes of a mesh are siblings: they
communicate at the same time, and share the way out of a domain that holds members of several of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from costmodels.machine.links import Link
from costmodels.machine.machine import Machine
from plans.errors import TwofoldError
from plans.layout import Layout

__all__ = ["Domains", "Group", "axes_group", "first_group", "mesh_group", "pair_group", "ranks_group"]

Axes = tuple[tuple[int, int], ...]
"""(size, stride) of axes of a mesh."""

Sizes = tuple[tuple[int, bool], ...]
"""For each tier the ranks of a domain, and whether they share an uplink."""

_MOST_LISTED = 2**22
"""Members of all groups together, above which groups are not listed."""


@dataclass(frozen=True, slots=True)
class Domains:
    """The division of a group into the domains of one tier.

    Args:
        number: number of the domains that hold members.
        fullest: members in the fullest of them.
        emptiest: members in the emptiest of them.
        cut: the largest product of members inside and outside of a domain: pairs that talk over its border.
        sharing: groups, this one included, that leave the same domain by a shared way when all siblings communicate.
    """

    number: int
    fullest: int
    emptiest: int
    cut: int
    sharing: float = 1.0


@dataclass(frozen=True, slots=True)
class Group:
    """A group of ranks that communicate, and its siblings, placed on the links of a machine.

    Args:
        members: ranks of the group.
        tiers: its domains on every tier, from the fastest to the one that joins all members.
        ranks: on a graph of links, the members of every sibling; () on tiers.

    >>> group = axes_group(Machine.load("h100-sxm-x1024"), [(128, 8)], 1024)
    >>> group.members, group.top, group.together, group.tiers[0].number
    (128, 1, 1, 128)
    """

    members: int
    tiers: tuple[Domains, ...]
    ranks: tuple[tuple[int, ...], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.members, self.tiers, self.ranks)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def top(self) -> int:
        """The number of the slowest tier that the group uses."""
        return len(self.tiers) - 1

    @property
    def together(self) -> int:
        """The fewest members in a domain of the tier below the slowest one; 1 for a group inside the first tier."""
        return self.tiers[-2].emptiest if self.top else 1

    @property
    def _farness(self) -> tuple[int, int, int]:
        return self.top, -self.together, self.tiers[0].fullest

    def is_no_nearer(self, other: Group) -> bool:
        """Whether this group is on links that are no faster than those of another one of as many members: a farther
        tier, or the same with fewer members together, or with as many and a node no less full; and no way out is shared
        by fewer."""
        if self._farness < other._farness:
            return False
        return all(own.sharing >= its.sharing for own, its in zip(self.tiers, other.tiers, strict=False))


def axes_group(
    machine: Machine, axes: Iterable[tuple[int, int]], num_ranks: int, stages: tuple[int, int] = (1, 1)
) -> Group:
    """The groups along some axes of a mesh of consecutive ranks.

    Args:
        machine: with its links.
        axes: (size, stride) of each axis, in any order; the strides are those of one mesh.
        num_ranks: number of ranks of the full mesh.
        stages: size and stride of the pipeline's axis: groups of other stages are not siblings.

    Raises:
        TwofoldError: more ranks than the machine has.

    >>> axes_group(Machine.load("h100-sxm-x1024"), [(2, 1), (4, 256)], 1024).together
    2
    """
    if num_ranks > machine.num_devices:
        raise TwofoldError(
            f"{num_ranks} ranks, but machine {machine.name!r} has {machine.num_devices} devices; "
            "plan for fewer devices or load a larger machine"
        )
    joined = _joined(axes)
    if not joined:
        return _ALONE
    if machine.graph is not None:
        return _listed(_sizes(machine), joined, num_ranks, stages, True)
    return _axes_group(_sizes(machine), joined, num_ranks, stages)


def mesh_group(machine: Machine, mesh: Layout, axes: Sequence[str]) -> Group:
    """The groups of a mesh along some of its axes: the ranks of other meshes are not siblings.

    Raises:
        TwofoldError: a rank that the machine does not have.
    """
    return _mesh_group(machine, mesh, tuple(axes))


def ranks_group(machine: Machine, ranks: Sequence[int]) -> Group:
    """A group of any ranks, without siblings.

    Raises:
        TwofoldError: a rank that the machine does not have.
    """
    machine.tier(ranks)
    return _counted(_sizes(machine), np.sort(np.array([ranks])), machine.graph is not None)


def first_group(links: Sequence[Link], members: int) -> Group:
    """The first ranks of a machine with such links, without siblings."""
    if members == 1:
        return _ALONE
    return _counted(_tier_sizes(tuple(links)), np.arange(members)[None], False)


@lru_cache(maxsize=4096)
def pair_group(tier: int, sharing: tuple[float, ...] = ()) -> Group:
    """Two ranks that meet on a tier; `sharing` of every tier below counts the pairs that leave a domain together."""
    apart = tuple(Domains(2, 1, 1, 1, sharing[number] if sharing else 1.0) for number in range(tier))
    return Group(2, (*apart, Domains(1, 2, 2, 0)))


_ALONE = Group(1, (Domains(1, 1, 1, 0),))


def _sizes(machine: Machine) -> Sizes:
    return _tier_sizes(machine.links)


@lru_cache(maxsize=256)
def _tier_sizes(links: tuple[Link, ...]) -> Sizes:
    ways_out = [link.way_out_Bps is not None for link in links[1:]]
    return tuple((link.ranks, shares) for link, shares in zip(links, [*ways_out, False], strict=True))


def _nests(domain: int, axes: Axes) -> bool:
    """Whether a domain holds complete runs along each axis, or none crosses its border."""
    return all(
        stride % domain == 0
        or (domain % stride == 0 and (domain % (size * stride) == 0 or size * stride % domain == 0))
        for size, stride in axes
    )


def _joined(axes: Iterable[tuple[int, int]]) -> Axes:
    """The same ranks along as few axes as possible, the innermost first."""
    joined: list[tuple[int, int]] = []
    for size, stride in sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1]):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = joined[-1][0] * size, joined[-1][1]
        else:
            joined.append((size, stride))
    return tuple(joined)


@lru_cache(maxsize=16_384)
def _axes_group(sizes: Sizes, axes: Axes, num_ranks: int, stages: tuple[int, int]) -> Group:
    of_stage = _joined([(stages[1], 1), (num_ranks // (stages[0] * stages[1]), stages[0] * stages[1])])
    return _regular(sizes, axes, of_stage) or _listed(sizes, axes, num_ranks, stages, False)


def _regular(sizes: Sizes, axes: Axes, family: Axes) -> Group | None:
    """Groups along `axes` of the ranks along `family`, from rank 0 on, in closed form; None where domains cut them
    unevenly."""
    members = math.prod(size for size, _ in axes)
    tiers: list[Domains] = []
    for domain, shares in sizes:
        if not (_nests(domain, axes) and _nests(domain, family)):
            return None
        inside, present = (math.prod(min(size, max(1, domain // stride)) for size, stride in own)
                           for own in (axes, family))  # fmt: skip
        if inside == members:
            return Group(members, (*tiers, Domains(1, members, members, 0)))
        sharing = max(1.0, present / inside) if shares else 1.0
        tiers.append(Domains(members // inside, inside, inside, inside * (members - inside), sharing))
    raise AssertionError("the last tier joins all devices")


@lru_cache(maxsize=4096)
def _listed(sizes: Sizes, axes: Axes, num_ranks: int, stages: tuple[int, int], with_ranks: bool) -> Group:
    """By listing the groups, until how they are in domains repeats."""
    spans = [size * stride for size, stride in (*axes, stages)]
    period = num_ranks if with_ranks else min(num_ranks, math.lcm(*spans, *(domain for domain, _ in sizes)))
    bases = np.arange(period)
    members = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        bases = bases[bases // stride % size == 0]
        members = (members[:, None] + stride * np.arange(size)).ravel()
    bases = bases[bases + members[-1] < num_ranks]  # whole groups
    few = bases[: max(1, _MOST_LISTED // len(members))]
    if with_ranks:  # of one stage
        few = few[few // stages[1] % stages[0] == 0]
    stage = few // stages[1] % stages[0]
    return _counted(sizes, np.sort(few[:, None] + members, axis=1), with_ranks, stage)


@lru_cache(maxsize=4096)
def _mesh_group(machine: Machine, mesh: Layout, axes: tuple[str, ...]) -> Group:
    if mesh.size(axes) == 1:
        return _ALONE
    machine.tier((max(mesh.rank_list),))
    if machine.graph is None and (strides := _strides(mesh)) is not None:
        first, sizes = mesh.rank_list[0], _sizes(machine)
        family = [(mesh.size((axis,)), stride) for axis, stride in strides.items()]
        along = _joined((mesh.size((axis,)), strides[axis]) for axis in axes)
        if all(first % domain == 0 or first // domain == mesh.rank_list[-1] // domain for domain, _ in sizes):
            moved = tuple((domain if first % domain == 0 else machine.num_devices, out) for domain, out in sizes)
            if (found := _regular(moved, along, _joined(family))) is not None:
                return found
    return _counted(_sizes(machine), np.sort(np.array(mesh.groups(axes)), axis=1), machine.graph is not None)


def _strides(mesh: Layout) -> dict[str, int] | None:
    """Distance of neighbours along every axis, if it is the same everywhere and no axis is inside another."""
    sizes = [mesh.size((axis,)) for axis in mesh.alias_name]
    ranks = np.asarray(mesh.rank_list)
    if math.prod(sizes) != len(ranks):
        return None
    table = ranks.reshape(sizes)
    strides, expected = {}, np.zeros(1, dtype=np.int64)
    for number, (axis, size) in enumerate(zip(mesh.alias_name, sizes, strict=True)):
        ahead = tuple(1 if at == number and size > 1 else 0 for at in range(len(sizes)))
        strides[axis] = int(table[ahead] - ranks[0])
        expected = (expected[:, None] + strides[axis] * np.arange(size)).ravel()
    return strides if min(strides.values()) >= 0 and (ranks - ranks[0] == expected).all() else None


def _counted(
    sizes: Sizes, groups: npt.NDArray[np.int64], with_ranks: bool, stage: npt.NDArray[np.int64] | None = None
) -> Group:
    """The worst of listed groups (one row each, ascending) on every tier; only those of one stage are siblings."""
    count, members = groups.shape
    ranks = tuple(map(tuple, groups.tolist())) if with_ranks else ()
    tiers: list[Domains] = []
    for size, shares in sizes:
        domains = groups // size
        if (domains[:, 0] == domains[:, -1]).all():
            return Group(members, (*tiers, Domains(1, members, members, 0)), ranks)
        most = int(domains.max()) + 1
        keys, inside = np.unique(np.arange(count)[:, None] * most + domains, return_counts=True)
        crosses = inside < members
        family = 0 if stage is None else stage[keys[crosses] // most] * most
        shared = np.bincount(family + keys[crosses] % most)
        tiers.append(
            Domains(
                number=int(np.bincount(keys // most).max()), fullest=int(inside.max()), emptiest=int(inside.min()),
                cut=int((inside * (members - inside)).max()), sharing=float(shared.max()) if shares else 1.0,
            )
        )  # fmt: skip
    raise AssertionError("the last tier joins all devices")
