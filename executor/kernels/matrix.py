"""Linear layers, matmul and convolution: every gradient is a separate matrix product (or convolution)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.context import OpContext, Rule

__all__ = ["MATRIX_RULES"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten


def _own_bias(context: OpContext, attrs: Attrs, bias: Tensor | None) -> Tensor | None:
    """With "bias_axes" the sum is split over those axes: the parts are added later, and only index 0 has the bias."""
    axes = attrs.get("bias_axes", ())
    return None if axes and context.mesh.index(context.rank, axes) else bias


# -- linear: y[b.., n] = sum_k x[b.., k] w[n, k] + bias[n] -------------------------------------------------------------


def linear(context: OpContext, attrs: Attrs, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """y[.., n] = sum_k x[.., k] w[n, k] + bias[n], by torch.nn.functional.linear."""
    return F.linear(x, w, _own_bias(context, attrs, bias))


def linear_grad_x(context: OpContext, attrs: Attrs, g: Tensor, w: Tensor) -> Tensor:
    """dL/dx[b.., k] = sum_n g[b.., n] w[n, k]."""
    return g @ w


def linear_grad_w(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, old: Tensor | None = None) -> Tensor:
    """dL/dw[n, k] = sum_b g[b.., n] x[b.., k]; added to `old` in place, in the precision of the product, if given."""
    rows, columns = g.reshape(-1, g.shape[-1]).t(), x.reshape(-1, x.shape[-1])
    return rows @ columns if old is None else old.addmm_(rows, columns)


def linear_grad_bias(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """dL/dbias[n] = sum_b g[b.., n]."""
    return g.reshape(-1, g.shape[-1]).sum(0)


# -- matmul ------------------------------------------------------------------------------------------------------------


def matmul(context: OpContext, attrs: Attrs, a: Tensor, c: Tensor) -> Tensor:
    """Product of matrices, batches of matrices or vectors, as torch.matmul."""
    return a @ c


def matmul_grad_a(context: OpContext, attrs: Attrs, g: Tensor, c: Tensor) -> Tensor:
    """dL/da = g c^T, summed over batch dims along which a was repeated."""
    if c.dim() == 1:
        return g.unsqueeze(-1) * c
    rows = g if len(context.shape) > 1 else g.unsqueeze(-2)  # a vector: one row
    found = rows @ c.transpose(-1, -2)
    return (
        found.sum_to_size(context.shape)
        if len(context.shape) > 1
        else found.sum_to_size((1, *context.shape)).squeeze(0)
    )


def matmul_grad_c(context: OpContext, attrs: Attrs, g: Tensor, a: Tensor) -> Tensor:
    """dL/dc = a^T g, summed over batch dims along which c was repeated."""
    if len(context.shape) == 1:
        return (g.reshape(1, -1) @ a.reshape(-1, a.shape[-1])).squeeze(0)
    if len(context.shape) == 2:
        return a.reshape(-1, a.shape[-1]).t() @ g.reshape(-1, g.shape[-1])
    rows, made = (a, g) if a.dim() > 1 else (a.unsqueeze(0), g.unsqueeze(-2))
    return (rows.transpose(-1, -2) @ made).sum_to_size(context.shape)


# -- convolution -------------------------------------------------------------------------------------------------------


def conv2d(context: OpContext, attrs: Attrs, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """With groups, a part of the channels is a part of the groups: those that fit the weight's channels."""
    settings = (attrs["stride"], attrs["padding"], attrs["dilation"], x.shape[1] // w.shape[1])
    return F.conv2d(x, w, _own_bias(context, attrs, bias), *settings).contiguous()


def _conv2d_backward(attrs: Attrs, g: Tensor, x: Tensor, w: Tensor, which: int) -> Tensor:
    mask = [index == which for index in range(3)]
    geometry = (list(attrs["stride"]), list(attrs["padding"]), list(attrs["dilation"]), False, [0, 0])
    found = _aten.convolution_backward(g, x, w, None, *geometry, x.shape[1] // w.shape[1], mask)
    made: Tensor = found[which]
    return made.contiguous()


def conv2d_grad_x(context: OpContext, attrs: Attrs, g: Tensor, w: Tensor) -> Tensor:
    """torch's own kernel, which reads nothing of x but its shape."""
    return _conv2d_backward(attrs, g, g.new_empty(1).expand(context.shape), w, 0)


def conv2d_grad_w(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel, which reads nothing of the weight but its shape."""
    return _conv2d_backward(attrs, g, x, g.new_empty(1).expand(context.shape), 1)


def conv2d_grad_bias(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """dL/dbias[n] = sum_{b, h, w} g[b, n, h, w]."""
    return g.sum((0, 2, 3))


MATRIX_RULES: Mapping[str, Rule] = {
    "linear.forward": linear,
    "linear.grad0": linear_grad_x,
    "linear.grad1": linear_grad_w,
    "linear.grad2": linear_grad_bias,
    "matmul.forward": matmul,
    "matmul.grad0": matmul_grad_a,
    "matmul.grad1": matmul_grad_c,
    "conv2d.forward": conv2d,
    "conv2d.grad0": conv2d_grad_x,
    "conv2d.grad1": conv2d_grad_w,
    "conv2d.grad2": conv2d_grad_bias,
}
