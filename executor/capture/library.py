"""Replacements for layers whose implementation a plan cannot express, used during capture.

torch's recurrent layers stack the states of all layers, its embedding bags flatten the batch, and the experts of
transformers sort the tokens of all samples. The replacements compute the same layer by layer, sample by sample, and
token by token. Numbers that a forward turns into tensors are filled in.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from executor.capture.table import rule
from executor.capture.translation import Translation
from executor.capture.values import Unreadable, Value
from plans.errors import TwofoldError

__all__ = ["in_other_forms"]

_LIBRARY = torch.library.Library("twofold", "DEF")
_LIBRARY.define(
    "recurrent(Tensor x, Tensor[] weights, Tensor[] states, str mode, bool bias, bool reverse) -> (Tensor, Tensor)"
)

_LIBRARY.define(
    "ctc_loss(Tensor chances, Tensor labels, Tensor times, Tensor lengths, int blank, int reduction, bool infinite) "
    "-> Tensor"
)

_EXPERTS = "_experts_implementation_internal"
"""Attribute of transformers' configurations that selects the implementation of experts."""


@torch.library.impl(_LIBRARY, "recurrent", "CompositeExplicitAutograd")
def _shapes_of_recurrent(
    x: Tensor, weights: Sequence[Tensor], states: Sequence[Tensor], mode: str, bias: bool, reverse: bool
) -> tuple[Tensor, Tensor]:
    hidden = weights[1].shape[1]
    return x.new_empty(x.shape[0], x.shape[1], hidden), x.new_empty(x.shape[0], hidden)


@contextlib.contextmanager
def in_other_forms(module: nn.Module) -> Iterator[None]:
    """Within this context the layers of `module` that are named above run in a form that can be captured."""
    configs = {
        id(submodule.config): submodule.config
        for submodule in module.modules()
        if getattr(getattr(submodule, "config", None), _EXPERTS, None) is not None
    }
    with contextlib.ExitStack() as stack:
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(mock.patch.object(kind, "forward", _recurrent))
        stack.enter_context(mock.patch.object(nn.EmbeddingBag, "forward", _bag))
        with torch.device("meta"):
            torch.empty(0)  # torch then looks up, once, which functions a device is given to: torch's own torch.tensor
        stack.enter_context(mock.patch.object(torch, "ctc_loss", _ctc_loss))
        stack.enter_context(mock.patch.object(F, "gaussian_nll_loss", _gaussian_nll_loss))
        stack.enter_context(mock.patch.object(torch, "tensor", _filled))
        stack.enter_context(mock.patch.object(Tensor, "__getitem__", _part))
        stack.enter_context(mock.patch.object(Tensor, "__setitem__", _write_part))
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        for config in configs.values():
            stack.enter_context(mock.patch.object(config, _EXPERTS, "batched_mm"))
        yield


_TENSOR = torch.tensor
_MOST_NUMBERS = 64


def _filled(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:
    """Numbers written in the forward, as calls that make them: the value of a tensor made so is lost on meta."""
    if any(more.values()):
        return _TENSOR(data, dtype=dtype, device=device, **more)
    if isinstance(data, bool | int | float):
        kind = torch.bool if isinstance(data, bool) else torch.int64 if isinstance(data, int) else None
        return torch.full((), data, dtype=dtype or kind or torch.get_default_dtype(), device=device)
    is_row = isinstance(data, list | tuple) and 0 < len(data) <= _MOST_NUMBERS
    if is_row and len({type(each) for each in data}) == 1 and isinstance(data[0], bool | int | float | list | tuple):
        return torch.stack([_filled(each, dtype=dtype, device=device) for each in data])
    return _TENSOR(data, dtype=dtype, device=device)


_PART = Tensor.__getitem__


def _part(self: Tensor, index: Any) -> Tensor:
    """A part of a tensor. A list of numbers becomes a slice or a tensor that calls make: its value is lost on meta."""
    given = index if isinstance(index, tuple) else (index,)
    if not any(_is_numbers(each) for each in given):
        return _PART(self, index)
    alone = sum(isinstance(each, list | Tensor) for each in given) == 1
    return _PART(self, tuple(_chosen(each, alone) if _is_numbers(each) else each for each in given))


_WRITE_PART = Tensor.__setitem__


def _write_part(self: Tensor, index: Any, value: Any) -> None:
    """Write a part of a tensor. One number where a mask is true is filled in: its value is lost on meta."""
    is_number = isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.dim() == 0)
    if is_number and isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() <= self.dim():
        self.masked_fill_(index.reshape(*index.shape, *(1,) * (self.dim() - index.dim())), value)
        return
    _WRITE_PART(self, index, value)


def _is_numbers(index: Any) -> bool:
    return isinstance(index, list) and bool(index) and all(type(each) is int for each in index)


def _chosen(numbers: list[int], alone: bool) -> Any:
    steps = {after - before for before, after in itertools.pairwise(numbers)} or {1}
    (step, *others), last = steps, numbers[-1]
    if alone and not others and step > 0 and (numbers[0] >= 0) == (last >= 0):
        return slice(numbers[0], None if last == -1 else last + 1, step)
    return _filled(numbers)


def _recurrent(self: nn.RNNBase, input: Any, hx: Any = None) -> tuple[Tensor, Any]:
    """Every layer and direction separately; the first dim of everything is the batch."""
    kind = type(self).__name__
    if not isinstance(input, Tensor):
        raise TwofoldError(f"nn.{kind} is given a packed sequence, whose shape depends on values; give it a padded one")
    if input.dim() != 3:
        raise TwofoldError(f"nn.{kind} needs an input of three dims, one of them the batch, to be planned")
    if not self.batch_first:
        input = input.transpose(0, 1)
    if self.proj_size:
        raise TwofoldError(f"nn.{kind} with proj_size is not supported; give it hidden_size and add an nn.Linear")
    given = [] if hx is None else list(hx) if isinstance(hx, tuple) else [hx]
    directions = 2 if self.bidirectional else 1
    made: list[list[Tensor]] = [[], []]
    for layer in range(self.num_layers):
        outputs = []
        for reverse in range(directions):
            at = layer * directions + reverse
            states = [each[at] for each in given]
            output, cell = torch.ops.twofold.recurrent(
                input, list(self.all_weights[at]), states, self.mode, self.bias, bool(reverse)
            )
            outputs.append(output)
            made[0].append(output[:, 0 if reverse else -1])
            made[1].append(cell)
        input = torch.cat(outputs, -1) if directions > 1 else outputs[0]
        if self.dropout and self.training and layer < self.num_layers - 1:
            # torch keeps time in dim 0 there, and a position decides what is dropped
            input = F.dropout(input.transpose(0, 1), self.dropout).transpose(0, 1)
    last = torch.stack(made[0])
    input = input if self.batch_first else input.transpose(0, 1)
    return input, (last, torch.stack(made[1])) if self.mode == "LSTM" else last


@torch.library.impl(_LIBRARY, "ctc_loss", "CompositeExplicitAutograd")
def _shape_of_ctc_loss(chances: Tensor, *rest: Any) -> Tensor:
    return chances.new_empty(() if rest[4] else chances.shape[1:2])


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """torch's own has no shape on the meta device. Lengths are made a tensor."""
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise TwofoldError("a CTC loss needs log_probs [time, batch, classes] and padded targets [batch, labels]")
    lengths = []
    for given in (input_lengths, target_lengths):
        if not isinstance(given, Tensor):
            if len(set(given)) != 1:
                raise TwofoldError("the lengths of a CTC loss must be a tensor, an input of the forward, unless equal")
            given = torch.full((len(given),), given[0], dtype=torch.int64, device=log_probs.device)
        lengths.append(given)
    return torch.ops.twofold.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """torch's formula, without its check that no variance is negative, which reads values."""
    spread = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if spread.dim() == input.dim() - 1:
        spread = spread.unsqueeze(-1)
    spread = spread + (spread.clamp(min=eps) - spread).detach()  # as if there were no clamp to the gradient
    terms = 0.5 * (spread.log() + (input - target).square() / spread)
    if full:
        terms = terms + 0.5 * math.log(2 * math.pi)
    return terms.mean() if reduction == "mean" else terms.sum() if reduction == "sum" else terms


def _bag(
    self: nn.EmbeddingBag, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> Tensor:
    """Rows of every sample, and their sum, mean or maximum."""
    if offsets is not None or input.dim() != 2 or self.padding_idx is not None or self.max_norm is not None:
        raise TwofoldError(
            "nn.EmbeddingBag is supported for ids [batch, bag] only, without offsets, padding_idx and max_norm: bags "
            "of "
            "several lengths can be padded, with per_sample_weights of 0"
        )
    rows = F.embedding(input, self.weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return rows.amax(1) if self.mode == "max" else rows.mean(1) if self.mode == "mean" else rows.sum(1)


@rule("twofold.recurrent.default")
def _recurrent_operators(
    build: Translation, node: fx.Node, x: Value, weights: Sequence[Value], states: Sequence[Value], mode: str,
    bias: bool, reverse: bool,
) -> Value:  # fmt: skip
    """One operator for each result that is read: all states, and the last of the cells."""
    read = {user.args[1] for user in node.users if user.users}
    attrs: dict[str, Any] = {"mode": mode, "bias": bias} | ({"reverse": True} if reverse else {})
    results: list[Value] = []
    for index, more in enumerate(({}, {"cell": True})):
        if index not in read or (more and mode != "LSTM"):
            results.append(Unreadable(reason=f"a state of {mode} that it does not have"))
            continue
        shape, dtype = build.shape_dtype_of(node, node.meta["val"][index])
        results.append(build.make(node, "recurrent", (x, *weights, *states), shape=shape, dtype=dtype, **attrs, **more))
    return tuple(results)
