"""Which links a regular group of ranks uses, without listing all groups of a large machine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from costmodels.machine.machine import Machine
from plans.errors import TwofoldError

__all__ = ["axes_tiers", "group_tiers"]


def group_tiers(machine: Machine, size: int, stride: int, num_ranks: int, first: int = 0) -> tuple[int, int]:
    """The tiers of the groups {base, base + stride, ...} of `size` ranks each that cut `num_ranks` ranks evenly.

    Args:
        machine: with its tiers of links.
        size: members of a group.
        stride: distance of neighbours in a group.
        num_ranks: ranks from `first` on that fall into such groups; a multiple of size x stride.
        first: the first rank.

    Returns:
        the number of the slowest tier that any group uses, and the fewest members of a group that sit together in a
        domain of the tier below (1 for tier 0): what `price_collective` takes.

    Raises:
        TwofoldError: more ranks than the machine has.

    >>> group_tiers(Machine.load("h100-sxm-x1024"), 8, 1, 1024)
    (0, 1)
    >>> group_tiers(Machine.load("h100-sxm-x1024"), 128, 8, 1024)
    (1, 1)
    """
    if first + num_ranks > machine.num_devices:
        raise TwofoldError(
            f"{first + num_ranks} ranks, but machine {machine.name!r} has {machine.num_devices} devices; "
            "plan for fewer devices or load a larger machine"
        )
    return _tiers(tuple(link.ranks for link in machine.links), size, stride, num_ranks, first)


def axes_tiers(machine: Machine, axes: Iterable[tuple[int, int]], num_ranks: int) -> tuple[int, int]:
    """The tiers of the groups along several axes of a mesh: see `group_tiers`.

    Args:
        machine: with its tiers of links.
        axes: (size, stride) of each axis, in any order; the strides are those of one mesh.
        num_ranks: of the whole mesh.

    >>> axes_tiers(Machine.load("h100-sxm-x1024"), [(2, 1), (4, 256)], 1024)
    (1, 2)
    """
    joined: list[tuple[int, int]] = []
    for size, stride in sorted(axes, key=lambda axis: axis[1]):
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = joined[-1][0] * size, joined[-1][1]
        elif size > 1:
            joined.append((size, stride))
    if not joined:
        return 0, 1
    if len(joined) == 1 or num_ranks > machine.num_devices:
        return group_tiers(machine, *joined[0], num_ranks)
    return _axes_tiers(tuple(link.ranks for link in machine.links), tuple(joined), num_ranks)


def _nests(domain: int, axes: tuple[tuple[int, int], ...]) -> bool:
    """Whether a domain holds whole runs along each axis, or none crosses its border."""
    return all(
        stride % domain == 0
        or (domain % stride == 0 and (domain % (size * stride) == 0 or size * stride % domain == 0))
        for size, stride in axes
    )


@lru_cache(maxsize=16_384)
def _axes_tiers(domains: tuple[int, ...], axes: tuple[tuple[int, int], ...], num_ranks: int) -> tuple[int, int]:
    if all(_nests(domain, axes) for domain in domains):
        together = [math.prod(min(size, max(1, domain // stride)) for size, stride in axes) for domain in domains]
        tier = together.index(math.prod(size for size, _ in axes))
        return (tier, together[tier - 1]) if tier else (0, 1)
    period = min(num_ranks, math.lcm(*(size * stride for size, stride in axes), *domains))
    bases = np.arange(period)
    members = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        bases = bases[bases // stride % size == 0]
        members = (members[:, None] + stride * np.arange(size)).ravel()
    groups = np.sort(bases[:, None] + members, axis=1)
    tier = next(
        number for number, ranks in enumerate(domains) if (groups[:, 0] // ranks == groups[:, -1] // ranks).all()
    )
    if tier == 0:
        return 0, 1
    inside = groups // domains[tier - 1]
    return tier, min(int(np.unique(own, return_counts=True)[1].min()) for own in np.unique(inside, axis=0))


@lru_cache(maxsize=16_384)
def _tiers(domains: tuple[int, ...], size: int, stride: int, num_ranks: int, first: int) -> tuple[int, int]:
    if size == 1:
        return 0, 1
    span = size * stride
    # how groups lie in domains repeats with the least common multiple of both
    period = min(num_ranks, math.lcm(span, *domains))
    bases = (first + np.arange(0, period, span)[:, None] + np.arange(stride)).ravel()
    tier = next(
        number
        for number, ranks in enumerate(domains)
        if (bases // ranks == (bases + (size - 1) * stride) // ranks).all()
    )
    if tier == 0:
        return 0, 1
    below = domains[tier - 1]
    fewest = size
    for base in np.unique(bases % math.lcm(below, stride)):
        members = base + stride * np.arange(size)
        fewest = min(fewest, int(np.unique(members // below, return_counts=True)[1].min()))
    return tier, fewest
