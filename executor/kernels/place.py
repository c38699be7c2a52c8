"""The position of a rank's part within a dim that an instruction lists in attrs "split"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext

__all__ = ["by_autograd", "num_parts", "number", "offset"]

Attrs = Mapping[str, Any]


def number(attrs: Attrs, key: str) -> float:
    """A number among the attrs; one that is not finite is written as text ("-inf")."""
    value = attrs[key]
    return float(value) if isinstance(value, str) else value


def num_parts(context: OpContext, attrs: Attrs, dim: str) -> int:
    """Number of parts that the named dim is cut into."""
    return context.mesh.size(attrs.get("split", {}).get(dim, ()))


def offset(context: OpContext, attrs: Attrs, dim: str, width: int) -> int:
    """The first index of this rank's part of the named dim, cut into parts of `width`."""
    return context.mesh.index(context.rank, attrs.get("split", {}).get(dim, ())) * width


def _known(x: Tensor) -> Tensor:
    """The same memory as a tensor that autograd can save; inference tensors cannot be saved."""
    if not x.is_inference():
        return x.detach()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    )


def by_autograd(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], wanted: Sequence[int], g: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of one operator by autograd: its forward is computed again; nothing is changed in place."""
    with torch.inference_mode(False), torch.enable_grad():
        fresh = [_known(tensor) for tensor in inputs]
        for index in wanted:
            fresh[index].requires_grad_()
        output = function(*fresh)
        found = torch.autograd.grad(output, [fresh[index] for index in wanted], g, allow_unused=True)
    return tuple(
        torch.zeros_like(fresh[index]) if tensor is None else tensor.contiguous()
        for index, tensor in zip(wanted, found, strict=True)
    )
