"""Pooling over windows of images, by torch's kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext, Rule

__all__ = ["IMAGE_RULES"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten


def _max_settings(attrs: Attrs) -> tuple[Any, ...]:
    pairs = (list(attrs[key]) for key in ("kernel", "stride", "padding", "dilation"))
    return (*pairs, attrs.get("ceil", False))


def max_pool2d(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Maximum over every window of x [n, c, h, w]."""
    return _aten.max_pool2d_with_indices(x, *_max_settings(attrs))[0].contiguous()


def max_pool2d_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """Gradient of the maximum: g at the largest element of every window, which is searched again."""
    settings = _max_settings(attrs)
    where = _aten.max_pool2d_with_indices(x, *settings)[1]
    return _aten.max_pool2d_with_indices_backward(g, x, *settings, where).contiguous()


def _average_settings(attrs: Attrs) -> tuple[Any, ...]:
    pairs = (list(attrs[key]) for key in ("kernel", "stride", "padding"))
    return (*pairs, attrs.get("ceil", False), attrs.get("count_padding", True), None)


def avg_pool2d(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Mean over every window of x [n, c, h, w]."""
    return _aten.avg_pool2d(x, *_average_settings(attrs)).contiguous()


def avg_pool2d_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """Gradient of the mean: each g is spread evenly over its window."""
    return _aten.avg_pool2d_backward(g, x, *_average_settings(attrs)).contiguous()


IMAGE_RULES: Mapping[str, Rule] = {
    "max_pool2d.forward": max_pool2d,
    "max_pool2d.grad0": max_pool2d_grad,
    "avg_pool2d.forward": avg_pool2d,
    "avg_pool2d.grad0": avg_pool2d_grad,
}
