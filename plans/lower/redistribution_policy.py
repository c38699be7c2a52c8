"""The choice of redistribution steps: those stored in the plan, those with the fewest bytes, or those of the least
price.

A plan for a particular machine stores the steps that are faster there than those with the fewest bytes. They are found
by lowering with a `Choice`, which is called for every redistribution of the program, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from plans.layout import TensorLayout
from plans.lower.emit import Ways, least_bytes
from plans.model.graph import itemsize
from plans.plan import Plan
from plans.redistribution import Step, StepPrice, redistribute
from plans.redistribution.fastest import EXACT_AXES
from plans.redistribution.search import least_s
from plans.stored_redistribution import Redistribution

__all__ = ["Choice", "stored_ways"]


def stored_ways(plan: Plan) -> Ways:
    """The redistribution steps stored in the plan; those with the fewest bytes where none are stored."""
    if not plan.redistributions:
        return least_bytes
    stored = {redistribution.key: redistribution.sequence for redistribution in plan.redistributions}

    def ways(source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> tuple[Step, ...]:
        found = stored.get((source, target, shape, itemsize(dtype)))
        return least_bytes(source, target, shape, dtype) if found is None else found

    return ways


@dataclass(slots=True)
class Choice:
    """The steps of least time, remembered where they are faster than those of least bytes.

    Args:
        price_of: dtype -> the price of a step.
    """

    price_of: Callable[[str], StepPrice]
    _stored: dict[tuple[TensorLayout, TensorLayout, tuple[int, ...], int], Redistribution] = field(default_factory=dict)

    def __call__(
        self, source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str
    ) -> tuple[Step, ...]:
        """The steps from `source` to `target`."""
        key = (source, target, shape, itemsize(dtype))
        if key in self._stored:
            return self._stored[key].sequence
        steps = self.least_s(source, target, shape, dtype)[0]
        if steps != least_bytes(source, target, shape, dtype):
            self._stored[key] = Redistribution.of(source, target, shape, key[3], steps)
        return steps

    def seconds(self, source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str) -> float:
        """The seconds of the fastest steps."""
        mesh = source.mesh
        if mesh != target.mesh or sum(mesh.size((axis,)) > 1 for axis in mesh.alias_name) > EXACT_AXES:
            return self.least_s(source, target, shape, dtype)[1]
        # the search is exact here: no other steps are faster
        return least_s(source, target, shape, itemsize(dtype), self.price_of(dtype))

    def least_s(
        self, source: TensorLayout, target: TensorLayout, shape: tuple[int, ...], dtype: str
    ) -> tuple[tuple[Step, ...], float]:
        """The fastest steps and their seconds; the steps with the fewest bytes unless others are faster."""
        price = self.price_of(dtype)
        plain = least_bytes(source, target, shape, dtype)
        plain_s = sum(price(step, shape, itemsize(dtype)) for step in plain)
        if not plain:
            return plain, plain_s
        steps = redistribute(source, target, shape, itemsize=itemsize(dtype), price=price, even=True)
        seconds = sum(price(step, shape, itemsize(dtype)) for step in steps)
        return (steps, seconds) if seconds < plain_s else (plain, plain_s)

    @property
    def redistributions(self) -> tuple[Redistribution, ...]:
        """The redistributions that a plan has to store, in the order in which lowering asks for them."""
        return tuple(self._stored.values())
