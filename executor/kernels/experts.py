"""Dispatch of tokens to their experts and back, with a fixed capacity (`plans.operators.experts`).

On a GPU with Triton, every call finds the places in two small kernels and moves the rows in a single pass. Otherwise
plain torch computes the same in several passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from executor.kernels.chips import has_triton
from executor.kernels.context import OpContext, Rule
from executor.kernels.expert_rows import PlainRouting, Routing

__all__ = ["EXPERT_RULES"]

Attrs = Mapping[str, Any]


def _routing(attrs: Attrs, logits: Tensor) -> Routing:
    if has_triton(logits):
        from executor.kernels.triton_experts import RoutingInOnePass

        return RoutingInOnePass(attrs, logits)
    return PlainRouting(attrs, logits)


def dispatch(context: OpContext, attrs: Attrs, x: Tensor, logits: Tensor) -> Tensor:
    """Copy every token to its places at its experts."""
    return _routing(attrs, logits).spread(x, weighted=False)


def dispatch_grad(context: OpContext, attrs: Attrs, g: Tensor, logits: Tensor) -> Tensor:
    """dL/dx: the sum of the gradients of a token's places."""
    return _routing(attrs, logits).collected(g, weighted=False)


def combine(context: OpContext, attrs: Attrs, routed: Tensor, logits: Tensor) -> Tensor:
    """The weighted sum of the outputs of a token's experts."""
    return _routing(attrs, logits).collected(routed, weighted=True)


def combine_grad_routed(context: OpContext, attrs: Attrs, g: Tensor, logits: Tensor) -> Tensor:
    """dL/dx[place] = weight x dL/dy of its token."""
    return _routing(attrs, logits).spread(g, weighted=True)


def combine_grad_logits(context: OpContext, attrs: Attrs, g: Tensor, routed: Tensor, logits: Tensor) -> Tensor:
    """dL/dlogits through the weights."""
    return _routing(attrs, logits).logits_gradient(g, routed)


EXPERT_RULES: Mapping[str, Rule] = {
    "dispatch.forward": dispatch,
    "dispatch.grad0": dispatch_grad,
    "combine.forward": combine,
    "combine.grad0": combine_grad_routed,
    "combine.grad1": combine_grad_logits,
}
