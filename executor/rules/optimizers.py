"""Optimizer updates in place, with the arithmetic and the defaults of torch.optim (its single-tensor forms).

attrs are the settings of `plans.plan.Optimizer`: lr, weight_decay; momentum, dampening, nesterov; beta1, beta2, eps.
States start at zero. Inputs (weight, gradient, states...), outputs (weight, states...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from executor.rules.site import Rule, Site

__all__ = ["UPDATE_RULES"]

Attrs = Mapping[str, Any]


def sgd(site: Site, attrs: Attrs, weight: Tensor, gradient: Tensor) -> Tensor:
    """torch.optim.SGD without momentum."""
    return weight.add_(_decayed(attrs, weight, gradient), alpha=-attrs.get("lr", 1e-3))


def momentum(site: Site, attrs: Attrs, weight: Tensor, gradient: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """torch.optim.SGD with momentum (0.9 unless stated); its buffer begins as the first gradient."""
    gradient = _decayed(attrs, weight, gradient)
    factor = attrs.get("momentum", 0.9)
    if site.progress.step == 1:
        buffer.copy_(gradient)
    else:
        buffer.mul_(factor).add_(gradient, alpha=1 - attrs.get("dampening", 0.0))
    step = gradient.add(buffer, alpha=factor) if attrs.get("nesterov", 0.0) else buffer
    return weight.add_(step, alpha=-attrs.get("lr", 1e-3)), buffer


def adamw(
    site: Site, attrs: Attrs, weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """torch.optim.AdamW (Loshchilov and Hutter 2019)."""
    lr, beta1, beta2 = attrs.get("lr", 1e-3), attrs.get("beta1", 0.9), attrs.get("beta2", 0.999)
    decay, step = attrs.get("weight_decay", 1e-2), site.progress.step
    if decay:
        weight.mul_(1 - lr * decay)
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square.sqrt() / math.sqrt(1 - beta2**step)).add_(attrs.get("eps", 1e-8))
    return weight.addcdiv_(mean, root, value=-(lr / (1 - beta1**step))), mean, square


def _decayed(attrs: Attrs, weight: Tensor, gradient: Tensor) -> Tensor:
    decay = attrs.get("weight_decay", 0.0)
    return gradient.add(weight, alpha=decay) if decay else gradient


UPDATE_RULES: Mapping[str, Rule] = {"sgd.update": sgd, "momentum.update": momentum, "adamw.update": adamw}
