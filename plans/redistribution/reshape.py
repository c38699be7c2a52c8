"""Layouts through a reshape or a transpose of the tensor.

A reshape keeps the order of the elements, so a layout survives it where each rank's part stays one contiguous run of
every factor group: old and new dims are paired into the smallest groups of equal size ((B, S, H) to (B * S, H) gives
the groups B, S | B * S and H | H), and inside a group only the major dims may be split, a dim after another only if the
one before is split to the last element. What does not fit has to be gathered first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from plans.errors import TwofoldError
from plans.layout import INTERLEAVED, TensorLayout

__all__ = ["Reshaped", "reshape_layout", "transpose_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshaped:
    """A layout through a reshape: redistribute to `before`, reshape every local part, and the layout is `after`.

    Args:
        before: the layout wanted on the old shape; the given one if nothing has to be gathered.
        after: the layout on the new shape.
        gathered: the old dims that lose axes.
    """

    before: TensorLayout
    after: TensorLayout
    gathered: tuple[int, ...]


def reshape_layout(layout: TensorLayout, old_shape: Sequence[int], new_shape: Sequence[int]) -> Reshaped:
    """Carry a layout through a reshape, keeping as many splits as stay contiguous.

    Raises:
        TwofoldError: the shapes have different numbers of elements, or do not fit the layout.

    >>> from plans.layout import Layout
    >>> mesh = Layout((2, 2), ("dp", "sp"))
    >>> reshape_layout(mesh("dp", "None", "sp"), (4, 6, 8), (24, 8)).after.dims
    (('dp',), ('sp',))
    >>> found = reshape_layout(mesh("dp", "sp", "None"), (4, 6, 8), (24, 8))
    >>> f"{found.before} {found.after} {found.gathered}"
    '(dp, None, None) (dp, None) (1,)'
    """
    if math.prod(old_shape) != math.prod(new_shape):
        raise TwofoldError(
            f"shape {tuple(old_shape)} cannot become {tuple(new_shape)}: "
            f"{math.prod(old_shape)} elements are not {math.prod(new_shape)}"
        )
    if len(old_shape) != len(layout.dims):
        raise TwofoldError(f"shape {tuple(old_shape)} has {len(old_shape)} dims, but {layout} names {len(layout.dims)}")
    before: list[tuple[str, ...]] = [()] * len(old_shape)
    after: list[tuple[str, ...]] = [()] * len(new_shape)
    for old_dims, new_dims in _groups(old_shape, new_shape):
        if len(old_dims) == len(new_dims) == 1:
            before[old_dims[0]] = after[new_dims[0]] = layout.dims[old_dims[0]]
        else:
            _carry(layout, old_shape, new_shape, old_dims, new_dims, before, after)
    gathered = tuple(dim for dim, axes in enumerate(before) if axes != layout.dims[dim])
    return Reshaped(
        before=TensorLayout(mesh=layout.mesh, dims=tuple(before), partial=layout.partial) if gathered else layout,
        after=TensorLayout(mesh=layout.mesh, dims=tuple(after), partial=layout.partial),
        gathered=gathered,
    )


def transpose_layout(layout: TensorLayout, permutation: Sequence[int]) -> TensorLayout:
    """The layout after the dims are permuted: dim i of the result is dim `permutation[i]` of the tensor.

    >>> from plans.layout import Layout
    >>> transpose_layout(Layout((2, 2), ("dp", "mp"))("dp", "mp"), (1, 0)).dims
    (('mp',), ('dp',))
    """
    if sorted(permutation) != list(range(len(layout.dims))):
        raise TwofoldError(f"{tuple(permutation)} is not a permutation of the {len(layout.dims)} dims of {layout}")
    dims = tuple(layout.dims[dim] for dim in permutation)
    return TensorLayout(mesh=layout.mesh, dims=dims, partial=layout.partial)


def _groups(old_shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of consecutive old and new dims with equal numbers of elements; size-1 dims join the last."""
    groups: list[tuple[list[int], list[int]]] = []
    old = new = 0
    while old < len(old_shape) or new < len(new_shape):
        mine: list[int] = []
        theirs: list[int] = []
        have = want = 1
        while True:
            if have <= want and old < len(old_shape) and (have < want or not mine):
                have *= old_shape[old]
                mine.append(old)
                old += 1
            elif new < len(new_shape) and (want < have or not theirs):
                want *= new_shape[new]
                theirs.append(new)
                new += 1
            else:
                break
        groups.append((mine, theirs))
    return groups


def _carry(
    layout: TensorLayout,
    old_shape: Sequence[int],
    new_shape: Sequence[int],
    old_dims: list[int],
    new_dims: list[int],
    before: list[tuple[str, ...]],
    after: list[tuple[str, ...]],
) -> None:
    """Move the axes of a group's old dims to its new dims, major first, until one does not fit."""
    at, left = 0, new_shape[new_dims[0]] if new_dims else 1
    for old in old_dims:
        whole = old_shape[old]
        for axis in layout.dims[old]:
            size = layout.mesh.size((axis,))
            while left == 1 and at + 1 < len(new_dims) and size > 1:
                at += 1
                left = new_shape[new_dims[at]]
            if axis == INTERLEAVED or left % size or whole % size or not new_dims:
                return
            before[old] += (axis,)
            after[new_dims[at]] += (axis,)
            left //= size
            whole //= size
        if whole > 1:  # the rest of this dim is between the parts of the next ones
            return
