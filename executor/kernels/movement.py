"""Calls that move or add values on one rank: slices, sums, accumulation, parts of flattened tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from plans.redistribution import Step

__all__ = ["MOVEMENT_RULES"]

Attrs = Mapping[str, Any]


def slice_part(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """This rank's chunk of one dim: the slice step of a redistribution (attrs "step")."""
    step: Step = attrs["step"]
    assert step.dim is not None
    width, num_parts = context.shape[step.dim], context.mesh.size(step.axes)
    if width * num_parts == x.shape[step.dim]:
        start = context.mesh.index(context.rank, step.axes) * width
    else:  # an uneven dim: cut by one axis after the other
        before, after = (layout.region(context.rank, attrs["shape"])[step.dim] for layout in (step.before, step.after))
        start, width = after[0] - before[0], after[1] - after[0]
    part = x.narrow(step.dim, start, width)
    return part if context.shares else part.clone(memory_format=torch.contiguous_format)


def total(context: OpContext, attrs: Attrs, first: Tensor, *rest: Tensor) -> Tensor:
    """The sum of all inputs, added from left to right."""
    if not rest:
        return first.clone()
    result = first + rest[0]
    for tensor in rest[1:]:
        result.add_(tensor)
    return result


def accumulate(context: OpContext, attrs: Attrs, new: Tensor, old: Tensor | None) -> Tensor:
    """Add attrs "scale" (default 1) times `new` to `old` in place; the first of a step makes a copy."""
    scale = attrs.get("scale", 1.0)
    if old is None:
        return new.to(context.torch_dtype, copy=True) if scale == 1.0 else new.to(context.torch_dtype) * scale
    return old.add_(new, alpha=scale)


def flat_slice(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """This rank's part, along attrs "axes", of `x` flattened and padded with zeros."""
    return flat_part(x, context.shape[0], context.mesh.index(context.rank, attrs["axes"]))


def flat_part(x: Tensor, size: int, index: int) -> Tensor:
    """Elements [index size, (index + 1) size) of `x` flattened and padded with zeros, in memory of their own."""
    part = x.reshape(-1)[index * size : (index + 1) * size]
    return F.pad(part, (0, size - part.numel())) if part.numel() < size else part.clone()


MOVEMENT_RULES: Mapping[str, Rule] = {
    "slice": slice_part,
    "sum": total,
    "accumulate": accumulate,
    "flat_slice": flat_slice,
}
