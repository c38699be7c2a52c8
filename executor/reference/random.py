"""Runs a module in torch with the random numbers of its plan.

The random numbers of a plan are functions of an element's position, the step, and the number of the random operator in
the forward (`executor.kernels.random`). torch draws its own from a generator. Inside `PlannedRandom`, torch's dropout,
attention with dropout and random tensors use the numbers of the plan, so that autograd of the module is the reference
for every layout.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from executor.kernels.random import drawn_elements, kept_elements, seed_of
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.operators.attention import heads_first

__all__ = ["PlannedRandom"]

_DROPOUT, _ATTENTION = F.dropout, F.scaled_dot_product_attention


class PlannedRandom:
    """Replaces torch's random numbers while a module runs.

    Args:
        graph: graph of the module, to check that both number their random operators alike; None checks nothing.

    >>> random = PlannedRandom()
    >>> with random.forward(step=1, micro_batch=0):
    ...     whole = F.dropout(torch.ones(4, 8), 0.5)
    >>> with random.forward(step=1, micro_batch=1):
    ...     half = F.dropout(torch.ones(2, 8), 0.5)
    >>> torch.equal(whole[2:], half)
    True
    """

    def __init__(self, graph: Graph | None = None) -> None:
        self._expected = {} if graph is None else _random_operators(graph)
        self._draws_any = graph is None or bool(self._expected)
        self._step = self._micro_batch = 0
        self._found: list[tuple[float | str, tuple[int, ...]]] = []

    @contextlib.contextmanager
    def forward(self, step: int, micro_batch: int) -> Iterator[None]:
        """One forward: `step` counts from 1, micro-batches (slices of them included) from 0.

        Raises:
            TwofoldError: the module's random operators are not those of the graph.
        """
        self._step, self._micro_batch, self._found = step, micro_batch, []
        with contextlib.ExitStack() as stack:
            # by name for torch's own composite functions, inside with no mode is asked; by the mode for the rest
            stack.enter_context(mock.patch.object(F, "dropout", self._dropout))
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", self._attention))
            stack.enter_context(_Mode(self))
            if self._draws_any:
                stack.enter_context(_Draws(self))
            yield
        self._check()

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        dropped = input * self.kept(p, tuple(input.shape), input.device)
        dropped = dropped * (1 / (1 - p) if p < 1 else 0)
        return input.copy_(dropped) if inplace else dropped

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if dropout_p == 0:
            return _ATTENTION(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )  # fmt: skip
        if enable_gqa:
            key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) for tensor in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        if attn_mask is not None:
            is_choice = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if is_choice else scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value

    def kept(self, p: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The elements that the next random operator keeps."""
        self._found.append((p, shape))
        region = [(0, size) for size in shape]
        return kept_elements(region, shape, p, seed_of(len(self._found)), self._step, self._micro_batch, device)

    def drawn(self, kind: str, like: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor that the next random operator draws."""
        shape = tuple(like.shape)
        self._found.append((kind, shape))
        region, seed = [(0, size) for size in shape], seed_of(len(self._found))
        return drawn_elements(kind, region, shape, dtype, seed, self._step, self._micro_batch, like.device)

    def _check(self) -> None:
        found = {seed_of(number): each for number, each in enumerate(self._found, start=1)}
        for seed, (name, what, shape) in self._expected.items():
            mine = found.get(seed)
            if mine is None or not _is_same(mine[0], what) or not _is_alike(mine[1], shape):
                other = "nothing" if mine is None else _described(*mine)
                raise TwofoldError(
                    f"operator {name!r} draws {_described(what, shape)} where the module draws {other}: the random "
                    f"numbers of a forward must be drawn in one fixed order"
                )


def _described(what: float | str, shape: tuple[int, ...]) -> str:
    return f"{what} numbers {shape}" if isinstance(what, str) else f"a dropout of {what:g} of {shape}"


def _is_same(mine: float | str, what: float | str) -> bool:
    """Whether two kinds of random numbers or rates of dropout are equal; 1 - (1 - p) is p but for rounding."""
    if isinstance(mine, str) or isinstance(what, str):
        return mine == what
    return math.isclose(mine, what, rel_tol=1e-12)


def _is_alike(mine: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether shapes are equal but for one dim, the batch; a module may drop of rows what its graph drops of
    [batch, length, width]."""
    pairs = list(zip(mine, shape[-len(mine) :], strict=False))
    return len(pairs) == len(mine) and sum(one != other for one, other in pairs) <= 1


class _Mode(TorchFunctionMode):
    """Catches calls by whatever name they were imported as."""

    def __init__(self, random: PlannedRandom) -> None:
        super().__init__()
        # torch.dropout(input, p, train) is nn.functional's with other names
        self.instead: dict[Any, Callable[..., Tensor]] = {
            _DROPOUT: random._dropout, torch.dropout: lambda input, p, train: random._dropout(input, p, train),
            _ATTENTION: random._attention,
        }  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.instead.get(func, func)(*args, **(kwargs or {}))


class _Draws(TorchDispatchMode):
    """Replaces what torch's generator draws, at whatever depth, by the formulas of `executor.capture.rules.random`."""

    def __init__(self, random: PlannedRandom) -> None:
        super().__init__()
        self.random = random

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in _FORMULAS:
            return func(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        return made.copy_(_FORMULAS[name](self.random, made, given | (kwargs or {})))


Given = dict[str, Any]


def _uniform(random: PlannedRandom, made: Tensor, given: Given) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return random.drawn("uniform", made, made.dtype) * (high - low) + low


def _normal(random: PlannedRandom, made: Tensor, given: Given) -> Tensor:
    return random.drawn("normal", made, made.dtype) * given.get("std", 1.0) + given.get("mean", 0.0)


def _whole(random: PlannedRandom, made: Tensor, given: Given) -> Tensor:
    low, high = given.get("low", 0), given["high"]
    return (random.drawn("uniform", made, torch.float32) * (high - low)).to(torch.int64) + low


def _bernoulli(random: PlannedRandom, made: Tensor, given: Given) -> Tensor:
    return (random.drawn("uniform", made, made.dtype) < given["self"]).to(made.dtype)


def _exponential(random: PlannedRandom, made: Tensor, given: Given) -> Tensor:
    return (1 - random.drawn("uniform", made, made.dtype)).log() * (-1 / given.get("lambd", 1.0))


_FORMULAS: dict[str, Callable[[PlannedRandom, Tensor, Given], Tensor]] = {
    "rand": _uniform, "rand_like": _uniform, "uniform_": _uniform,
    "randn": _normal, "randn_like": _normal, "normal_": _normal, "normal": _normal,
    "randint": _whole, "randint_like": _whole, "exponential_": _exponential, "bernoulli": _bernoulli,
    # stochastic depth and torch's dropouts inside other functions draw what stays with the probability p
    "bernoulli_": lambda random, made, given: random.kept(
        round(1 - given.get("p", 0.5), 15), tuple(made.shape), made.device
    ),
}  # fmt: skip
"""aten call -> the values that it makes."""


def _random_operators(graph: Graph) -> dict[int, tuple[str, float | str, tuple[int, ...]]]:
    """seed -> the operator that has it, its probability or its kind, and the shape of what it draws."""
    found: dict[int, tuple[str, float | str, tuple[int, ...]]] = {}
    for operator in graph.operators:
        if "seed" in operator.attrs:
            shape = graph.tensors[operator.outputs[0]].shape
            if operator.kind == "attention":
                queries, keys = heads_first([graph.tensors[name].shape for name in operator.inputs[:2]], operator.attrs)
                shape = (*queries[:-1], keys[-2])
            what = float(operator.attrs["p"]) if "p" in operator.attrs else operator.kind  # type: ignore[arg-type]
            found[int(operator.attrs["seed"])] = (operator.name, what, shape)  # type: ignore[arg-type]
    return found
