"""Megatron-LM: fused element-wise kernels, gradients accumulated inside the weight product."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels import Machine
from costmodels.price import price_compute
from plans.plan import Optimizer
from simulator.scale.action import COMPUTE, Line
from simulator.scale.stacks.base import Kernel, Shape, Stack, update_bytes
from simulator.scale.stacks.kernels import elementwise, unfused_attention

__all__ = ["Megatron"]

_FREE = frozenset(
    {
        "add.grad0", "add.grad1", "reshape.forward", "reshape.grad0", "load", "arange.forward", "accumulate",
        "add.forward",
    }
)  # fmt: skip
"""Views; gradients that pass; the sum of the residual, which is inside the fused bias, dropout and add; accumulation,
which is inside the product that makes a weight's gradient."""


@dataclass(frozen=True, kw_only=True)
class Megatron(Stack):
    """The kernels of Megatron-LM's transformer layer (Narayanan et al. 2021, arXiv 2104.04473, section 4.2: fused bias
    and GeLU, fused bias, dropout and add, fused scale, mask and softmax).

    Args:
        flash_attention: one kernel for the attention core (from 2023 on), or the products written out.
    """

    name: str = "megatron"
    gathers_again: bool = True
    flash_attention: bool = True

    def kernels(
        self, call: str, shapes: Sequence[Shape], dtype: str, touched_bytes: int, part: str
    ) -> Sequence[Kernel]:
        """See `Stack`."""
        if call in _FREE:
            return ()
        shape = tuple(shapes)
        kind, _, which = call.partition(".")
        if kind == "attention":
            if not self.flash_attention:
                return unfused_attention(call, shape, dtype)
            name = call if which == "forward" else "attention.backward"
            return (Kernel(call=name, shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)
        if kind in ("rms_norm", "layer_norm") and which not in ("forward", "grad0"):
            return ()  # one backward kernel for all three gradients
        if kind == "dropout" and which == "forward":
            return (elementwise(call, math.prod(shape[0]), dtype, 2, 1),)  # with bias and residual
        if kind == "linear" and which == "grad2":
            return ()  # the bias's gradient comes out of the fused kernel behind it
        return (Kernel(call=call, shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)

    def update_lines(
        self, sizes: Sequence[int], dtype: str, optimizer: Optimizer, num_shards: int, machine: Machine
    ) -> list[Line]:
        """Apex's multi-tensor Adam: one pass over all parameters of a piece."""
        elements = sum(-(-size // num_shards) for size in sizes)
        if not elements:
            return []
        call = "adamw.fused" if optimizer.kind == "adamw" else f"{optimizer.kind}.update"
        cost = price_compute(
            machine, call, ((elements,),), optimizer.updates_in(dtype), elements * update_bytes(dtype, optimizer)
        )
        return [Line(COMPUTE, self.dispatch_ps(cost.dispatch_ps, "update", "U"), cost.work_ps, "memory")]
