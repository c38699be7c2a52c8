"""Flat buffers of several parameters, clipping by the global norm, and weights rounded from master weights.

A flat buffer is a matrix of attrs "rows" rows in which parts of several tensors, of attrs "sizes" elements each, stand
next to each other (`plans.lower.buckets`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext, Rule

__all__ = ["FLAT_RULES"]

Attrs = Mapping[str, Any]


def flat_pack(context: OpContext, attrs: Attrs, *tensors: Tensor) -> Tensor:
    """Tensors flattened, padded with zeros, cast and put into the columns of a flat buffer, by one kernel on a GPU.

    attrs "axes": along them every rank has the same tensors; of every row it packs the piece that is its own.
    """
    rows, sizes, axes = attrs["rows"], attrs["sizes"], attrs.get("axes", ())
    count, index = context.mesh.size(axes), context.mesh.index(context.rank, axes)
    dtype = context.torch_dtype
    result = torch.empty(context.shape, dtype=dtype, device=tensors[0].device)
    matrix, start = result.view(rows, -1), 0
    if count == 1:  # `size` is that of `rows` padded parts
        torch._chunk_cat([tensor.reshape(-1) for tensor in tensors], 0, rows, out=matrix)
        return result
    for tensor, size in zip(tensors, sizes, strict=True):
        flat, column = tensor.reshape(-1), matrix[:, start : start + size]
        start += size
        if flat.numel() == rows * count * size:
            column.copy_(flat.view(rows, count, size)[:, index])
            continue
        for row in range(rows):
            first = (row * count + index) * size
            part = flat[first : first + size]
            column[row, : part.numel()] = part
            column[row, part.numel() :] = 0
    return result


def flat_unpack(context: OpContext, attrs: Attrs, flat: Tensor) -> tuple[Tensor, ...]:
    """The tensors of attrs "shapes" out of a flat buffer; for one row they are views of it if the program declares so.

    All are copied by one kernel on a GPU.
    """
    rows, sizes = attrs["rows"], attrs["sizes"]
    matrix = flat.view(rows, -1)
    if context.shares:
        parts = [part.view(-1) for part in matrix.split(sizes, 1)]
    else:
        parts = [flat.new_empty(rows * size) for size in sizes]
        torch.split_with_sizes_copy(matrix, sizes, 1, out=[part.view(rows, -1) for part in parts])
    return tuple(part[: math.prod(shape)].view(shape) for part, shape in zip(parts, attrs["shapes"], strict=True))


def store(context: OpContext, attrs: Attrs, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Round master weights, the first half of `tensors`, into the weights, the second half, in place."""
    count = len(tensors) // 2
    if count == 1:
        return tensors[1].copy_(tensors[0])
    masters, weights = tensors[:count], tensors[count:]
    torch._foreach_copy_(weights, masters)
    return weights


def sum_squares(context: OpContext, attrs: Attrs, *gradients: Tensor) -> Tensor:
    """The sum of the squares of all elements; 0 where another rank along attrs "axes" counts them."""
    total = torch.zeros((), dtype=context.torch_dtype, device=context.device)
    if context.mesh.index(context.rank, attrs["axes"]) == 0:
        for gradient in gradients:
            total += torch.linalg.vector_norm(gradient, dtype=total.dtype).square_()
    return total


def clip_scale(context: OpContext, attrs: Attrs, square: Tensor) -> Tensor:
    """The factor by which torch.nn.utils.clip_grad_norm_ scales: at most 1."""
    return (attrs["clip_norm"] / (square.sqrt() + 1e-6)).clamp_(max=1.0)


def scale(context: OpContext, attrs: Attrs, x: Tensor, factor: Tensor) -> Tensor:
    """Multiply `x` by a scalar tensor in place."""
    return x.mul_(factor)


FLAT_RULES: Mapping[str, Rule] = {
    "flat_pack": flat_pack,
    "flat_unpack": flat_unpack,
    "store": store,
    "sum_squares": sum_squares,
    "clip_scale": clip_scale,
    "scale": scale,
}
