"""Optimizer updates in place, with the arithmetic and the defaults of torch.optim (its single-tensor forms).

attrs are the settings of `plans.optimizer.Optimizer`: lr, lr_scale, weight_decay, momentum, dampening, nesterov, beta1,
beta2, eps. States start at zero. Inputs (weight, gradient, states...), outputs (weight, states...). The arithmetic is
that of the weight's dtype; states that are kept in another one are read into it and rounded back. On a GPU large
parameters are updated by `triton_adamw`, and small ones by torch's fused kernel.

The learning rate and what else changes from step to step are scalars on the device (`StepCounter.number`), so that a
recorded step can be replayed. A scalar of the dtype of a half-precision weight would lose digits: there the last
product is made in float32.

With attrs "checked" the last two inputs are the decision whether the step is skipped and the state of the check
(`plans.step_check`). If it is skipped, everything stays unchanged; the number of the update, for AdamW's correction of
its means, leaves out the steps that were skipped. A CPU looks at the decision, other devices continue without it: the
fused kernel supports this; otherwise the previous values are restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from executor.kernels.chips import has_triton, is_gpu
from executor.kernels.context import OpContext, Rule, StepCounter
from executor.kernels.step_check import number_of_update

__all__ = ["DEFAULT_LR", "UPDATE_RULES", "adamw_of_many", "learning_rate", "step_number"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten


def sgd(context: OpContext, attrs: Attrs, weight: Tensor, gradient: Tensor, *_: Tensor) -> Tensor:
    """One update, as by torch.optim.SGD without momentum."""
    return _moved(weight, _decayed(attrs, weight, gradient), _rate(context, attrs, weight))


def momentum(
    context: OpContext, attrs: Attrs, weight: Tensor, gradient: Tensor, buffer: Tensor, held: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """torch.optim.SGD with momentum (0.9 unless stated); its buffer begins as the first gradient."""
    gradient = _decayed(attrs, weight, gradient)
    factor, own = attrs.get("momentum", 0.9), buffer.to(weight.dtype)
    number = None if held is None else _number(context, held)
    if number is None and context.counter.step == 1:
        own.copy_(gradient)
    else:
        own.mul_(factor).add_(gradient, alpha=1 - attrs.get("dampening", 0.0))
    if number is not None:
        own.copy_(torch.where(number == 1, gradient, own))
    step = gradient.add(own, alpha=factor) if attrs.get("nesterov", 0.0) else own
    return _moved(weight, step, _rate(context, attrs, weight)), _rounded(buffer, own)


def adamw(
    context: OpContext, attrs: Attrs, weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor,
    corrections: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One update, as by torch.optim.AdamW (Loshchilov and Hutter 2019); its bias corrections may be given."""
    beta1, beta2, eps = attrs.get("beta1", 0.9), attrs.get("beta2", 0.999), attrs.get("eps", 1e-8)
    decay, number = attrs.get("weight_decay", 1e-2), context.counter.number
    device = weight.device
    scalar = _scalar_dtype(weight)
    precise = scalar == weight.dtype
    if decay:
        left = number(_left_by_decay, (*_stated(attrs), decay), scalar, device)
        weight.mul_(left) if precise else weight.copy_(weight.to(scalar).mul_(left))
    first, second = _in(mean, weight.dtype), _in(square, weight.dtype)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    bias, unbiased = corrections or _corrections(context, attrs, scalar, device)
    # rounded where torch's single-tensor form rounds: after the root, its division and eps, and with the weight
    root = _in(second.sqrt(), scalar).div_(bias)
    root = _in(root, weight.dtype).add_(eps)
    # in the order of torch's addcdiv, which takes no tensor for the rate
    step = _in(first, scalar).mul(unbiased).div_(root)
    weight.sub_(step) if precise else weight.copy_(weight.to(scalar).sub_(step))
    return weight, _rounded(mean, first), _rounded(square, second)


def _corrections(
    context: OpContext, attrs: Attrs, dtype: torch.dtype, device: torch.device, held: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The root of the correction of the mean square, and the rate over that of the mean."""
    beta1, beta2, number = attrs.get("beta1", 0.9), attrs.get("beta2", 0.999), context.counter.number
    if held is None:
        return number(_root_of_bias, (beta2,), dtype, device), number(
            _unbiased_rate, (*_stated(attrs), beta1), dtype, device
        )
    wide = dtype if device.type == "npu" else torch.float64  # in which torch.optim computes them
    done = _number(context, held).to(wide)
    corrections = [-torch.expm1(done * math.log(beta)) if beta else torch.ones_like(done) for beta in (beta1, beta2)]
    rate = number(learning_rate, _stated(attrs), wide, device)
    return corrections[1].sqrt().to(dtype), (rate / corrections[0]).to(dtype)


def _number(context: OpContext, held: Tensor) -> Tensor:
    """The number of this update, where the step is checked."""
    return number_of_update(context.counter.number(step_number, (), torch.float32, held.device), held)


def _in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype: itself where it has it, without a call of torch."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


DEFAULT_LR = 1e-3
"""The learning rate where neither the run nor the plan states one, as in torch."""


def step_number(now: StepCounter) -> float:
    """The number of the step, for `StepCounter.number`."""
    return now.step


def learning_rate(now: StepCounter, stated: float, scale: float) -> float:
    """The learning rate of the step, for `StepCounter.number`: the run's or the instruction's, times a factor."""
    return scale * (stated if now.learning_rate is None else now.learning_rate)


def _stated(attrs: Attrs) -> tuple[float, float]:
    """The learning rate of an instruction and its factor, for `learning_rate`."""
    return attrs.get("lr", DEFAULT_LR), attrs.get("lr_scale", 1.0)


def _left_by_decay(now: StepCounter, stated: float, scale: float, decay: float) -> float:
    return 1 - learning_rate(now, stated, scale) * decay


def _root_of_bias(now: StepCounter, beta2: float) -> float:
    return math.sqrt(1 - beta2**now.step)


def _unbiased_rate(now: StepCounter, stated: float, scale: float, beta1: float) -> float:
    return learning_rate(now, stated, scale) / (1 - beta1**now.step)


def _scalar_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.dtype is torch.float64 else torch.float32


def _rate(context: OpContext, attrs: Attrs, weight: Tensor) -> Tensor:
    """The learning rate of this step."""
    return context.counter.number(learning_rate, _stated(attrs), _scalar_dtype(weight), weight.device)


def _moved(weight: Tensor, step: Tensor, rate: Tensor) -> Tensor:
    """weight -= rate * step, in place."""
    if rate.dtype == weight.dtype:
        return weight.addcmul_(step, rate, value=-1)
    return weight.copy_(torch.addcmul(weight.to(rate.dtype), step.to(rate.dtype), rate, value=-1))


def _decayed(attrs: Attrs, weight: Tensor, gradient: Tensor) -> Tensor:
    decay = attrs.get("weight_decay", 0.0)
    return gradient.add(weight, alpha=decay) if decay else gradient


def _rounded(state: Tensor, own: Tensor) -> Tensor:
    """Write a computed value into the memory of the optimizer state, with the state's dtype."""
    return state if own is state else state.copy_(own)


def adamw_of_many(context: OpContext, attrs: Attrs, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`adamw` of several parameters, (weight, gradient, mean, square) of one behind those of the other.

    On a GPU a kernel in Triton updates every large parameter, and torch's fused kernel the others together, where all
    are of one dtype.
    """
    own, skips, held = list(tensors), None, None
    if attrs.get("checked"):
        *own, skips, held = tensors
    parameters = [*zip(*(own[at::4] for at in range(4)), strict=True)]
    large: list[_Parameter] = []
    others: list[_Parameter] = []
    for each in parameters:
        (large if _is_for_triton(each) else others).append(each)
    if large:
        _by_triton(context, attrs, large, skips, held)
    if others and is_gpu(own[0]) and len({each.dtype for of_one in others for each in of_one}) == 1:
        _by_one_kernel(context, attrs, others, skips, held)
    elif others:
        _by_torch(context, attrs, others, skips, held)
    return tuple(each for weight, _, mean, square in parameters for each in (weight, mean, square))


_Parameter = tuple[Tensor, ...]
"""Weight, gradient, mean, square."""

_LARGE = 2**22
"""Elements from which a parameter has a launch of its own: its kernel takes longer than the launch of the next."""


def _is_for_triton(parameter: _Parameter) -> bool:
    return (
        parameter[0].numel() >= _LARGE
        and has_triton(parameter[0])
        and all(each.is_contiguous() and each.dtype is not torch.float64 for each in parameter)
    )


def _by_triton(
    context: OpContext, attrs: Attrs, parameters: Sequence[_Parameter], skips: Tensor | None, held: Tensor | None
) -> None:
    """One launch per parameter, each of which reads and writes its tensors once."""
    from executor.kernels.triton_adamw import adamw_in_one_pass

    device = parameters[0][0].device
    decay = (*_stated(attrs), attrs.get("weight_decay", 1e-2))
    left = context.counter.number(_left_by_decay, decay, torch.float32, device)
    root, rate = _corrections(context, attrs, torch.float32, device, held)
    settings = attrs.get("beta1", 0.9), attrs.get("beta2", 0.999), attrs.get("eps", 1e-8)
    for parameter in parameters:
        adamw_in_one_pass(parameter, (left, root, rate), settings, skips)


def _by_one_kernel(
    context: OpContext, attrs: Attrs, parameters: Sequence[_Parameter], skips: Tensor | None, held: Tensor | None
) -> None:
    """torch's fused kernel, which updates nothing where `skips` is 1."""
    weights, gradients, means, squares = (list(each) for each in zip(*parameters, strict=True))
    number, device = context.counter.number, weights[0].device
    step = number(step_number, (), torch.float32, device) if held is None else _number(context, held)
    _aten._fused_adamw_.tensor_lr(  # the overload by name: matching a rate against a float would read it to the host
        weights, gradients, means, squares, [], [step] * len(weights),
        lr=number(learning_rate, _stated(attrs), torch.float32, device),
        beta1=attrs.get("beta1", 0.9), beta2=attrs.get("beta2", 0.999), weight_decay=attrs.get("weight_decay", 1e-2),
        eps=attrs.get("eps", 1e-8), amsgrad=False, maximize=False, found_inf=skips,
    )  # fmt: skip


def _by_torch(
    context: OpContext, attrs: Attrs, parameters: Sequence[_Parameter], skips: Tensor | None, held: Tensor | None
) -> None:
    """The single-tensor form of every parameter."""
    first = parameters[0][0]
    scalar = _scalar_dtype(first)
    corrections = None if skips is None else _corrections(context, attrs, scalar, first.device, held)  # once for all

    def update(parameter: _Parameter) -> None:
        weight, gradient, mean, square = parameter
        adamw(context, attrs, weight, gradient, mean, square, corrections)

    for each in parameters:
        if skips is None:
            update(each)
        else:
            _unless(skips, (each[0], *each[2:]), partial(update, each))


def _unless(skips: Tensor, changed: tuple[Tensor, ...], update: Callable[[], object]) -> tuple[Tensor, ...]:
    """The tensors that an update changes, unless the step is skipped."""
    if _can_look(skips):
        if not skips:
            update()
        return changed
    before = [tensor.clone() for tensor in changed]
    update()
    for tensor, old in zip(changed, before, strict=True):
        tensor.copy_(torch.where(skips > 0, old, tensor))
    return changed


def _can_look(tensor: Tensor) -> bool:
    """Whether reading a number waits for nothing."""
    return tensor.device.type == "cpu"


def _may_be_checked(rule: Rule) -> Rule:
    """The update of one parameter as a rule that takes steps that are checked, too."""

    def of_one(context: OpContext, attrs: Attrs, *tensors: Tensor) -> Any:
        if not attrs.get("checked"):
            return rule(context, attrs, *tensors)
        *own, skips, held = tensors
        made = _unless(skips, (own[0], *own[2:]), lambda: rule(context, attrs, *own, held))
        return made if len(made) > 1 else made[0]

    return of_one


UPDATE_RULES: Mapping[str, Rule] = {
    "sgd.update": _may_be_checked(sgd),
    "momentum.update": _may_be_checked(momentum),
    "adamw.update": adamw_of_many,
}
