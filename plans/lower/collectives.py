"""Redistributions inside a stage by collectives only, where sending pieces between ranks would move fewer bytes.

Sending pieces can save bytes that a sequence of collectives moves twice. Libraries nevertheless move large tensors by
collectives, and blocks of a folded model must use collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from plans.layout import Layout, TensorLayout
from plans.lower.emit import Ways
from plans.lower.lower import lower_by
from plans.lower.redistribution_policy import Choice
from plans.plan import Plan
from plans.redistribution import Step, StepKind, max_received_bytes

__all__ = ["by_collectives", "collective_ways", "ways_at_sizes"]

_NEVER = 1e18


def collective_ways() -> Choice:
    """The redistribution steps of tensors inside a stage that use collectives only, with the fewest bytes."""
    return Choice(lambda dtype: _bytes)


def by_collectives(plan: Plan) -> Plan:
    """The plan with the steps stored that redistribute its tensors inside a stage by collectives of least bytes."""
    choice = collective_ways()
    lower_by(msgspec.structs.replace(plan, redistributions=()), choice)
    return msgspec.structs.replace(plan, redistributions=choice.redistributions)


def _bytes(step: Step, shape: Sequence[int], itemsize: int) -> float:
    inside = step.kind is StepKind.TRANSFER and set(step.before.mesh.rank_list) == set(step.after.mesh.rank_list)
    return max_received_bytes(step, tuple(shape), itemsize) + (_NEVER if inside else 1.0)


def ways_at_sizes(ways: Ways, sizes: Mapping[str, int]) -> Ways:
    """The steps that `ways` takes where some axes have other sizes, on the meshes that it is asked about.

    A template is lowered with axes of prime sizes; which steps move fewest bytes depends on the sizes.

    Args:
        ways: that decides.
        sizes: axis -> its size in the decision.
    """

    def resized(layout: TensorLayout) -> TensorLayout:
        mesh = layout.mesh
        matrix = tuple(sizes.get(axis, mesh.size((axis,))) for axis in mesh.alias_name)
        return replace(layout, mesh=Layout(matrix, mesh.alias_name))

    def taken(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> tuple[Step, ...]:
        if source.mesh != target.mesh:
            return ways(source, target, shape, dtype)
        mesh = source.mesh
        own = {axis: (mesh.size((axis,)), size) for axis, size in sizes.items() if axis in mesh.alias_name}
        smaller = []
        for size in shape:  # a dim divides by an axis there if it does here
            for prime, other in own.values():
                while prime > 1 and size % prime == 0:
                    size = size // prime * other
            smaller.append(size)
        steps = ways(resized(source), resized(target), tuple(smaller), dtype)
        return tuple(
            replace(step, before=replace(step.before, mesh=mesh), after=replace(step.after, mesh=mesh))
            for step in steps
        )

    return taken
