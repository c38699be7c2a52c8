"""Losses: means over a whole micro-batch, computed in parts that add up.

attrs "count" is the number of terms of the whole micro-batch (elements, or labels for the cross entropy): each rank
divides the sum of its own part by it, so that the parts add up to the mean. The backward begins with the gradient of
the loss, which takes no incoming gradient; attrs "scale" stands for it (one over the number of micro-batches).

A cross entropy with attrs "ignore_index" takes the number of labels that count from its third input instead: that
depends on the data, and is summed over ranks before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.context import OpContext, Rule
from executor.kernels.lookup import local_ids
from plans.errors import TwofoldError

__all__ = ["LOSS_RULES"]

Attrs = Mapping[str, Any]


def l1_loss(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """L1 loss: sum |x - t| / count."""
    return F.l1_loss(x, t, reduction="sum") / attrs["count"]


def l1_loss_grad(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """Gradient of the L1 loss: sign(x - t) scale / count."""
    return torch.sgn(x - t).mul_(attrs.get("scale", 1.0) / attrs["count"])


def mse_loss(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """Squared error: sum (x - t)^2 / count."""
    return F.mse_loss(x, t, reduction="sum") / attrs["count"]


def mse_loss_grad(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """Gradient of the squared error: 2 (x - t) scale / count."""
    return (x - t).mul_(2.0 * attrs.get("scale", 1.0) / attrs["count"])


_NO_LABEL = -(2**63)
"""What torch is told to ignore where nothing is: its default, -100, would be left out of the sum but be counted."""


def count_labels(context: OpContext, attrs: Attrs, t: Tensor) -> Tensor:
    """How many labels of this part are not attrs "ignore_index"."""
    return (t != attrs["ignore_index"]).sum().to(context.torch_dtype)


def _labels(context: OpContext, attrs: Attrs, t: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For a part of the classes: the labels relative to its first class, and whether they lie inside it."""
    what = "a label of a cross_entropy"
    if (ignored := attrs.get("ignore_index")) is None:
        return local_ids(context, attrs, "c", t, width, what)
    counts = t != ignored
    local, mine = local_ids(context, attrs, "c", t.where(counts, 0), width, what)
    return local, mine & counts


def _operands(attrs: Attrs, rest: tuple[Tensor, ...]) -> tuple[Any, Tensor | None]:
    """The number of labels, and what the shards of split classes know."""
    if "ignore_index" in attrs:
        return rest[0], rest[1] if len(rest) > 1 else None
    return attrs["count"], rest[0] if rest else None


def cross_entropy_statistic(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor, *_: Tensor) -> Tensor:
    """Of a part of the classes: [1, 2, b..], the log of the sum of exponentials and the label's logit (0 elsewhere)."""
    label, mine = _labels(context, attrs, t, x.shape[-1])
    x = x.to(context.torch_dtype)
    logit = x.gather(-1, label.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0)
    return torch.stack([torch.logsumexp(x, -1), logit]).unsqueeze(0)


def cross_entropy(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor, *rest: Tensor) -> Tensor:
    """sum -log softmax(x[b.., c])[t[b..]] / count; the classes are the last dim.

    `rest` holds the number of labels, with attrs "ignore_index", and what `cross_entropy_statistic` made of every part
    of split classes; that has all that is needed.
    """
    count, shards = _operands(attrs, rest)
    ignored = attrs.get("ignore_index", _NO_LABEL)
    if shards is not None:
        total = torch.logsumexp(shards[:, 0], 0) - shards[:, 1].sum(0)
        return (total.masked_fill_(t == ignored, 0).sum() / count).to(context.torch_dtype)
    try:
        total = F.cross_entropy(x.reshape(-1, x.shape[-1]), t.reshape(-1), reduction="sum", ignore_index=ignored)
    except IndexError as error:  # on an accelerator the device says it, later
        raise TwofoldError(
            f"{error} in a cross_entropy of {x.shape[-1]} classes. Labels that are to be ignored need an ignore_index "
            f"that the loss is given and that is not torch's default of -100, such as CrossEntropyLoss(ignore_index=-1)"
        ) from None
    return (total / count).to(context.torch_dtype)


def cross_entropy_grad(context: OpContext, attrs: Attrs, x: Tensor, t: Tensor, *rest: Tensor) -> Tensor:
    """(softmax(x) - one at the label) scale / count, 0 where the label is ignored."""
    count, shards = _operands(attrs, rest)
    if shards is None:
        probability, label = torch.softmax(x, -1), t.unsqueeze(-1)
        one = x.new_full((), -1.0).expand(*t.shape, 1)
        if "ignore_index" in attrs:
            label = label.masked_fill(label == attrs["ignore_index"], 0)
    else:
        total = torch.logsumexp(shards[:, 0], 0).unsqueeze(-1)
        probability = (x - total).exp_().to(x.dtype)
        local, mine = _labels(context, attrs, t, x.shape[-1])
        label, one = local.unsqueeze(-1), -mine.unsqueeze(-1).to(x.dtype)
    g = probability.scatter_add_(-1, label, one).mul_(attrs.get("scale", 1.0) / count)
    return g.masked_fill_((t == attrs["ignore_index"]).unsqueeze(-1), 0) if "ignore_index" in attrs else g


LOSS_RULES: Mapping[str, Rule] = {
    "l1_loss.forward": l1_loss,
    "l1_loss.grad0": l1_loss_grad,
    "mse_loss.forward": mse_loss,
    "mse_loss.grad0": mse_loss_grad,
    "count_labels.forward": count_labels,
    "cross_entropy.statistic": cross_entropy_statistic,
    "cross_entropy.forward": cross_entropy,
    "cross_entropy.grad0": cross_entropy_grad,
}
