"""Dropout for a module run by torch that drops the same elements as the program of its plan.

A plan's dropout is a function of an element's position, of the step and of the number of the dropout in the forward
(`executor.kernels.random`), torch's is drawn by a generator. Inside `Dropping` calls of torch's dropout, of
`bernoulli_` (stochastic depth) and of attention with dropout take the former: autograd of the module is then the
reference for every layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from executor.kernels.random import kept_elements, seed_of
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.operators.attention import heads_first

__all__ = ["Dropping"]

_DROPOUT, _ATTENTION = F.dropout, F.scaled_dot_product_attention


class Dropping:
    """Replaces torch's dropout while a module runs.

    Args:
        graph: graph of the module, to check that both number their dropouts alike; None checks nothing.

    >>> dropping = Dropping()
    >>> with dropping.forward(step=1, micro_batch=0):
    ...     whole = F.dropout(torch.ones(4, 8), 0.5)
    >>> with dropping.forward(step=1, micro_batch=1):
    ...     half = F.dropout(torch.ones(2, 8), 0.5)
    >>> torch.equal(whole[2:], half)
    True
    """

    def __init__(self, graph: Graph | None = None) -> None:
        self._expected = {} if graph is None else _random_operators(graph)
        self._step = self._micro_batch = 0
        self._found: list[tuple[float, tuple[int, ...]]] = []

    @contextlib.contextmanager
    def forward(self, step: int, micro_batch: int) -> Iterator[None]:
        """One forward: `step` counts from 1, micro-batches (slices of them included) from 0.

        Raises:
            TwofoldError: the module's dropouts are not those of the graph.
        """
        self._step, self._micro_batch, self._found = step, micro_batch, []
        with contextlib.ExitStack() as stack:
            # by name for torch's own composite functions, inside with no mode is asked; by the mode for the rest
            stack.enter_context(mock.patch.object(F, "dropout", self._dropout))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", self._attention))
            stack.enter_context(_Mode(self))
            yield
        self._check()

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        dropped = input * self._kept(p, tuple(input.shape), input.device)
        dropped = dropped * (1 / (1 - p) if p < 1 else 0)
        return input.copy_(dropped) if inplace else dropped

    def _bernoulli(self, input: Tensor, p: float = 0.5) -> Tensor:
        """Stochastic depth draws which samples stay with the probability p."""
        return input.copy_(self._kept(1 - p, tuple(input.shape), input.device))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if dropout_p == 0:
            return _ATTENTION(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )  # fmt: skip
        if enable_gqa:
            key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if attn_mask is not None:
            is_choice = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_choice else scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value

    def _kept(self, p: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
        self._found.append((p, shape))
        region = [(0, size) for size in shape]
        return kept_elements(region, shape, p, seed_of(len(self._found)), self._step, self._micro_batch, device)

    def _check(self) -> None:
        found = {seed_of(number): each for number, each in enumerate(self._found, start=1)}
        for seed, (name, p, shape) in self._expected.items():
            mine = found.get(seed)
            if mine is None or mine[0] != p or not _is_alike(mine[1], shape):
                raise TwofoldError(
                    f"operator {name!r} drops {p:g} of a tensor {shape} where the module drops "
                    f"{'nothing' if mine is None else f'{mine[0]:g} of {mine[1]}'}: the dropouts of a forward must be "
                    f"called in one fixed order"
                )


def _is_alike(mine: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether shapes are equal but for one dim, the batch; a module may drop of rows what its graph drops of
    [batch, length, width]."""
    pairs = list(zip(mine, shape[-len(mine) :], strict=False))
    return len(pairs) == len(mine) and sum(one != other for one, other in pairs) <= 1


class _Mode(TorchFunctionMode):
    """Catches calls by whatever name they were imported as."""

    def __init__(self, dropping: Dropping) -> None:
        super().__init__()
        # torch.dropout(input, p, train) is nn.functional's with other names
        self.instead: dict[Any, Callable[..., Tensor]] = {
            _DROPOUT: dropping._dropout, torch.dropout: lambda input, p, train: dropping._dropout(input, p, train),
            _ATTENTION: dropping._attention, Tensor.bernoulli_: dropping._bernoulli,
        }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.instead.get(func, func)(*args, **(kwargs or {}))


def _random_operators(graph: Graph) -> dict[int, tuple[str, float, tuple[int, ...]]]:
    """seed -> the operator that has it, its probability and the shape of what it drops."""
    found = {}
    for operator in graph.operators:
        if "seed" in operator.attrs:
            shape = graph.tensors[operator.inputs[0]].shape
            if operator.kind == "attention":
                queries, keys = heads_first([graph.tensors[name].shape for name in operator.inputs[:2]], operator.attrs)
                shape = (*queries[:-1], keys[-2])
            found[int(operator.attrs["seed"])] = (operator.name, float(operator.attrs["p"]), shape)  # type: ignore[arg-type]
    return found
