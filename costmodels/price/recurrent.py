"""Time of recurrent layers, whose time steps run one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.price.compute import Compute, matrix_s

__all__ = ["recurrent_s"]

STEP_KERNELS = 3
"""Kernels of a step in addition to its product. cuDNN's LSTM, GRU and RNN took 4.5 us a step at width 32 in bfloat16 on
an H100 (benchmarks/results/recurrent_h100.json)."""

BACKWARD = 1.5
"""Times the forward that a backward takes: 1.0 to 2.3 in the same file, the more the larger the layer."""


def recurrent_s(
    compute: Compute, call: str, shapes: Sequence[tuple[int, ...]], flops_per_s: float, item_bytes: int
) -> float:
    """Seconds of a call of the operator `recurrent`: one product for the inputs of all steps, and then step by step.

    A gradient runs the forward again. cuDNN has faster kernels for small layers in float32, which are not known here.

    Args:
        compute: of the device.
        call: "recurrent.forward", or "recurrent.grad012" with the numbers of the inputs.
        shapes: of its operands: in a gradient that of the output comes first; x[b, s, i], weights [g, i] and [g, h].
        flops_per_s: of matrix products.
        item_bytes: of an element.

    >>> chip = Compute(matrix_flops_per_s={"bfloat16": 1e15}, vector_flops_per_s={"float32": 1e13}, memory_Bps=1e12,
    ...                kernel_s=1e-6)
    >>> shapes = ((4, 16, 8), (32, 8), (32, 8))
    >>> round(recurrent_s(chip, "recurrent.forward", shapes, 1e15, 2) * 1e6)
    65
    """
    is_forward = call.endswith(".forward")
    (batch, length, width), _, (gates, hidden) = shapes[:3] if is_forward else shapes[1:4]
    rows = batch * length
    inputs_s = matrix_s(
        compute, (rows, gates, width), flops_per_s, (rows * (gates + width) + gates * width) * item_bytes,
        item_bytes=item_bytes,
    )  # fmt: skip
    step_s = matrix_s(
        compute, (batch, gates, hidden), flops_per_s, batch * (gates + hidden) * item_bytes, item_bytes=item_bytes
    )  # fmt: skip
    forward_s = inputs_s + length * (STEP_KERNELS * compute.kernel_s + step_s)
    return forward_s if is_forward else (1 + BACKWARD) * forward_s
