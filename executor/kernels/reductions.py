"""Sums and means over dims: the parts of a split dim are added later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from executor.kernels.place import num_parts

__all__ = ["REDUCTION_RULES"]

Attrs = Mapping[str, Any]


def reduce_sum(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Sum over attrs "dims"."""
    return x.sum(attrs["dims"], keepdim=attrs.get("keepdim", False)) if attrs["dims"] else x.clone()


def reduce_sum_grad(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """Gradient of a sum: g, expanded to the summed dims."""
    for dim in sorted(dim % len(context.shape) for dim in attrs["dims"]):
        if not attrs.get("keepdim", False):
            g = g.unsqueeze(dim)
    return g.expand(context.shape).clone(memory_format=torch.contiguous_format)


def _count(context: OpContext, attrs: Attrs, shape: tuple[int, ...]) -> int:
    """The number of elements in the mean, including those of other ranks."""
    over = [dim % len(shape) for dim in attrs["dims"]]
    return math.prod(shape[dim] * num_parts(context, attrs, f"d{dim}") for dim in over)


def reduce_mean(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """The sum over attrs "dims" of this part, over the number of elements of all parts."""
    return reduce_sum(context, attrs, x).div_(_count(context, attrs, x.shape))


def reduce_mean_grad(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """Gradient of a mean: g / number of elements, expanded to the averaged dims."""
    return reduce_sum_grad(context, attrs, g).div_(_count(context, attrs, context.shape))


REDUCTION_RULES: Mapping[str, Rule] = {
    "reduce_sum.forward": reduce_sum,
    "reduce_sum.grad0": reduce_sum_grad,
    "reduce_mean.forward": reduce_mean,
    "reduce_mean.grad0": reduce_mean_grad,
}
