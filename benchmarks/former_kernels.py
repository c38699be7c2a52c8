"""A device as it was while older steps were measured: what its kernels took then, where they have changed since."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from costmodels import Machine
from costmodels.machine.catalogue import Device
from costmodels.price.compute import Rule

__all__ = ["with_former_kernels"]

ADAMW = Rule(kernels=3.68, passes=1.827)
"""An update until 2026-11-26, by torch's fused kernel: fitted to the points of an H200 of that time, assumed of H100.
Since then large parameters are updated by `executor.kernels.triton_adamw`."""

Priced = TypeVar("Priced", Device, Machine)


def with_former_kernels(priced: Priced) -> Priced:
    """A device or a machine with the update of AdamW that steps had until 2026-11-26.

    >>> with_former_kernels(Machine.load("h200-x2")).compute.rules["adamw.update"].passes
    1.827
    """
    rules = {**priced.compute.rules, "adamw.update": ADAMW}
    return msgspec.structs.replace(priced, compute=msgspec.structs.replace(priced.compute, rules=rules))
