"""Placing a directed graph in layers, from top to bottom.

The method of Sugiyama, Tagawa and Toda (1981) in its simplest form: a node's layer is the longest path to it, edges
that span layers pass through points of their own, and a few sweeps put every node near the mean of its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    num_layers = 1 + max(layer.values(), default=-1)
    members: list[list[str]] = [[] for _ in range(num_layers)]
    for name in sizes:
        members[layer[name]].append(name)
    width = {name: size[0] for name, size in sizes.items()}
    chains: list[list[str]] = []
    for number, (source, target) in enumerate(edges):
        chain = [source]
        for between in range(layer[source] + 1, layer[target]):
            passing = f"\0{number}:{between}"  # no node is called so
            members[between].append(passing)
            width[passing] = _PASSING
            chain.append(passing)
        chains.append([*chain, target])
    centre = _centres(members, width, chains)
    tops, y = [], 0.0
    for names in members:
        tops.append(y)
        y += max((sizes[name][1] for name in names if name in sizes), default=0.0) + layer_gap
    tall = [max((sizes[name][1] for name in names if name in sizes), default=0.0) for names in members]
    routes = []
    for (source, target), chain in zip(edges, chains, strict=True):
        points = [(centre[source], tops[layer[source]] + sizes[source][1])]
        for step, name in enumerate(chain[1:-1], layer[source] + 1):
            points += [(centre[name], tops[step]), (centre[name], tops[step] + tall[step])]
        routes.append((*points, (centre[target], tops[layer[target]])))
    low = min((centre[name] - width[name] / 2 for name in centre), default=0.0)
    high = max((centre[name] + width[name] / 2 for name in centre), default=0.0)
    return Placed(
        corners={name: (centre[name] - sizes[name][0] / 2 - low, tops[layer[name]]) for name in sizes},
        routes=tuple(tuple((x - low, y) for x, y in route) for route in routes),
        width=high - low,
        height=max(0.0, y - layer_gap),
    )


def _layers(sizes: Mapping[str, object], edges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The longest path to each node; nodes without predecessors stand just above their first reader."""
    before: dict[str, list[str]] = {name: [] for name in sizes}
    after: dict[str, list[str]] = {name: [] for name in sizes}
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    waiting = {name: len(before[name]) for name in sizes}
    ready = [name for name in sizes if not waiting[name]]
    layer: dict[str, int] = {}
    while ready:
        name = ready.pop()
        layer[name] = 1 + max((layer[each] for each in before[name]), default=-1)
        for each in after[name]:
            waiting[each] -= 1
            if not waiting[each]:
                ready.append(each)
    assert len(layer) == len(sizes), "the edges form a cycle"
    for name in sizes:
        if not before[name] and after[name]:
            layer[name] = min(layer[each] for each in after[name]) - 1
    return layer


def _centres(members: list[list[str]], width: Mapping[str, float], chains: Sequence[Sequence[str]]) -> dict[str, float]:
    """Horizontal centres: order each layer by the mean of its neighbours, then push apart what overlaps."""
    near: dict[str, list[str]] = {name: [] for names in members for name in names}
    for chain in chains:
        for a, b in pairwise(chain):
            near[a].append(b)
            near[b].append(a)
    centre: dict[str, float] = {}
    for names in members:
        _spread(names, dict.fromkeys(names, 0.0), width, centre)
    for sweep in range(_SWEEPS):
        for names in members if sweep % 2 == 0 else reversed(members):
            wanted = {
                name: sum(centre[each] for each in near[name]) / len(near[name]) if near[name] else centre[name]
                for name in names
            }
            names.sort(key=lambda name, wanted=wanted: (wanted[name], centre[name]))  # type: ignore[misc]
            _spread(names, wanted, width, centre)
    return centre


def _spread(
    names: Sequence[str], wanted: Mapping[str, float], width: Mapping[str, float], centre: dict[str, float]
) -> None:
    """Centres as near to the wanted ones as the order allows, in least squares (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # (sum of wanted minus own offset, count)
    offsets, at = [], 0.0
    for number, name in enumerate(names):
        at += 0.0 if not number else (width[names[number - 1]] + width[name]) / 2 + _SIDE_GAP
        offsets.append(at)
        blocks.append((wanted[name] - at, 1))
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] >= blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1] = (blocks[-1][0] + total, blocks[-1][1] + count)
    number = 0
    for total, count in blocks:
        for _ in range(count):
            centre[names[number]] = total / count + offsets[number]
            number += 1
