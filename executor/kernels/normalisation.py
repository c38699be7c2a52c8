"""Softmax, layer norm, RMS norm; the gradients recompute the statistics of a norm.

On a GPU the gradients of norms are torch's fused kernels: one that makes the statistics again (with an output that is
thrown away) and one that reads the input and the gradient once. In half precision those compute in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.context import OpContext, Rule

__all__ = ["NORMALISATION_RULES"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten


def softmax(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Softmax along attrs "dim"."""
    return torch.softmax(x, attrs["dim"])


def softmax_grad(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """Gradient of softmax: y (g - sum g y)."""
    return _aten._softmax_backward_data(g, y, attrs["dim"], y.dtype)


def log_softmax(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """The logarithm of the softmax along attrs "dim"."""
    return torch.log_softmax(x, attrs["dim"])


def log_softmax_grad(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """Gradient of log-softmax: g - exp(y) sum g."""
    return _aten._log_softmax_backward_data(g, y, attrs["dim"], y.dtype)


def _last(x: Tensor, attrs: Attrs) -> tuple[int, ...]:
    return tuple(range(-attrs.get("num_dims", 1), 0))


def _over_rows(x: Tensor, attrs: Attrs) -> tuple[int, ...]:
    return tuple(range(x.dim() - attrs.get("num_dims", 1)))


def _is_fused(x: Tensor, weight: Tensor | None) -> bool:
    """Whether torch has a fused kernel for it: on a GPU, with all operands of one dtype."""
    return x.is_cuda and (weight is None or weight.dtype == x.dtype)


def layer_norm(
    context: OpContext, attrs: Attrs, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) weight + bias."""
    return F.layer_norm(x, x.shape[-attrs.get("num_dims", 1) :], weight, bias, attrs["eps"])


def _normalised(attrs: Attrs, x: Tensor) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, _last(x, attrs), correction=0, keepdim=True)
    scale = (variance + attrs["eps"]).rsqrt_()
    return (x - mean).mul_(scale), scale


def layer_norm_grad_x(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """With h = g weight and z = normalised x: scale (h - mean h - z mean(h z))."""
    if _is_fused(x, weight):
        return _fused_layer_norm(attrs, g, x, weight, (True, False, False))
    z, scale = _normalised(attrs, x)
    h, last = (g if weight is None else g * weight), _last(x, attrs)
    return (h - h.mean(last, keepdim=True) - z * (h * z).mean(last, keepdim=True)).mul_(scale)


def layer_norm_grad_weight(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """The sum of g times normalised x over all other dims."""
    if x.is_cuda and context.torch_dtype == x.dtype:
        return _fused_layer_norm(attrs, g, x, x.new_empty(context.shape), (False, True, False))
    return (_normalised(attrs, x)[0].mul_(g)).sum_to_size(context.shape)


def _fused_layer_norm(
    attrs: Attrs, g: Tensor, x: Tensor, weight: Tensor | None, wanted: tuple[bool, bool, bool]
) -> Tensor:
    """One gradient; that of the weight takes its shape and type from `weight`, no values."""
    shape = x.shape[-attrs.get("num_dims", 1) :]
    _, mean, scale = torch.native_layer_norm(x, shape, None, None, attrs["eps"])
    found = _aten.native_layer_norm_backward(g.contiguous(), x, shape, mean, scale, weight, None, wanted)
    return found[wanted.index(True)]


def layer_norm_grad_bias(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """The sum of g over all other dims."""
    rows = _over_rows(g, attrs)
    return g.sum(rows) if rows else g.clone()


def _inverse_root(attrs: Attrs, x: Tensor) -> Tensor:
    return x.square().mean(_last(x, attrs), keepdim=True).add_(attrs["eps"]).rsqrt_()


def rms_norm(context: OpContext, attrs: Attrs, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight."""
    return F.rms_norm(x, x.shape[-attrs.get("num_dims", 1) :], weight, attrs["eps"])


def rms_norm_grad_x(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """With h = g weight and z = x scale: scale (h - z mean(h z))."""
    if _is_fused(x, weight):
        return _fused_rms_norm(attrs, g, x, weight, (True, False))
    scale = _inverse_root(attrs, x)
    z, h = x * scale, g if weight is None else g * weight
    return (h - z * (h * z).mean(_last(x, attrs), keepdim=True)).mul_(scale)


def rms_norm_grad_weight(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """The sum of g times normalised x over all other dims."""
    if x.is_cuda and context.torch_dtype == x.dtype:
        return _fused_rms_norm(attrs, g, x, x.new_empty(context.shape), (False, True))
    product = (x * _inverse_root(attrs, x)).mul_(g)
    return product.sum_to_size(context.shape)


def _fused_rms_norm(attrs: Attrs, g: Tensor, x: Tensor, weight: Tensor | None, wanted: tuple[bool, bool]) -> Tensor:
    """One gradient; that of the weight takes its shape and type from `weight`, no values."""
    shape = x.shape[-attrs.get("num_dims", 1) :]
    _, scale = _aten._fused_rms_norm(x, shape, None, attrs["eps"])
    return _aten._fused_rms_norm_backward(g.contiguous(), x, shape, scale, weight, wanted)[wanted.index(True)]


NORMALISATION_RULES: Mapping[str, Rule] = {
    "softmax.forward": softmax,
    "softmax.grad0": softmax_grad,
    "log_softmax.forward": log_softmax,
    "log_softmax.grad0": log_softmax_grad,
    "layer_norm.forward": layer_norm,
    "layer_norm.grad0": layer_norm_grad_x,
    "layer_norm.grad1": layer_norm_grad_weight,
    "layer_norm.grad2": layer_norm_grad_bias,
    "rms_norm.forward": rms_norm,
    "rms_norm.grad0": rms_norm_grad_x,
    "rms_norm.grad1": rms_norm_grad_weight,
}
