"""The sequence that MindSpore's greedy inference makes, on one mesh, for even splits.

Written from the description of its `redistribution_operator_infer.cc`; sums are all-reduced first, as it has no partial
state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from plans.layout import Layout, TensorLayout
from plans.redistribution import StepKind

__all__ = ["Done", "elements", "mindspore_steps"]


class Done(NamedTuple):
    """A slice or collective of another planner: its groups, and the elements of a rank's part before and after."""

    kind: StepKind
    mesh: Layout
    axes: frozenset[str]
    before: int
    after: int
    reshapes: bool = False
    """Whether it leads to or from a part with gaps, which is not a layout of the tensor itself, only of a reshaped
    one."""

    @property
    def touched(self) -> int:
        """What it is priced by: of a slice both parts, of a collective the larger."""
        return self.before + self.after if self.kind is StepKind.SLICE else max(self.before, self.after)


def elements(steps: Sequence[Done]) -> int:
    """Elements each rank receives, counted as `traffic.max_received_bytes` does."""
    total = 0
    for step in steps:
        members = step.mesh.size(tuple(step.axes))
        total += {
            StepKind.SLICE: 0,
            StepKind.ALL_GATHER: (members - 1) * step.before,
            StepKind.REDUCE_SCATTER: (members - 1) * step.after,
            StepKind.ALL_REDUCE: 2 * (members - 1) * -(-step.before // members),
            StepKind.ALL_TO_ALL: (members - 1) * (step.before // members),
        }[step.kind]
    return total


def mindspore_steps(source: TensorLayout, target: TensorLayout, shape: Sequence[int]) -> list[Done]:
    """What MindSpore does.

    Axes and dims are first cut into prime factors, so that each factor of a dim has at most one axis. Then, until both
    agree: slice factors whose axis is free; all-to-all for an axis that sits at another factor; gather axes
    that the target does not have; if nothing applies, gather the first factor that differs. Where the factors of a dim
    cannot be aligned, the full tensor is gathered, dim by dim, and sliced.
    """
    mesh, factors = _refined(source.mesh)
    local = math.prod(source.local_shape(shape))
    found: list[Done] = []
    ends: list[int] = []  # where each dim's factors end

    def has_gap() -> bool:
        inner = [at for at in range(1, len(now)) if at not in ends]
        return any(now[at - 1] is None and now[at] is not None for at in inner)

    def do(kind: StepKind, axes: Sequence[str], after: int) -> None:
        nonlocal local
        found.append(Done(kind, mesh, frozenset(axes), local, after))
        local = after

    if source.partial:
        do(StepKind.ALL_REDUCE, [factor for axis in source.partial for factor in factors[axis]], local)
    if source.dims == target.dims:
        return found
    now: list[str | None] = []
    goal: list[str | None] = []
    for mine, theirs in zip(source.dims, target.dims, strict=True):
        own = [factor for axis in mine for factor in factors[axis]]
        wanted = [factor for axis in theirs for factor in factors[axis]]
        if any(mesh.size((a,)) != mesh.size((b,)) for a, b in zip(own, wanted, strict=False)):
            for axes in source.dims:
                if group := [factor for axis in axes for factor in factors[axis]]:
                    do(StepKind.ALL_GATHER, group, local * mesh.size(tuple(group)))
            for axes in target.dims:
                if group := [factor for axis in axes for factor in factors[axis]]:
                    do(StepKind.SLICE, group, local // mesh.size(tuple(group)))
            return found
        length = max(len(own), len(wanted))
        now += [*own, *[None] * (length - len(own))]
        goal += [*wanted, *[None] * (length - len(wanted))]
        ends.append(len(now))
    gap = False
    while now != goal:
        pending = [at for at in range(len(now)) if now[at] != goal[at]]
        sliced = [at for at in pending if now[at] is None and goal[at] not in now]
        moved = [at for at in pending if now[at] is None and goal[at] in now]
        absent = [at for at in pending if now[at] is not None and now[at] not in goal]
        if sliced or moved:
            at = (sliced or moved)[0]
            factor = goal[at]
            assert factor is not None
            if sliced:
                do(StepKind.SLICE, [factor], local // mesh.size((factor,)))
            else:
                do(StepKind.ALL_TO_ALL, [factor], local)
                now[now.index(factor)] = None
            now[at] = factor
        else:
            at = (absent or [at for at in pending if now[at] is not None])[0]
            factor = now[at]
            assert factor is not None
            do(StepKind.ALL_GATHER, [factor], local * mesh.size((factor,)))
            now[at] = None
        gap, had_gap = has_gap(), gap
        found[-1] = found[-1]._replace(reshapes=gap or had_gap)
    return found


def _refined(mesh: Layout) -> tuple[Layout, dict[str, list[str]]]:
    """The same ranks with an axis for every prime factor of an axis, and which those are."""
    sizes: list[int] = []
    factors: dict[str, list[str]] = {}
    for axis in mesh.alias_name:
        factors[axis] = []
        rest, prime = mesh.size((axis,)), 2
        while rest > 1:
            if rest % prime:
                prime += 1
                continue
            factors[axis].append(f"{axis}.{len(factors[axis])}")
            sizes.append(prime)
            rest //= prime
    names = [factor for each in factors.values() for factor in each]
    return Layout(sizes, names, mesh.rank_list), factors
