"""The cheapest sequence of steps from one layout to another.

States are layouts on one mesh: per dim the ordered axes that split it, and the axes that are partial. Edges are steps:
slices, all-gathers, all-to-alls, reduce-scatters and all-reduces over one or several axes, and transfers. A* finds the
cheapest path (Hart, Nilsson and Raphael 1968):

* **Least bytes** (`price=None`): the sum over steps of the bytes received by the rank that receives most. The bound
  on what is left is what the worst rank still lacks of its target region, so almost nothing is expanded. Transfers
  lead to the target; where sums have uneven parts to any layout, as moving terms to where they fit may pay. Ties go to
  fewer communicating steps, then fewer transfers (a collective is one library call), then fewer slices.
* **Least time**: `price` gives the seconds of a step. One that says more about itself (`price.LocalPrice`) is
  searched over arrays: on up to three axes transfers between any two layouts included, on four and five some; where
  links have tiers, greedy sequences over prime factors of the axes are tried too. Any other callable is asked for every
  step, transfers lead to the target or to a layout one collective away from it; if it has a method
  `floor_s(num_bytes)`, the least seconds of any step that brings that many bytes to some rank, the search leaves out
  what cannot win (floor_s must be subadditive, as latency + bytes / bandwidth is, with floor_s(0) = 0); otherwise it
  expands every state cheaper than the target.

On up to three axes of more than one rank the answer is the cheapest path over these edges. On more axes slices and
reductions are tried axis by axis and in the target's own runs, and the search stops after a number of states; it starts
from the sequences of `greedy` and never ends above them.

With `even` only layouts count that cut every dim evenly, as the values of a program must.

Two different meshes over the same ranks are refined to their atomic mesh (`atomic`; one of the two where possible), and
all layouts of the steps are on it; so the first step's `before` and the last step's `after` are placed like source and
target but may be written with other axes. Without a common refinement, with different ranks, or where an axis of
several atoms cuts a dim unevenly (its atoms would cut it elsewhere), all sums are reduced first, for all ranks or
scattered onto one dim, and a transfer does the rest, if anything is left.

A target may keep partial axes of the source. Making a replicated tensor partial is refused: it would hold zeros on all
ranks but one, and no operator asks for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from plans.errors import TwofoldError
from plans.layout import DimAxes, Layout, TensorLayout
from plans.redistribution.astar import AStar
from plans.redistribution.atomic import is_same_cut, primes, refine, rewrite
from plans.redistribution.fastest import EXACT_AXES, fastest, fastest_s, is_small
from plans.redistribution.greedy import by_gathering, by_moving, by_moving_each
from plans.redistribution.price import LocalPrice, StepPrice
from plans.redistribution.space import Move, Space
from plans.redistribution.step import Step, StepKind
from plans.redistribution.traffic import max_received_bytes

__all__ = ["StepPrice", "least_s", "redistribute"]

_Found = tuple[tuple[Step, ...], float | None]
"""Steps, and their seconds where the search knows them."""


class _Terms(NamedTuple):
    """What is asked of the steps between two layouts; arguments of `redistribute`."""

    shape: tuple[int, ...]
    itemsize: int
    price: StepPrice | None
    even: bool


def redistribute(
    source: TensorLayout,
    target: TensorLayout,
    shape: Sequence[int],
    *,
    itemsize: int = 4,
    price: StepPrice | None = None,
    even: bool = False,
) -> tuple[Step, ...]:
    """The cheapest steps from `source` to `target`; empty if every rank holds the right part already.

    Args:
        source: the layout of the tensor now.
        target: the layout wanted, on the same ranks or on others.
        shape: the global shape.
        itemsize: bytes per element.
        price: seconds of a step; by default the bytes received count.
        even: go only through layouts that cut every dim evenly; source and target do.

    Raises:
        TwofoldError: the dims do not fit the shape, or the target is partial where the source is not.

    >>> from plans.layout import Layout
    >>> mesh = Layout((2, 2), ("dp", "mp"))
    >>> for step in redistribute(mesh("dp", "mp"), mesh("None", ("mp", "dp")), (8, 8)):
    ...     print(step)
    all_to_all over dp dim 0 to 1: (dp, mp) -> (None, (mp, dp))
    """
    if even and not (source.is_even(shape) and target.is_even(shape)):
        raise TwofoldError(f"{source} or {target} does not cut a tensor of shape {tuple(shape)} evenly")
    terms = _Terms(tuple(shape), itemsize, price, even)
    try:
        hash(price)
    except TypeError:
        return _cached.__wrapped__(source, target, terms)[0]
    return _cached(source, target, terms)[0]


@lru_cache(maxsize=8192)
def _cached(source: TensorLayout, target: TensorLayout, terms: _Terms) -> _Found:
    shape = terms.shape
    if not len(source.dims) == len(target.dims) == len(shape):
        raise TwofoldError(f"a tensor of shape {shape} cannot go from {source} to {target}: the numbers of dims differ")
    if source.mesh == target.mesh:
        return _on_one_mesh(source, target, terms)
    if source.is_even(shape) and source.same_placement(target):
        return (), 0.0
    refined = refine(source.mesh, target.mesh)
    if refined is None:
        return _across(source, target, terms), None
    mesh, mine, theirs = refined
    if not (is_same_cut(source, mine, shape) and is_same_cut(target, theirs, shape)):
        return _across(source, target, terms), None
    return _on_one_mesh(rewrite(source, mesh, mine), rewrite(target, mesh, theirs), terms)


def _on_one_mesh(source: TensorLayout, target: TensorLayout, terms: _Terms) -> _Found:
    shape, itemsize, price, even = terms
    space = Space(source.mesh, target, shape)
    start, goal = space.state(source), space.state(target)
    if not set(goal[1]) <= set(start[1]):
        raise TwofoldError(
            f"the target {target} is partial over {target.partial}, but the source {source} is not; "
            "only sums that are already partial can stay so"
        )
    if space.is_alike(start, goal):
        return (), 0.0
    seconds: float | None = None
    local = price if isinstance(price, LocalPrice) else None
    if local is not None and is_small(space, start, goal):
        moves, seconds = fastest(space, start, goal, itemsize, local, even)
    else:
        moves = AStar(space, start, goal, itemsize, price, even).run()
    steps = [space.step(move) for move in moves]
    if local is not None and local.domains(source.mesh.rank_list) is not None:
        seconds = sum(local(step, shape, itemsize) for step in steps) if seconds is None else seconds
        tiered = _by_factors(source, target, shape, itemsize, local, seconds)
        if tiered is not None:
            return tiered
    first, last = steps[0], steps[-1]
    if last is first:
        return (_with(first, source, target),), seconds
    return (_with(first, source, first.after), *steps[1:-1], _with(last, last.before, target)), seconds


def least_s(
    source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], itemsize: int, price: StepPrice
) -> float:
    """Seconds of the steps of least time through even layouts, without the steps where they are not needed for it."""
    if source.mesh == target.mesh and isinstance(price, LocalPrice):
        space = Space(source.mesh, target, shape)
        start, goal = space.state(source), space.state(target)
        is_exact = len(space.axes) <= EXACT_AXES and price.domains(source.mesh.rank_list) is None
        if is_exact and set(goal[1]) <= set(start[1]):
            if space.is_alike(start, goal):
                return 0.0
            return fastest_s(space, start, goal, itemsize, price, True)
    steps, seconds = _cached(source, target, _Terms(shape, itemsize, price, True))
    return sum(price(step, shape, itemsize) for step in steps) if seconds is None else seconds


def _by_factors(
    source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], itemsize: int, price: LocalPrice, least_s: float
) -> tuple[tuple[Step, ...], float] | None:
    """The greedy sequences over prime factors of the axes, where links have tiers, if they take less than `least_s`.

    A collective over an axis that reaches out of a node and one over its part inside the node, one after the other, may
    be faster than one over both.
    """
    if not (source.is_even(shape) and target.is_even(shape)):
        return None
    mesh, atoms = primes(source.mesh)
    if mesh.alias_name == source.mesh.alias_name:
        return None
    found: list[Move] | None = None
    space = Space(mesh, rewrite(target, mesh, atoms), shape)
    start = space.state(rewrite(source, mesh, atoms))
    least_s *= 1 - 1e-9
    for sequence in (by_gathering, by_moving, by_moving_each):
        moves, seconds = sequence(space, start, space.goal), 0.0
        for move in moves:
            sizes = [itemsize * space.local_elements(state) for state in (move.before, move.after)]
            size = sum(sizes) if move.kind is StepKind.SLICE else max(sizes)
            seconds += price.local_s(move.kind, mesh, frozenset(move.axes), size, itemsize)
            if seconds >= least_s:
                break
        if seconds < least_s and all(space.is_even(move.after) for move in moves):
            found, least_s = moves, seconds
    return None if found is None else (tuple(space.step(move) for move in found), least_s)


def _with(step: Step, before: TensorLayout, after: TensorLayout) -> Step:
    """The step between the layouts as the user wrote them (axes of size 1 included)."""
    return Step(kind=step.kind, axes=step.axes, dim=step.dim, to_dim=step.to_dim, before=before, after=after)


def _across(source: TensorLayout, target: TensorLayout, terms: _Terms) -> tuple[Step, ...]:
    """Reduce the sums on the source's mesh, then transfer; under a price maybe to one collective before the target."""
    shape, itemsize, price, even = terms
    if not source.partial and not target.partial and _same_regions(source, target, shape):
        return ()
    if target.partial and source.mesh.size(source.partial) != target.mesh.size(target.partial):
        raise TwofoldError(
            f"{source} cannot become {target} on another mesh: its partial sums are distributed differently"
        )

    def cost(steps: tuple[Step, ...]) -> float:
        if price is None:
            return sum(max_received_bytes(step, shape, itemsize) for step in steps)
        return sum(price(step, shape, itemsize) for step in steps)

    endings = _endings(target, terms)
    candidates: list[tuple[float, int, tuple[Step, ...]]] = []  # least cost, order of making, steps
    for reduced in [source] if target.partial else _reduced(source):
        if even and not reduced.is_even(shape):
            continue
        before = redistribute(source, reduced, shape, itemsize=itemsize, price=price, even=even)
        for landing, ending in endings:
            around = cost((*before, *ending))
            if before and not landing.partial and _same_regions(reduced, landing, shape):
                candidates.append((around, len(candidates), (*before, *ending)))
                continue
            transfer = Step(kind=StepKind.TRANSFER, before=reduced, after=landing)
            least = _least_cost(transfer, terms)
            candidates.append((around + least, len(candidates), (*before, transfer, *ending)))
    best, chosen = (math.inf, 0), candidates[0][2]
    for bound, _, steps in sorted(candidates, key=lambda candidate: candidate[:2]):
        if bound > best[0]:
            break
        if (now := (cost(steps), len(steps))) < best:
            best, chosen = now, steps
    return chosen


def _endings(target: TensorLayout, terms: _Terms) -> list[tuple[TensorLayout, tuple[Step, ...]]]:
    """The possible targets of a transfer, and the steps from there: the target, or one collective before it."""
    endings: list[tuple[TensorLayout, tuple[Step, ...]]] = [(target, ())]
    if terms.price is not None:
        space = Space(target.mesh, target, terms.shape)
        closing = [
            space.step(move) for move in space.closing(space.goal) if not terms.even or space.is_even(move.before)
        ]
        endings += [(step.before, (_with(step, step.before, target),)) for step in closing]
    return endings


def _least_cost(transfer: Step, terms: _Terms) -> float:
    """A lower bound on the cost of a transfer: its bytes, or the price's floor for them."""
    least = max_received_bytes(transfer, terms.shape, terms.itemsize)
    if terms.price is None:
        return least
    floor_s: Callable[[float], float] | None = getattr(terms.price, "floor_s", None)
    return 0.0 if floor_s is None else floor_s(least)


def _same_regions(one: TensorLayout, two: TensorLayout, shape: tuple[int, ...]) -> bool:
    """Whether two layouts have the same ranks and every rank has the same indices under both."""
    ranks = one.mesh.rank_list
    return set(ranks) == set(two.mesh.rank_list) and all(
        one.region(rank, shape) == two.region(rank, shape) for rank in ranks
    )


def _reduced(source: TensorLayout) -> list[TensorLayout]:
    if not source.partial:
        return [source]
    axes = source.partial

    def scattered(dim: int) -> tuple[DimAxes, ...]:
        return tuple(own + axes if at == dim else own for at, own in enumerate(source.dims))

    mesh: Layout = source.mesh
    return [source.without_partial()] + [
        TensorLayout(mesh=mesh, dims=scattered(dim)) for dim in range(len(source.dims))
    ]
