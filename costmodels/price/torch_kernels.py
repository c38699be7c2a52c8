"""Torch's kernels whose time is not that of their bytes, on the rates of a device."""

from __future__ import annotations

from costmodels.price.compute import Compute, memory_s
from costmodels.price.embedding_gradient import embedding_gradient_s
from costmodels.price.tensor_lists import tensor_list_s

__all__ = ["table_grad_s", "update_s"]


def update_s(compute: Compute, call: str, touched: float, elements: int, tensors: int = 1) -> float | None:
    """Seconds of an update of `tensors` equal tensors with operands of `touched` bytes; None: `compute` has no form."""
    model = compute.tensor_lists.get(call)
    if model is None:
        return None
    bytes_per_s = compute.memory_Bps * compute.memory_efficiency
    return tensor_list_s(model, call, compute.num_cores, bytes_per_s, touched, elements, tensors)


def table_grad_s(compute: Compute, tokens: int, table: tuple[int, int], item_bytes: int, dtype: str) -> float | None:
    """Seconds of the gradient of an embedding's table (rows, features); None: `compute` has no form."""
    model, (rows, features) = compute.embedding_gradient, table
    if model is None:
        return None
    fill_s = memory_s(compute, item_bytes * rows * features, call="zero_.forward", dtype=dtype)
    return embedding_gradient_s(model, fill_s, tokens, rows, features)
