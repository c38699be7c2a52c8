"""How a kernel and a collective slow each other down while both run on a device: the only model of overlap."""

from __future__ import annotations

from collections.abc import Callable

from costmodels.machine.machine import Machine
from costmodels.price.traffic import plain_call

__all__ = ["OverlapLaw", "overlap_law"]

OverlapLaw = Callable[[str, float, str, float], tuple[float, float]]
"""(class of kernel, its seconds alone, call of the collective, its seconds alone) -> (rate of the kernel, rate of the
collective) while both run; 1 is alone.

The class is that of `costmodels.price.instruction.overlap_class`: matrix, attention or memory (updates are memory).
"""

_SLOWEST = 1e-6
"""A message never moves slower than so, however long the kernel next to it."""


def overlap_law(machine: Machine) -> OverlapLaw | None:
    """The law of a machine's measured pairs (`costmodels.machine.sections.Overlap`); None where it has none.

    A pair that the machine has no rates for does not slow down. One instruction counts as one kernel.

    >>> law = overlap_law(Machine.load("h200-x8"))
    >>> short, long = law("matrix", 1e-4, "all_reduce", 1e-3), law("matrix", 1e-2, "all_reduce", 1e-3)
    >>> short[0] < long[0] < 1, short[1] > long[1]
    (True, True)
    """
    if not machine.overlap:
        return None
    pairs = {(str(entry.compute), entry.collective): entry for entry in machine.overlap}

    def rates(kernel: str, kernel_s: float, collective: str, message_s: float) -> tuple[float, float]:
        pair = pairs.get((kernel, plain_call(collective)))
        if pair is None:
            return 1.0, 1.0
        slowed, moving = pair.rates(kernel_s, message_s)
        return slowed, max(moving, _SLOWEST)

    return rates
