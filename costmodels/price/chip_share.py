"""The share of a device that a kernel occupies, which determines how fast a concurrent kernel runs.

A product with few tiles leaves cores idle (`costmodels.price.tiled`: its waves, relative to those whose time it takes),
and no kernel uses the device while it starts and ends (`Compute.kernel_s`, and a product's `Tiled.start_s`). Otherwise
a kernel is assumed to fill the device: measurements of single kernels do not show how memory-bound kernels and products
share it.
"""

from __future__ import annotations

from functools import lru_cache

from costmodels.machine.machine import Machine
from costmodels.price.compute import matrix_rate, matrix_share
from costmodels.price.instruction import Shapes, compute_class
from costmodels.price.products import product
from plans.model.graph import itemsize
from plans.program import Instruction

__all__ = ["chip_share"]


def chip_share(machine: Machine, instruction: Instruction, seconds: float) -> float:
    """The share of a device, averaged over the time of a COMPUTE instruction.

    Args:
        machine: it runs on.
        instruction: that computes.
        seconds: it takes alone.
    """
    return _share(machine, instruction.call, instruction.shapes, instruction.dtype, seconds)


@lru_cache(maxsize=65_536)
def _share(machine: Machine, call: str, shapes: Shapes, dtype: str, seconds: float) -> float:
    compute, share, start_s = machine.compute, 1.0, machine.compute.kernel_s
    if compute_class(call) == "matrix":
        made, peak = product(call, shapes), matrix_rate(machine.compute, dtype, machine.name)
        share = matrix_share(compute, (made.m, made.n, made.k), peak, made.batch, made.form, itemsize(dtype))
        start_s += compute.tiled.start_s if compute.tiled is not None else 0.0
    return share * max(0.0, 1 - start_s / seconds) if seconds else share
