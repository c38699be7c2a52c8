"""Parts of a tensor as collectives move them: rows that are joined along a dim, or cut along it."""

from __future__ import annotations

import torch
from torch import Tensor

from executor.step.groups import Team

__all__ = ["cut_parts", "joined_parts"]


def joined_parts(rows: Tensor, team: Team, dim: int) -> Tensor:
    """Rows [position, ...] as one contiguous tensor, in the order of the members along `dim`; a view where they lie
    so."""
    if team.is_sorted:
        wide = _wide(rows)
        part = wide.shape[1:]
        whole = wide.movedim(0, dim).reshape(*part[:dim], team.size * part[dim], *part[dim + 1 :])
        return whole.contiguous().view(rows.dtype)  # a reshape may be a view of the rows, in another order
    return torch.cat([rows[position] for position in team.order], dim)


def cut_parts(x: Tensor, team: Team, dim: int) -> Tensor:
    """The chunks of `x` along `dim` as rows [position, ...]; row i is the chunk of member i."""
    if team.is_sorted:
        wide = _wide(x, team.size if dim == x.dim() - 1 else 1)
        return wide.unflatten(dim, (team.size, -1)).movedim(dim, 0).contiguous().view(x.dtype)
    chunks = x.chunk(team.size, dim)
    return torch.stack([chunks[member] for member in team.inverse])


def _wide(x: Tensor, parts: int = 1) -> Tensor:
    """`x` in elements of 8 bytes where `parts` of its rows are whole numbers of them.

    A GPU copies what does not are in one piece element by element, so small ones take several times as long.
    """
    width = 8 // x.element_size()
    if width < 2 or not x.is_contiguous() or x.shape[-1] % (parts * width) or x.storage_offset() % width:
        return x
    plain = x.view(-1).view(x.shape)  # the strides of dims of one element may be any number
    return plain.view(torch.int64)
