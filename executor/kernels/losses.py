"""Losses: means over a full micro-batch, computed in parts that add up.

attrs "count" is the number of terms of the full micro-batch (elements, or labels for the cross entropy): each rank
divides the sum of its own part by it, so that the parts add up to the mean. The backward begins with the gradient of
the loss, which takes no incoming gradient; attrs "scale" stands for it (one over the number of micro-batches). With
attrs "scaled" the last input holds the scale of the loss (`plans.step_check`), by which it is multiplied.

A cross entropy with attrs "ignore_index" takes the number of labels that count from its third input instead: that
depends on the data, and is summed over ranks before.

A cross entropy reads its logits in their own dtype, once forward and once backward, and adds up in at least single
precision: on a GPU by two Triton kernels, elsewhere in plain torch, some rows at a time. What its backward needs of the
forward is one number a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.chips import has_triton
from executor.kernels.context import OpContext, Rule
from executor.kernels.lookup import local_ids
from executor.kernels.place import num_parts
from plans.errors import TwofoldError
from plans.step_check import Held

__all__ = ["LOSS_RULES", "gradient_plainly"]

Attrs = Mapping[str, Any]


def l1_loss(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """L1 loss: sum |x - t| / count."""
    return F.l1_loss(x, t, reduction="sum") / attrs["count"]


def l1_loss_grad(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """Gradient of the L1 loss: sign(x - t) scale / count."""
    return _times(torch.sgn(x - t), attrs.get("scale", 1.0) / attrs["count"])


def mse_loss(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """Squared error: sum (x - t)^2 / count."""
    return F.mse_loss(x, t, reduction="sum") / attrs["count"]


def mse_loss_grad(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """Gradient of the squared error: 2 (x - t) scale / count."""
    return _times(x - t, 2.0 * attrs.get("scale", 1.0) / attrs["count"])


def mean_loss(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Sum of x / count."""
    return x.sum() / attrs["count"]


def mean_loss_grad(context: OpContext, attrs: Attrs) -> Tensor:
    """Gradient of the mean: scale / count everywhere."""
    value = attrs.get("scale", 1.0) / attrs["count"]
    if isinstance(value, Tensor):
        return value.to(context.torch_dtype).expand(context.shape).clone()
    return torch.full(context.shape, value, dtype=context.torch_dtype, device=context.device)


def batch_mean(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Sum of x over its leading dims, over the number of elements of all parts."""
    over = x.dim() - len(context.shape)
    parts = math.prod(num_parts(context, attrs, f"d{dim}") for dim in range(over))
    return batch_sum(context, attrs, x).div_(math.prod(x.shape[:over]) * parts)


def batch_sum(context: OpContext, attrs: Attrs, x: Tensor) -> Tensor:
    """Sum of x over its leading dims; other parts have sums of their own."""
    return x.sum(tuple(range(x.dim() - len(context.shape))), dtype=context.torch_dtype)


def pick(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """x[b.., t[b..]], 0 where the class is in another part."""
    label, mine = local_ids(context, attrs, "c", t, x.shape[-1], "a label")
    return x.gather(-1, label.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0)


def pick_grad(context: OpContext, attrs: Attrs, g: Tensor, t: Tensor) -> Tensor:
    """Gradient of a pick: g at the class of each label, else 0."""
    label, mine = local_ids(context, attrs, "c", t, context.shape[-1], "a label")
    made = torch.zeros(context.shape, dtype=g.dtype, device=g.device)
    return made.scatter_(-1, label.unsqueeze(-1), g.masked_fill(~mine, 0).unsqueeze(-1))


def count_labels(context: OpContext, attrs: Attrs, t: Tensor) -> Tensor:
    """Number of labels of this part that are not attrs "ignore_index"."""
    return (t != attrs["ignore_index"]).sum().to(context.torch_dtype)


def _labels(context: OpContext, attrs: Attrs, t: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For a part of the classes: the labels relative to its first class, and whether they are inside it."""
    what = "a label of a cross_entropy"
    if (ignored := attrs.get("ignore_index")) is None:
        return local_ids(context, attrs, "c", t, width, what)
    counts = t != ignored
    local, mine = local_ids(context, attrs, "c", t.where(counts, 0), width, what)
    return local, mine & counts


def _operands(attrs: Attrs, rest: tuple[Tensor, ...]) -> tuple[Any, Tensor | None]:
    """The number of labels, and the statistics of the shards of split classes."""
    if "ignore_index" in attrs:
        return rest[0], rest[1] if len(rest) > 1 else None
    return attrs["count"], rest[0] if rest else None


def cross_entropy_statistic(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor, *_: Tensor) -> Tensor:
    """The result for a part of the classes: [1, 2, b..], the log of the sum of exponentials and the label's logit (0
    elsewhere)."""
    label, mine = _labels(context, attrs, t, x.shape[-1])
    return torch.stack(_read(x, label, mine, context.torch_dtype)).unsqueeze(0)


def cross_entropy(
    context: OpContext, attrs: Attrs, x: Tensor, t: Tensor, *rest: Tensor
) -> Tensor | tuple[Tensor, Tensor]:
    """sum -log softmax(x[b.., c])[t[b..]] / count, and the logarithms of the sums of exponentials [b..].

    The classes are the last dim. `rest` holds the number of labels, with attrs "ignore_index", and what
    `cross_entropy_statistic` made of every part of split classes; that has all that is needed, and the loss is all that
    comes out.
    """
    count, shards = _operands(attrs, rest)
    if shards is not None:
        return _mean(context, attrs, torch.logsumexp(shards[:, 0], 0) - shards[:, 1].sum(0), t, count)
    try:
        label, mine = _labels(context, attrs, t, x.shape[-1])
    except RuntimeError as error:  # on an accelerator the device says it, later
        raise TwofoldError(
            f"{error} in a cross_entropy of {x.shape[-1]} classes. To ignore labels, pass an ignore_index other than "
            f"torch's default of -100 to the loss, such as CrossEntropyLoss(ignore_index=-1)"
        ) from None
    sums, logit = _read(x, label, mine, _wide(x))
    return _mean(context, attrs, sums - logit, t, count), sums


def _mean(context: OpContext, attrs: Attrs, terms: Tensor, t: Tensor, count: Any) -> Tensor:
    if "ignore_index" in attrs:
        terms = terms.masked_fill(t == attrs["ignore_index"], 0)
    return (terms.sum() / count).to(context.torch_dtype)


def cross_entropy_grad(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor, *rest: Tensor) -> Tensor:
    """(softmax(x) - one at the label) scale / count, 0 where the label is ignored.

    The last of `rest` is the value kept by the forward, or the statistic of split classes.
    """
    count = rest[0] if "ignore_index" in attrs else attrs["count"]
    known = rest[-1]
    sums = torch.logsumexp(known[:, 0], 0) if known.dim() > t.dim() else known
    label, mine = _labels(context, attrs, t, x.shape[-1])
    ignored = t == attrs["ignore_index"] if "ignore_index" in attrs else None
    scale = attrs.get("scale", 1.0)
    if has_triton(x):
        from executor.kernels.triton_loss import label_gradient

        factor = scale / count
        if not isinstance(factor, Tensor):
            factor = _scalar(factor, sums.dtype, x.device)
        return label_gradient(x, label.masked_fill(~mine, -1), sums, factor.to(sums.dtype), ignored)
    return gradient_plainly(x, label, mine, sums, scale / count, ignored)


def _read(x: Tensor, label: Tensor, mine: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The logarithms of the sums of exponentials of the rows of `x`, and the labels' logits, 0 where not `mine`."""
    if has_triton(x):
        from executor.kernels.triton_loss import log_sum_and_logit

        return log_sum_and_logit(x, label.masked_fill(~mine, -1), dtype)
    sums = torch.cat([torch.logsumexp(rows.to(dtype), -1) for rows in _chunks(x)]).view(x.shape[:-1])
    logit = x.gather(-1, label.unsqueeze(-1)).squeeze(-1).to(dtype)
    return sums, logit.masked_fill_(~mine, 0)


def gradient_plainly(
    x: Tensor, label: Tensor, mine: Tensor, sums: Tensor, factor: Tensor | float, ignored: Tensor | None
) -> Tensor:
    """(exp(x - sums) - one at the label) factor in the dtype of `x`, in plain torch.

    Args:
        x: logits [b.., classes].
        label: [b..], a class of `x` wherever it is `mine`.
        mine: [b..], where the label is in `x`.
        sums: [b..], logarithms of sums of exponentials.
        factor: a number or a scalar tensor.
        ignored: [b..], rows whose gradient is 0; None: none.
    """
    classes = x.shape[-1]
    one = torch.where(mine, -1.0, 0.0).to(sums.dtype).view(-1, 1)
    label, sums = label.view(-1, 1), sums.reshape(-1, 1)
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, first = made.view(-1, classes), 0
    for part in _chunks(x):
        last = first + part.shape[0]
        g = (part - sums[first:last]).exp_().scatter_add_(-1, label[first:last], one[first:last]).mul_(factor)
        rows[first:last] = g
        first = last
    return made if ignored is None else made.masked_fill_(ignored.unsqueeze(-1), 0)


_CHUNK = 2**24
"""Logits whose exponentials are held at once in single precision: 64 MiB."""


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    """The rows of `x`, some at a time."""
    flat = x.reshape(-1, x.shape[-1])
    return flat.split(max(1, _CHUNK // max(1, x.shape[-1])))


@lru_cache(maxsize=64)
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on a device; kept, as a step that is replayed can copy nothing to it."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=dtype, device=device)


def _times(x: Tensor, factor: Tensor | float) -> Tensor:
    """x times a factor, in place where that is a number; one on the device may be more than half precision holds."""
    if isinstance(factor, Tensor):
        return x.to(_wide(x)).mul(factor).to(x.dtype)
    return x.mul_(factor)


def _scaled(rule: Rule) -> Rule:
    """A gradient of a loss that may be scaled: with attrs "scaled" its last input holds the scale."""

    def scaled(context: OpContext, attrs: Attrs, *inputs: Tensor) -> Tensor:
        if attrs.get("scaled"):
            *inputs, held = inputs  # type: ignore[assignment]
            attrs = {**attrs, "scale": held[Held.SCALE] * attrs.get("scale", 1.0)}
        made: Tensor = rule(context, attrs, *inputs)
        return made

    return scaled


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize == 2 else x.dtype


LOSS_RULES: Mapping[str, Rule] = {
    "l1_loss.forward": l1_loss,
    "l1_loss.grad0": _scaled(l1_loss_grad),
    "mse_loss.forward": mse_loss,
    "mse_loss.grad0": _scaled(mse_loss_grad),
    "mean_loss.forward": mean_loss,
    "mean_loss.grad0": _scaled(mean_loss_grad),
    "batch_mean.forward": batch_mean,
    "batch_sum.forward": batch_sum,
    "pick.forward": pick,
    "pick.grad0": pick_grad,
    "count_labels.forward": count_labels,
    "cross_entropy.statistic": cross_entropy_statistic,
    "cross_entropy.forward": cross_entropy,
    "cross_entropy.grad0": _scaled(cross_entropy_grad),
}
