"""Decisions that a forward takes on the number of rows that a mask selects, as `if len(x[mask]) > 9`.

While a module is exported, that number is a prime (`executor.capture.calls.counted_masks`), and a graph holds what the
forward does for it. Exports with other numbers show whether it does the same for these.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from executor.capture.calls.counted_masks import PLACES, READ
from executor.capture.calls.functional import line_of
from plans.errors import TwofoldError

__all__ = ["AT_NONE", "check_row_counts"]

AT_NONE = "twofold_at_no_rows"
"""Key in the `meta` of a division by the number of rows: by what the forward divides where there are none."""

_ONE, _MANY = 1, 1_000_000
_DIVISIONS = (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)


def check_row_counts(graph: fx.Graph, again: Callable[[int], fx.Graph]) -> None:
    """Refuse a forward that does something else for few or many rows of a mask; note by what it divides without any.

    Args:
        graph: exported, with the rows of its masks as they were counted.
        again: exports the same, for this number of rows of every mask.

    Raises:
        TwofoldError: with the line of the first call that differs.

    Warns:
        UserWarning: it does something else where there are no rows.
    """
    counts = [node.args[-1] for node in graph.nodes if str(node.target) in (READ, PLACES)]
    if not counts:
        return
    for count in (_ONE, _MANY, 0):
        try:
            other = again(count)
        except TwofoldError:  # the forward fails for this number
            continue
        scaled = _Scaled(counts, count)
        if not count:
            _note_divisors(graph, other, scaled)
        if (node := _first_difference(graph, other, scaled)) is None:
            continue
        what = f"the forward does something else where a mask selects {_rows(count)}, at or before {line_of(node)}"
        if count:
            raise TwofoldError(f"{what}; a plan is the same for all data. Choose by torch.where and mask.sum()")
        warnings.warn(
            f"{what}; a plan does not: a mean of no rows is nan. (losses * mask).sum() / mask.sum().clamp(min=1) is 0",
            stacklevel=2,
        )


def _rows(count: int) -> str:
    return {0: "no row", 1: "one row"}.get(count, f"{count:,} rows")


@dataclass(frozen=True, slots=True)
class _Scaled:
    """Compares numbers of an export with those of one that has another number of rows.

    Args:
        counts: the numbers of rows of the masks in the first.
        other: that of every mask in the second.
    """

    counts: Sequence[Any]
    other: int

    def is_same(self, one: Any, two: Any) -> bool:
        """Whether two arguments are equal, or made in the same way of the numbers of rows."""
        if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, two)):
            return type(one) is type(two) and bool(one == two)
        return one == two or any(
            math.isclose(one * self.other, two * own) or (self.other > 0 and math.isclose(one * own, two * self.other))
            for own in self.counts
        )


def _note_divisors(graph: fx.Graph, none: fx.Graph, scaled: _Scaled) -> None:
    """Note what calls divide by where there are no rows: 1 of `losses.sum() / max(len(x), 1)`."""
    for node, other in zip(graph.nodes, none.nodes, strict=False):
        if node.target not in _DIVISIONS or node.target is not other.target:
            continue
        by, without = node.args[1], other.args[1]
        if isinstance(by, int) and isinstance(without, int) and 0 < without < by and scaled.is_same(by, 0):
            node.meta[AT_NONE] = without


def _first_difference(graph: fx.Graph, other: fx.Graph, scaled: _Scaled) -> fx.Node | None:
    """The first call of a graph that the one with other numbers of rows does not have; None if they are the same."""
    paired: dict[fx.Node, fx.Node] = {}
    for one, two in itertools.zip_longest(graph.nodes, other.nodes):
        if one is None or two is None or (one.op, str(one.target)) != (two.op, str(two.target)):
            return two if one is None or one.op == "output" else one
        paired[one] = two
        here, structure = pytree.tree_flatten((one.args, one.kwargs))
        there, other_structure = pytree.tree_flatten((two.args, two.kwargs))
        if structure != other_structure:
            return one
        is_noted = not scaled.other and AT_NONE in one.meta
        for each, its in zip(here, there, strict=True):
            if paired[each] is not its if isinstance(each, fx.Node) else not is_noted and not scaled.is_same(each, its):
                return one
    return None
