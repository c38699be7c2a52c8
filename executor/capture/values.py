"""The translations of calls of an exported module: usually tensors of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

__all__ = ["Chosen", "Complex", "Mean", "Transposed", "Unreadable", "Value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transposed:
    """A 2-D parameter, or a value computed from it alone, that is read transposed."""

    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Groups of weights [v, k, n] selected by ids; a product reads them without copying: `grouped_linear`."""

    weights: str
    ids: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Complex:
    """A complex tensor as two real tensors of its shape."""

    real: str
    imaginary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A result that a graph cannot represent, with the reason; an error is raised if an operator reads it."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean (or a sum) over the samples of a batch, which may only be used to compute a loss.

    A weighted sum of such means equals the mean over the samples of the weighted sum of their terms. The graph computes
    these terms.

    Args:
        node: the call that computes the mean.
        terms: adds the operators that compute the terms, [batch, *shape]; returns the tensor's name.
        shape: one number for each sample, or several, such as the share of every expert.
        own: adds one operator that computes the mean directly; None if there is no such operator.
        is_sum: whether this is the sum over the samples instead of the mean.
    """

    node: fx.Node
    terms: Callable[[], str]
    shape: tuple[int, ...] = ()
    own: Callable[[], str] | None = None
    is_sum: bool = False


Value = str | Transposed | Chosen | Complex | Unreadable | Mean | tuple[Any, ...] | None
"""The translation of a node: usually the name of a tensor."""
