"""Scaled-dot-product attention by fused kernels, forward and backward.

Without a mask and without dropout, the forward keeps the logarithms of its softmax sums for the backward. It uses
torch's own kernels (`executor.kernels.fused_attention`) unless a kind of device has others. With a mask or dropout,
gradients are computed by autograd of the single operator, which repeats its forward.

A rank with rows [first, first + rows) of a split causal query reads only the keys up to its last row, so its mask ends
in the lower right corner, which flash attention supports. Flash attention does not support dropout here: which weights
are dropped is a function of their position, and torch's kernels draw their own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from executor.kernels.fused_attention import attend, attend_backward, lower_mask
from executor.kernels.place import by_autograd, num_parts, offset
from executor.kernels.random import kept_now

__all__ = ["ATTENTION_RULES", "Kernels", "attention_rules"]

Attrs = Mapping[str, Any]


class _Backward(Protocol):
    def __call__(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *, first: int | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


class Kernels(NamedTuple):
    """Attention without a mask or dropout, in the form of `fused_attention`.

    Args:
        attend: (q, k, v, first, scale) -> the output and the logarithms of the sums of exponentials.
        backward: the gradients of q, k and v from that of the output, the operands and what `attend` made.
    """

    attend: Callable[[Tensor, Tensor, Tensor, int | None, float | None], tuple[Tensor, Tensor]]
    backward: _Backward


def attention(
    kernels: Kernels, context: OpContext, attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T scale + mask) v; heads of k and v serve equal numbers of heads of q in a row.

    With it come the logarithms of the sums of exponentials [b.., heads, length], but for a mask or dropout.
    """
    if mask is not None or attrs.get("p", 0) > 0:
        return _masked(context, attrs, q, k, v, mask)
    shape, first = q.shape, _first(context, attrs, q)
    q, k, v = (_heads_first(attrs, tensor) for tensor in (q, k, v))
    keys = _num_keys(q, k, first)
    out, sums = kernels.attend(q, k[:, :, :keys], v[:, :, :keys], _corner(first, q, keys), attrs.get("scale"))
    made = (*shape[:-1], v.shape[-1])
    heads = made if attrs.get("layout") != "bshd" else (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return _as_given(attrs, out, made), sums.reshape(heads[:-1]).contiguous()


def _first(context: OpContext, attrs: Attrs, q: Tensor) -> int | None:
    """The position of the first row where the attention is causal."""
    if not attrs.get("causal", False):
        return None
    return offset(context, attrs, "s", q.shape[-3 if attrs.get("layout") == "bshd" else -2])


def _num_keys(q: Tensor, k: Tensor, first: int | None) -> int:
    """Number of keys that the rows read: in causal attention up to the last row."""
    return k.shape[2] if first is None else min(k.shape[2], first + q.shape[2])


def _corner(first: int | None, q: Tensor, keys: int) -> int | None:
    """A mask that hides nothing is none."""
    return None if first is not None and first >= keys - 1 else first


def _heads_first(attrs: Attrs, x: Tensor) -> Tensor:
    """q, k or v as a view [b, heads, length, size], the layout of torch's kernels. Flash attention also returns it."""
    x = x.reshape(-1, *x.shape[-3:]) if x.dim() != 4 else x
    return x.transpose(1, 2) if attrs.get("layout") == "bshd" else x


def _as_given(attrs: Attrs, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    x = x.transpose(1, 2) if attrs.get("layout") == "bshd" else x
    return x.contiguous().view(shape)


def attention_grads(
    kernels: Kernels, context: OpContext, attrs: Attrs, g: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v from q, k, v, the output and the values kept by the forward; or from q, k, v and the
    mask."""
    if len(inputs) < 5:
        return by_autograd(lambda *fresh: _masked(context, attrs, *fresh), inputs, (0, 1, 2), g)
    shapes, first = [tensor.shape for tensor in inputs[:3]], _first(context, attrs, inputs[0])
    g, q, k, v, out = (_heads_first(attrs, tensor) for tensor in (g, *inputs[:4]))
    keys = _num_keys(q, k, first)
    made = kernels.backward(
        g, q, k[:, :, :keys], v[:, :, :keys], out, inputs[4].reshape(q.shape[:3]), first=_corner(first, q, keys),
        scale=attrs.get("scale"),
    )  # fmt: skip
    if keys < k.shape[2]:  # nothing comes back to the keys behind the last row
        hidden = (0, 0, 0, k.shape[2] - keys)
        made = made[0], F.pad(made[1], hidden), F.pad(made[2], hidden)
    return tuple(_as_given(attrs, tensor, shape) for tensor, shape in zip(made, shapes, strict=True))


def attention_grad(
    which: int, kernels: Kernels, context: OpContext, attrs: Attrs, g: Tensor, *inputs: Tensor
) -> Tensor:
    """One of the gradients alone."""
    if len(inputs) == 5:
        return attention_grads(kernels, context, attrs, g, *inputs)[which]
    return by_autograd(lambda *fresh: _masked(context, attrs, *fresh), inputs, (which,), g)[0]


# -- with a mask or dropout --------------------------------------------------------------------------------------------


def _masked(context: OpContext, attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    if attrs.get("layout") == "bshd":
        q, k, v = (tensor.transpose(-2, -3) for tensor in (q, k, v))
        return _scaled_dot_product(context, attrs, q, k, v, mask).transpose(-2, -3).contiguous()
    return _scaled_dot_product(context, attrs, q, k, v, mask).contiguous()


def _scaled_dot_product(
    context: OpContext, attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    causal, rows, keys = attrs.get("causal", False), q.shape[-2], k.shape[-2]
    kept = _kept_weights(context, attrs, q, keys) if attrs.get("p", 0) > 0 else None
    if causal and num_parts(context, attrs, "s") > 1:
        first = offset(context, attrs, "s", rows)
        keys, causal = min(keys, first + rows), False
        k, v = k[..., :keys, :], v[..., :keys, :]
        lower = lower_mask(rows, keys, first, q.device)
        mask = lower if mask is None else _both(lower, mask[..., :keys] if mask.shape[-1] > 1 else mask)
    elif causal and mask is not None:
        mask, causal = _both(lower_mask(rows, keys, 0, q.device), mask), False
    if kept is not None:
        return _dropped(attrs, q, k, v, mask, causal, kept[..., : k.shape[-2]])
    grouped = q.shape[-3] != k.shape[-3]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=attrs.get("scale"), enable_gqa=grouped
    )


def _both(lower: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return lower & mask
    return mask.masked_fill(~lower, -torch.inf)


def _dropped(attrs: Attrs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kept: Tensor) -> Tensor:
    """Attention computed by its formula, with dropout of the softmax weights."""
    repeats = q.shape[-3] // k.shape[-3]
    if causal:
        mask = lower_mask(q.shape[-2], k.shape[-2], 0, q.device)
    scores = (q * attrs.get("scale", q.shape[-1] ** -0.5)) @ k.repeat_interleave(repeats, -3).transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1) * kept
    return (weights @ v.repeat_interleave(repeats, -3)).mul(1 / (1 - attrs["p"]) if attrs["p"] < 1 else 0)


def _kept_weights(context: OpContext, attrs: Attrs, q: Tensor, keys: int) -> Tensor:
    """Which of this rank's weights are kept, by their position in the full batch."""
    num_heads, rows = q.shape[-3], q.shape[-2]
    first_of = [offset(context, attrs, f"b{at}", size) for at, size in enumerate(q.shape[:-3])]
    sizes = [size * num_parts(context, attrs, f"b{at}") for at, size in enumerate(q.shape[:-3])]
    # heads are (h, r): a part of r is in one h alone
    parts, part = num_parts(context, attrs, "r"), offset(context, attrs, "r", 1)
    first_head = (offset(context, attrs, "h", 1) * parts + part) * num_heads
    first_row = offset(context, attrs, "s", rows)
    region = [(low, low + size) for low, size in zip(first_of, q.shape[:-3], strict=True)]
    region += [(first_head, first_head + num_heads), (first_row, first_row + rows), (0, keys)]
    shape = [*sizes, num_heads * num_parts(context, attrs, "h") * parts, rows * num_parts(context, attrs, "s"), keys]
    return kept_now(context, attrs, region, shape, q.device)


def attention_rules(kernels: Kernels) -> Mapping[str, Rule]:
    """The rules of attention by these kernels."""
    return {
        "attention.forward": partial(attention, kernels),
        "attention.grad012": partial(attention_grads, kernels),
        **{f"attention.grad{which}": partial(attention_grad, which, kernels) for which in range(3)},
    }


ATTENTION_RULES = attention_rules(Kernels(attend=attend, backward=attend_backward))
