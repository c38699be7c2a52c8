"""Redistributions inside a stage by collectives alone, where fewest bytes would have ranks send to each other.

Sending piece by piece can save bytes that a sequence of collectives moves twice, but libraries move large tensors by
collectives, and every block of a model that is folded must be collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from plans.lower.lower import lower_by
from plans.lower.redistribution_policy import Choice
from plans.plan import Plan
from plans.redistribution import Step, StepKind, max_received_bytes

__all__ = ["by_collectives", "collective_ways"]

_NEVER = 1e18


def collective_ways() -> Choice:
    """The steps that redistribute tensors inside a stage by collectives of least bytes."""
    return Choice(lambda dtype: _bytes)


def by_collectives(plan: Plan) -> Plan:
    """The plan with the steps stored that redistribute its tensors inside a stage by collectives of least bytes."""
    choice = collective_ways()
    lower_by(msgspec.structs.replace(plan, redistributions=()), choice)
    return msgspec.structs.replace(plan, redistributions=choice.redistributions)


def _bytes(step: Step, shape: Sequence[int], itemsize: int) -> float:
    inside = step.kind is StepKind.TRANSFER and set(step.before.mesh.rank_list) == set(step.after.mesh.rank_list)
    return max_received_bytes(step, tuple(shape), itemsize) + (_NEVER if inside else 1.0)
