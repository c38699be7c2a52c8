"""Rules that rearrange elements: reshape, permute, narrow, concat.

All except reshape copy, because collectives and reshapes need contiguous values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from plans.operators.shapes import MAX_CONCAT

__all__ = ["SHAPE_RULES"]

Attrs = Mapping[str, Any]


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def reshape(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """The same elements in the output's local shape; the gradient is the same rule."""
    result = x.reshape(context.shape)
    return result if context.shares else result.clone()


def permute(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Dim i is dim attrs "dims"[i] of x."""
    return _copied(x.permute(attrs["dims"]))


def permute_grad(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """Gradient of a permutation: g with the dims in their former order."""
    dims = attrs["dims"]
    return _copied(g.permute(sorted(range(len(dims)), key=lambda dim: dims[dim])))


def _chosen(attrs: Attrs, size: int) -> slice:
    start, step = attrs["start"], attrs.get("step", 1)
    return slice(start, start + (size - 1) * step + 1, step)


def narrow(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Elements attrs "start", start + "step", ... of dim attrs "dim"."""
    dim = attrs["dim"]
    return _copied(x[(slice(None),) * dim + (_chosen(attrs, context.shape[dim]),)])


def narrow_grad(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """Gradient of a slice: g where the slice was taken, zeros elsewhere."""
    dim = attrs["dim"]
    whole = g.new_zeros(context.shape)
    whole[(slice(None),) * dim + (_chosen(attrs, g.shape[dim]),)] = g
    return whole


def concat(context: OpContext, attrs: Attrs, *parts: Tensor) -> Tensor:
    """The parts one behind the other along dim attrs "dim"."""
    return torch.cat(parts, attrs["dim"])


def _concat_grad(which: int) -> Callable[..., Tensor]:
    def one(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
        sizes = attrs["sizes"]
        return _copied(g.narrow(attrs["dim"], sum(sizes[:which]), sizes[which]))

    return one


SHAPE_RULES: Mapping[str, Rule] = {
    "reshape.forward": reshape,
    "reshape.grad0": reshape,
    "permute.forward": permute,
    "permute.grad0": permute_grad,
    "narrow.forward": narrow,
    "narrow.grad0": narrow_grad,
    "concat.forward": concat,
    **{f"concat.grad{which}": _concat_grad(which) for which in range(MAX_CONCAT)},
}
