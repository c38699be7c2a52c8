"""Functions of one number: a table of torch's calls, with the settings that aten gives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from executor.kernels.place import number

__all__ = ["ACTIVATION_RULES"]

_aten = torch.ops.aten


class _Function(NamedTuple):
    """A function of one number.

    Args:
        forward: of the input and the settings.
        gradient: of the output's gradient, the input or output that `plans.operators.elementwise` names, the settings.
        settings: attrs and their defaults, in the order in which both take them.
    """

    forward: Callable[..., Tensor]
    gradient: Callable[..., Tensor]
    settings: Mapping[str, Any] = {}


def _gelu_grad(g: Tensor, x: Tensor, approximate: str) -> Tensor:
    return _aten.gelu_backward(g, x, approximate=approximate)


def _erf_grad(g: Tensor, x: Tensor) -> Tensor:
    """g 2 / sqrt(pi) e^(-x^2)."""
    return x.square().neg_().exp_().mul_(g).mul_(2 / math.sqrt(math.pi))


def _elu_grad(g: Tensor, x: Tensor, *settings: float) -> Tensor:
    return _aten.elu_backward(g, *settings, False, x)


def _clamp_grad(g: Tensor, x: Tensor, least: float | None, most: float | None) -> Tensor:
    """g between the limits and on them, else 0."""
    if least is not None:
        g = g.masked_fill(x < least, 0)
    return g if most is None else g.masked_fill(x > most, 0)


def _power_grad(g: Tensor, x: Tensor, exponent: float) -> Tensor:
    """g e x^(e - 1), 0 for e = 0."""
    return torch.zeros_like(g) if exponent == 0 else torch.pow(x, exponent - 1).mul_(g).mul_(exponent)


def _negative(g: Tensor, *_: Tensor) -> Tensor:
    return -g


def _zero(g: Tensor, *_: Tensor) -> Tensor:
    return torch.zeros_like(g)


_FUNCTIONS: Mapping[str, _Function] = {
    # the gradient reads the output
    "relu": _Function(torch.relu, lambda g, y: _aten.threshold_backward(g, y, 0)),
    "tanh": _Function(torch.tanh, _aten.tanh_backward),
    "sigmoid": _Function(torch.sigmoid, _aten.sigmoid_backward),
    "exp": _Function(torch.exp, torch.mul),
    "expm1": _Function(torch.expm1, lambda g, y: torch.addcmul(g, g, y)),
    "sqrt": _Function(torch.sqrt, lambda g, y: (g / y).mul_(0.5)),
    "rsqrt": _Function(torch.rsqrt, lambda g, y: (g * y**3).mul_(-0.5)),
    # the gradient reads the input
    "gelu": _Function(lambda x, approximate: F.gelu(x, approximate=approximate), _gelu_grad, {"approximate": "none"}),
    "silu": _Function(F.silu, _aten.silu_backward),
    "abs": _Function(torch.abs, lambda g, x: g * torch.sgn(x)),
    "log": _Function(torch.log, torch.div),
    "log1p": _Function(torch.log1p, lambda g, x: g / (1 + x)),
    "log2": _Function(torch.log2, lambda g, x: g / (x * math.log(2))),
    "log10": _Function(torch.log10, lambda g, x: g / (x * math.log(10))),
    "log_sigmoid": _Function(F.logsigmoid, lambda g, x: torch.sigmoid(-x).mul_(g)),
    "sin": _Function(torch.sin, lambda g, x: torch.cos(x).mul_(g)),
    "cos": _Function(torch.cos, lambda g, x: torch.sin(x).mul_(g).neg_()),
    "atan": _Function(torch.atan, lambda g, x: g / (1 + x * x)),
    "erf": _Function(torch.erf, _erf_grad),
    "leaky_relu": _Function(
        F.leaky_relu, lambda g, x, slope: _aten.leaky_relu_backward(g, x, slope, False), {"negative_slope": 0.01}
    ),
    "elu": _Function(_aten.elu, _elu_grad, {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}),
    "softplus": _Function(F.softplus, _aten.softplus_backward, {"beta": 1, "threshold": 20}),
    "mish": _Function(F.mish, _aten.mish_backward),
    "hardswish": _Function(F.hardswish, _aten.hardswish_backward),
    "hardsigmoid": _Function(F.hardsigmoid, _aten.hardsigmoid_backward),
    "hardtanh": _Function(F.hardtanh, _aten.hardtanh_backward, {"min_val": -1, "max_val": 1}),
    "relu6": _Function(F.relu6, lambda g, x: _aten.hardtanh_backward(g, x, 0, 6)),
    "clamp": _Function(torch.clamp, _clamp_grad, {"min": None, "max": None}),
    "pow": _Function(torch.pow, _power_grad, {"exponent": 1}),
    # the gradient reads nothing
    "neg": _Function(torch.neg, _negative),
    "floor": _Function(torch.floor, _zero),
    "ceil": _Function(torch.ceil, _zero),
    "trunc": _Function(torch.trunc, _zero),
    "round": _Function(torch.round, _zero),
    "sign": _Function(torch.sign, _zero),
}
"""Kind -> its function; the names of settings are aten's."""


def _rules(kind: str, function: _Function) -> dict[str, Rule]:
    def settings(attrs: Mapping[str, Any]) -> list[Any]:
        return [
            default if name not in attrs else number(attrs, name) if name in ("min", "max") else attrs[name]
            for name, default in function.settings.items()
        ]

    def forward(context: OpContext, attrs: Mapping[str, Any], x: Tensor) -> Tensor:
        return function.forward(x, *settings(attrs))

    def gradient(context: OpContext, attrs: Mapping[str, Any], g: Tensor, *saved: Tensor) -> Tensor:
        return function.gradient(g, *saved, *settings(attrs))

    return {f"{kind}.forward": forward, f"{kind}.grad0": gradient}


ACTIVATION_RULES: Mapping[str, Rule] = {
    name: rule for kind, function in _FUNCTIONS.items() for name, rule in _rules(kind, function).items()
}
