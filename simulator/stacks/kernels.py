"""Kernels that several stacks share: written-out attention, softmax, elementwise passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plans.model.graph import itemsize
from simulator.stacks.steps import Kernel, Shape

__all__ = ["elementwise", "unfused_attention"]


def elementwise(call: str, num_elements: int, dtype: str, reads: int, writes: int, shape: Shape = ()) -> Kernel:
    """One pass over `reads` + `writes` tensors of equal size."""
    touched = (reads + writes) * num_elements * itemsize(dtype)
    return Kernel(call=call, shapes=(shape or (num_elements,),), dtype=dtype, touched_bytes=touched)


def unfused_attention(call: str, shapes: Sequence[Shape], dtype: str) -> list[Kernel]:
    """softmax(q k^T) v as two batched products with a fused masking softmax and a dropout between them.

    Forward: scores, softmax (read and write them), dropout (read, write, one byte of mask), context. Backward: the
    gradients of the weights and of v, dropout, softmax (read two, write one), the gradients of q and k. Source: the
    kernels of Megatron-LM's core attention as described by Korthikanti et al. 2022, arXiv 2205.05198, section 4.1.
    """
    forward = call == "attention.forward"
    q, k, v = (shapes[:3] if forward else shapes[1:4])[:3]
    batch = math.prod(q[:-2])
    rows, columns, depth, width = q[-2], k[-2], q[-1], v[-1]
    scores = batch * rows * columns
    size = itemsize(dtype)

    def product(kind: str, m: int, n: int, inner: int) -> Kernel:
        operands = ((batch, m, inner), (batch, inner, n), (batch, m, n))
        touched = size * batch * (m * inner + inner * n + m * n)
        return Kernel(call=kind, shapes=operands, dtype=dtype, touched_bytes=touched)

    def dropout() -> Kernel:
        return Kernel(call="dropout.forward", shapes=((scores,),), dtype=dtype, touched_bytes=scores * (2 * size + 1))

    softmax = elementwise("softmax.forward", scores, dtype, 1, 1, (batch * rows, columns))
    if forward:
        return [
            product("matmul.forward", rows, columns, depth), softmax, dropout(),
            product("matmul.forward", rows, width, columns),
        ]  # fmt: skip
    return [
        product("matmul.forward", rows, columns, width),
        product("matmul.forward", columns, width, rows),
        dropout(),
        elementwise("softmax.grad0", scores, dtype, 2, 1, (batch * rows, columns)),
        product("matmul.forward", rows, depth, columns),
        product("matmul.forward", columns, depth, rows),
    ]
