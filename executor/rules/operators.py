"""Forward and gradients of the operators.

"<kind>.forward" takes the operator's inputs. "<kind>.grad<i>", the gradient of input i, takes the gradient of the
output and then the saved operands that `plans.operators` names in `Gradient.needs`, in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.rules.site import Rule, Site

__all__ = ["OPERATOR_RULES"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten


# -- linear: y[b.., n] = sum_k x[b.., k] w[n, k] + bias[n] -------------------------------------------------------------


def linear(site: Site, attrs: Attrs, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """With "bias_axes" k is split over those axes: the parts are summed later, and only index 0 adds the bias."""
    axes = attrs.get("bias_axes", ())
    return F.linear(x, w, None if axes and site.mesh.index(site.rank, axes) else bias)


def linear_grad_x(site: Site, attrs: Attrs, g: Tensor, w: Tensor) -> Tensor:
    """dL/dx[b.., k] = sum_n g[b.., n] w[n, k]."""
    return g @ w


def linear_grad_w(site: Site, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """dL/dw[n, k] = sum_b g[b.., n] x[b.., k]."""
    return g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def linear_grad_bias(site: Site, attrs: Attrs, g: Tensor) -> Tensor:
    """dL/dbias[n] = sum_b g[b.., n]."""
    return g.reshape(-1, g.shape[-1]).sum(0)


# -- element by element ------------------------------------------------------------------------------------------------


def relu(site: Site, attrs: Attrs, x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.relu(x)


def relu_grad(site: Site, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """g where the output is positive."""
    return _aten.threshold_backward(g, y, 0)


def gelu(site: Site, attrs: Attrs, x: Tensor) -> Tensor:
    """attrs "approximate": "none" (default) or "tanh"."""
    return F.gelu(x, approximate=attrs.get("approximate", "none"))


def gelu_grad(site: Site, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.gelu_backward(g, x, approximate=attrs.get("approximate", "none"))


def silu(site: Site, attrs: Attrs, x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return F.silu(x)


def silu_grad(site: Site, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.silu_backward(g, x)


def absolute(site: Site, attrs: Attrs, x: Tensor) -> Tensor:
    """|x|."""
    return torch.abs(x)


def absolute_grad(site: Site, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """g sign(x), 0 at 0."""
    return g * torch.sgn(x)


def cast(site: Site, attrs: Attrs, x: Tensor) -> Tensor:
    """To the output's dtype; the gradient is the same rule, back to the input's dtype."""
    return x.to(site.torch_dtype, copy=not site.shares)


# -- two operands, broadcast against each other ------------------------------------------------------------------------


def add(site: Site, attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    """a + b."""
    return a + b


def sub(site: Site, attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    """a - b."""
    return a - b


def mul(site: Site, attrs: Attrs, a: Tensor, b: Tensor) -> Tensor:
    """a b."""
    return a * b


def pass_grad(site: Site, attrs: Attrs, g: Tensor) -> Tensor:
    """The gradient as it is, summed over the dims along which the operand was repeated."""
    if g.shape == site.shape and not site.shares:
        return g.clone()
    return g.sum_to_size(site.shape)


def negative_grad(site: Site, attrs: Attrs, g: Tensor) -> Tensor:
    """The gradient of what was subtracted."""
    return -g.sum_to_size(site.shape)


def mul_grad(site: Site, attrs: Attrs, g: Tensor, other: Tensor) -> Tensor:
    """g times the other operand, summed over the dims along which the operand was repeated."""
    return (g * other).sum_to_size(site.shape)


# -- shape -------------------------------------------------------------------------------------------------------------


def reshape(site: Site, attrs: Attrs, x: Tensor) -> Tensor:
    """The same elements in the output's local shape; the gradient is the same rule."""
    result = x.reshape(site.shape)
    return result if site.shares else result.clone()


OPERATOR_RULES: Mapping[str, Rule] = {
    "linear.forward": linear,
    "linear.grad0": linear_grad_x,
    "linear.grad1": linear_grad_w,
    "linear.grad2": linear_grad_bias,
    "relu.forward": relu,
    "relu.grad0": relu_grad,
    "gelu.forward": gelu,
    "gelu.grad0": gelu_grad,
    "silu.forward": silu,
    "silu.grad0": silu_grad,
    "abs.forward": absolute,
    "abs.grad0": absolute_grad,
    "cast.forward": cast,
    "cast.grad0": cast,
    "add.forward": add,
    "add.grad0": pass_grad,
    "add.grad1": pass_grad,
    "sub.forward": sub,
    "sub.grad0": pass_grad,
    "sub.grad1": negative_grad,
    "mul.forward": mul,
    "mul.grad0": mul_grad,
    "mul.grad1": mul_grad,
    "reshape.forward": reshape,
    "reshape.grad0": reshape,
}
