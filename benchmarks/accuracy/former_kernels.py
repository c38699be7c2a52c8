"""A device as it was while older steps were measured: what its kernels took then, where they have changed since."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from costmodels import Machine
from costmodels.machine.catalogue import Device
from costmodels.price.compute import Rule

__all__ = ["with_former_kernels"]

FORMER = {
    # torch's fused kernel; since then large parameters are updated by `executor.kernels.triton_adamw`
    "adamw.update": Rule(kernels=3.68, passes=1.827),
    # plain torch; since then by `executor.kernels.triton_experts`
    "combine.forward": Rule(kernels=0.981, passes=20.895),
    "combine.grad0": Rule(kernels=0.990, passes=18.336),
    "combine.grad1": Rule(kernels=0.993, passes=20.734),
    "dispatch.forward": Rule(kernels=1.010, passes=9.322),
    "dispatch.grad0": Rule(kernels=0.975, passes=12.218),
}
"""Instructions until 2026-11-26: fitted to the points of an H200 of that time, assumed of H100."""

Priced = TypeVar("Priced", Device, Machine)


def with_former_kernels(priced: Priced) -> Priced:
    """A device or a machine with the update of AdamW and the instructions of experts that steps had until 2026-11-26.

    >>> with_former_kernels(Machine.load("h200-x2")).compute.rules["adamw.update"].passes
    1.827
    """
    rules = {**priced.compute.rules, **FORMER}
    return msgspec.structs.replace(priced, compute=msgspec.structs.replace(priced.compute, rules=rules))
