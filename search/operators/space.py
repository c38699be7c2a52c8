"""The choices: meshes of a stage's devices, and strategies of one operator on a mesh.

This is the first of the two recursions, the one over devices: a number of devices is split into up to three axes of any
sizes, and each axis is then given to one dim of the operator, or to none (replicated).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations, product

from plans.layout import Layout
from plans.operators import OperatorSpec
from plans.plan import Strategy

__all__ = ["AXIS_NAMES", "factorisations", "finest", "meshes", "strategies"]

AXIS_NAMES = ("d0", "d1", "d2")


def factorisations(number: int, max_factors: int = 3) -> list[tuple[int, ...]]:
    """All ways to write `number` as a product of at most `max_factors` factors above 1, the largest first.

    >>> factorisations(12)
    [(12,), (6, 2), (4, 3), (3, 2, 2)]
    """
    return list(_products(number, number, max_factors))


def _products(rest: int, largest: int, count: int) -> Iterator[tuple[int, ...]]:
    """At most `count` factors from 2 to `largest` whose product is `rest`."""
    if rest == 1:
        yield ()
    elif count:
        for factor in range(min(rest, largest), 1, -1):
            if rest % factor == 0:
                for tail in _products(rest // factor, factor, count - 1):
                    yield (factor, *tail)


def meshes(ranks: Sequence[int], ordered: bool = False) -> list[Layout]:
    """The meshes of a stage's ranks; one axis of size 1 for a single rank.

    Args:
        ranks: ranks of the stage.
        ordered: whether axes of the same sizes in another order are another mesh, as they are where links have tiers:
            the last axis joins neighbours.
    """
    found = factorisations(len(ranks)) or [(1,)]
    if ordered:
        found = [order for sizes in found for order in sorted(set(permutations(sizes)), reverse=True)]
    return [Layout(sizes or (1,), AXIS_NAMES[: len(sizes) or 1], ranks) for sizes in found if sizes or len(ranks) == 1]


def finest(found: Sequence[Layout]) -> list[Layout]:
    """Without the meshes whose every layout another one has, too: those that cut an axis of theirs further.

    >>> [mesh.device_matrix for mesh in finest(meshes(range(24)))]
    [(8, 3), (6, 2, 2), (4, 3, 2)]
    """
    return [
        mesh for mesh in found
        if not any(len(other.device_matrix) > len(mesh.device_matrix) and _cuts(other.device_matrix, mesh.device_matrix)
                   for other in found)
    ]  # fmt: skip


def _cuts(fine: tuple[int, ...], coarse: tuple[int, ...]) -> bool:
    """Whether runs of neighbouring axes multiply to the coarser ones."""
    at, product_of = 0, 1
    for size in fine:
        product_of *= size
        if at < len(coarse) and product_of == coarse[at]:
            at, product_of = at + 1, 1
    return at == len(coarse) and product_of == 1


def strategies(spec: OperatorSpec, mesh: Layout) -> list[Strategy]:
    """Every way to give each axis of `mesh` to a splittable dim of the operator, or to none, that divides evenly.

    Axes given to one dim are in mesh order, the first is major.
    """
    dims = [dim for dim in spec.sizes if dim in spec.splittable and spec.sizes[dim] > 1]
    axes = [axis for axis in mesh.alias_name if mesh.size((axis,)) > 1]
    found = []
    for choice in product((None, *dims), repeat=len(axes)):
        given: dict[str, tuple[str, ...]] = {}
        for axis, dim in zip(axes, choice, strict=True):
            if dim is not None:
                given[dim] = (*given.get(dim, ()), axis)
        if spec.fits(mesh, given):
            found.append(Strategy(dims=given))
    return found
