"""Optimizer updates in place, with the arithmetic and the defaults of torch.optim (its single-tensor forms).

attrs are the settings of `plans.plan.Optimizer`: lr, weight_decay; momentum, dampening, nesterov; beta1, beta2, eps.
States start at zero. Inputs (weight, gradient, states...), outputs (weight, states...). The arithmetic is that of the
weight's dtype; states that are kept in another one are read into it and rounded back. On a GPU AdamW is torch's fused
kernel, where all are of one dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from executor.kernels.chips import is_gpu
from executor.kernels.context import OpContext, Rule

__all__ = ["UPDATE_RULES"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten


def sgd(context: OpContext, attrs: Attrs, weight: Tensor, gradient: Tensor) -> Tensor:
    """One update as torch.optim.SGD without momentum makes it."""
    return weight.add_(_decayed(attrs, weight, gradient), alpha=-attrs.get("lr", 1e-3))


def momentum(
    context: OpContext, attrs: Attrs, weight: Tensor, gradient: Tensor, buffer: Tensor
) -> tuple[Tensor, Tensor]:
    """torch.optim.SGD with momentum (0.9 unless stated); its buffer begins as the first gradient."""
    gradient = _decayed(attrs, weight, gradient)
    factor, own = attrs.get("momentum", 0.9), buffer.to(weight.dtype)
    if context.counter.step == 1:
        own.copy_(gradient)
    else:
        own.mul_(factor).add_(gradient, alpha=1 - attrs.get("dampening", 0.0))
    step = gradient.add(own, alpha=factor) if attrs.get("nesterov", 0.0) else own
    return weight.add_(step, alpha=-attrs.get("lr", 1e-3)), _rounded(buffer, own)


def adamw(
    context: OpContext, attrs: Attrs, weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One update as torch.optim.AdamW makes it (Loshchilov and Hutter 2019)."""
    lr, beta1, beta2 = attrs.get("lr", 1e-3), attrs.get("beta1", 0.9), attrs.get("beta2", 0.999)
    decay, step = attrs.get("weight_decay", 1e-2), context.counter.step
    if weight.is_cuda and {gradient.dtype, mean.dtype, square.dtype} == {weight.dtype}:
        _aten._fused_adamw_(
            [weight], [gradient], [mean], [square], [], [context.counter.on(weight.device)], lr=lr, beta1=beta1,
            beta2=beta2, weight_decay=decay, eps=attrs.get("eps", 1e-8), amsgrad=False, maximize=False,
        )  # fmt: skip
        return weight, mean, square
    if decay:
        weight.mul_(1 - lr * decay)
    first, second = mean.to(weight.dtype), square.to(weight.dtype)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second.sqrt() / math.sqrt(1 - beta2**step)).add_(attrs.get("eps", 1e-8))
    weight.addcdiv_(first, root, value=-(lr / (1 - beta1**step)))
    return weight, _rounded(mean, first), _rounded(square, second)


def _decayed(attrs: Attrs, weight: Tensor, gradient: Tensor) -> Tensor:
    decay = attrs.get("weight_decay", 0.0)
    return gradient.add(weight, alpha=decay) if decay else gradient


def _rounded(state: Tensor, own: Tensor) -> Tensor:
    """Write a computed value into the memory of the optimizer state, with the state's dtype."""
    return state if own is state else state.copy_(own)


def adamw_of_many(context: OpContext, attrs: Attrs, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`adamw` of several parameters, (weight, gradient, mean, square) of one behind those of the other.

    On a GPU, where all are of one dtype, one kernel updates them all.
    """
    of_each = [tensors[at : at + 4] for at in range(0, len(tensors), 4)]
    first = tensors[0]
    if len(of_each) > 1 and is_gpu(first) and all(each.dtype == first.dtype for each in tensors):
        weights, gradients, means, squares = (list(each) for each in zip(*of_each, strict=True))
        step = context.counter.on(first.device)
        _aten._fused_adamw_(
            weights, gradients, means, squares, [], [step] * len(weights), lr=attrs.get("lr", 1e-3),
            beta1=attrs.get("beta1", 0.9), beta2=attrs.get("beta2", 0.999), eps=attrs.get("eps", 1e-8),
            weight_decay=attrs.get("weight_decay", 1e-2), amsgrad=False, maximize=False,
        )  # fmt: skip
        return tuple(each for one in of_each for each in (one[0], *one[2:]))
    return tuple(made for each in of_each for made in adamw(context, attrs, *each))


UPDATE_RULES: Mapping[str, Rule] = {"sgd.update": sgd, "momentum.update": momentum, "adamw.update": adamw_of_many}
