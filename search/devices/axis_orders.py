"""The orders of mesh axes that need to be searched: those that place groups inside a stage differently.

Orders that put these groups on the same tiers of links share a mesh. They differ only in the price of the optimizer's
communication and of the transfers between stages.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from costmodels import Group
from plans.degrees import ORDER
from search.devices.costs import Costs
from search.devices.problem import Problem
from search.devices.space import Mesh, Placement, orders, placement
from search.devices.stage_config import StageConfig

__all__ = ["AxisOrders"]


@dataclass(kw_only=True)
class AxisOrders:
    """Orders of the axes of meshes, grouped by the links that they use.

    Args:
        problem: the problem.
        costs: its costs.
        only_best: whether only the best configuration is needed, so that orders that are nowhere faster than another
            can be dropped.
    """

    problem: Problem
    costs: Costs
    only_best: bool
    _orders: dict[Mesh, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    _tiers_of: dict[Mesh, tuple[tuple[str, Group], ...]] = field(default_factory=dict)
    _nearest: dict[Mesh, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    _where: dict[Mesh, dict[str, Group]] = field(default_factory=dict)
    _placed: dict[Mesh, list[Mesh]] = field(default_factory=dict)

    def of(self, mesh: Mesh) -> list[Mesh]:
        """The mesh in one order of its axes for each location of groups inside a stage, starting with its own."""
        if mesh not in self._placed:
            found: dict[Any, list[tuple[str, ...]]] = {}
            outer: dict[tuple[str, ...], tuple[Group, ...]] = {}
            every = orders(self.problem, mesh)
            if self.only_best and self.slower_outside and self.costs.recompute_only_adds:
                every = list(dict.fromkeys([every[0], *_undominated(every)]))  # the usual order stands for the mesh
            for order, where in every:
                found.setdefault(where.inner, []).append(order)
                outer[order] = where.groups
            usual = placement(self.problem, replace(mesh, order=ORDER)).inner
            places = []
            for inner, same in found.items():
                place = replace(mesh, order=same[0])
                places.append(place)
                self._orders[place] = tuple(same)
                self._nearest[place] = tuple(
                    order for order, _ in _undominated([(each, Placement((), outer[each])) for each in same])
                )
                self._tiers_of[place] = () if inner == usual else inner
                self._where[place] = dict(inner)
            self._placed[mesh] = places
        return self._placed[mesh]

    def orders(self, place: Mesh) -> tuple[tuple[str, ...], ...]:
        """The orders of the axes that a mesh represents."""
        return self._orders[place]

    def nearest(self, place: Mesh) -> tuple[tuple[str, ...], ...]:
        """The orders in which no communication of the optimizer takes longer than in another order."""
        return self._nearest[place] if self.slower_outside else self._orders[place]

    def stage_config(self, place: Mesh, sp: bool, size: int, recompute: str, split: bool) -> StageConfig:
        """The stage configuration of a mesh."""
        return StageConfig(place.tp, place.cp, sp, size, recompute, split, place.ep, self._tiers_of.get(place, ()))

    def is_farther(self, place: Mesh, mesh: Mesh) -> bool:
        """Whether every group inside a stage is on links that are no faster than where another mesh has it."""
        here, there = self._where[place], self._where[mesh]
        return self.slower_outside and all(group.is_no_nearer(there[name]) for name, group in here.items())

    @functools.cached_property
    def slower_outside(self) -> bool:
        """Whether every tier of links is no faster than the one inside it."""
        links = self.problem.machine.links
        return all(
            one.bandwidth_Bps >= other.bandwidth_Bps and one.latency_s <= other.latency_s
            for one, other in pairwise(links)
        )


def _undominated(places: Sequence[tuple[tuple[str, ...], Placement]]) -> list[tuple[tuple[str, ...], Placement]]:
    """The orders without those that are dominated: another one has every group and every transfer on links at least as
    fast."""
    left: list[tuple[tuple[str, ...], Placement]] = []
    for order, where in places:
        if any(_is_no_nearer(where, other) for _, other in left):
            continue
        left = [each for each in left if not _is_no_nearer(each[1], where)]
        left.append((order, where))
    return left


def _is_no_nearer(place: Placement, other: Placement) -> bool:
    return (
        all(own[1].is_no_nearer(its[1]) for own, its in zip(place.inner, other.inner, strict=True))
        and all(map(Group.is_no_nearer, place.groups, other.groups)) and all(map(operator.ge, place.hops, other.hops))
    )  # fmt: skip
