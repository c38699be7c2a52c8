"""Losses: means over a whole micro-batch, computed in parts that add up.

attrs "count" is the number of terms of the whole micro-batch (elements, or labels for the cross entropy): each rank
divides the sum of its own part by it, so that the parts add up to the mean. The backward begins with the gradient of
the loss, which takes no incoming gradient; attrs "scale" stands for it (one over the number of micro-batches).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.rules.lookup import local_ids
from executor.rules.site import Rule, Site

__all__ = ["LOSS_RULES"]

Attrs = Mapping[str, Any]


def l1_loss(site: Site, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """sum |x - t| / count."""
    return F.l1_loss(x, t, reduction="sum") / attrs["count"]


def l1_loss_grad(site: Site, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """sign(x - t) scale / count."""
    return torch.sgn(x - t).mul_(attrs.get("scale", 1.0) / attrs["count"])


def mse_loss(site: Site, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """sum (x - t)^2 / count."""
    return F.mse_loss(x, t, reduction="sum") / attrs["count"]


def mse_loss_grad(site: Site, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """2 (x - t) scale / count."""
    return (x - t).mul_(2.0 * attrs.get("scale", 1.0) / attrs["count"])


def cross_entropy_statistic(site: Site, attrs: Attrs, x: Tensor, t: Tensor) -> Tensor:
    """Of a part of the classes: [1, 2, b..], the log of the sum of exponentials and the label's logit (0 elsewhere)."""
    label, mine = local_ids(site, attrs, "c", t, x.shape[-1], "a label of a cross_entropy")
    x = x.to(site.torch_dtype)
    logit = x.gather(-1, label.unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0)
    return torch.stack([torch.logsumexp(x, -1), logit]).unsqueeze(0)


def cross_entropy(site: Site, attrs: Attrs, x: Tensor, t: Tensor, shards: Tensor | None = None) -> Tensor:
    """sum -log softmax(x[b.., c])[t[b..]] / count; the classes are the last dim.

    `shards` holds what `cross_entropy_statistic` made of every part of split classes; it has all that is needed.
    """
    if shards is not None:
        total = torch.logsumexp(shards[:, 0], 0) - shards[:, 1].sum(0)
        return (total.sum() / attrs["count"]).to(site.torch_dtype)
    return F.cross_entropy(x.reshape(-1, x.shape[-1]), t.reshape(-1), reduction="sum") / attrs["count"]


def cross_entropy_grad(site: Site, attrs: Attrs, x: Tensor, t: Tensor, shards: Tensor | None = None) -> Tensor:
    """(softmax(x) - one at the label) scale / count."""
    if shards is None:
        probability, label, one = torch.softmax(x, -1), t.unsqueeze(-1), x.new_full((), -1.0).expand(*t.shape, 1)
    else:
        total = torch.logsumexp(shards[:, 0], 0).unsqueeze(-1)
        probability = (x - total).exp_().to(x.dtype)
        local, mine = local_ids(site, attrs, "c", t, x.shape[-1], "a label of a cross_entropy")
        label, one = local.unsqueeze(-1), -mine.unsqueeze(-1).to(x.dtype)
    return probability.scatter_add_(-1, label, one).mul_(attrs.get("scale", 1.0) / attrs["count"])


LOSS_RULES: Mapping[str, Rule] = {
    "l1_loss.forward": l1_loss,
    "l1_loss.grad0": l1_loss_grad,
    "mse_loss.forward": mse_loss,
    "mse_loss.grad0": mse_loss_grad,
    "cross_entropy.statistic": cross_entropy_statistic,
    "cross_entropy.forward": cross_entropy,
    "cross_entropy.grad0": cross_entropy_grad,
}
