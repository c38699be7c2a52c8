"""Elementwise rules: activations, arithmetic with broadcasting or with a number, comparisons, casts, masks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from executor.kernels.place import number

__all__ = ["ELEMENTWISE_RULES"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten


def relu(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.relu(x)


def relu_grad(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """Gradient of relu: g where the output y is positive, else 0."""
    return _aten.threshold_backward(g, y, 0)


def gelu(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """GELU; attrs "approximate" is "none" (exact, the default) or "tanh"."""
    return F.gelu(x, approximate=attrs.get("approximate", "none"))


def gelu_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.gelu_backward(g, x, approximate=attrs.get("approximate", "none"))


def silu(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return F.silu(x)


def silu_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.silu_backward(g, x)


def tanh(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """tanh(x)."""
    return torch.tanh(x)


def tanh_grad(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """Gradient of tanh: g (1 - y^2)."""
    return _aten.tanh_backward(g, y)


def sigmoid(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


def sigmoid_grad(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """Gradient of sigmoid: g y (1 - y)."""
    return _aten.sigmoid_backward(g, y)


def exp(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Exponential, e^x."""
    return torch.exp(x)


def exp_grad(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """Gradient of exp: g y."""
    return g * y


def log(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """The natural logarithm."""
    return torch.log(x)


def log_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """Gradient of log: g / x."""
    return g / x


def sqrt(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """The square root."""
    return torch.sqrt(x)


def sqrt_grad(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """Gradient of sqrt: g / (2 y)."""
    return (g / y).mul_(0.5)


def rsqrt(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return torch.rsqrt(x)


def rsqrt_grad(context: OpContext, attrs: Attrs, g: Tensor, y: Tensor) -> Tensor:
    """Gradient of rsqrt: -g y^3 / 2."""
    return (g * y**3).mul_(-0.5)


def sin(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """The sine."""
    return torch.sin(x)


def sin_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """Gradient of sin: g cos(x)."""
    return torch.cos(x).mul_(g)


def cos(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """The cosine."""
    return torch.cos(x)


def cos_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """Gradient of cos: -g sin(x)."""
    return torch.sin(x).mul_(g).neg_()


def erf(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """The error function."""
    return torch.erf(x)


def erf_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """Gradient of erf: g 2 / sqrt(pi) e^(-x^2)."""
    return x.square().neg_().exp_().mul_(g).mul_(2 / math.sqrt(math.pi))


def leaky_relu(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x, times attrs "negative_slope" (0.01) where it is negative."""
    return F.leaky_relu(x, attrs.get("negative_slope", 0.01))


def leaky_relu_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.leaky_relu_backward(g, x, attrs.get("negative_slope", 0.01), False)


def _elu_settings(attrs: Attrs) -> tuple[float, float, float]:
    return attrs.get("alpha", 1.0), attrs.get("scale", 1.0), attrs.get("input_scale", 1.0)


def elu(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """scale x where it is positive, else scale alpha (e^(input_scale x) - 1)."""
    return _aten.elu(x, *_elu_settings(attrs))


def elu_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.elu_backward(g, *_elu_settings(attrs), False, x)


def softplus(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """log(1 + e^(beta x)) / beta, x itself where beta x is above attrs "threshold"."""
    return F.softplus(x, attrs.get("beta", 1), attrs.get("threshold", 20))


def softplus_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.softplus_backward(g, x, attrs.get("beta", 1), attrs.get("threshold", 20))


def mish(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x tanh(softplus(x))."""
    return F.mish(x)


def mish_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.mish_backward(g, x)


def hardswish(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x relu6(x + 3) / 6."""
    return F.hardswish(x)


def hardswish_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.hardswish_backward(g, x)


def hardsigmoid(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """relu6(x + 3) / 6."""
    return F.hardsigmoid(x)


def hardsigmoid_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.hardsigmoid_backward(g, x)


def _ends(attrs: Attrs) -> tuple[float, float]:
    """Of hardtanh and relu6: -1 and 1, or 0 and 6."""
    return attrs.get("min_val", -1), attrs.get("max_val", 1)


def hardtanh(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x between attrs "min_val" (-1) and "max_val" (1)."""
    return F.hardtanh(x, *_ends(attrs))


def hardtanh_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.hardtanh_backward(g, x, *_ends(attrs))


def relu6(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x between 0 and 6."""
    return F.relu6(x)


def relu6_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """torch's own kernel."""
    return _aten.hardtanh_backward(g, x, 0, 6)


def _limits(attrs: Attrs) -> tuple[float | None, float | None]:
    least, most = (number(attrs, key) if key in attrs else None for key in ("min", "max"))
    return least, most


def clamp(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x between attrs "min" and "max", each of which may be absent."""
    least, most = _limits(attrs)
    return torch.clamp(x, least, most)


def clamp_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """Gradient of clamp: g between the limits and on them, else 0."""
    least, most = _limits(attrs)
    if least is not None:
        g = g.masked_fill(x < least, 0)
    return g if most is None else g.masked_fill(x > most, 0)


def power(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x to the power of attrs "exponent"."""
    return torch.pow(x, attrs["exponent"])


def power_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """g e x^(e - 1), 0 for e = 0."""
    exponent = attrs["exponent"]
    return torch.zeros_like(g) if exponent == 0 else torch.pow(x, exponent - 1).mul_(g).mul_(exponent)


def absolute(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Absolute value, |x|."""
    return torch.abs(x)


def absolute_grad(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor) -> Tensor:
    """Gradient of the absolute value: g sign(x), 0 at x = 0."""
    return g * torch.sgn(x)


def negative(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Negation, -x; its gradient is the same rule, -g."""
    return -x


def cast(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """To the output's dtype; the gradient is the same rule, back to the input's dtype."""
    return x.to(context.torch_dtype, copy=not context.shares)


# -- two operands, broadcast against each other; or one and the number attrs "number" ----------------------------------


def _pair(attrs: Attrs, a: Tensor, b: Tensor | None) -> tuple[Any, Any]:
    if b is not None:
        return a, b
    return (number(attrs, "number"), a) if attrs.get("reverse") else (a, number(attrs, "number"))


def add(context: OpContext, attrs: Attrs, a: Tensor, b: Tensor | None = None) -> Tensor:
    """a + b."""
    left, right = _pair(attrs, a, b)
    return left + right


def sub(context: OpContext, attrs: Attrs, a: Tensor, b: Tensor | None = None) -> Tensor:
    """a - b."""
    left, right = _pair(attrs, a, b)
    return left - right


def mul(context: OpContext, attrs: Attrs, a: Tensor, b: Tensor | None = None) -> Tensor:
    """a b."""
    left, right = _pair(attrs, a, b)
    return left * right


def div(context: OpContext, attrs: Attrs, a: Tensor, b: Tensor | None = None) -> Tensor:
    """a / b."""
    left, right = _pair(attrs, a, b)
    return left / right


def pass_grad(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """Gradient of an addition: g, summed over the dims along which the operand was broadcast."""
    if g.shape == context.shape and not context.shares:
        return g.clone()
    return g.sum_to_size(context.shape)


def negative_grad(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """Gradient of b in a - b: -g, summed to the shape of b."""
    return -g.sum_to_size(context.shape)


def sub_grad(context: OpContext, attrs: Attrs, g: Tensor) -> Tensor:
    """Gradient of a in a - b, or of x in number - x (attrs "reverse")."""
    return negative_grad(context, attrs, g) if attrs.get("reverse") else pass_grad(context, attrs, g)


def mul_grad(context: OpContext, attrs: Attrs, g: Tensor, other: Tensor | None = None) -> Tensor:
    """Gradient of a product: g times the other operand, summed over broadcast dims."""
    return (g * (number(attrs, "number") if other is None else other)).sum_to_size(context.shape)


def div_grad_a(context: OpContext, attrs: Attrs, g: Tensor, other: Tensor | None = None) -> Tensor:
    """g / b; of a number over x: -g number / x^2."""
    if attrs.get("reverse"):
        assert other is not None
        return (g / other).div_(other).mul_(-number(attrs, "number"))
    return (g / (number(attrs, "number") if other is None else other)).sum_to_size(context.shape)


def div_grad_b(context: OpContext, attrs: Attrs, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Gradient of b in a / b: -g a / b^2."""
    return (g * a / b).div_(b).neg_().sum_to_size(context.shape)


def _comparing(compare: Callable[[Any, Any], Tensor]) -> Rule:
    def one(context: OpContext, attrs: Attrs, a: Tensor, b: Tensor | None = None) -> Tensor:
        return compare(a, number(attrs, "number") if b is None else b)

    return one


def logical_not(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Elementwise logical not."""
    return torch.logical_not(x)


def where(context: OpContext, attrs: Attrs, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where the condition is true, else b."""
    return torch.where(condition, a, b)


def where_grad_a(context: OpContext, attrs: Attrs, g: Tensor, condition: Tensor) -> Tensor:
    """Gradient of a in where: g where the condition is true, summed over broadcast dims."""
    return torch.where(condition, g, 0).sum_to_size(context.shape)


def where_grad_b(context: OpContext, attrs: Attrs, g: Tensor, condition: Tensor) -> Tensor:
    """Gradient of b in where: g where the condition is false, summed over broadcast dims."""
    return torch.where(condition, 0, g).sum_to_size(context.shape)


def masked_fill(context: OpContext, attrs: Attrs, x: Tensor, mask: Tensor) -> Tensor:
    """x with attrs "value" where the mask is true."""
    return torch.masked_fill(x.expand(context.shape), mask, number(attrs, "value"))


def masked_fill_grad(context: OpContext, attrs: Attrs, g: Tensor, mask: Tensor) -> Tensor:
    """Gradient of x in masked_fill: g, and 0 where the mask is true."""
    return torch.masked_fill(g, mask, 0).sum_to_size(context.shape)


def expand(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """x repeated to the output's local shape, in memory of its own."""
    return x.expand(context.shape).clone(memory_format=torch.contiguous_format)


ELEMENTWISE_RULES: Mapping[str, Rule] = {
    "relu.forward": relu,
    "relu.grad0": relu_grad,
    "gelu.forward": gelu,
    "gelu.grad0": gelu_grad,
    "silu.forward": silu,
    "silu.grad0": silu_grad,
    "tanh.forward": tanh,
    "tanh.grad0": tanh_grad,
    "sigmoid.forward": sigmoid,
    "sigmoid.grad0": sigmoid_grad,
    "exp.forward": exp,
    "exp.grad0": exp_grad,
    "log.forward": log,
    "log.grad0": log_grad,
    "sqrt.forward": sqrt,
    "sqrt.grad0": sqrt_grad,
    "rsqrt.forward": rsqrt,
    "rsqrt.grad0": rsqrt_grad,
    "sin.forward": sin,
    "sin.grad0": sin_grad,
    "cos.forward": cos,
    "cos.grad0": cos_grad,
    "erf.forward": erf,
    "erf.grad0": erf_grad,
    "leaky_relu.forward": leaky_relu,
    "leaky_relu.grad0": leaky_relu_grad,
    "elu.forward": elu,
    "elu.grad0": elu_grad,
    "softplus.forward": softplus,
    "softplus.grad0": softplus_grad,
    "mish.forward": mish,
    "mish.grad0": mish_grad,
    "hardswish.forward": hardswish,
    "hardswish.grad0": hardswish_grad,
    "hardsigmoid.forward": hardsigmoid,
    "hardsigmoid.grad0": hardsigmoid_grad,
    "hardtanh.forward": hardtanh,
    "hardtanh.grad0": hardtanh_grad,
    "relu6.forward": relu6,
    "relu6.grad0": relu6_grad,
    "clamp.forward": clamp,
    "clamp.grad0": clamp_grad,
    "pow.forward": power,
    "pow.grad0": power_grad,
    "abs.forward": absolute,
    "abs.grad0": absolute_grad,
    "neg.forward": negative,
    "neg.grad0": negative,
    "detach.forward": cast,
    "cast.forward": cast,
    "cast.grad0": cast,
    "add.forward": add,
    "add.grad0": pass_grad,
    "add.grad1": pass_grad,
    "sub.forward": sub,
    "sub.grad0": sub_grad,
    "sub.grad1": negative_grad,
    "mul.forward": mul,
    "mul.grad0": mul_grad,
    "mul.grad1": mul_grad,
    "div.forward": div,
    "div.grad0": div_grad_a,
    "div.grad1": div_grad_b,
    "eq.forward": _comparing(torch.eq),
    "ne.forward": _comparing(torch.ne),
    "lt.forward": _comparing(torch.lt),
    "le.forward": _comparing(torch.le),
    "gt.forward": _comparing(torch.gt),
    "ge.forward": _comparing(torch.ge),
    "logical_and.forward": _comparing(torch.logical_and),
    "logical_or.forward": _comparing(torch.logical_or),
    "logical_not.forward": logical_not,
    "where.forward": where,
    "where.grad1": where_grad_a,
    "where.grad2": where_grad_b,
    "masked_fill.forward": masked_fill,
    "masked_fill.grad0": masked_fill_grad,
    "expand.forward": expand,
    "expand.grad0": pass_grad,
}
