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

__all__ = ["AxisOrders", "Tiers"]

Tiers = tuple[tuple[str, Group], ...]
"""Groups inside a stage, by name; those that are not listed are where the conventional order puts them."""


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
    _tiers_of: dict[Mesh, Tiers] = field(default_factory=dict)
    _nearest: dict[Mesh, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    _where: dict[Mesh, dict[str, Group]] = field(default_factory=dict)
    _placed: dict[Mesh, list[Mesh]] = field(default_factory=dict)
    _nearest_tiers: dict[Mesh, Tiers] = field(default_factory=dict)

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
                self._tiers_of[place] = tuple(each for each in inner if each not in usual)
                self._where[place] = dict(inner)
            self._placed[mesh] = places
            nearest = _nearest([self._where[place] for place in places]) if self.slower_outside else None
            if nearest is not None:
                self._nearest_tiers[mesh] = tuple(each for each in nearest.items() if each not in usual)
        return self._placed[mesh]

    def orders(self, place: Mesh) -> tuple[tuple[str, ...], ...]:
        """The orders of the axes that a mesh represents."""
        return self._orders[place]

    def nearest(self, place: Mesh) -> tuple[tuple[str, ...], ...]:
        """The orders in which no communication of the optimizer takes longer than in another order."""
        return self._nearest[place] if self.slower_outside else self._orders[place]

    def stage_config(
        self, place: Mesh, sp: bool, size: int, recompute: str, split: bool, tiers: Tiers | None = None
    ) -> StageConfig:
        """The stage configuration of a mesh; `tiers` instead of where it has its groups."""
        tiers = self._tiers_of.get(place, ()) if tiers is None else tiers
        return _stage_config(place.tp, place.cp, sp, size, recompute, split, place.ep, tiers)

    def nearest_tiers(self, mesh: Mesh) -> Tiers | None:
        """Each group inside a stage on the nearest links of all locations, which no location is faster than; None:
        not known."""
        self.of(mesh)
        return self._nearest_tiers.get(mesh)

    def has_tiers(self, place: Mesh, tiers: Tiers) -> bool:
        """Whether a mesh has its groups on these tiers."""
        return self._tiers_of[place] == tiers

    @functools.cached_property
    def slower_outside(self) -> bool:
        """Whether every tier of links is no faster than the one inside it."""
        links = self.problem.machine.links
        return all(
            one.bandwidth_Bps >= other.bandwidth_Bps and one.latency_s <= other.latency_s
            for one, other in pairwise(links)
        )


_stage_config = functools.lru_cache(maxsize=65_536)(StageConfig)
"""Equal ones are one object: as keys they are found without comparing them."""


def _nearest(places: Sequence[dict[str, Group]]) -> dict[str, Group] | None:
    """Each group where it is nearest; None if one is nowhere nearer than everywhere else."""
    found = {}
    for name in places[0]:
        groups = [place[name] for place in places]
        best = next((group for group in groups if all(other.is_no_nearer(group) for other in groups)), None)
        if best is None:
            return None
        found[name] = best
    return found


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
