"""The list of calls that run no kernel, used by prices, stacks and calibration.

The host still issues such a call (`Machine.dispatch_s`, class "view").
"""

from __future__ import annotations

__all__ = ["FREE_CALLS", "LOADS", "MAYBE_VIEWS", "VIEWS"]

VIEWS = ("reshape",)
"""Kinds of calls whose result always shares the memory of an operand."""

MAYBE_VIEWS = ("flat_unpack", "add.grad0", "add.grad1", "slice")
"""Calls whose result shares the memory of an operand where the program lets it (`Value.shares`)."""

LOADS = ("load",)
"""Calls that pass a batch which is already in the device's memory."""

FREE_CALLS = frozenset(
    {*(f"{kind}.{part}" for kind in VIEWS for part in ("forward", "grad0")), *LOADS, "add.grad0", "add.grad1",
     "arange.forward"}
)  # fmt: skip
"""Calls for which torch's modules and autograd run no kernel: views, loads, the gradients of a sum, which are passed on
as they are, and positions, which a module keeps."""
