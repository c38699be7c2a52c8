"""Softmax, layer norm, RMS norm, batch norm.

The forward of a norm keeps the scale (and the mean) of every row in at least single precision; the gradients read them.
On a GPU both ways are torch's fused kernels, which compute half precision in single.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.chips import is_gpu
from executor.kernels.context import OpContext, Rule
from executor.kernels.place import num_parts

__all__ = ["NORMALISATION_RULES", "shifted"]

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


def _num_dims(attrs: Attrs) -> int:
    return int(attrs.get("num_dims", 1))


def _last(attrs: Attrs) -> tuple[int, ...]:
    return tuple(range(-_num_dims(attrs), 0))


def _rows(attrs: Attrs, x: Tensor) -> torch.Size:
    """The shape of what there is one of for each row."""
    return x.shape[: x.dim() - _num_dims(attrs)]


def _beside(attrs: Attrs, x: Tensor, figure: Tensor) -> Tensor:
    """A figure of every row, with the dims of `x`."""
    return figure.view(*_rows(attrs, x), *(1,) * _num_dims(attrs))


def _is_narrow(x: Tensor) -> bool:
    return x.dtype.itemsize == 2


def shifted(attrs: Attrs, weight: Tensor | None) -> Tensor | None:
    """The factor of a norm: the weight plus attrs "offset"."""
    return weight if weight is None or "offset" not in attrs else weight + attrs["offset"]


# -- layer norm --------------------------------------------------------------------------------------------------------


def layer_norm(
    context: OpContext, attrs: Attrs, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) weight + bias, and mean and 1 / sqrt(variance + eps) of every row."""
    shape, rows, weight = x.shape[-_num_dims(attrs) :], _rows(attrs, x), shifted(attrs, weight)
    if _is_narrow(x) and not is_gpu(x):  # a CPU would round what it keeps to the dtype of x
        variance, mean = torch.var_mean(x.float(), _last(attrs), correction=0)
        return F.layer_norm(x, shape, weight, bias, attrs["eps"]), mean, (variance + attrs["eps"]).rsqrt_()
    y, mean, scale = torch.native_layer_norm(x, shape, weight, bias, attrs["eps"])
    return y, mean.view(rows), scale.view(rows)


def layer_norm_grad_x(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
    """With h = g weight and z = normalised x: scale (h - mean h - z mean(h z)); `rest`: a weight, mean and scale."""
    weight, mean, scale = (None, *rest)[-3:]
    assert mean is not None and scale is not None
    weight = shifted(attrs, weight)
    if _has_layer_norm_backward(x, weight):
        return _layer_norm_backward(attrs, g, x, mean, scale, weight, 0)
    z = _normalised(attrs, x, mean, scale)
    h, last = (g if weight is None else g * weight), _last(attrs)
    h = h - h.mean(last, keepdim=True) - z * (h * z).mean(last, keepdim=True)
    return h.mul_(_beside(attrs, x, scale)).to(x.dtype)


def layer_norm_grad_weight(
    context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, mean: Tensor, scale: Tensor
) -> Tensor:
    """The sum of g times normalised x over all other dims."""
    if context.torch_dtype == x.dtype and _has_layer_norm_backward(x, None):
        return _layer_norm_backward(attrs, g, x, mean, scale, x.new_empty(context.shape), 1)
    return _normalised(attrs, x, mean, scale).mul_(g).sum_to_size(context.shape).to(context.torch_dtype)


def layer_norm_grad_bias(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """The sum of g over all other dims."""
    rows = tuple(range(len(_rows(attrs, g))))
    return g.sum(rows, dtype=context.torch_dtype) if rows else g.to(context.torch_dtype, copy=True)


def _normalised(attrs: Attrs, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (x - _beside(attrs, x, mean)).mul_(_beside(attrs, x, scale))


def _has_layer_norm_backward(x: Tensor, weight: Tensor | None) -> bool:
    """Whether torch's kernel takes statistics in the precision in which they are kept, and operands of these dtypes."""
    known = is_gpu(x) or (x.device.type == "cpu" and not _is_narrow(x))
    return known and (weight is None or weight.dtype == x.dtype)


def _layer_norm_backward(
    attrs: Attrs, g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, which: int
) -> Tensor:
    """One gradient; that of the weight takes its shape and type from `weight`, no values."""
    shape = x.shape[-_num_dims(attrs) :]
    figures = _beside(attrs, x, mean), _beside(attrs, x, scale)
    wanted = [at == which for at in range(3)]
    made: Tensor = _aten.native_layer_norm_backward(g.contiguous(), x, shape, *figures, weight, None, wanted)[which]
    return made


# -- RMS norm ----------------------------------------------------------------------------------------------------------


def rms_norm(context: OpContext, attrs: Attrs, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RMS norm: x / sqrt(mean(x^2) + eps) * weight, and 1 / sqrt(mean(x^2) + eps) of every row."""
    shape, weight = x.shape[-_num_dims(attrs) :], shifted(attrs, weight)
    if is_gpu(x) and weight is not None and weight.dtype != x.dtype:  # torch's kernel takes one dtype
        wide = x.float() if _is_narrow(x) else x
        scale = wide.square().mean(_last(attrs)).add_(attrs["eps"]).rsqrt_()
        return F.rms_norm(x, shape, weight, attrs["eps"]), scale
    y, scale = _aten._fused_rms_norm(x, shape, weight, attrs["eps"])
    return y, scale.view(_rows(attrs, x))


def rms_norm_grad_x(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
    """With h = g weight and z = x scale: scale (h - z mean(h z)); `rest`: a weight and the scale."""
    weight, scale = (None, *rest)[-2:]
    assert scale is not None
    weight = shifted(attrs, weight)
    figure = _beside(attrs, x, scale)
    if is_gpu(x) and (weight is None or weight.dtype == x.dtype):
        return _rms_norm_backward(attrs, g, x, figure, weight, 0)
    z, h = x * figure, g if weight is None else g * weight
    return (h - z * (h * z).mean(_last(attrs), keepdim=True)).mul_(figure).to(x.dtype)


def rms_norm_grad_weight(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """The sum of g times normalised x over all other dims."""
    figure = _beside(attrs, x, scale)
    if is_gpu(x) and context.torch_dtype == x.dtype:
        return _rms_norm_backward(attrs, g, x, figure, x.new_empty(context.shape), 1)
    return (x * figure).mul_(g).sum_to_size(context.shape).to(context.torch_dtype)


def _rms_norm_backward(attrs: Attrs, g: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None, which: int) -> Tensor:
    """One gradient; that of the weight takes its shape and type from `weight`, no values."""
    shape, wanted = x.shape[-_num_dims(attrs) :], [at == which for at in range(2)]
    made: Tensor = _aten._fused_rms_norm_backward(g.contiguous(), x, shape, scale, weight, wanted)[which]
    return made


# -- batch norm --------------------------------------------------------------------------------------------------------


def batch_statistics_part(context: OpContext, attrs: Attrs, x: Tensor, *running: Tensor) -> Tensor:
    """The statistics of a part of the batch: [1, 2, c], mean and variance of every channel."""
    variance, mean = torch.var_mean(x.to(context.torch_dtype), _but_channels(x), correction=0)
    return torch.stack([mean, variance]).unsqueeze(0)


def batch_statistics(context: OpContext, attrs: Attrs, x: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Mean and variance of all parts [2, c], and the running ones, changed in place; `rest`: those, and the parts'."""
    running = rest[: 3 * (len(rest) // 3)]
    if attrs.get("frozen"):
        return torch.stack(running[:2]).to(context.torch_dtype)
    parts = rest[-1] if len(rest) % 3 else batch_statistics_part(context, attrs, x)
    mean, variance = parts.mean(0).unbind()
    spread = torch.stack([mean, variance + (parts[:, 0] - mean).square().mean(0)])  # parts of equal size
    if not running:
        return spread
    count = num_parts(context, attrs, "b") * x.numel() // x.shape[1]
    running_mean, running_variance, steps = running
    running_mean.lerp_(spread[0].to(running_mean.dtype), attrs["momentum"])
    running_variance.lerp_((spread[1] * (count / max(1, count - 1))).to(running_variance.dtype), attrs["momentum"])
    return spread, running_mean, running_variance, steps.add_(1)


def batch_statistics_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """With n places of all parts: (g_mean + 2 (x - mean) g_variance) / n."""
    count = num_parts(context, attrs, "b") * x.numel() // x.shape[1]
    made = (x - _in_channels(x, y[0])).mul_(_in_channels(x, g[1] * (2 / count)))
    return made.add_(_in_channels(x, g[0] / count)).to(x.dtype)


def batch_norm(context: OpContext, attrs: Attrs, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + eps) weight + bias; `y` holds mean and variance of every channel."""
    scale = _scale(attrs, y) * weight
    return (x - _in_channels(x, y[0])).mul_(_in_channels(x, scale)).add_(_in_channels(x, bias)).to(x.dtype)


def batch_norm_grad_x(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The part that does not go through the statistics: g weight / sqrt(variance + eps)."""
    return (g * _in_channels(g, _scale(attrs, y) * weight)).to(g.dtype)


def batch_norm_grad_statistics(
    context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, y: Tensor, weight: Tensor
) -> Tensor:
    """With s = 1 / sqrt(variance + eps): mean -s weight sum g, variance -s^3 weight sum g (x - mean) / 2."""
    scale, centred = _scale(attrs, y), x - _in_channels(x, y[0])
    mean = g.sum(_but_channels(g), dtype=y.dtype).mul_(scale * weight).neg_()
    variance = centred.mul_(g).sum(_but_channels(g), dtype=y.dtype).mul_(scale.pow(3) * weight * -0.5)
    return torch.stack([mean, variance])


def batch_norm_grad_weight(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The sum of g times normalised x over all dims but the channels."""
    made = (x - _in_channels(x, y[0])).mul_(g).sum(_but_channels(g), dtype=y.dtype)
    return made.mul_(_scale(attrs, y)).to(context.torch_dtype)


def batch_norm_grad_bias(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """The sum of g over all dims but the channels."""
    return g.sum(_but_channels(g), dtype=context.torch_dtype)


def _but_channels(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _in_channels(x: Tensor, figure: Tensor) -> Tensor:
    """A figure of every channel, with the dims of `x`."""
    return figure.view(-1, *(1,) * (x.dim() - 2))


def _scale(attrs: Attrs, y: Tensor) -> Tensor:
    return (y[1] + attrs["eps"]).rsqrt_()


NORMALISATION_RULES: Mapping[str, Rule] = {
    "batch_norm.forward": batch_norm,
    "batch_norm.grad0": batch_norm_grad_x,
    "batch_norm.grad1": batch_norm_grad_statistics,
    "batch_norm.grad2": batch_norm_grad_weight,
    "batch_norm.grad3": batch_norm_grad_bias,
    "batch_statistics.forward": batch_statistics,
    "batch_statistics.grad0": batch_statistics_grad,
    "batch_statistics.statistic": batch_statistics_part,
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
