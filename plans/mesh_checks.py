"""Checks of the arguments of a mesh (`plans.layout.Layout`): sizes, names of axes, ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plans.errors import TwofoldError

__all__ = ["INTERLEAVED", "check_matrix", "check_names", "checked_ranks"]

INTERLEAVED = "interleaved_parallel"
"""The name of the virtual last axis that cuts a dim into copies on the same rank."""


def check_matrix(device_matrix: object) -> None:
    """Refuse a device matrix that is not a sequence of sizes of at least 1.

    Raises:
        TwofoldError: names the size at fault.

    >>> check_matrix((2, 0))
    Traceback (most recent call last):
    plans.errors.TwofoldError: device_matrix (2, 0) has the size 0; every size must be an int of at least 1
    """
    if not isinstance(device_matrix, tuple | list) or not device_matrix:
        raise TwofoldError(f"device_matrix must be a tuple of sizes such as (2, 4), not {device_matrix!r}")
    for size in device_matrix:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise TwofoldError(
                f"device_matrix {device_matrix!r} has the size {size!r}; every size must be an int of at least 1"
            )


def check_names(device_matrix: Sequence[int], names: object) -> None:
    """Refuse names of axes that are not one distinct, non-empty string per entry of the device matrix.

    Raises:
        TwofoldError: names the axis at fault.

    >>> check_names((2, 4), ("dp",))
    Traceback (most recent call last):
    plans.errors.TwofoldError: 2 axes (2, 4) need 2 names, got ('dp',)
    """
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TwofoldError(f"alias_name must be a tuple of str, one per axis, not {names!r}")
    if len(names) != len(device_matrix):
        raise TwofoldError(
            f"{len(device_matrix)} axes {tuple(device_matrix)} need {len(device_matrix)} names, got {tuple(names)}"
        )
    for name in names:
        if not name or name == "None":
            raise TwofoldError(f"{name!r} in {tuple(names)} cannot name an axis: it must not be empty or 'None'")
        if list(names).count(name) > 1:
            raise TwofoldError(f"the axis name {name!r} occurs more than once in {tuple(names)}")
    if INTERLEAVED in list(names)[:-1]:
        raise TwofoldError(f"{INTERLEAVED!r} is virtual and must be the last axis; got {tuple(names)}")


def checked_ranks(rank_list: object, count: int, device_matrix: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a mesh as a tuple of ints.

    Args:
        rank_list: what the user gave.
        count: how many ranks the mesh has.
        device_matrix: the sizes whose product that is, for the message.

    Raises:
        TwofoldError: no list, entries that are not ints of at least 0, repeated ranks, another number of ranks.

    >>> checked_ranks([3, 1], 2, (2,))
    (3, 1)
    """
    if isinstance(rank_list, range) and len(rank_list) == count and min(rank_list[0], rank_list[-1]) >= 0:
        return tuple(rank_list)  # whole numbers, each once: ten thousands of ranks need no look at each
    if not isinstance(rank_list, tuple | list | range):
        raise TwofoldError(f"rank_list must be a list of ranks, not {rank_list!r}")
    for rank in rank_list:
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 0:
            raise TwofoldError(
                f"rank_list {list(rank_list)} has the entry {rank!r}; every rank must be an int of at least 0"
            )
    if len(rank_list) != count:
        product = " * ".join(str(size) for size in device_matrix)
        raise TwofoldError(f"rank_list has {len(rank_list)} ranks, but the device matrix has {product} = {count}")
    if len(set(rank_list)) != count:
        twice = sorted({rank for rank in rank_list if list(rank_list).count(rank) > 1})
        raise TwofoldError(f"rank_list {list(rank_list)} has {twice} more than once")
    return tuple(int(rank) for rank in rank_list)
