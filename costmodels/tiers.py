"""Which links a regular group of ranks uses, without listing all groups of a large machine."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from costmodels.machine import Machine
from plans.errors import TwofoldError

__all__ = ["group_tiers"]


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
