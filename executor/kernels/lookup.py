"""Selection by ids, also of tables and weights that are split over ranks: rows, and weights for each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels.chips import is_gpu
from executor.kernels.context import OpContext, Rule
from executor.kernels.place import num_parts, offset

__all__ = ["LOOKUP_RULES", "local_ids"]

Attrs = Mapping[str, Any]

_aten = torch.ops.aten

_NO_ROW = -1
"""The id of an embedding's uses that have no gradient, as torch.nn.functional.embedding has it."""


def local_ids(context: OpContext, attrs: Attrs, dim: str, ids: Tensor, width: int, what: str) -> tuple[Tensor, Tensor]:
    """Ids counted from the first one that this rank has, 0 for those it does not have, and which it has.

    Ids that no rank has end the run, as they do where the dim is whole; but not in a recorded step of a device that
    would have to ask the host.
    """
    if context.can_assert or not context.counter.is_recording:
        inside = (ids >= 0) & (ids < width * num_parts(context, attrs, dim))
        torch._assert_async(inside.all(), f"{what} is out of range")
    local = ids - offset(context, attrs, dim, width)
    mine = (local >= 0) & (local < width)
    return local.masked_fill(~mine, 0), mine


def embedding(context: OpContext, attrs: Attrs, ids: Tensor, table: Tensor) -> Tensor:
    """Rows of the table; where its rows are split, zeros for those of other ranks."""
    if num_parts(context, attrs, "v") == 1:
        return F.embedding(ids, table)
    local, mine = local_ids(context, attrs, "v", ids, table.shape[0], "an id of an embedding")
    return F.embedding(local, table).masked_fill_(~mine.unsqueeze(-1), 0)


def embedding_grad(context: OpContext, attrs: Attrs, g: Tensor, ids: Tensor) -> Tensor:
    """The gradients of a row's uses added up; attrs "padding_id" is a row without one.

    On a GPU the uses are sorted by row, as torch does: sums are the same in every run, and rounded once.
    """
    padding = attrs.get("padding_id")
    kept = None if padding is None else ids != padding
    rows, num_rows = ids, context.shape[0]
    if num_parts(context, attrs, "v") > 1:
        rows, mine = local_ids(context, attrs, "v", ids, num_rows, "an id of an embedding")
        kept = mine if kept is None else kept & mine
    if is_gpu(g):
        rows = rows if kept is None else torch.where(kept, rows, _NO_ROW)
        return _aten.embedding_dense_backward(g, rows, num_rows, _NO_ROW, False)
    if kept is not None:
        g = g.masked_fill(~kept.unsqueeze(-1), 0)
        # the zeros are added to many rows: atomic additions to a single one wait for each other
        rows = torch.where(kept, rows, ids.remainder(num_rows))
    return g.new_zeros(context.shape).index_add_(0, rows.reshape(-1), g.reshape(-1, g.shape[-1]))


# -- linear layers of groups -------------------------------------------------------------------------------------------


def _rows_of_groups(context: OpContext, attrs: Attrs, ids: Tensor, groups: int) -> Iterator[Tensor]:
    """The rows of every group that this rank has. The host reads how many, so such a step cannot be recorded."""
    local, mine = local_ids(context, attrs, "v", ids.reshape(-1), groups, "an id of a group of weights")
    for group in range(groups):
        yield (mine & (local == group)).nonzero().squeeze(1)


def grouped_linear(context: OpContext, attrs: Attrs, x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Each row by the weights of its group; zeros for rows of groups that other ranks have."""
    rows = x.reshape(-1, x.shape[-1])
    made = x.new_zeros(context.shape)
    flat = made.view(-1, made.shape[-1])
    for group, chosen in enumerate(_rows_of_groups(context, attrs, ids, len(weight))):
        own = weight[group].t() if attrs.get("transposed") else weight[group]
        flat.index_copy_(0, chosen, rows[chosen] @ own)
    return made


def grouped_linear_grad_x(context: OpContext, attrs: Attrs, g: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """The same of the gradient, with the weights turned."""
    return grouped_linear(context, {**attrs, "transposed": not attrs.get("transposed")}, g, ids, weight)


def grouped_linear_grad_w(context: OpContext, attrs: Attrs, g: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """The product of the rows with their gradients, for each group."""
    rows, grads = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    if attrs.get("transposed"):
        rows, grads = grads, rows
    made = g.new_zeros(context.shape)
    for group, chosen in enumerate(_rows_of_groups(context, attrs, ids, len(made))):
        made[group] = rows[chosen].t() @ grads[chosen]
    return made


LOOKUP_RULES: Mapping[str, Rule] = {
    "embedding.forward": embedding,
    "embedding.grad1": embedding_grad,
    "grouped_linear.forward": grouped_linear,
    "grouped_linear.grad0": grouped_linear_grad_x,
    "grouped_linear.grad2": grouped_linear_grad_w,
}
