"""Elementwise rules: arithmetic with broadcasting or with a number, comparisons, casts, masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from executor.kernels.place import number

__all__ = ["ELEMENTWISE_RULES"]

Attrs = Mapping[str, Any]


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
    """x repeated to the output's local shape, in new memory."""
    return x.expand(context.shape).clone(memory_format=torch.contiguous_format)


ELEMENTWISE_RULES: Mapping[str, Rule] = {
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
