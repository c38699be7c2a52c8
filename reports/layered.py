"""Layered drawing of a directed graph, from top to bottom.

This is the method of Sugiyama, Tagawa and Toda (1981) in its simplest form. The layer of a node is the longest path to
it, edges that span layers pass through separate points, and a few sweeps order every layer by the mean of its
neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise

__all__ = ["Placed", "place"]

_SWEEPS = 6
_SIDE_GAP = 26.0
_PASSING = 14.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Upper left corners by node, and per edge the points from its source's bottom to its target's top."""

    corners: Mapping[str, tuple[float, float]]
    routes: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


def place(
    sizes: Mapping[str, tuple[float, float]], edges: Sequence[tuple[str, str]], *, layer_gap: float = 40.0
) -> Placed:
    """Place nodes of given (width, height) so that every edge leads downwards and no two nodes overlap.

    Args:
        sizes: node -> width and height, in an order in which sources stand anywhere.
        edges: (source, target); they must not form a cycle.
        layer_gap: between one layer's lowest and the next one's highest point.
    """
    layer = _layers(sizes, edges)
    members: list[list[str]] = [[name for name in sizes if layer[name] == at] for at in range(1 + max(layer.values()))]
    width = {name: size[0] for name, size in sizes.items()}
    chains: list[list[str]] = []
    for number, (source, target) in enumerate(edges):
        passing = [f"\0{number}:{between}" for between in range(layer[source] + 1, layer[target])]  # no node's name
        for between, name in enumerate(passing, layer[source] + 1):
            members[between].append(name)
            width[name] = _PASSING
        chains.append([source, *passing, target])
    centre = _centres(members, width, chains)
    low = min(centre[name] - width[name] / 2 for name in centre)
    tall = [max((sizes[name][1] for name in names if name in sizes), default=0.0) for names in members]
    tops = list(accumulate((height + layer_gap for height in tall), initial=0.0))
    routes = []
    for (source, target), chain in zip(edges, chains, strict=True):
        points = [(centre[source] - low, tops[layer[source]] + sizes[source][1])]
        for at, name in enumerate(chain[1:-1], layer[source] + 1):
            points += [(centre[name] - low, tops[at]), (centre[name] - low, tops[at] + tall[at])]
        routes.append((*points, (centre[target] - low, tops[layer[target]])))
    return Placed(
        corners={name: (centre[name] - size[0] / 2 - low, tops[layer[name]]) for name, size in sizes.items()},
        routes=tuple(routes), width=max(centre[name] + width[name] / 2 for name in centre) - low,
        height=tops[-1] - layer_gap,
    )  # fmt: skip


def _layers(sizes: Mapping[str, object], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The longest path to each node; nodes without predecessors stand just above their first reader."""
    before: dict[str, list[str]] = {name: [] for name in sizes}
    for source, target in edges:
        before[target].append(source)
    layer: dict[str, int] = {}
    for name in TopologicalSorter(before).static_order():
        layer[name] = 1 + max((layer[each] for each in before[name]), default=-1)
    for name in sizes:
        readers = [layer[target] for source, target in edges if source == name]
        if not before[name] and readers:
            layer[name] = min(readers) - 1
    return layer


def _centres(members: list[list[str]], width: Mapping[str, float], chains: Sequence[Sequence[str]]) -> dict[str, float]:
    """Horizontal centres: each layer side by side, in the order of the means of its neighbours."""
    near: dict[str, list[str]] = {name: [] for names in members for name in names}
    for chain in chains:
        for a, b in pairwise(chain):
            near[a].append(b)
            near[b].append(a)
    centre = dict.fromkeys(near, 0.0)
    for sweep in range(_SWEEPS):
        for names in members if sweep % 2 == 0 else reversed(members):
            wanted = {
                name: sum(centre[each] for each in near[name]) / len(near[name]) if near[name] else centre[name]
                for name in names
            }
            names.sort(key=lambda name, wanted=wanted: (wanted[name], centre[name]))  # type: ignore[misc]
            steps = ((width[a] + width[b]) / 2 + _SIDE_GAP for a, b in pairwise(names))
            offsets = list(accumulate(steps, initial=0.0))
            shift = sum(wanted[name] - at for name, at in zip(names, offsets, strict=True)) / len(names)
            centre |= {name: at + shift for name, at in zip(names, offsets, strict=True)}
    return centre
