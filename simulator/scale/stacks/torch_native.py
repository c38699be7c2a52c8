"""torch's own parallel parts, eager or with torch.compile on every block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels import Machine
from costmodels.price import price_compute
from plans.graph import itemsize
from plans.plan import Optimizer
from plans.scale import Degrees
from simulator.scale.action import COMPUTE, Line
from simulator.scale.stacks.base import Kernel, Shape, Stack, update_bytes
from simulator.scale.stacks.kernels import elementwise

__all__ = ["TorchNative"]

_FREE = frozenset({"add.grad0", "add.grad1", "reshape.forward", "reshape.grad0", "load", "arange.forward"})
"""autograd hands a gradient through a sum as it is, and views cost nothing on the device."""


_HOST_S = {
    "plain": (405e-6, 674e-6),
    "ddp": (418e-6, 682e-6),
    "dtensor": (2868e-6, 4008e-6),
    "fsdp2": (1269e-6, 1260e-6),
    "fsdp2_accumulate": (1280e-6, 795e-6),
    "fsdp2_reshard": (1283e-6, 1786e-6),
}
"""Host seconds of one Llama block, forward and backward, with tiny sizes: torch 2.11.0, H200 host, 2026-11-21, kinds of
dispatch in benchmarks/data (stacks torch, ddp, dtensor, fsdp2). Assumed for other hosts."""

_CHECKPOINT_S = (820e-6 - 405e-6, 1607e-6 - 674e-6 - 405e-6)
"""What activation checkpointing adds to a block's forward and, beside the forward made again, to its backward."""


@dataclass(frozen=True, kw_only=True)
class TorchNative(Stack):
    """The kernels that torch's eager mode launches for a transformer, and those that Inductor leaves of them.

    Args:
        compiled: torch.compile of each block: chains of element-wise operations and the norms around them are one
            kernel; embedding, head and loss stay eager.
        fused_norm: whether a norm is one kernel (torch 2.8 and later) or the composite of seven passes.
        update: the optimizer's form: "fused" (one kernel over all tensors) or "foreach".
    """

    name: str = "torch"
    compiled: bool = False
    fused_norm: bool = True
    update: str = "fused"

    def block_host_s(self, degrees: Degrees, part: str, *, reduces: bool) -> float | None:
        """Measured on one block of tiny sizes, so that the device idles (see `_HOST_S`)."""
        if self.compiled or part not in ("F", "B"):
            return None
        if degrees.tp > 1:
            kind = "dtensor"
        elif degrees.dp * degrees.cp > 1:
            kind = {0: "ddp", 3: "fsdp2_reshard"}.get(degrees.optimizer.parallel_level, "fsdp2")
        else:
            kind = "plain"
        forward, backward = _HOST_S[kind if reduces or kind != "fsdp2" else "fsdp2_accumulate"]
        if part == "F":
            return forward + (_CHECKPOINT_S[0] if degrees.recompute != "none" else 0)
        return backward + (forward + _CHECKPOINT_S[1] if degrees.recompute != "none" else 0)

    def kernels(
        self, call: str, shapes: Sequence[Shape], dtype: str, touched_bytes: int, part: str
    ) -> Sequence[Kernel]:
        """See `Stack`."""
        if call in _FREE:
            return ()
        shape = tuple(shapes)
        kind, _, which = call.partition(".")
        size = itemsize(dtype)
        if kind == "attention" and which != "forward":
            return (Kernel(call="attention.backward", shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)
        if kind == "accumulate":
            elements = math.prod(shape[0])
            return (elementwise(call, elements, dtype, 2, 1),)
        if kind in ("rms_norm", "layer_norm"):
            return self._norm(call, shape, dtype, touched_bytes)
        if kind == "cross_entropy":
            # log_softmax reads and writes all logits; backward reads gradient and output, writes the gradient, after
            # the loss has written a gradient of zeros with one entry a row
            elements = math.prod(shape[0])
            if which == "forward":
                return (elementwise("cross_entropy.forward", elements, dtype, 1, 1, shape[0]),)
            return (
                elementwise("zero", elements, dtype, 0, 1, shape[0]),
                elementwise("softmax.grad0", elements, dtype, 2, 1, shape[0]),
            )
        if self.compiled and kind in ("silu", "gelu", "mul", "sum", "rope", "dropout", "add"):
            return self._compiled(call, shape, dtype, touched_bytes, size)
        return (Kernel(call=call, shapes=shape, dtype=dtype, touched_bytes=touched_bytes),)

    def _norm(self, call: str, shapes: tuple[Shape, ...], dtype: str, touched: int) -> Sequence[Kernel]:
        """Forward and backward of a norm; the gradients of x and of the weight come from one kernel."""
        which = call.partition(".")[2]
        if which not in ("forward", "grad0"):
            return ()
        elements = math.prod(shapes[0])
        if self.compiled:  # Inductor joins it with the sum before it: the sum's output is not read again
            reads = 1 if which == "forward" else 2
            return (elementwise(call, elements, dtype, reads, 1, shapes[0]),)
        if self.fused_norm:
            return (Kernel(call=call, shapes=shapes, dtype=dtype, touched_bytes=touched),)
        # cast to float, square, mean, scale by the root, cast back, weight: each a pass; the backward has twice as many
        passes = 6 if which == "forward" else 12
        return tuple(elementwise("mul.forward", elements, "float32", 1, 1, shapes[0]) for _ in range(passes))

    def _compiled(self, call: str, shapes: tuple[Shape, ...], dtype: str, touched: int, size: int) -> Sequence[Kernel]:
        """What is left of element-wise operations: each tensor between two of them is neither written nor read."""
        kind, _, which = call.partition(".")
        elements = math.prod(shapes[0])
        if kind in ("silu", "gelu"):
            return ()  # inside the product that follows or precedes it
        if kind == "mul":
            if which == "forward":
                return (elementwise(call, elements, dtype, 2, 1),)
            return (elementwise(call, elements, dtype, 3, 2),) if which == "grad0" else ()
        if kind in ("sum", "add"):
            return (elementwise(call, elements, dtype, 2, 1),)
        return (Kernel(call=call, shapes=shapes, dtype=dtype, touched_bytes=touched),)

    def update_lines(
        self, sizes: Sequence[int], dtype: str, optimizer: Optimizer, num_shards: int, machine: Machine
    ) -> list[Line]:
        """One multi-tensor kernel over all parameters of a piece."""
        elements = sum(-(-size // num_shards) for size in sizes)
        if not elements:
            return []
        call = f"{optimizer.kind}.{self.update}" if optimizer.kind == "adamw" else f"{optimizer.kind}.update"
        cost = price_compute(
            machine, call, ((elements,),), optimizer.updates_in(dtype), elements * update_bytes(dtype, optimizer)
        )
        return [Line(COMPUTE, self.dispatch_ps(cost.dispatch_ps, "update", "U"), cost.work_ps, "memory")]

    def memory(self, roles: dict[str, int], degrees: Degrees) -> dict[str, int]:
        """DistributedDataParallel's buckets hold every gradient once more (gradient_as_bucket_view is off)."""
        if degrees.dp > 1 and not degrees.optimizer.parallel_level:
            roles["buffer"] = roles.get("buffer", 0) + roles["gradient"]
        return roles
