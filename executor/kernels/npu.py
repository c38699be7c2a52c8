"""Fused kernels of Ascend NPUs, from torch-npu 2.13: imported only where an NPU is used. **Not run on Ascend.**

Each is taken for the dtypes and shapes that its documentation allows; for all others, and for calls that are not in
`NPU_RULES`, torch's rule of `executor.kernels` stays. The values kept for gradients are those of the program:

* Attention keeps the logarithm of the sum of exponentials of each row. The kernel makes a row's maximum m and its sum
  s of exp(score - m), and its backward takes both, for the weights exp(score - m) / s. So the forward keeps m + log s,
  and the backward is given that as the maximum and 1 as the sum: exp(score - (m + log s)) / 1 is the same number.
* RMS norm and layer norm keep scales and means in float32, as the kernels make them.
* Rope keeps nothing: its gradient is the rotation back, by the same kernel with -sin. The kernel takes its tables in
  the dtype of the tensor, so in half precision cos and sin are rounded once.

A gated MLP stays two elementwise kernels: `npu_swiglu` reads one tensor that holds both products side by side, and the
program makes them apart; joining them first moves more bytes (7 instead of 5 passes) than the kernel saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch_npu
from torch import Tensor

from executor.kernels import matrix, normalisation
from executor.kernels.attention import Kernels, attention_rules
from executor.kernels.context import OpContext, Rule
from executor.kernels.fused_attention import attend, attend_backward, lower_mask
from executor.kernels.optimizers import DEFAULT_LR, adamw_of_many, step_number
from executor.kernels.positions import position_rules, turned_plainly

__all__ = ["NPU_RULES"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_KNOWN = (*_HALF, torch.float32)


# -- attention ---------------------------------------------------------------------------------------------------------

_WIDEST = 512
"""Elements of a head, at most."""

_SQUARE = 2048
"""Rows of the mask that stands for a causal one of any size, where its corner is upper left or lower right."""

_FIGURES = 8
"""Number of times that the kernel writes the maximum and the sum of a row."""


def npu_attend(q: Tensor, k: Tensor, v: Tensor, first: int | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """As `fused_attention.attend`."""
    if not _can_attend(q, k, v):
        return attend(q, k, v, first, scale)
    layout = _layout(q)
    out, largest, total, *_ = torch_npu.npu_fusion_attention(
        *(_laid(layout, tensor) for tensor in (q, k, v)), q.shape[1], layout,
        scale=_scale(q, scale), **_mask(q, k, first),
    )  # fmt: skip
    return _heads_first(layout, out), largest[..., 0] + total[..., 0].log()


def npu_attend_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *, first: int | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused_attention.attend_backward`."""
    if not _can_attend(q, k, v):
        return attend_backward(g, q, k, v, out, sums, first=first, scale=scale)
    layout = _layout(q)
    largest = sums.unsqueeze(-1).expand(*sums.shape, _FIGURES).contiguous()
    q_laid, k_laid, v_laid, g_laid, out_laid = (_laid(layout, tensor) for tensor in (q, k, v, g, out))
    made = torch_npu.npu_fusion_attention_grad(
        q_laid, k_laid, v_laid, g_laid, q.shape[1], layout, softmax_max=largest, softmax_sum=torch.ones_like(largest),
        attention_in=out_laid, scale_value=_scale(q, scale), **_mask(q, k, first),
    )  # fmt: skip
    of_q, of_k, of_v = (_heads_first(layout, each) for each in made[:3])
    return of_q, of_k, of_v


def _can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    fits = q.dtype in _KNOWN and q.shape[-1] == v.shape[-1] <= _WIDEST
    return fits and q.numel() > 0 and k.numel() > 0


def _layout(q: Tensor) -> str:
    """Memory order of heads and lengths; it is the same for q, k and v."""
    return "BSND" if q.transpose(1, 2).is_contiguous() else "BNSD"


def _laid(layout: str, x: Tensor) -> Tensor:
    """A tensor [b, heads, length, size] in a layout; a copy where it is a part of another."""
    return (x.transpose(1, 2) if layout == "BSND" else x).contiguous()


def _heads_first(layout: str, x: Tensor) -> Tensor:
    return x.transpose(1, 2) if layout == "BSND" else x


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _mask(q: Tensor, k: Tensor, first: int | None) -> dict[str, Any]:
    """The mask, true for weights that are left out, and the `sparse_mode` of the kernel."""
    if first is None:
        return {}
    rows, keys = q.shape[2], k.shape[2]
    if first in (0, keys - rows):
        return {"atten_mask": _hidden(_SQUARE, _SQUARE, 0, q.device), "sparse_mode": 2 if first == 0 else 3}
    return {"atten_mask": _hidden(rows, keys, first, q.device), "sparse_mode": 1}


@lru_cache(maxsize=8)
def _hidden(rows: int, columns: int, first: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return ~lower_mask(rows, columns, first, device)


# -- norms -------------------------------------------------------------------------------------------------------------


def rms_norm(context: OpContext, attrs: Attrs, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As `normalisation.rms_norm`."""
    if weight is None or weight.dtype != x.dtype or x.dtype not in _KNOWN:
        return normalisation.rms_norm(context, attrs, x, weight)
    y, scale = torch_npu.npu_rms_norm(x, normalisation.shifted(attrs, weight), attrs["eps"])
    return y, scale.view(x.shape[: x.dim() - weight.dim()])


def rms_norm_grad_x(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
    """As `normalisation.rms_norm_grad_x`."""
    if len(rest) < 2 or rest[0].dtype != x.dtype or x.dtype not in _KNOWN:
        return normalisation.rms_norm_grad_x(context, attrs, g, x, *rest)
    weight, scale = normalisation.shifted(attrs, rest[0]), rest[1]
    made: Tensor = torch_npu.npu_rms_norm_backward(g, x, weight, _beside(scale, x))[0]
    return made


def rms_norm_grad_weight(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """As `normalisation.rms_norm_grad_weight`; the kernel reads the weight for the other gradient alone."""
    if context.torch_dtype != x.dtype or x.dtype not in _KNOWN:
        return normalisation.rms_norm_grad_weight(context, attrs, g, x, scale)
    made: Tensor = torch_npu.npu_rms_norm_backward(g, x, x.new_empty(context.shape), _beside(scale, x))[1]
    return made.to(x.dtype)


def layer_norm(
    context: OpContext, attrs: Attrs, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `normalisation.layer_norm`: torch's operator, which computes and keeps half precision in float32 on an NPU."""
    num_dims = int(attrs.get("num_dims", 1))
    rows, shape = x.shape[: x.dim() - num_dims], x.shape[x.dim() - num_dims :]
    y, mean, scale = torch.native_layer_norm(x, shape, normalisation.shifted(attrs, weight), bias, attrs["eps"])
    wide = torch.float32 if x.dtype in _HALF else x.dtype
    return y, mean.view(rows).to(wide), scale.view(rows).to(wide)


def layer_norm_grad_x(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, *rest: Tensor) -> Tensor:
    """As `normalisation.layer_norm_grad_x`."""
    weight, mean, scale = (None, *rest)[-3:]
    assert mean is not None and scale is not None
    if weight is not None and weight.dtype != x.dtype:
        return normalisation.layer_norm_grad_x(context, attrs, g, x, *rest)
    return _layer_norm_backward(attrs, g, x, mean, scale, normalisation.shifted(attrs, weight))[0]


def layer_norm_grad_weight(
    context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, mean: Tensor, scale: Tensor
) -> Tensor:
    """As `normalisation.layer_norm_grad_weight`; the kernel reads the weight for the other gradient alone."""
    if context.torch_dtype != x.dtype:
        return normalisation.layer_norm_grad_weight(context, attrs, g, x, mean, scale)
    return _layer_norm_backward(attrs, g, x, mean, scale, x.new_empty(context.shape))[1].to(x.dtype)


def _layer_norm_backward(
    attrs: Attrs, g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None
) -> tuple[Tensor, ...]:
    shape, wanted = x.shape[x.dim() - int(attrs.get("num_dims", 1)) :], [True, weight is not None, False]
    figures = _beside(mean, x), _beside(scale, x)
    made: tuple[Tensor, ...] = _aten.native_layer_norm_backward(g, x, shape, *figures, weight, None, wanted)
    return made


def _beside(figure: Tensor, x: Tensor) -> Tensor:
    """A figure of every row, with as many dims as `x`."""
    return figure.view(*figure.shape, *(1,) * (x.dim() - figure.dim()))


# -- rope --------------------------------------------------------------------------------------------------------------

_MOST = 1000
"""Samples and heads must be fewer."""

_LONGEST = 896
"""A turned row must be shorter."""


def npu_turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int, *, interleaved: bool) -> Tensor:
    """As `positions.turned_plainly`."""
    heads, size, rotary = x.shape[-2], x.shape[-1], 2 * cos.shape[-1]
    samples = x.numel() // max(1, x.shape[-3] * heads * size)
    too_many = samples * heads >= _MOST if interleaved else max(samples, heads) >= _MOST
    if x.dtype not in _KNOWN or rotary >= _LONGEST or too_many or not x.numel():
        return turned_plainly(x, cos, sin, sign, interleaved=interleaved)
    tables = _tables(cos, sin, sign, interleaved, x.dtype)
    flat = x.reshape(-1, *x.shape[-3:])
    made: Tensor = torch_npu.npu_rotary_mul(
        flat[..., :rotary].contiguous(), *tables, "interleave" if interleaved else "half"
    )
    return (made if rotary == size else torch.cat((made, flat[..., rotary:]), -1)).view(x.shape)


@lru_cache(maxsize=64)
def _tables(cos: Tensor, sin: Tensor, sign: int, interleaved: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of elements [1, length, 1, 2 pairs] from those of pairs, which are the same tensors each step."""
    with torch.inference_mode(False):
        if interleaved:
            cos, sin = (tensor.repeat_interleave(2, -1) for tensor in (cos, sin))
        else:
            cos, sin = (torch.cat((tensor, tensor), -1) for tensor in (cos, sin))
        return cos.to(dtype).unsqueeze(0), (sign * sin).to(dtype).unsqueeze(0)


# -- products of experts -----------------------------------------------------------------------------------------------


def matmul(context: OpContext, attrs: Attrs, a: Tensor, c: Tensor) -> Tensor:
    """As `matrix.matmul`; matrices [groups, rows, k] and [groups, k, columns] by one grouped product."""
    if not _are_grouped(a, c):
        return matrix.matmul(context, attrs, a, c)
    return _rows_by_group(a, c)


def matmul_grad_a(context: OpContext, attrs: Attrs, g: Tensor, c: Tensor) -> Tensor:
    """As `matrix.matmul_grad_a`."""
    if not _are_grouped(g, c) or len(context.shape) != 3:
        return matrix.matmul_grad_a(context, attrs, g, c)
    return _rows_by_group(g, c.transpose(1, 2))


def matmul_grad_c(context: OpContext, attrs: Attrs, g: Tensor, a: Tensor) -> Tensor:
    """As `matrix.matmul_grad_c`; the groups are parts of the dim that is summed over."""
    if not _are_grouped(a, g) or len(context.shape) != 3:
        return matrix.matmul_grad_c(context, attrs, g, a)
    made: Tensor
    (made,) = torch_npu.npu_grouped_matmul(
        [a.reshape(-1, a.shape[-1]).t()], [g.reshape(-1, g.shape[-1])], group_list=_ends(*a.shape[:2], a.device),
        split_item=3, group_type=2,
    )  # fmt: skip
    return made


def _are_grouped(a: Tensor, c: Tensor) -> bool:
    """Whether these are several pairs of matrices, in dtypes that the kernel takes."""
    return a.dim() == c.dim() == 3 and a.shape[0] == c.shape[0] > 1 and a.dtype in _HALF and a.numel() > 0


def _rows_by_group(a: Tensor, c: Tensor) -> Tensor:
    made: Tensor
    (made,) = torch_npu.npu_grouped_matmul(
        [a.reshape(-1, a.shape[-1])], [c], group_list=_ends(*a.shape[:2], a.device), split_item=3, group_type=0
    )
    return made.view(*a.shape[:2], -1)


@lru_cache(maxsize=64)
def _ends(groups: int, rows: int, device: torch.device) -> Tensor:
    """The end of each group of rows, all groups having equally many."""
    with torch.inference_mode(False):
        return torch.arange(rows, groups * rows + 1, rows, device=device)


# -- the optimizer -----------------------------------------------------------------------------------------------------


def adamw(context: OpContext, attrs: Attrs, *tensors: Tensor) -> tuple[Tensor, ...]:
    """As `optimizers.adamw_of_many`, with one fused kernel per parameter if the plan states the learning rate.

    The kernel takes the rate from the host, so a recorded step keeps it. A rate that the run states may change from
    step to step, and `optimizers.adamw` reads it from the device.
    """
    first = tensors[0]
    alike = all(tensor.dtype == first.dtype for tensor in tensors)
    if attrs.get("checked") or not alike or first.dtype not in _KNOWN or context.counter.learning_rate is not None:
        return adamw_of_many(context, attrs, *tensors)
    weights, gradients, means, squares = (list(tensors[at::4]) for at in range(4))
    step = context.counter.number(step_number, (), torch.float32, first.device)
    _aten._fused_adamw_(
        weights, gradients, means, squares, [], [step] * len(weights),
        lr=attrs.get("lr", DEFAULT_LR) * attrs.get("lr_scale", 1.0),
        beta1=attrs.get("beta1", 0.9), beta2=attrs.get("beta2", 0.999), weight_decay=attrs.get("weight_decay", 1e-2),
        eps=attrs.get("eps", 1e-8), amsgrad=False, maximize=False,
    )  # fmt: skip
    return tuple(tensor for weight, mean, square in zip(weights, means, squares, strict=True)
                 for tensor in (weight, mean, square))  # fmt: skip


NPU_RULES: Mapping[str, Rule] = {
    **attention_rules(Kernels(attend=npu_attend, backward=npu_attend_backward)),
    **position_rules(npu_turned),
    "rms_norm.forward": rms_norm,
    "rms_norm.grad0": rms_norm_grad_x,
    "rms_norm.grad1": rms_norm_grad_weight,
    "layer_norm.forward": layer_norm,
    "layer_norm.grad0": layer_norm_grad_x,
    "layer_norm.grad1": layer_norm_grad_weight,
    "matmul.forward": matmul,
    "matmul.grad0": matmul_grad_a,
    "matmul.grad1": matmul_grad_c,
    "adamw.update": adamw,
}
